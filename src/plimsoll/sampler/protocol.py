"""The interface of a rollout engine; one instance is one replica of the policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from plimsoll.config.engine import ALL_LINEAR
from plimsoll.config.engines import ROLLOUT_ENGINES, folder_value
from plimsoll.config.rollout import RolloutConfig, SamplingConfig
from plimsoll.records import ExtractCalls, Floats, Ints, Prompt, Trajectory
from plimsoll.run.readings import Reading
from plimsoll.sync.channel import Channel
from plimsoll.trainer.weights import AdapterFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_TOKENS, CACHED_TOKENS = "prompt_tokens", "cached_tokens"
"""Names of two figures of a trajectory, from engines with a prefix cache: the number of tokens in
the prompt, and how many of them the cache had."""


@dataclass(frozen=True)
class EngineSpec:
    """The description from which an engine is built.

    Attributes:
        index: which of the run's engines this is.
        model: the directory that the engine first loads.
        max_tokens: the longest prompt and response together.
        threads: CPU threads.
        device: "cuda" or "cpu".
        rollout: the settings of the engine.
        trust_remote_code: whether the model's own code may run.
        adapter_rank: the highest rank of an adapter for which the engine makes room beside its
            model; None: no room.
        adapter_targets: the layers that such an adapter has, as `actor.adapter.targets` names them.
    """

    index: int
    model: str
    max_tokens: int
    threads: int
    device: str
    rollout: RolloutConfig
    trust_remote_code: bool = False
    adapter_rank: int | None = None
    adapter_targets: tuple[str, ...] = (ALL_LINEAR,)

    @property
    def first_process(self) -> int:
        """The number of the engine's first process among those of all engines, from 1."""
        return 1 + self.index * self.rollout.parts


@dataclass(frozen=True)
class Request:
    """Prompts to answer with `responses` samples each.

    Attributes:
        prompts: the prompts.
        responses: samples of each prompt.
        sampling: how they are sampled.
        seed: no other request of the run has it; with it, sampling is repeatable as far as the
            engine's arithmetic is.
        limits: the longest response to each prompt, in tokens of 1 or more, where that is less than
            `sampling.max_new_tokens`; None: no prompt has a limit of its own.
    """

    prompts: tuple[Prompt, ...]
    responses: int
    sampling: SamplingConfig
    seed: int
    limits: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.limits is not None:
            assert len(self.limits) == len(self.prompts) and min(self.limits, default=1) >= 1

    def most_tokens(self) -> list[int]:
        """Return the longest response to each prompt."""
        most = self.sampling.max_new_tokens
        return [min(most, limit) for limit in self.limits or [most] * len(self.prompts)]

    def each_prompt(self) -> list[Prompt]:
        """Return the prompt of each response, in the order of the engine's responses."""
        return [prompt for prompt in self.prompts for _ in range(self.responses)]

    def seeds(self) -> list[int]:
        """Return a seed for each prompt; two equal prompts have different seeds."""
        return derive_seeds(self.seed, len(self.prompts))


def derive_seeds(seed: int | Sequence[int], count: int) -> list[int]:
    """Return `count` seeds, all different, from one seed, or from several numbers together."""
    return [int(s) for s in np.random.SeedSequence(seed).generate_state(count)]


Ask = Callable[[Request, int], Awaitable[list[Trajectory]]]
"""Sends a request to an engine and returns its trajectories; arguments: request, episode. All
requests of an episode go to the same engine, whose prefix cache has the episode's earlier turns."""


class RolloutEngine(Protocol):
    """An engine that samples, and takes new weights.

    It takes requests, any number at once, and weight buckets between requests. It waits for its own
    model, and for nothing outside itself. It produces trajectories with the weight version that
    sampled them. It ends by `stop`, or with its process.
    """

    responses_per_request: int
    """How many responses the engine wants to be asked for at once."""

    async def generate(self, request: Request) -> list[Trajectory]:
        """Return all responses: prompt by prompt, and for each prompt sample by sample."""

    async def log_probs(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Return the log-prob (nats, temperature 1) of every token but the first, per sequence."""

    async def sleep(self) -> None:
        """Free the memory that the engine's settings name, until new weights come."""

    async def cards(self) -> Sequence[str]:
        """Return the name of the card of each of the engine's processes; "" for a CPU."""

    async def begin_sync(self, names: tuple[str, ...], channels: Sequence[Channel]) -> None:
        """Prepare for these tensors as new weights, in buckets; if asleep, make room for them.

        Each channel is of a rank that sends, and all send the same weights; each of the engine's
        processes takes them by the channel that reaches it.
        """

    async def receive(self) -> None:
        """Take the next bucket, once it comes, and check its checksums."""

    async def end_receiving(self) -> None:
        """Put the new weights in their places, and let go of the senders' memory.

        Raises:
            WeightSyncError: a tensor is missing.
        """

    async def finish_sync(self, version: int) -> None:
        """Use the new weights as `version` from now on; wake up, and drop cached prefixes."""

    async def pause(self) -> None:
        """Sample no further token until `resume`; requests keep what they have, new ones wait."""

    async def resume(self) -> None:
        """Sample on; each token from here on has the version of the weights that sample it."""

    async def read_memory(self) -> Reading:
        """Return the memory of the engine's processes, and their peaks since the last call.

        With several cards, the reading is of the fullest one.
        """

    async def take_adapter(self, files: AdapterFiles) -> int:
        """Sample with this adapter on the engine's weights from now on; return its bytes.

        Cached prefixes are dropped, and the engine takes the adapter's version.
        """

    async def watch(self) -> str:
        """Wait until the engine has died; return the reason."""

    async def answer(self) -> None:
        """Wait until the engine's own processes have answered, between two of their steps.

        It may be called in another event loop than the engine's.
        """

    async def stop(self) -> None:
        """End the engine and its processes."""


ENGINE_ENDED = "its engine process ended"
"""The reason that `RolloutEngine.watch` returns for an engine whose own processes are gone."""


@dataclass(frozen=True)
class RolloutBuild:
    """How an engine that samples is started.

    Attributes:
        start: makes the engine, in the process that it lives in.
        prepare: imports in that process what the engine needs; uses no card.
        environment: environment variables of that process, set before it starts.
        memory_settings: the settings that decide whether the engine can start, for people.
        logged_error: returns the last error that the engine logged, or None. Args: the path of the
            process's log without its suffix.
        calls_of: returns a function that finds tool calls in a text without its thought; None if
            the engine has no such parsers. Args: the name of a format, the policy's tokenizer.
            Raises ConfigError if the format is unknown, or the tokenizer lacks tokens of it.
    """

    start: Callable[[EngineSpec], RolloutEngine]
    environment: Callable[[EngineSpec], Mapping[str, str]]
    memory_settings: Callable[[EngineSpec], str]
    logged_error: Callable[[str], str | None]
    calls_of: Callable[[str, PreTrainedTokenizerBase], ExtractCalls] | None = None
    prepare: Callable[[], None] = lambda: None


def rollout_build(rollout: RolloutConfig) -> RolloutBuild:
    """Return the build functions of the engine that the settings name."""
    return cast(RolloutBuild, rollout.engine_value("engine"))


def calls_by_engine(
    rollout: RolloutConfig, name: str, tokenizer: PreTrainedTokenizerBase
) -> ExtractCalls:
    """Return the parser of a format of tool calls: the run's engine's, or else another engine's."""
    others: Iterator[RolloutBuild] = (folder_value(p, "engine") for p in ROLLOUT_ENGINES)
    parsers = (build.calls_of for build in chain([rollout_build(rollout)], others))
    return next(filter(None, parsers))(name, tokenizer)
