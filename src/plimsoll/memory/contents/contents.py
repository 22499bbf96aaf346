"""What each process of a run holds in every phase: roles, engines, and the process itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any, Literal, cast

from plimsoll.config.cluster import Device
from plimsoll.config.engine import FrozenRole
from plimsoll.engine.price.roles import RoleWork, frozen_role, trained_role, trainer_price
from plimsoll.engine.price.transfers import teacher_items
from plimsoll.environment.price import episodes_at_once
from plimsoll.environment.price import process_items as environment_processes
from plimsoll.machine.hardware import Card, Hardware
from plimsoll.memory.contents.layout import Layout, Process, ProcessKind, Slot, lay_out
from plimsoll.memory.contents.overheads import Constants, constant_item, process_items
from plimsoll.model.price.form import TeacherHead
from plimsoll.model.price.parameters import adapter_parameters
from plimsoll.reward.price import process_items as reward_processes
from plimsoll.rollout.price import (
    STARTING,
    EngineProcess,
    EngineSite,
    Sampler,
    receiving_items,
    rollout_price,
    sampler_of,
)
from plimsoll.shapes.known_models import read_shape
from plimsoll.shapes.shape import MicroBatch, ModelShape
from plimsoll.spec.kernels import Capability
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import RunSpec
from plimsoll.spec.workload import Workload
from plimsoll.timeline.items import Allocation, Moment
from plimsoll.timeline.lifetimes import TrainPhase, job_moments

_SCORING = Moment("score", "forward")
_SAVING = Moment("save", "gather")
_WRITING = Moment("save", "write")


@dataclass(frozen=True)
class Job:
    """A run with what pricing it needs, each worked out once. moments: all of the run's."""

    spec: RunSpec[Any]
    hardware: Hardware
    constants: Constants
    device: Device
    layout: Layout
    shapes: Mapping[RoleName, ModelShape]
    moments: frozenset[Moment]

    @cached_property
    def policy(self) -> ModelShape:
        """The shape of what engines sample with, which no rank may have."""
        return self.shapes.get("actor") or read_shape(self.spec.actor.model.path)

    @property
    def sampler(self) -> Sampler | None:
        """What each engine runs; None without engines."""
        return sampler_of(self.spec, self.policy)

    @property
    def engine_site(self) -> EngineSite | None:
        """The engines that sample, on the run's hardware; None without engines."""
        sampler, sampling = self.sampler, self.spec.sampling
        if sampler is None or sampling is None:
            return None
        cores, environments = self.hardware.nodes[0].cores, sampling.environments
        episodes = episodes_at_once(environments, sampler.rollout, cores) if environments else None
        return EngineSite(self.spec, sampler, self.hardware, self.device, self.capability, episodes)

    @property
    def engine_cards(self) -> tuple[int, ...]:
        """The numbers of the first node's cards that engines use."""
        slots = {p.slot for p in self.layout.processes if p.kind == "engine worker"}
        return tuple(sorted(s.card for s in slots if s.node == 0 and s.card is not None))

    @cached_property
    def computing(self) -> frozenset[Moment]:
        """The moments from when all roles are loaded."""
        return frozenset(moment for moment in self.moments if moment.phase != "load")

    @cached_property
    def steps(self) -> frozenset[Moment]:
        """The moments of the steps: those from when all roles are loaded, but not those of a
        reference that scores everything before."""
        return frozenset(moment for moment in self.computing if moment.phase != "precompute")

    @cached_property
    def capability(self) -> Capability | None:
        """The lowest of the cards that the run uses; None where none is known, as without any."""
        cards = [card for p in self.layout.processes if (card := self.card(p.slot)) is not None]
        return min((c.compute_capability for c in cards if c.compute_capability), default=None)

    def key(self, role: RoleName) -> str:
        """The config's key of a role."""
        return self.spec.roles[role].key

    def card(self, slot: Slot) -> Card | None:
        """None for a node alone."""
        return None if slot.card is None else self.hardware.nodes[slot.node].cards[slot.card]


def make_job(spec: RunSpec[Any], hardware: Hardware, constants: Constants) -> Job:
    """Raises ConfigError for a model whose shape cannot be known."""
    cards = [len(node.cards) for node in hardware.nodes]
    device: Device = "cuda" if hardware.cards and spec.cluster.device != "cpu" else "cpu"
    layout = lay_out(spec, cards if device == "cuda" else [0] * len(cards))
    read = {path: read_shape(path) for path in dict.fromkeys(m.path for m in spec.models.values())}
    shapes = {name: read[model.path] for name, model in spec.models.items()}
    moments = job_moments(tuple(shapes), spec.phases)
    if not spec.run.save_model:
        moments -= {_SAVING}
    if not spec.run.keep_checkpoints:
        moments -= {_WRITING}
    if spec.engines is not None:
        moments |= {STARTING}
    return Job(spec, hardware, constants, device, layout, shapes, moments)


