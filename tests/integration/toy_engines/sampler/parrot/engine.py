"""The engine itself: weights and log-probs are those of the engine on transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
from plimsoll.sampler.parrot.config import ParrotConfig

from plimsoll.records import Trajectory, single_turn
from plimsoll.sampler.protocol import EngineSpec, Request, RolloutBuild
from plimsoll.sampler.text import Decoder
from plimsoll.sampler.transformers.engine import TransformersEngine


class ParrotEngine:
    """A `RolloutEngine` that says what the reference answer says."""

    def __init__(self, spec: EngineSpec) -> None:
        self._weights = TransformersEngine(spec)
        self._repeats = spec.rollout.settings_of(ParrotConfig).repeats
        self._decoder = Decoder(spec.model, spec.trust_remote_code)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    async def generate(self, request: Request) -> list[Trajectory]:
        return [
            await self._say(prompt, number, request)
            for prompt in request.prompts
            for number in range(request.responses)
        ]

    async def _say(self, prompt: Any, number: int, request: Request) -> Trajectory:
        text = f"{prompt.reference} " * self._repeats + " again" * number
        tokens = self._decoder.tokenizer.encode(text, add_special_tokens=False)
        answer = np.array([*tokens[: request.sampling.max_new_tokens - 1], *self._end])
        [logprobs] = await self._weights.log_probs([np.concatenate([prompt.tokens, answer])])
        return single_turn(
            prompt, number, answer, logprobs[-len(answer) :], text, "stop",
            self._weights._version,
        )  # fmt: skip

    @property
    def _end(self) -> tuple[int, ...]:
        return self._decoder.end_tokens[:1]


ENGINE = RolloutBuild(
    start=ParrotEngine,
    environment=lambda spec: {},
    as_published=False,
    memory_settings=lambda spec: "",
    logged_error=lambda log: None,
)
