"""The contents of each process of a run in every phase: roles, engines, and the process itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any, Literal, cast

from plimsoll.config.cluster import RANK_NAMES, DecidedExchange, Device, decided_exchange
from plimsoll.config.engine import TrainedRole
from plimsoll.config.rollout import RolloutConfig
from plimsoll.environment.price import episodes_at_once
from plimsoll.environment.price import process_items as environment_processes
from plimsoll.machine.hardware import Card, Hardware
from plimsoll.memory.contents.layout import Layout, Process, ProcessKind, Slot, lay_out
from plimsoll.memory.contents.overheads import Constants, constant_item, process_items
from plimsoll.model.price.form import TeacherHead, adapter_parameters
from plimsoll.resolve.decisions import Capability
from plimsoll.resolve.job import Workload
from plimsoll.resolve.roles import Role, RoleName
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.reward.references import process_items as reward_processes
from plimsoll.sampler.price import (
    STARTING,
    EngineProcess,
    EngineSite,
    Sampler,
    estimating_item,
    receiving_items,
    rollout_price,
    sampler_of,
    step_item,
    waiting_item,
)
from plimsoll.shapes.known_models import find_shape
from plimsoll.shapes.shape import MicroBatch, ModelShape
from plimsoll.sync.price import Sending
from plimsoll.timeline.items import Allocation, Item, Moment, job_moments, states_asleep
from plimsoll.trainer.price import RoleWork, frozen_role, teacher_items, trained_role, trainer_price

_SCORING = Moment("score", "forward")
_SAVING = Moment("save", "gather")
_WRITING = Moment("save", "write")


@dataclass(frozen=True)
class PlannedJob:
    """A run with everything that pricing needs, each value computed once."""

    spec: RunSpec[Any]
    hardware: Hardware
    constants: Constants
    device: Device
    layout: Layout
    shapes: Mapping[RoleName, ModelShape]
    moments: frozenset[Moment]
    """All moments of the run."""

    @cached_property
    def sending(self) -> Sending | None:
        """How the actor's weights go to the engines; None without engines.

        An adapter that is sent alone is sent in one piece (cluster/route.py).
        """
        actor, shape, engines = self.spec.actor, self.policy, self.spec.engines
        if engines is None:
            return None
        if actor.adapter and self.spec.sends_adapter_alone:
            size = adapter_parameters(shape, actor.adapter) * actor.model.element
            return Sending(None, size, size, size)
        every = _sent_bytes(engines, actor, shape)
        gathered = _bucket_bytes(engines, actor, shape)
        cuts = engines.engine.as_published and shape.origin == "described"
        bucket = _bucket_bytes(engines, actor, shape.unstacked) if cuts else gathered
        return Sending(engines.sync.decided_route, bucket, min(2 * bucket, every), gathered)

    @cached_property
    def policy(self) -> ModelShape:
        """The shape of the model that engines sample with; there may be no rank that holds it."""
        senders = (self.shapes[name] for name, role in self.spec.roles.items() if role.sends)
        return next(senders, None) or find_shape(self.spec.actor.model.path)

    @property
    def sampler(self) -> Sampler | None:
        """The sampler that each engine runs; None without engines."""
        return sampler_of(self.spec, self.policy)

    @property
    def engine_site(self) -> EngineSite | None:
        """The engines that sample, on the run's hardware; None without engines."""
        sampler, sampling = self.sampler, self.spec.sampling
        if sampler is None or sampling is None:
            return None
        cores, environments = self.hardware.node.cores, sampling.environments
        episodes = episodes_at_once(environments, sampler.rollout, cores) if environments else None
        return EngineSite(self.spec, sampler, self.hardware, self.device, self.capability, episodes)

    @property
    def engine_cards(self) -> tuple[int, ...]:
        """The numbers of the first node's cards that engines use."""
        here = self.layout.kinds[0].processes
        cards = {process.slot.card for process in here if process.kind == "engine worker"}
        return tuple(sorted(card for card in cards if card is not None))

    @cached_property
    def computing(self) -> frozenset[Moment]:
        """The moments after all roles are loaded."""
        return frozenset(moment for moment in self.moments if moment.phase != "load")

    @cached_property
    def steps(self) -> frozenset[Moment]:
        """The moments after loading, except those of the phase `precompute` before the steps."""
        return frozenset(moment for moment in self.computing if moment.phase != "precompute")

    @cached_property
    def capability(self) -> Capability | None:
        """The lowest compute capability of the run's cards; None if none is known."""
        known = (card.compute_capability for card in self.count_cards())
        return min(filter(None, known), default=None)

    @cached_property
    def contents(self) -> Mapping[ContentsKey, tuple[Allocation, ...]]:
        """Everything that each kind of process holds at any moment."""
        processes = (process for kind in self.layout.kinds for process in kind.processes)
        examples = {contents_key(self, process): process for process in processes}
        return {key: contents_of(self, process) for key, process in examples.items()}

    def key(self, role: RoleName) -> str:
        """Return the config's key of a role."""
        return self.spec.roles[role].key

    def count_cards(
        self, wanted: Callable[[Process], bool] = lambda process: True
    ) -> Mapping[Card, int]:
        """Return how many cards of each kind have processes of the wanted kinds."""
        counts = Counter[Card]()
        for kind in self.layout.kinds:
            slots = {process.slot for process in kind.processes if wanted(process)}
            for card in filter(None, map(self.card, slots)):
                counts[card] += len(kind.nodes)
        return counts

    def card(self, slot: Slot) -> Card | None:
        """Return the card of a slot; None if the slot is a node alone."""
        return None if slot.card is None else self.hardware.node.cards[slot.card]