@dataclass(frozen=True)
class Alike:
    """What tells processes apart that hold different things: of the actor's ranks only the first
    collects weights, and an engine's share is of its card and of its stage."""

    kind: ProcessKind
    first: bool
    card: str
    stage: int


def alike(job: Job, process: Process) -> Alike:
    """The same for processes that hold the same."""
    card = job.card(process.slot)
    first = process.kind in ("local", "rank") and process.index == 0
    return Alike(process.kind, first, "" if card is None else card.name, _stage(job, process))


def _stage(job: Job, process: Process) -> int:
    """Return the number of a worker's stage."""
    return job.spec.engines.engine.stage_of(process.part) if job.spec.engines else 0


def held_by(job: Job, process: Process) -> tuple[Allocation, ...]:
    """Everything that a process ever holds, wherever that is."""
    own = tuple(_contents(job, process))
    if job.device == "cuda":
        return own
    return tuple(replace(one, item=replace(one.item, where="host")) for one in own)


def _contents(job: Job, process: Process) -> Iterator[Allocation]:
    yield from _process(job, process)
    first = process.index == 0
    held = [one for name in hosted(job, process) for one in _role(job, name, first)]
    held = list(_one_at_a_time(held, _SCORING, job.steps))
    yield from _one_at_a_time(held, _WRITING, job.steps)
    if process.samples:
        yield from _engine(job, process)


def _process(job: Job, process: Process) -> Iterator[Allocation]:
    """What it is besides what it does, and what Ray's object store carries on its node."""
    cluster, sampler = job.spec.cluster, job.sampler
    parts = sampler.rollout.parts if sampler else 1
    groups = {"rank": cluster.ranks, "critic rank": cluster.critic_ranks or 1}
    groups |= {"engine": parts, "engine worker": parts}
    group = groups.get(process.kind, 1)
    libraries = "worker_process" if sampler is None else rollout_price(sampler.rollout).libraries
    cuda_build = job.hardware.nodes[process.slot.node].cuda_build
    for item in process_items(process, job.device, group, libraries, cuda_build, job.constants):
        yield Allocation(item, job.moments)
    for name, moments in _besides(job, process):
        yield Allocation(constant_item(name, job.constants), moments)
    yield from _rewards(job, process)
    if process.kind == "ray" and sampler is not None:
        words = "the largest bucket, and the next one"
        size = _two_buckets(job)
        yield from receiving_items("buckets in the object store", size, job.moments, words)


def _besides(job: Job, process: Process) -> Iterator[tuple[str, frozenset[Moment]]]:
    """The constants of what it holds for what it does, and when. Kernels of 16 bits are prepared by
    shape, from the first forward on, and kept; products of fp32 are not."""
    trained = job.spec.trained
    if any(name in trained and trained[name].adapter for name in hosted(job, process)):
        yield "adapter_libraries", job.moments
    narrow = any(model.dtype == "bfloat16" for model in job.spec.models.values())
    if job.device == "cpu" and narrow and process.kind not in ("recipe", "ray"):
        yield "kernel_cache", job.computing
    if process.kind in ("local", "recipe") and job.spec.sampling is not None:
        yield "trajectory_libraries", job.computing  # it writes trajectories, from the first on


def _rewards(job: Job, process: Process) -> Iterator[Allocation]:
    """The processes that rewards and environments start, with the first responses, where the loop
    runs."""
    sampling, node = job.spec.sampling, job.hardware.nodes[process.slot.node]
    if sampling is None or process.kind not in ("local", "recipe"):
        return
    for item in reward_processes(sampling.rewards, node.cores):
        yield Allocation(item, job.computing)
    for item in environment_processes(sampling.environments, node.cores):
        yield Allocation(item, job.computing)


def hosted(job: Job, process: Process) -> Iterator[RoleName]:
    """The roles that live in a process: in ranks alone."""
    own_critic = job.spec.cluster.critic_ranks is not None
    critics = ("critic rank",) if own_critic else ("local", "rank")
    for name in job.shapes:
        if process.kind in (critics if name == "critic" else ("local", "rank")):
            yield name


