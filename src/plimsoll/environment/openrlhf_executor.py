"""Executors of OpenRLHF that play whole episodes: `execute(prompt, label, sampling_params,
max_length, hf_tokenizer, llm_engine)`.

What was sampled is taken from what the engine gave, never from what the executor says of it: each
of its `action_ranges` must be an answer of the engine's to the tokens before it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from plimsoll.environment.openrlhf import AgentExecutorBase, number_of, numbers_of
from plimsoll.environment.schemas import shown
from plimsoll.errors import ConfigError

MOST_ANSWERS = 65536
"""Answers that are remembered at most, for the episodes that they are of; the oldest go first."""


@dataclass(frozen=True)
class Sampled:
    """An engine's answer. logprobs: of each token, by the engine. version: of the weights."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str
    version: int = 0


Sample = Callable[[Sequence[int], Any], Awaitable[Sampled]]
"""Samples after tokens, with sampling parameters as OpenRLHF's (`max_tokens`, ...)."""


class EngineFace:
    """What an executor takes for OpenRLHF's `llm_engine`: one for all episodes, for executors keep
    it. Made in the event loop that `sample` works in; it may be asked from others, as of servers in
    threads."""

    def __init__(self, sample: Sample) -> None:
        self._sample, self._loop = sample, asyncio.get_running_loop()
        self._answers: OrderedDict[tuple[int, ...], list[Sampled]] = OrderedDict()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Any,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> SimpleNamespace:
        """As vLLM's `RequestOutput`: `outputs[0]` has token_ids, text, logprobs, finish_reason."""
        if multi_modal_data:
            raise ConfigError("The agent gave images to the engine, which takes text alone.")
        prompt = [int(token) for token in prompt_token_ids]
        work = self._answered(prompt, sampling_params)
        if asyncio.get_running_loop() is self._loop:
            found = await work
        else:
            found = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        output = SimpleNamespace(
            token_ids=list(found.tokens),
            text=found.text,
            finish_reason=found.finish_reason,
            logprobs=[
                {token: SimpleNamespace(logprob=logprob)}
                for token, logprob in zip(found.tokens, found.logprobs, strict=True)
            ],
        )
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[output])

    async def _answered(self, prompt: list[int], params: Any) -> Sampled:
        found = await self._sample(prompt, params)
        self._answers.setdefault(tuple(prompt), []).append(found)
        while len(self._answers) > MOST_ANSWERS:
            self._answers.popitem(last=False)
        return found

    def taken(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Sampled | None:
        """The answer of these tokens after that prompt, once; None: the engine gave none."""
        answers = self._answers.get(prompt, [])
        found = next((answer for answer in answers if answer.tokens == tokens), None)
        if found is not None:
            answers.remove(found)
            if not answers:
                del self._answers[prompt]
        return found


@dataclass(frozen=True)
class Turn:
    """One answer of the engine's in an episode: tokens[begin:end]."""

    begin: int
    end: int
    sampled: Sampled


@dataclass(frozen=True)
class Played:
    """A whole episode. tokens: prompt, answers, and what the agent put between. reward: None: the
    agent gives none."""

    tokens: tuple[int, ...]
    turns: tuple[Turn, ...]
    reward: float | None
    truncated: bool
    figures: Mapping[str, float] = field(default_factory=dict)


async def play(
    executor: AgentExecutorBase,
    prompt: str,
    label: object,
    sampling_params: Any,
    max_length: int,
    tokenizer: Any,
    engine: EngineFace,
) -> Played:
    """One episode. prompt: as text, after the chat template. max_length: of all its tokens.

    Raises ConfigError where what the executor gives is not of OpenRLHF's form, or says that tokens
    were sampled that the engine did not give there.
    """
    parameters = inspect.signature(executor.execute).parameters.values()
    named = {
        "prompt": prompt,
        "label": label,
        "sampling_params": sampling_params,
        "max_length": max_length,
        "hf_tokenizer": tokenizer,
        "llm_engine": engine,
    }
    if any(p.name == "images" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        named["images"] = None
    return _played(await executor.execute(**named), engine)


def _played(found: object, engine: EngineFace) -> Played:
    if not isinstance(found, Mapping):
        raise ConfigError(f"The agent's execute gave {shown(found)}, and a dict is needed.")
    missing = [key for key in ("observation_tokens", "action_ranges") if key not in found]
    if missing:
        raise ConfigError(f"The agent's execute gave no {' and no '.join(missing)}.")
    tokens = tuple(int(token) for token in found["observation_tokens"])
    turns: list[Turn] = []
    for begin, end in found["action_ranges"]:
        turns.append(_turn(tokens, int(begin), int(end), turns, engine))
    if not turns:
        raise ConfigError("The agent's execute gave no action_ranges: nothing was sampled.")
    figures = (
        {} if found.get("scores") is None else {"scores": number_of(found["scores"], "scores")}
    )
    reward = found.get("reward")
    return Played(
        tokens,
        tuple(turns),
        None if reward is None else number_of(reward, "reward"),
        bool(found.get("truncated", False)),
        figures | numbers_of(found.get("extra_logs") or {}),
    )


def _turn(
    tokens: tuple[int, ...], begin: int, end: int, before: Sequence[Turn], engine: EngineFace
) -> Turn:
    earliest = before[-1].end if before else 0
    sampled = None
    if earliest <= begin <= end <= len(tokens):
        sampled = engine.taken(tokens[:begin], tokens[begin:end])
    if sampled is None:
        raise ConfigError(
            f"The agent's execute says that its tokens {begin} to {end} of {len(tokens)} were "
            f"sampled, and the engine gave no such answer after those before them. What is learned "
            f"must be what was sampled: give the engine's tokens as they are, after the very "
            f"tokens that it was asked with."
        )
    return Turn(begin, end, sampled)