def make_job(spec: RunSpec[Any], hardware: Hardware, constants: Constants) -> PlannedJob:
    """Return the job of a run. Raises ConfigError for a model whose shape cannot be known."""
    device: Device = "cuda" if hardware.cards and spec.cluster.device != "cpu" else "cpu"
    layout = lay_out(spec, len(hardware.node.cards) if device == "cuda" else 0, hardware.nodes)
    read = {path: find_shape(path) for path in dict.fromkeys(m.path for m in spec.models.values())}
    shapes = {name: read[model.path] for name, model in spec.models.items()}
    moments = job_moments([spec.roles[name] for name in shapes], spec.phases)
    if not spec.run.save_model:
        moments -= {_SAVING}
    if not spec.run.keep_checkpoints:
        moments -= {_WRITING}
    if spec.engines is not None:
        moments |= {STARTING}
    return PlannedJob(spec, hardware, constants, device, layout, shapes, moments)


@dataclass(frozen=True)
class ContentsKey:
    """The properties of a process on which its contents depend."""

    kind: ProcessKind
    first: bool
    """Whether it is the first of the actor's ranks, which alone collects weights, or Ray's
    processes on the node of the process that runs the loop."""
    card: str
    """The name of its card, on which an engine's share depends; "" without a card."""
    stage: int
    """The stage of an engine's worker, on which its share depends too."""


def contents_key(job: PlannedJob, process: Process) -> ContentsKey:
    """Return a key that is equal for processes with equal contents."""
    card = job.card(process.slot)
    first = process.kind in ("local", "rank", "ray") and process.index == 0
    return ContentsKey(process.kind, first, "" if card is None else card.name, _stage(job, process))


def _stage(job: PlannedJob, process: Process) -> int:
    """Return the number of a worker's stage."""
    return job.spec.engines.engine.stage_of(process.part) if job.spec.engines else 0


def contents_of(job: PlannedJob, process: Process) -> tuple[Allocation, ...]:
    """Return everything that a process holds at any moment, on its card and on its host."""
    contents = tuple(_contents(job, process))
    if job.device == "cuda":
        return contents
    return tuple(replace(held, item=replace(held.item, where="host")) for held in contents)


def _contents(job: PlannedJob, process: Process) -> Iterator[Allocation]:
    yield from _process(job, process)
    first = process.index == 0
    held = [held for name in roles_in(job, process) for held in _role(job, name, first)]
    awake = job.steps - states_asleep(job.spec.rank_sleep)
    held = list(_one_at_a_time(held, _SCORING, awake))
    yield from _one_at_a_time(held, _WRITING, awake)
    if process.samples:
        yield from _engine(job, process)


