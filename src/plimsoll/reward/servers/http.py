"""A reward from servers over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from plimsoll.config.reward import HttpReward
from plimsoll.records import Trajectory
from plimsoll.reward.outcome import Broken, Failed, Outcome, TimeLimit
from plimsoll.reward.servers.formats import (
    AskServer,
    Tokens,
    openrlhf_request,
    outcomes,
    plimsoll_request,
    texts_by,
    vllm_outcomes,
    vllm_request,
)
from plimsoll.reward.servers.replicas import Replicas

Read = Callable[[object, int], list[Outcome]]
"""Takes a server's answer and the number of trajectories, and returns their outcomes."""


@dataclass(frozen=True)
class Servers:
    """Asks one of several servers about a batch: a `Call`."""

    replicas: Replicas
    ask: AskServer
    read: Read = outcomes

    @classmethod
    def of(cls, http: HttpReward, client: httpx.AsyncClient, limit: TimeLimit) -> Servers:
        """Return the servers of a config. `limit` says how long one request may take."""
        replicas = Replicas.of(client, http.urls, limit)
        if http.format == "plimsoll":
            return cls(replicas, plimsoll_request)
        if http.format == "vllm":
            render = http.tokenizer and _renderer(http.tokenizer, http.chat_template)
            return cls(replicas, vllm_request(render or _actors_tokens), vllm_outcomes)
        return cls(replicas, openrlhf_request(texts_by(http.tokenizer)))

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        """Return the outcomes that a server gives."""
        reply = await self.replicas.post(self.ask(trajectories))
        if isinstance(reply, Failed | Broken):
            return [reply] * len(trajectories)
        return self.read(reply, len(trajectories))


def _actors_tokens(trajectory: Trajectory) -> Sequence[int]:
    return [*trajectory.prompt.tokens, *trajectory.response_tokens]


def _renderer(model: str, chat_template: str | None) -> Tokens:
    """Return what renders prompt and response by the model's own tokenizer and template."""
    # Heavy, and only where asked for.
    from plimsoll.data.template import make_template
    from plimsoll.model.load import load_tokenizer
    from plimsoll.reward.conversation import conversation_tokens

    template = make_template(load_tokenizer(model), chat_template, None)
    return lambda trajectory: conversation_tokens(trajectory, template)[0].tolist()
