"""The model and work of a rollout engine, and the price functions that its folder has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from plimsoll.config.cluster import Device
from plimsoll.config.engine import ELEMENT_BYTES
from plimsoll.config.problems import Problem
from plimsoll.config.rollout import RolloutConfig
from plimsoll.machine.hardware import Card, Hardware
from plimsoll.resolve.engine_rules import rollout_rules
from plimsoll.resolve.run_spec import Phase, RunSpec
from plimsoll.shapes.shape import ModelShape
from plimsoll.sync.price import Sending
from plimsoll.timeline.items import Allocation, Item, Moment, Where

STARTING = Moment("load", "start engines")
"""The moment when engines take their share, before the ranks read their models."""
_SENDING = Moment("sync", "gather")


@dataclass(frozen=True)
class Sampler:
    """An engine's model and work.

    Attributes:
        longest: tokens of the longest prompt with its response.
        sequences: sequences that are sampled at once.
        adapter_rank: see `EngineSpec`.
        ranks_sleep: whether the ranks on the engine's cards sleep while it is awake.
    """

    rollout: RolloutConfig
    shape: ModelShape
    longest: int
    sequences: int
    adapter_rank: int | None = None
    ranks_sleep: bool = False

    @property
    def element(self) -> int:
        """Bytes of a weight."""
        return ELEMENT_BYTES[self.rollout.dtype]


@dataclass(frozen=True)
class EngineProcess:
    """One process of an engine.

    Attributes:
        kind: "local" if the engine lives in the controller's process; "engine" is the process that
            answers requests; "engine worker" is another that holds a part of the model.
        part: the number of the worker in its engine.
        card: the process's card; None on the CPU, or if the process has none.
        context: bytes of a CUDA context, which are counted elsewhere.
        sending: how new weights come.
        moments: all moments of the job.
    """

    sampler: Sampler
    kind: Literal["local", "engine", "engine worker"]
    part: int
    device: Device
    card: Card | None
    context: int
    sending: Sending | None
    moments: frozenset[Moment]


@dataclass(frozen=True)
class EngineSite:
    """The engines of a run on its hardware.

    Attributes:
        capability: the lowest compute capability of the run's cards; None if unknown.
        episodes: episodes in flight over all engines; None without environments.
    """

    spec: RunSpec[Any]
    sampler: Sampler
    hardware: Hardware
    device: Device
    capability: tuple[int, int] | None
    episodes: int | None = None


@dataclass(frozen=True)
class CrowdedCard:
    """A card that has room for an engine or for the ranks, but not for both.

    Attributes:
        name: the card's name and place.
        capacity: its usable bytes.
        moment: when it is fullest.
        bytes: the bytes that it would hold then.
        beside: how many of these bytes are not the engine's.
    """

    name: str
    capacity: int
    moment: Moment
    bytes: int
    beside: int


@dataclass(frozen=True)
class RolloutPrice:
    """The functions that price a rollout engine.

    Attributes:
        contents: the memory of one process of the engine, without interpreter and libraries.
        libraries: the constant of the plan that stands for interpreter and libraries.
        plan: problems that show once the hardware is known.
        starts: errors of engines that have too little memory to start. Args: site, bytes of the
            smallest card of an engine; None on the CPU.
        shares: the error of an engine that takes too much of a card beside the ranks.
        here: problems of the cards at hand. Args: site, the numbers of the cards of the first node
            that engines use, bytes that are free on each card of that node.
    """

    contents: Callable[[EngineProcess], Iterator[Allocation]]
    libraries: Literal["engine_process", "worker_process"]
    plan: Callable[[EngineSite], Iterator[Problem]]
    starts: Callable[[EngineSite, int | None], Iterator[Problem]]
    shares: Callable[[EngineSite, CrowdedCard], Iterator[Problem]]
    here: Callable[[EngineSite, Sequence[int], Sequence[int]], Iterator[Problem]]


def sampler_of(spec: RunSpec[Any], policy: ModelShape) -> Sampler | None:
    """Return the model and work of each engine of a run; None without engines.

    Args:
        spec: the run.
        policy: the shape of the model that engines sample with.
    """
    sampling, engines = spec.sampling, spec.engines
    if sampling is None or engines is None:
        return None
    most = engines.max_sequences
    return Sampler(
        engines,
        policy,
        spec.longest_sequence(held_out=True)[0],
        most if spec.data.eval else min(most, sampling.sequences),
        rollout_rules(engines).adapter_room(spec),
        spec.rank_sleep != "none",
    )


def rollout_price(rollout: RolloutConfig) -> RolloutPrice:
    """Return the price functions of the engine that the settings name."""
    return cast(RolloutPrice, rollout.engine_value("price"))


def receiving_items(
    name: str,
    size: int,
    moments: frozenset[Moment],
    words: str = "the largest bucket",
    where: Where = "host",
) -> Iterator[Allocation]:
    """Yield a copy of new weights on their way to an engine.

    Args:
        name: the copy's name in the plan.
        size: its bytes.
        moments: all moments of the job.
        words: a description of the bytes, for the formula.
        where: in host memory, or on the card.
    """
    formula = f"{size:,} bytes of {words}"
    source = "sampler/vllm/engine.py: receive; sampler/vllm/receiver.py"
    item = Item("rollout", "rollout engines", name, where, "allocated", size, formula, source)
    yield Allocation(item, moments & {_SENDING})


def samples_in(rollout: RolloutConfig, phase: Phase) -> bool:
    """Return whether engines may be sampling in a phase."""
    beside = rollout.staleness > 0 and phase not in ("load", "precompute")
    return phase == "rollout" or beside


_TOKEN_BYTES = 26
"""Bytes of a token in a trajectory: its id and weight version (8 each), log-prob (4), loss mask (1)
and about five characters of text."""


def waiting_item(rollout: RolloutConfig, sequences: int, longest: int) -> Item | None:
    """Return the groups that wait in the host memory of the process that runs the loop, or None.

    Only a run that samples while it learns has them.

    Args:
        rollout: the settings of the engines.
        sequences: the trajectories of a step.
        longest: the most tokens of a trajectory.
    """
    if rollout.staleness == 0:
        return None
    batches = rollout.staleness + 1
    size = batches * sequences * longest * _TOKEN_BYTES
    formula = f"{_TOKEN_BYTES} bytes x {longest:,} tokens x {sequences:,} trajectories x "
    formula += f"{batches} batches (rollout.staleness + 1)"
    name, source = "groups that wait", "records.py: Trajectory; rl/ahead.py"
    return Item("rollout", "rollout engines", name, "host", "allocated", size, formula, source)