def _process(job: PlannedJob, process: Process) -> Iterator[Allocation]:
    """Yield everything that a process holds besides its roles and its engine.

    For Ray's own processes this includes the weights in the node's object store.
    """
    cluster, sampler = job.spec.cluster, job.sampler
    parts = sampler.rollout.parts if sampler else 1
    groups: dict[ProcessKind, int] = {RANK_NAMES[k]: n for k, n in cluster.rank_counts.items()}
    groups |= {"engine": parts, "engine worker": parts}
    group = groups.get(process.kind, 1)
    libraries = "worker_process" if sampler is None else rollout_price(sampler.rollout).libraries
    cuda_build = job.hardware.node.cuda_build
    by_nccl = job.sending is not None and job.sending.route == "nccl"
    sends = (process.kind == "rank" and process.index == 0) or process.samples
    shards = dict[ProcessKind, int]()
    shards |= {RANK_NAMES[kind]: cluster.shards_of(kind) for kind in cluster.rank_counts}
    shares = 1 < shards.get(process.kind, 1) < group  # in a process group of their own
    facts = group, (group > 1) + (by_nccl and sends) + shares, libraries, cuda_build
    for item in process_items(process, job.device, *facts, job.constants):
        yield Allocation(item, job.moments)
    for name, moments in _task_constants(job, process):
        yield Allocation(constant_item(name, job.constants), moments)
    yield from _rewards(job, process)
    data = job.spec.config.data
    renders = any(data.template_of(source) != "none" for source in data.sources().values())
    if process.kind in ("local", "controller") and renders:
        yield Allocation(_TEMPLATES, job.moments)
    if job.spec.run.mirror is not None and process.kind in ("local", "controller"):
        yield Allocation(_UPLOADS, job.computing)
    yield from _step(job, process)
    sending = job.sending if process.kind == "ray" else None
    if sending is not None and sending.route is None:
        name, words = "buckets in the object store", "the largest bucket, and the next one"
        yield from receiving_items(name, sending.two, job.moments, words)


def _step(job: PlannedJob, process: Process) -> Iterator[Allocation]:
    """Yield what the process that runs the loop, and Ray's store beside it, hold of a step."""
    sampling, loops = job.spec.sampling, process.kind in ("local", "controller")
    if sampling is None or not (loops or (process.kind == "ray" and process.index == 0)):
        return
    if job.spec.trained:
        step = step_item(job.spec, sampling, in_store=not loops, routing=routing_bytes(job))
        yield Allocation(step, job.steps)
    if job.spec.trained and loops:
        scoring = frozenset(moment for moment in job.steps if moment.phase == "score")
        yield Allocation(estimating_item(job.spec, sampling), scoring)
    if process.kind == "controller" and job.sampler is not None:
        longest, _ = job.spec.longest_sequence(held_out=True)
        if (waiting := waiting_item(sampling, longest, routing_bytes(job))) is not None:
            yield Allocation(waiting, job.computing)


def routing_bytes(job: PlannedJob) -> int:
    """Return the bytes of a token's experts that engines return; 0 if they return none."""
    sampling = job.spec.sampling
    follows = sampling is not None and sampling.rollout.routing == "sampled"
    return job.policy.routing_bytes if follows else 0


_TEMPLATES = Item(
    "process",
    "processes",
    "process that renders the chat template",
    "host",
    "process",
    25 * 2**20,
    "25 MiB",
    "measured: Linux, Python 3.11, jinja2 3.1, 24.1 MiB resident",
)

_UPLOADS = Item(
    "process",
    "processes",
    "uploads to the mirror",
    "host",
    "process",
    10 * 50 * 2**20,
    "10 parts x 50 MiB of a file",
    "s3fs 2026.9, core.py: _put_file; gcsfs uploads one part at a time",
)


def _task_constants(job: PlannedJob, process: Process) -> Iterator[tuple[str, frozenset[Moment]]]:
    """Yield the constants that depend on the work of a process, each with its moments.

    16-bit kernels are prepared for each shape from the first forward on, and kept. fp32 products
    need no such kernels.
    """
    trained = job.spec.trained
    if any(name in trained and trained[name].adapter for name in roles_in(job, process)):
        yield "adapter_libraries", job.moments
    narrow = any(model.dtype == "bfloat16" for model in job.spec.models.values())
    if job.device == "cpu" and narrow and process.kind not in ("controller", "ray"):
        yield "kernel_cache", job.computing
    if process.kind in ("local", "controller") and job.spec.sampling is not None:
        yield "trajectory_libraries", job.computing  # it writes trajectories, from the first on