def _role(job: Job, name: RoleName, first: bool) -> tuple[Allocation, ...]:
    """On a rank of its group; first: that collects the actor's weights when they leave."""
    spec, shape, ranks = job.spec, job.shapes[name], job.spec.ranks_of(name)
    sampling = spec.sampling
    own = RoleWork(
        name=name,
        shape=shape,
        head=spec.roles[name].head,
        work=micro_batch(spec.workload, ranks),
        ranks=ranks,
        device=job.device,
        moments=job.moments,
        scaled=sampling is not None and sampling.rollout.sampling.temperature != 1,
        capability=job.capability,
        first=first or name != "actor",  # else alike: only the actor's weights leave
        scores=name != "actor" or spec.actor_scores,
    )
    if frozen := spec.frozen.get(name):
        held = frozen_role(frozen, own)
        return (*held, *_distillation(job, frozen)) if name == "teacher" else held
    role = spec.trained[name]
    phase: TrainPhase = "train_critic" if name == "critic" else "train_actor"
    return trained_role(
        role,
        own,
        phase,
        entropy=sampling is not None,
        sync_bucket=_sync_bucket(job) if name == "actor" else 0,
        teacher=_teacher_head(job),
    )


def _sync_bucket(job: Job) -> int:
    """Bytes of a bucket of new weights on its way to the engines; an adapter that goes by itself
    goes in one piece (cluster/route.py)."""
    actor, shape = job.spec.actor, job.policy
    if actor.adapter and job.spec.sends_adapter_alone:
        return adapter_parameters(shape, actor.adapter) * actor.model.element
    return _bucket_bytes(job.spec, shape)


def _two_buckets(job: Job) -> int:
    """Bytes of what engines receive and of what is gathered meanwhile (cluster/ray.py:
    hand_over)."""
    bucket, shape = _sync_bucket(job), job.policy
    if job.spec.sends_adapter_alone:
        return bucket
    every = shape.parameters + (shape.embedding_parameters if shape.tied else 0)
    return min(2 * bucket, every * job.spec.actor.model.element)


def _bucket_bytes(spec: RunSpec[Any], shape: ModelShape) -> int:
    """One tensor may be larger than a bucket is meant to be, and a tied head is sent beside the
    embedding. 0 without engines."""
    if spec.engines is None:
        return 0
    element = spec.actor.model.element
    tied = element * shape.embedding_parameters if shape.tied else 0
    largest = element * shape.largest_parameter
    whole = element * shape.parameters
    return min(max(spec.engines.sync.bucket_bytes, largest), whole) + tied


def micro_batch(work: Workload, ranks: int) -> MicroBatch:
    """The largest pack of a rank. Where prompts are shared, a response may be a token long, and its
    prompt almost all of a micro-batch."""
    tokens = work.largest_pack(ranks)
    sequences = -(-tokens // work.longest)
    loss_tokens = sequences if work.ends_only else tokens
    shared = tokens if work.shares_prompts else 0
    return MicroBatch(tokens, sequences, min(work.longest, tokens), loss_tokens, shared)


def _distillation(job: Job, teacher: FrozenRole) -> Iterator[Allocation]:
    ranks = job.spec.ranks_of("teacher")
    tokens = -(-job.spec.workload.sequences // ranks) * job.spec.workload.longest
    shape = job.shapes["teacher"]
    has_head = trainer_price(teacher).has_head(teacher, ranks, job.device)
    return teacher_items(teacher, shape, tokens, job.moments, has_head=has_head)


def _teacher_head(job: Job) -> TeacherHead | None:
    """Of an actor that learns from a teacher."""
    teacher = job.spec.models.get("teacher")
    if teacher is None:
        return None
    element, chunk = teacher.element, job.spec.actor.model.head_chunk
    return TeacherHead(chunk, job.shapes["teacher"].hidden, element)


def _engine(job: Job, process: Process) -> Iterator[Allocation]:
    """Yield what a process of an engine holds."""
    sampler = job.sampler
    if sampler is None:
        return
    part = EngineProcess(
        sampler=sampler,
        kind=cast(Literal["local", "engine", "engine worker"], process.kind),
        part=process.part,
        device=job.device,
        card=job.card(process.slot),
        context=job.constants.cuda_context,
        bucket=_sync_bucket(job),
        moments=job.moments,
    )
    yield from rollout_price(sampler.rollout).contents(part)


def _one_at_a_time(
    held: Sequence[Allocation], moment: Moment, steps: frozenset[Moment]
) -> Iterator[Allocation]:
    """Roles score one after another, and so are their states written: of what exists only
    meanwhile, the largest role's counts. What exists at all moments of the steps is always there.
    """

    passes = [moment in one.moments and not steps <= one.moments for one in held]
    passing: dict[str, int] = {}
    for one in compress(held, passes):
        passing[one.item.role] = passing.get(one.item.role, 0) + one.item.bytes
    largest = max(passing, key=lambda role: passing[role], default="")
    for one, does in zip(held, passes, strict=True):
        if does and one.item.role != largest:
            one = replace(one, moments=one.moments - {moment})
        if one.moments:
            yield one
