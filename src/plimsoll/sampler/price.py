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
from plimsoll.resolve.engine_rules import find_nothing, rollout_rules
from plimsoll.resolve.job import Sampling
from plimsoll.resolve.run_spec import Phase, RunSpec
from plimsoll.run.directory import ROWS_OF_A_GROUP
from plimsoll.shapes.shape import ModelShape
from plimsoll.sync.price import Sending
from plimsoll.timeline.items import Allocation, Item, Kind, Level, Moment, Where

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


def grown_contents(process: EngineProcess, source: str) -> Iterator[Allocation]:
    """Yield the weights, a KV cache that has grown to the longest response, and the logits.

    One layer of the cache is counted twice, because torch copies a layer to append to it. The
    processes of an engine share all of this; a process in front of them has nothing.
    """
    sampler, moments, engine = process.sampler, process.moments, process.sampler.rollout.engine
    parts = engine.parts
    if process.kind == "engine" and (engine.has_front if process.device == "cuda" else parts > 1):
        return
    shape, element = sampler.shape, sampler.element
    token = shape.cached_numbers() * element
    sequences, longest = sampler.sequences, sampler.longest
    cache = sequences * longest * token
    logits = sequences * shape.vocabulary * (element + 2 * 4)
    words = f"{sequences} sequences x {longest:,} tokens x {token:,} bytes"
    widths = f"{sequences} sequences x {shape.vocabulary:,} x ({element} + 2 x 4) bytes"

    sampling = frozenset(m for m in moments if samples_in(sampler.rollout, m.phase))

    def item(name: str, size: int, formula: str, cache: bool = False) -> Item:
        words = formula if parts == 1 else f"({formula}) / {parts}", source
        level: tuple[Where, Level] = ("device", "allocated")
        return Item("rollout", "rollout engines", name, *level, size // parts, *words, cache)

    weights = item("weights", element * shape.parameters, f"{element} bytes x {shape.parameters:,}")
    words = f"{words}, and one layer of it twice"
    kept = item("KV cache", cache + cache // shape.layers, words, cache=True)
    yield Allocation(weights, moments)
    yield Allocation(kept, sampling)
    yield Allocation(item("logits", logits, widths), sampling)


def coarse_contents(process: EngineProcess) -> Iterator[Allocation]:
    """Yield the share of its card that an engine takes, or what it holds if it grows.

    This is the price of an engine that has none of its own.
    """
    card, share = process.card, process.sampler.rollout.engine.card_share
    source = "coarse: the engine has no price.py (sampler/price.py)"
    if card is None or not share:
        yield from grown_contents(process, source)
        return
    size, words = int(share * card.usable_bytes), f"{share:g} x {card.usable_bytes:,} bytes"
    taken: tuple[str, Kind, str] = ("rollout", "rollout engines", "share of the card")
    yield Allocation(Item(*taken, "device", "process", size, words, source), process.moments)


@dataclass(frozen=True)
class RolloutPrice:
    """The functions that price a rollout engine; without them the price is coarse.

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

    contents: Callable[[EngineProcess], Iterator[Allocation]] = coarse_contents
    libraries: Literal["engine_process", "worker_process"] = "worker_process"
    plan: Callable[[EngineSite], Iterator[Problem]] = find_nothing
    starts: Callable[[EngineSite, int | None], Iterator[Problem]] = find_nothing
    shares: Callable[[EngineSite, CrowdedCard], Iterator[Problem]] = find_nothing
    here: Callable[[EngineSite, Sequence[int], Sequence[int]], Iterator[Problem]] = find_nothing


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
    """Return the price functions of the engine that the settings name, or coarse ones."""
    return cast(RolloutPrice, rollout.engine_value("price", RolloutPrice()))


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


_PACKED, _NUMBER, _TEXT, _WRITTEN = 4, 4, 5, 26
"""Bytes of a token in a pack (its id; a bit of the loss mask is not counted), in a column, and of
about five characters; and while a row of a file is made of it, beside its columns."""


def trajectory_bytes(sampling: Sampling) -> int:
    """Return the bytes of a token in a trajectory: its id, log-prob, and characters.

    Loss mask and weight version are held once for a response of one turn that one version of the
    weights sampled, and for each token otherwise. An environment may reward each token.
    """
    rewards = _NUMBER if sampling.environments else 0
    in_parts = sampling.environments or sampling.rollout.staleness
    return 4 + _NUMBER + _TEXT + (1 + 4 if in_parts else 0) + rewards


def step_item(spec: RunSpec[Any], sampling: Sampling, *, in_store: bool, routing: int = 0) -> Item:
    """Return what the process that runs the loop holds of a step's trajectories.

    Args:
        spec: the run.
        sampling: what a step samples.
        in_store: whether to return what Ray's object store on its node holds beside it: text that
            engines sent, the packs, and the columns of a loss.
        routing: bytes of the experts of a token that engines return.
    """
    longest, _ = spec.longest_sequence(held_out=False)
    roles = [r for r in spec.roles.values() if r.column]
    scored = [r for r in roles if spec.scores_before_learning or not r.sends]
    columns = len(scored) + 1 + any(r.trains == "train_critic" for r in roles)
    each, words = trajectory_bytes(sampling) + _PACKED + _NUMBER * columns, "trajectory, pack and"
    if in_store:
        columns += 1  # the sampler's log-probs
        each, words = _TEXT + _PACKED + _NUMBER * columns, "text, pack and"
    each += 2 * routing  # of the trajectory, and of the pack
    size, source = each * longest * sampling.sequences, "records.py: Trajectory, Pack; rl/batch.py"
    formula = f"{each} bytes ({words} {columns} columns) x {longest:,} tokens x "
    formula += f"{sampling.sequences:,} trajectories"
    name = "a step's data in the object store" if in_store else "a step's data"
    if spec.run.keep_trajectories.are_written and not in_store:
        rows, each = min(ROWS_OF_A_GROUP, sampling.sequences), _WRITTEN + _NUMBER * columns
        each += 2 * routing  # as NumPy's file, and in Arrow's table
        size += each * longest * rows
        formula += f" + {each} bytes x {longest:,} tokens x {rows} rows being written"
    return Item("process", "processes", name, "host", "process", size, formula, source)


_ESTIMATING = 28
"""Most bytes of a token, beside their results, that advantages were measured to need: by GRPO with
a KL in the loss 16, in the reward 28, by GAE 16, by REINFORCE++ 28."""


def estimating_item(spec: RunSpec[Any], sampling: Sampling) -> Item:
    """Return what the process that runs the loop needs while it estimates a step's advantages."""
    longest, _ = spec.longest_sequence(held_out=False)
    size = _ESTIMATING * longest * sampling.sequences
    formula = f"{_ESTIMATING} bytes x {longest:,} tokens x {sampling.sequences:,} trajectories"
    name, source = "estimates of advantages", "measured: rl/batch.py: estimate_advantages"
    return Item("process", "processes", name, "host", "process", size, formula, source)


def waiting_item(sampling: Sampling, longest: int, routing: int = 0) -> Item | None:
    """Return the groups that wait in the host memory of the process that runs the loop, or None.

    Only a run that samples while it learns has them.

    Args:
        sampling: what a step samples.
        longest: the most tokens of a trajectory.
        routing: see `step_item`.
    """
    if sampling.rollout.staleness == 0:
        return None
    batches, each = sampling.rollout.staleness + 1, trajectory_bytes(sampling) + routing
    size = batches * sampling.sequences * longest * each
    formula = f"{each} bytes x {longest:,} tokens x {sampling.sequences:,} trajectories x "
    formula += f"{batches} batches (rollout.staleness + 1)"
    name, source = "groups that wait", "records.py: Trajectory; rl/ahead.py"
    return Item("rollout", "rollout engines", name, "host", "allocated", size, formula, source)