def _rewards(job: PlannedJob, process: Process) -> Iterator[Allocation]:
    """Yield the processes that rewards and environments start.

    They start with the first responses, on the node of the process that runs the loop; those that
    compute rewards on every node (cluster/ray_rewards.py).
    """
    sampling, node = job.spec.sampling, job.hardware.node
    if sampling is None:
        return
    if process.kind == "ray" and process.slot.node > 0:
        functions = {name: part for name, part in sampling.rewards.items() if part.name}
        for item in reward_processes(functions, node.cores):
            yield Allocation(item, job.computing)
    if process.kind not in ("local", "controller"):
        return
    for item in reward_processes(sampling.rewards, node.cores):
        yield Allocation(item, job.computing)
    for item in environment_processes(sampling.environments, node.cores):
        yield Allocation(item, job.computing)


def roles_in(job: PlannedJob, process: Process) -> Iterator[RoleName]:
    """Yield the roles that live in a process; only ranks have roles."""
    for name in job.shapes:
        if process.kind in ("local", RANK_NAMES[job.spec.rank_kind_of(name)]):
            yield name


def _role(job: PlannedJob, name: RoleName, first: bool) -> tuple[Allocation, ...]:
    """Return everything that one rank holds for a role.

    `first` says whether this rank collects the actor's weights before they are sent or saved.
    """
    spec, role, ranks = job.spec, job.spec.roles[name], job.spec.ranks_of(name)
    sampling, shards = spec.sampling, spec.shards_of(name)
    work = RoleWork(
        role=role,
        shape=job.shapes[name],
        work=micro_batch(spec.workload, ranks // shards, shards, decided_exchange(spec.cluster)),
        ranks=ranks,
        device=job.device,
        moments=job.moments,
        scaled=sampling is not None and sampling.rollout.sampling.temperature != 1,
        capability=job.capability,
        first=first or not role.sends,
        scores=spec.actor_scores if role.sends else True,
        rank_sleep=spec.rank_sleep if job.device == "cuda" else "none",
        copies_states=spec.run.copies_states,
    )
    if role.frozen:
        held = frozen_role(work)
        return (*held, *_distillation(job, role)) if role.head == "states" else held
    held = trained_role(
        work,
        entropy=sampling is not None,
        sending=job.sending if role.sends else None,
        teacher=_teacher_head(job) if role.sends else None,
    )
    return (*held, *_experts(job, work)) if role.sends else held


def _experts(job: PlannedJob, work: RoleWork) -> Iterator[Allocation]:
    """Yield the experts of a micro-batch's tokens that engines took, on the actor's device."""
    if each := routing_bytes(job):
        shards = work.work.shards
        tokens = work.work.tokens * (1 if shards == 1 else shards + 1)  # the pack's, and its own
        item = Item(
            work.role.name,
            "activations",
            "experts that engines took",
            "device" if work.device == "cuda" else "host",
            "allocated",
            each * tokens,
            f"{each} bytes x {tokens:,} tokens",
            "model/routers.py",
        )
        passes = ("forward", "forward_backward", "backward", "reduce")
        yield Allocation(item, frozenset(m for m in job.moments if m.instant in passes))


def _bucket_bytes(engines: RolloutConfig, actor: TrainedRole, shape: ModelShape) -> int:
    """Return the bytes of the largest bucket of weights.

    One tensor may be larger than the configured bucket. The embedding and a head tied to it are
    both sent.
    """
    element, whole = actor.model.element, _sent_bytes(engines, actor, shape)
    if _sends_linears_alone(engines, actor, shape):
        matrices = (one.inputs * one.outputs * one.stacked for one in shape.linears)
        return min(max(engines.sync.decided_bucket, element * max(matrices)), whole)
    tied = element * shape.embedding_parameters if shape.tied else 0
    largest = element * shape.largest_parameter
    return min(max(engines.sync.decided_bucket, largest), whole - tied) + tied


def _sent_bytes(engines: RolloutConfig, actor: TrainedRole, shape: ModelShape) -> int:
    """Return the bytes of all weights that a sync sends, at most."""
    if _sends_linears_alone(engines, actor, shape):
        return actor.model.element * sum(linear.parameters for linear in shape.linears)
    tied = shape.embedding_parameters if shape.tied else 0
    return actor.model.element * (shape.parameters + tied)


def _sends_linears_alone(engines: RolloutConfig, actor: TrainedRole, shape: ModelShape) -> bool:
    """Return whether only layers with an adapter are sent; see cluster/route.py, `transfer`."""
    adapter = actor.adapter
    if adapter is None or adapter.modules_to_save or actor.model.quantization != "none":
        return False
    linears = {linear.name for linear in shape.linears} | {"all-linear", "experts"}
    return not engines.engine.forgets_weights and linears.issuperset(adapter.targets)


def micro_batch(
    work: Workload, streams: int, shards: int = 1, exchange: DecidedExchange = "heads"
) -> MicroBatch:
    """Return the size of the largest micro-batch of a rank; `shards` ranks share a pack.

    If prompts are shared, a response may have one token, and its prompt may fill the rest of the
    micro-batch. If ranks share a pack, the learned tokens may all be one rank's.
    """
    pack = work.largest_pack(streams)
    tokens, sequences = -(-pack // shards), -(-pack // work.longest)
    loss_tokens = min(sequences, tokens) if work.ends_only else tokens
    shared = pack if work.shares_prompts else 0
    longest = min(work.longest, pack)
    return MicroBatch(tokens, sequences, longest, loss_tokens, shared, shards, exchange)


def _distillation(job: PlannedJob, teacher: Role) -> Iterator[Allocation]:
    settings, learns = teacher.frozen, job.spec.sender.trains
    ranks, shape = job.spec.ranks_of(teacher.name), job.shapes[teacher.name]
    assert settings is not None and learns is not None
    shards = job.spec.shards_of(teacher.name)  # each has the states of its own rows
    tokens = -(-job.spec.workload.sequences * shards // ranks) * job.spec.workload.longest
    tokens, budget = -(-tokens // shards), -(-job.spec.workload.budget // shards)
    has_head = trainer_price(settings).has_head(settings, ranks, job.device)
    pinned = min(tokens, budget) if job.device == "cuda" else 0
    where = shape, tokens, job.moments
    return teacher_items(teacher, learns, *where, has_head=has_head, pinned=pinned)


def _teacher_head(job: PlannedJob) -> TeacherHead | None:
    """Return the head of a teacher from whose whole distributions the actor learns, or None."""
    for teacher in job.spec.roles.values():
        if teacher.head == "states":
            element, chunk = teacher.model.element, job.spec.actor.model.head_chunk
            return TeacherHead(chunk, job.shapes[teacher.name].hidden, element)
    return None


def _engine(job: PlannedJob, process: Process) -> Iterator[Allocation]:
    """Yield the contents of a process of an engine."""
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
        sending=job.sending,
        moments=job.moments,
    )
    yield from rollout_price(sampler.rollout).contents(part)


def _one_at_a_time(
    held: Sequence[Allocation], moment: Moment, awake: frozenset[Moment]
) -> Iterator[Allocation]:
    """Yield the allocations; of the temporary ones, only the largest role's exist at the moment.

    Roles score one after another, and their states are written one after another. So the temporary
    allocations of all other roles lose this moment. An allocation that exists at all moments of the
    steps at which ranks are awake is not temporary, and keeps it.
    """
    temporary = [moment in a.moments and not awake <= a.moments for a in held]
    role_bytes: dict[str, int] = {}
    for allocation in compress(held, temporary):
        item = allocation.item
        role_bytes[item.role] = role_bytes.get(item.role, 0) + item.bytes
    largest = max(role_bytes, key=lambda role: role_bytes[role], default="")
    for allocation, is_temporary in zip(held, temporary, strict=True):
        if is_temporary and allocation.item.role != largest:
            allocation = replace(allocation, moments=allocation.moments - {moment})
        if allocation.moments:
            yield allocation
