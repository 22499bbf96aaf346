"""The engine itself: weights and log-probs are those of the engine on transformers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.sampler.protocol import EngineSpec, Request, RolloutBuild
from plimsoll.sampler.transformers.engine import TransformersEngine, environment
from plimsoll.sync.channel import Channel

from .config import ParrotConfig


class ParrotEngine(TransformersEngine):
    """A `RolloutEngine` that answers with the reference answer."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._settings = spec.rollout.settings_of(ParrotConfig)
        self._dropped: dict[str, torch.Size] = {}
        """The shapes of the weights that are dropped while the engine sleeps."""

    async def generate(self, request: Request) -> list[Trajectory]:
        assert not self._dropped, "a request to an engine that sleeps"
        return [
            await self._answer(prompt, number, request)
            for prompt in request.prompts
            for number in range(request.responses)
        ]

    async def _answer(self, prompt: Prompt, number: int, request: Request) -> Trajectory:
        text = f"{prompt.reference} " * self._settings.repeats + " again" * number
        tokens = self._decoder.tokenizer.encode(text, add_special_tokens=False)
        end = self._decoder.end_tokens[:1]
        answer = np.array([*tokens[: request.sampling.max_new_tokens - 1], *end])
        [logprobs] = await self.log_probs([np.concatenate([prompt.tokens, answer])])
        return single_turn(
            prompt, number, answer, logprobs[-len(answer) :], text, "stop", self._version
        )

    async def sleep(self) -> None:
        for name, parameter in self._model.named_parameters():
            self._dropped[name] = parameter.shape
            parameter.data = parameter.data.new_empty(0)

    async def begin_sync(self, names: tuple[str, ...], channels: Sequence[Channel]) -> None:
        for name, shape in self._dropped.items():
            parameter = self._model.get_parameter(name)
            parameter.data = parameter.data.new_empty(shape)
        self._dropped.clear()
        await super().begin_sync(names, channels)


ENGINE = RolloutBuild(
    start=ParrotEngine,
    environment=environment,
    memory_settings=lambda spec: "",
    logged_error=lambda log: None,
)
