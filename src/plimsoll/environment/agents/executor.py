"""Executors of OpenRLHF that play whole episodes: `execute(prompt, label, sampling_params,
max_length, hf_tokenizer, llm_engine)`.

What was sampled is taken from what the engine gave, never from what the executor says of it: each
of its `action_ranges` must be an answer of the engine's to the tokens before it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from plimsoll.environment.agents.play import Played
from plimsoll.environment.agents.session import Session
from plimsoll.environment.conversation import Conversation
from plimsoll.environment.openrlhf import AgentExecutorBase, number_of, numbers_of
from plimsoll.environment.schemas import shown
from plimsoll.environment.seat import called
from plimsoll.errors import ConfigError
from plimsoll.records import Trajectory

MOST_ANSWERS = 65536
"""Answers that are remembered at most, for the episodes that they are of; the oldest go first."""

_SESSION: ContextVar[Session | None] = ContextVar("session", default=None)
"""The episode that a call is of, where it comes from the executor's own task."""


class EngineFace:
    """What an executor takes for OpenRLHF's `llm_engine`: one for all episodes, for executors keep
    it. It may be asked from other event loops, as of servers in threads."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: list[Session] = []
        self._answers: OrderedDict[tuple[int, ...], list[Trajectory]] = OrderedDict()

    @contextmanager
    def serving(self, session: Session) -> Iterator[None]:
        """Within: an episode may ask."""
        self._loop = asyncio.get_running_loop()
        self._open.append(session)
        token = _SESSION.set(session)
        try:
            yield
        finally:
            _SESSION.reset(token)
            self._open = [one for one in self._open if one is not session]

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Any,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> SimpleNamespace:
        """As vLLM's `RequestOutput`: `outputs[0]` has token_ids, text, logprobs, finish_reason."""
        if multi_modal_data:
            raise ConfigError("The agent gave images to the engine, which takes text alone.")
        assert self._loop is not None, "an executor gets its engine with an episode"
        prompt = [int(token) for token in prompt_token_ids]
        work = self._answered(prompt, sampling_params, self._session_of(prompt))
        if asyncio.get_running_loop() is self._loop:
            found = await work
        else:
            found = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        tokens = found.response_tokens.tolist()
        output = SimpleNamespace(
            token_ids=tokens,
            text=found.response_text,
            finish_reason=found.finish_reason,
            logprobs=[
                {token: SimpleNamespace(logprob=logprob)}
                for token, logprob in zip(tokens, found.sampler_logprobs.tolist(), strict=True)
            ],
        )
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[output])

    def _session_of(self, prompt: Sequence[int]) -> Session:
        """The episode of the task that asks; of a server's, one that may have asked this."""
        own = _SESSION.get()
        if own is not None:
            return own
        if not self._open:
            raise ConfigError("The agent asked the engine while no episode was played.")

        def fits(session: Session) -> tuple[bool, int]:
            tokens = session.prompt.tokens.tolist()
            return prompt[: len(tokens)] != tokens, session.turns

        return min(self._open, key=fits)

    async def _answered(self, prompt: list[int], params: Any, session: Session) -> Trajectory:
        own = session.policy.sampling.temperature
        if getattr(params, "temperature", own) != own:
            raise ConfigError(
                f"The agent asked for a temperature of {params.temperature}, and "
                f"rollout.sampling.temperature is {own}. All turns are sampled as that says: set "
                f"it there."
            )
        stop = getattr(params, "stop", None) or ()
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        found = await session.ask(prompt, getattr(params, "max_tokens", None), stops)
        self._answers.setdefault(tuple(prompt), []).append(found)
        while len(self._answers) > MOST_ANSWERS:
            self._answers.popitem(last=False)
        return found

    def taken(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Trajectory | None:
        """The answer of these tokens after that prompt, once; None: the engine gave none."""
        answers = self._answers.get(prompt, [])
        at = next((i for i, one in enumerate(answers) if _tokens(one) == tokens), None)
        if at is None:
            return None
        found = answers.pop(at)
        if not answers:
            del self._answers[prompt]
        return found


def _tokens(answer: Trajectory) -> tuple[int, ...]:
    return tuple(answer.response_tokens.tolist())


@dataclass(frozen=True)
class ExecutorAgent:
    """An `Agent` of an executor."""

    executor: AgentExecutorBase
    engine: EngineFace = field(default_factory=EngineFace)

    async def __call__(self, session: Session, row: Mapping[str, Any]) -> Played:
        sampling = session.policy.sampling
        named: dict[str, Any] = {
            "prompt": row["prompt_text"],
            "label": row.get("label", row.get("reference_value")),
            "sampling_params": SimpleNamespace(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_new_tokens,
                stop=[*sampling.stop],
            ),
            "max_length": session.table.longest,
            "hf_tokenizer": session.table.speech.template.tokenizer,
            "llm_engine": self.engine,
        }
        parameters = inspect.signature(self.executor.execute).parameters.values()
        if any(p.name == "images" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            named["images"] = None

        async def execute() -> Played:
            return _played(await self.executor.execute(**named), session, self.engine)

        with self.engine.serving(session):
            found: Played = await called(execute, in_loop=True)
        return found


def _played(found: object, session: Session, engine: EngineFace) -> Played:
    """What the executor says of an episode, which the session then has.

    Raises ConfigError where that is not of OpenRLHF's form, or says that tokens were sampled that
    the engine did not give there.
    """
    if not isinstance(found, Mapping):
        raise ConfigError(f"The agent's execute gave {shown(found)}, and a dict is needed.")
    missing = [key for key in ("observation_tokens", "action_ranges") if key not in found]
    if missing:
        raise ConfigError(f"The agent's execute gave no {' and no '.join(missing)}.")
    tokens = tuple(int(token) for token in found["observation_tokens"])
    ranges = [(int(begin), int(end)) for begin, end in found["action_ranges"]]
    if not ranges:
        raise ConfigError("The agent's execute gave no action_ranges: nothing was sampled.")
    first = np.array(tokens[: ranges[0][0]], np.int64)
    branch, earliest = Conversation(replace(session.prompt, tokens=first)), ranges[0][0]
    for begin, end in ranges:
        answer = None
        if earliest <= begin <= end <= len(tokens):
            answer = engine.taken(tokens[:begin], tokens[begin:end])
        if answer is None:
            raise ConfigError(
                f"The agent's execute says that its tokens {begin} to {end} of {len(tokens)} were "
                f"sampled, and the engine gave no such answer after those before them. What is "
                f"learned must be what was sampled: give the engine's tokens as they are, after "
                f"the very tokens that it was asked with."
            )
        if begin > earliest:
            told = tokens[earliest:begin]
            branch = branch.told("user", told, session.table.speech.text(told))
        branch, earliest = branch.said(answer), end
    session.branches = [branch]
    return _said(found)


def _said(found: Mapping[str, Any]) -> Played:
    scores, reward = found.get("scores"), found.get("reward")
    figures = {} if scores is None else {"scores": number_of(scores, "scores")}
    return Played(
        None if reward is None else number_of(reward, "reward"),
        figures | numbers_of(found.get("extra_logs") or {}),
        bool(found.get("truncated", False)),
    )
