"""A reward from servers over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np

from plimsoll.config.reward import HttpReward
from plimsoll.records import Trajectory
from plimsoll.reward.outcome import Broken, Failed, Outcome
from plimsoll.reward.servers.formats import (
    Ask,
    Texts,
    openrlhf_request,
    outcomes,
    plain_texts,
    plimsoll_request,
)
from plimsoll.reward.servers.replicas import Replicas


@dataclass(frozen=True)
class Servers:
    """Asks one of several servers about a batch."""

    replicas: Replicas
    ask: Ask

    @classmethod
    def of(cls, http: HttpReward, client: httpx.AsyncClient) -> Servers:
        """Those of a config."""
        replicas = Replicas.of(client, http.urls, http.time_limit, http.at_once)
        if http.format == "plimsoll":
            return cls(replicas, plimsoll_request)
        texts = plain_texts if http.tokenizer is None else _tokenizer_texts(http.tokenizer)
        return cls(replicas, openrlhf_request(texts))

    async def __call__(self, trajectories: Sequence[Trajectory]) -> Sequence[Outcome]:
        reply = await self.replicas.post(self.ask(trajectories))
        if isinstance(reply, Failed | Broken):
            return [reply] * len(trajectories)
        return outcomes(reply, len(trajectories))


def _tokenizer_texts(model: str) -> Texts:
    """Texts as the actor saw and wrote them: with chat template and special tokens, as OpenRLHF
    decodes them (openrlhf/utils/agent.py)."""
    from transformers import AutoTokenizer  # heavy, and only where asked for

    tokenizer = AutoTokenizer.from_pretrained(model)

    def texts(trajectory: Trajectory) -> tuple[str, str]:
        prompt = trajectory.prompt.tokens
        whole = np.concatenate([prompt, trajectory.response_tokens])
        before: str = tokenizer.decode(prompt, skip_special_tokens=False)
        return before, tokenizer.decode(whole, skip_special_tokens=False).removeprefix(before)

    return texts
