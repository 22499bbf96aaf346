"""One training rank: the engines of all roles that live in its process."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from plimsoll.algorithm.sequences import sums
from plimsoll.config.cluster import RankSleep
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.rollout import DecidedRoute
from plimsoll.errors import ConfigError
from plimsoll.machine.faults import fault_point
from plimsoll.machine.heap import release_free_blocks
from plimsoll.machine.incident import OutOfMemory
from plimsoll.machine.processes import reset_process_peak
from plimsoll.model.adapters import adapter_off, add_adapter
from plimsoll.model.disturbance import UNSCALED, Disturbance, Scaled, disturb
from plimsoll.model.files import companions
from plimsoll.model.load import load_policy, load_teacher, load_tokenizer, load_value
from plimsoll.model.policy import (
    PackTensors,
    PolicyModel,
    ReadAt,
    TeacherModel,
    ValueModel,
    before_learned,
)
from plimsoll.model.routers import follow_sampler, freeze_routers
from plimsoll.model.shards import open_shard
from plimsoll.process.threads import call_in_background
from plimsoll.records import BatchCounts, Floats, Pack, PackColumns
from plimsoll.resolve.roles import HeadKind, RoleName
from plimsoll.run.readings import DividedShare, Reading
from plimsoll.run.state import SavedFile, other_contents
from plimsoll.sync.buckets import WeightBucket
from plimsoll.sync.channel import Channel, Outlet, card_name, open_outlet
from plimsoll.sync.proof import Rehearsal
from plimsoll.trainer.checkpoint import CheckpointFile, share_of, write_files
from plimsoll.trainer.memory import explain_shortage, read_memory
from plimsoll.trainer.objectives import (
    DistillationObjective,
    learn,
    losses,
    measure,
    score,
    teacher_forward,
)
from plimsoll.trainer.process_group import PeerFailed, Place, Vote, join, leave
from plimsoll.trainer.protocol import (
    Engine,
    FrozenEngine,
    Objective,
    TrainedEngine,
    engine_build,
    not_finite_error,
)
from plimsoll.trainer.weights import (
    AdapterFiles,
    PlannedBucket,
    WeightPlan,
    WeightSender,
    adapter_files,
    plan_rehearsals,
    plan_weights,
    write_adapter,
    write_model,
)


@dataclass(frozen=True)
class UpdateResult:
    """One rank's result of one optimizer step.

    Attributes:
        metrics: This rank's share of the batch's means; add over ranks.
        grad_norm: The norm of the full gradient, before clipping; the same on all ranks. If it is
            not finite, the step was left out.
    """

    metrics: dict[str, float]
    grad_norm: float


@dataclass(frozen=True)
class Abandoned:
    """One rank's result of an optimizer step that all ranks left because memory ran out on some.

    Attributes:
        error: The error on this rank; None if the rank only left with the others.
        pack: The number of this rank's micro-batch, from 0, at which memory ran out.
    """

    error: OutOfMemory | None = None
    pack: int = -1


class WithoutAdapter:
    """The `Engine` of a reference that is the actor with its adapter switched off.

    It only scores: it is the adapted model as it was before it learned.

    `gather` yields the adapter's parameters too, unchanged.
    """

    def __init__(self, adapted: Engine) -> None:
        self._adapted = adapted
        self.module = adapted.module

    def forward(self, *inputs: object, **options: object) -> Any:
        """Return the output of the adapted model; inside `scoring`, without the adapter."""
        return self._adapted.forward(*inputs, **options)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Switch gradients and the adapter off during the block."""
        with self._adapted.scoring(), adapter_off(self.module):
            yield

    def gather(self, names: Sequence[str]) -> AbstractContextManager[dict[str, Tensor]]:
        """Return a context manager that yields the undivided parameters by name."""
        return self._adapted.gather(names)

    def sleep(self, weights: bool) -> None:
        """Do nothing: the adapted model's engine sleeps by itself."""

    def wake(self) -> None:
        """Do nothing: the adapted model's engine wakes by itself."""

    def share(self, role: str) -> None:
        """Return None, because the actor's engine counts the divided tensors."""


class Worker:
    """The engines of a rank, and the calls that the controller makes, one at a time.

    Consumes: calls, the same on every rank in the same order, each with the rank's own packs. Waits
    for: the other ranks, inside collectives. Unblocked by: their making the same call. Produces:
    log-probs, values, step results, weight buckets, files. Shut down by `stop`, or with its
    process. `break_off` may be called beside another call.

    Attributes:
        ends: How many calls and micro-batches have ended. If the number stays, the rank does not
            work.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._device = join(place)
        self._engines: dict[RoleName, Engine] = {}
        self._sources: dict[RoleName, TrainedRole | FrozenRole] = {}
        self._seeds: dict[RoleName, int] = {}
        self._busy_with: RoleName | None = None
        self._distillation: list[PackColumns] = []
        self._outlet: Outlet | None = None
        self._sender = WeightSender()
        self._checkpoints: dict[RoleName, Future[tuple[SavedFile, ...]]] = {}
        self._vote = Vote(place)
        self._shard = open_shard(place.rank, place.ranks, place.shards, place.exchange)
        self._pack = -1  # the number of the micro-batch that was taken last; -1 before the first
        self.ends = 0

    def do(self, method: str, *arguments: object) -> Any:
        """Call a method of this worker by its name, and return its result.

        Raises:
            OutOfMemory: Memory ran out; the error names the role at work.
        """
        with explain_shortage(self._device, lambda: self._busy_with, self.shares):
            result = getattr(self, method)(*arguments)
        self.ends += 1
        return result

    @property
    def waits_for_card(self) -> bool:
        """Whether the host computes little, and mostly waits for its card."""
        return self._device.type == "cuda"

    def load_model(
        self,
        name: RoleName,
        role: TrainedRole | FrozenRole,
        temperature: float = 1.0,
        seed: int = 0,
        head: HeadKind = "policy",
    ) -> int:
        """Load a role; return the number of parameters of the undivided model, without an adapter.

        Args:
            name: The role.
            role: Its settings.
            temperature: The sampling temperature, by which a policy divides logits.
            seed: Initialises a new adapter, and the new head of a value function. The files of a
                role that only scores must have the head.
            head: The output for a token.
        """
        self._busy_with, device, frozen = name, self._device, isinstance(role, FrozenRole)
        module: PolicyModel | ValueModel | TeacherModel
        if head == "policy":
            module = load_policy(role.model, device, temperature, cast=False)
        elif head == "value":
            module = load_value(role.model, device, None if frozen else seed, cast=False)
        else:
            module = load_teacher(role.model, device)
        module.shard = self._shard
        size = sum(p.numel() for p in module.parameters())
        build = engine_build(role)
        if isinstance(role, FrozenRole):
            self._engines[name] = build.frozen(module, role, self._place)
        else:
            assert not isinstance(module, TeacherModel), "a teacher is frozen"
            if head == "policy":
                follow_sampler(module.lm)
            if role.adapter is not None:
                add_adapter(module, role.adapter, role.model.path, seed)
            if role.freeze == "router":
                freeze_routers(module)
            self._engines[name] = build.trained(module, role, self._place)
        self._sources[name], self._seeds[name] = role, seed
        if device.type == "cpu":
            # The heap keeps blocks for a second, in which the next role is loaded.
            release_free_blocks()
        return size

    def score_without_adapter(self, adapted: RoleName, name: RoleName) -> None:
        """Make `name` the role `adapted` with its adapter switched off; load no second model."""
        self._engines[name] = WithoutAdapter(self._engines[adapted])

    def log_probs(self, role: RoleName, *packs: Sequence[Pack]) -> list[Floats]:
        """Return the log-prob of every learned token, one array [L] per pack; nats.

        `packs`: those of each mini-batch.
        """
        engine = self._engine(role)
        counted = self._counted(chain(*packs))
        return score(engine, counted, lambda pack: engine.forward(pack)[0], self._device)

    def sequence_log_probs(self, role: RoleName, packs: Sequence[Pack]) -> list[Floats]:
        """Return the log-prob of each sequence, summed over its learned tokens.

        There is one array [S] per pack; nats.
        """
        engine = self._engine(role)

        def sum_log_probs(pack: PackTensors) -> Tensor:
            return sums(engine.forward(pack)[0], pack.cu_loss_tokens)

        return score(engine, self._counted(packs), sum_log_probs, self._device)

    def probe_log_probs(
        self, role: RoleName, packs: Sequence[Pack], disturbance: Disturbance | None = None
    ) -> list[Floats]:
        """Return `log_probs` at temperature 1, whatever temperature the role samples with.

        With a disturbance, return those of the disturbed model.
        """
        policy = self._engine(role).module
        assert isinstance(policy, PolicyModel), f"{role} is not a policy"
        with policy.at_temperature_one(), disturb(policy, disturbance or Disturbance()):
            return self.log_probs(role, packs)

    def values(self, role: RoleName, *packs: Sequence[Pack]) -> list[Floats]:
        """Return the scores of a value model before each learned token, one array per pack.

        `packs`: those of each mini-batch.
        """
        return self.values_at(role, [*chain(*packs)], before_learned)

    def values_at(self, role: RoleName, packs: Sequence[Pack], read_at: ReadAt) -> list[Floats]:
        """Return the scores of a value model or reward model, one array per pack.

        `read_at` chooses the rows of a pack at which the model scores.
        """
        engine = self._engine(role)
        counted = self._counted(packs)
        return score(engine, counted, engine.forward, self._device, read_at)

    def set_padding(self, role: RoleName, token: int | None) -> None:
        """Set the padding token in a value model's config.

        transformers skips padding to find a sequence's last token. With None, it accepts only one
        sequence at a time.
        """
        module = self._engine(role).module
        assert isinstance(module, ValueModel), f"{role} is no value model"
        module.lm.config.get_text_config().pad_token_id = token

    def nll(self, role: RoleName, packs: Sequence[Pack]) -> float:
        """Return the sum of -log p over the learned tokens of this rank's packs; nats."""
        return -float(sum(float(np.sum(x)) for x in self.log_probs(role, packs)))

    def train(
        self,
        role: RoleName,
        packs: Sequence[Pack],
        columns: Sequence[PackColumns] | None,
        counts: BatchCounts,
        objective: Objective,
        rate: float,
    ) -> UpdateResult:
        """Take one optimizer step of a role on an objective; return metrics and gradient norm.

        Args:
            role: A role that learns.
            packs: This rank's micro-batches.
            columns: Those of each pack; None: the outputs of the last `teacher_forward`.
            counts: The counts of the step, over all ranks.
            objective: The loss.
            rate: The learning rate.

        Raises:
            PlimsollError: The gradient was not finite in more steps in a row than the settings
                allow.
        """
        metrics = self._learn(role, packs, columns, counts, objective)
        return self._step(role, metrics, rate)

    def try_to_train(
        self,
        role: RoleName,
        packs: Sequence[Pack],
        columns: Sequence[PackColumns] | None,
        counts: BatchCounts,
        objective: Objective,
        rate: float,
    ) -> UpdateResult | Abandoned:
        """Take one optimizer step as `train` does, or leave it if memory runs out on any rank.

        The ranks vote before every collective, so that none waits for one that has failed. Then all
        drop the step's gradients and return `Abandoned`; weights and states are as before. The step
        is done anew from its first micro-batch: a copy of the gradients before each micro-batch,
        from which it could go on, would be as large as what training holds least room for.

        Raises:
            OutOfMemory: Memory ran out inside a collective, or in the optimizer's update: the other
                ranks cannot leave the step.
            PlimsollError: As `train`.
        """
        engine, self._pack = self._trained_engine(role), -1
        error: OutOfMemory | None = None
        try:
            with (
                engine.guard_collectives(self._vote.collective),
                nullcontext() if self._shard is None else self._shard.guard(self._vote.collective),
                explain_shortage(self._device, lambda: role, self.shares),
            ):
                metrics = self._learn(role, packs, columns, counts, objective)
            self._vote.in_favour()
        except PeerFailed:
            pass
        except OutOfMemory as failure:
            if self._vote.is_inside:
                raise
            error = OutOfMemory(failure.text, failure.incident)  # without the frames of the pass
        else:
            return self._step(role, metrics, rate)
        if error is not None:
            self._vote.against()
        engine.abandon_step()
        gc.collect()
        self.give_back()
        return Abandoned() if error is None else Abandoned(error, self._pack)

    def _learn(
        self,
        role: RoleName,
        packs: Iterable[Pack],
        columns: Sequence[PackColumns] | None,
        counts: BatchCounts,
        objective: Objective,
    ) -> dict[str, float]:
        """Add up the gradients of a step; return the rank's share of its metrics."""
        engine = self._trained_engine(role)
        # Seed torch (dropout) from the role's seed, the step and the rank. Nothing else goes into
        # the seed, so a resumed run draws the same numbers.
        steps = engine.steps.taken + engine.steps.skipped
        seeds = np.random.SeedSequence([self._seeds[role], steps, self._place.rank])
        torch.manual_seed(int(seeds.generate_state(1)[0]))
        columns = self._distillation if columns is None else columns
        counted = self._counted(packs)
        return learn(engine, losses(engine, counted, columns, counts, objective, self._device))

    def _step(self, role: RoleName, metrics: dict[str, float], rate: float) -> UpdateResult:
        """Update a role's weights; see `train`."""
        engine = self._trained_engine(role)
        fault_point("rank.step", engine.steps.taken + engine.steps.skipped + 1)
        norm = engine.step(rate)
        source, in_a_row = self._sources[role], engine.steps.in_a_row
        assert isinstance(source, TrainedRole), f"{role} is frozen"
        most = source.optimizer.max_skipped_steps
        if most is not None and in_a_row > most:
            raise not_finite_error(norm, metrics["loss"], in_a_row)
        return UpdateResult(metrics, norm)

    def teacher_forward(self, role: RoleName, packs: Sequence[Pack]) -> None:
        """Run a teacher on the packs that its student gets next, and keep its outputs here."""
        self._distillation.clear()
        teacher, counted = self._engine(role), self._counted(packs)
        self._distillation = teacher_forward(teacher, counted, self._device)

    def measure_distillation(
        self,
        role: RoleName,
        packs: Sequence[Pack],
        counts: BatchCounts,
        objective: DistillationObjective,
    ) -> dict[str, float]:
        """Return this rank's share of a student's loss and metrics, without gradients.

        `packs`: the same as in the last `teacher_forward`.
        """
        engine, counted = self._engine(role), self._counted(packs)
        return measure(
            engine, losses(engine, counted, self._distillation, counts, objective, self._device)
        )

    def _counted(self, packs: Iterable[Pack]) -> Iterator[Pack]:
        """Yield the packs, and count each as ended when the next is asked for."""
        for number, pack in enumerate(packs):
            self._pack = number
            yield pack if self._takes_routing else replace(pack, routing_T=None)
            self.ends += 1

    @property
    def _takes_routing(self) -> bool:
        """Whether the role at work computes with the experts that the sampler took: the actor."""
        role = self._busy_with
        assert role is not None
        learns = isinstance(self._sources.get(role), TrainedRole)
        return learns and isinstance(self._engines[role].module, PolicyModel)

    def weight_plan(
        self,
        role: RoleName,
        bucket_bytes: int,
        as_published: bool,
        only_trained: bool,
        layers: tuple[str, ...] | None = None,
    ) -> WeightPlan:
        """Return the plan by which `weight_bucket` sends a policy's weights to engines.

        `layers`: the layers to send, by their names in the policy; None: all.
        """
        return plan_weights(self._engine(role), bucket_bytes, as_published, only_trained, layers)

    def rehearsals(self, role: RoleName) -> tuple[Rehearsal, ...]:
        """Return what a policy sends before a run, to see that engines use what they get."""
        return plan_rehearsals(self._engine(role))

    def open_channel(
        self,
        route: DecidedRoute,
        largest: int,
        near: bool,
        processes: int,
        cards: Sequence[str] = (),
    ) -> Channel | None:
        """Make this rank's end of the way to the engines, and return the way.

        Return None if the rank sends nothing: by `ipc`, memory that nobody opens would never come
        back.

        Args:
            route: the kind of way.
            largest: bytes of the largest bucket.
            near: whether every engine is on rank 0's node.
            processes: of all engines.
            cards: the names of the engines' cards; only of `ipc`.
        """
        if self._outlet is not None:
            self._outlet.drop()
        self._outlet = None
        card = card_name(self._device) if route == "ipc" else ""
        readers = cards.count(card) if card else processes  # CPUs have no name: rank 0 serves all
        if not (readers if card else self._place.rank == 0):
            return None
        channel = Channel(route, largest, readers, card, near, address=self._place.address)
        self._outlet = open_outlet(channel, self._device)
        return self._outlet.channel

    def break_off(self) -> None:
        """Free this rank and the engines from a transfer that will not end.

        Another thread than that of the transfer calls it.
        """
        if self._outlet is not None:
            self._outlet.break_off()

    def weight_bucket(
        self,
        role: RoleName,
        bucket: PlannedBucket,
        as_published: bool,
        scaled: Scaled = UNSCALED,
    ) -> WeightBucket | None:
        """Ship a bucket of the plan if this rank sends; all ranks must call it.

        `scaled`: the layers whose weights are sent scaled.
        """
        fault_point("rank.send")
        return self._sender.ship(self._engine(role), bucket, as_published, self._outlet, scaled)

    def rest_channel(self) -> None:
        """Give back the card memory that was needed to send, once the engines let go of it."""
        if self._outlet is not None:
            self._outlet.close()
            self.give_back()  # an engine on this card wakes its cache next

    def adapter_files(self, role: RoleName, version: int) -> AdapterFiles | None:
        """Return the adapter's files on rank 0, else None; all ranks must call it."""
        return adapter_files(self._engine(role), version, self._place.rank)

    def save_checkpoint(self, role: RoleName, directory: Path) -> tuple[SavedFile, ...]:
        """Write a trained role's masters, moments and moving average to the directory.

        Returns the checksums of the files that this rank wrote.
        """
        return write_files(self._trained_engine(role).checkpoint_files(), directory)

    def begin_checkpoint(self, role: RoleName, directory: Path) -> None:
        """Copy what `save_checkpoint` writes to host memory, and write it in a thread."""
        copies = deque(self._trained_engine(role).checkpoint_files())
        write = partial(write_files, _take_all(copies), directory)
        self._checkpoints[role] = call_in_background(write)

    def is_checkpoint_written(self, role: RoleName) -> bool:
        """Return whether the thread of `begin_checkpoint` has ended."""
        return self._checkpoints[role].done()

    def finish_checkpoint(self, role: RoleName) -> tuple[SavedFile, ...]:
        """Wait for the thread of `begin_checkpoint`; return its checksums, or raise its error."""
        return self._checkpoints.pop(role).result()

    def find_damage(self, directory: Path, files: Sequence[SavedFile]) -> list[str]:
        """Return what differs from the manifest in this rank's share of a role's files.

        Raises ConfigError if a file cannot be read here, which is no damage.
        """
        try:
            return other_contents(directory, share_of(files, self._place.rank, self._place.ranks))
        except OSError as error:
            raise ConfigError(
                f"{directory} cannot be read on this rank's node: {error}. Mend its file system, "
                "or put run.directory where all nodes reach it"
            ) from error

    def load_checkpoint(self, role: RoleName, directory: Path) -> None:
        """Load a role's checkpoint, also if it was divided over the ranks in another way.

        If it was divided in the same way, the values are restored bit for bit.
        """
        self._trained_engine(role).restore(directory)

    def swap_average(self, role: RoleName) -> None:
        """Exchange a role's weights with their moving average; a second call undoes it."""
        self._trained_engine(role).swap_average()

    def save_model(
        self, role: RoleName, directory: Path, template: str | None = "none"
    ) -> str | None:
        """Write a role's model in Hugging Face format, or only its adapter in PEFT's format.

        All ranks must call it. `template`: a chat template, as for `companions`, whose `added_end`
        is returned.
        """
        engine = self._engine(role)
        source = self._sources[role]
        assert isinstance(engine.module, PolicyModel | ValueModel), f"{role} is not saved"
        tokenizer = load_tokenizer(source.model.path, source.model.trust_remote_code)
        companion_files = companions(engine.module.lm, tokenizer, template)
        adapted = isinstance(source, TrainedRole) and source.adapter is not None
        write = write_adapter if adapted else write_model
        write(engine, companion_files, directory, self._place.rank)
        return companion_files.added_end

    def release(self, role: RoleName) -> None:
        """Drop a role that only scores, and free its memory."""
        assert isinstance(self._sources[role], FrozenRole), f"{role} is trained"
        cast(FrozenEngine, self._engine(role)).release()
        del self._engines[role], self._sources[role]
        gc.collect()  # hooks and their modules hold one another
        self.give_back()

    def sleep(self, depth: RankSleep, spared: RoleName | None = None) -> None:
        """Move what the roles keep on the card to host memory, and free the allocator's cache.

        `depth`: what moves (`cluster.rank_sleep`). `spared`: a role whose weights stay.
        """
        for name, engine in self._engines.items():
            engine.sleep(weights=depth == "all" and name != spared)
        self.give_back()

    def wake(self) -> None:
        """Move back to the card what `sleep` moved away."""
        for engine in self._engines.values():
            engine.wake()

    def give_back(self) -> None:
        """Free the allocator's cached blocks, so that other processes on the card can use them."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def release_heap(self) -> None:
        """On CPU, return the heap's free blocks to the system, and restart the peak from there."""
        if self._device.type == "cpu":
            release_free_blocks()
            reset_process_peak()

    def read_memory(self) -> Reading:
        """Return the process's memory, its peaks since the last call, and the roles' shares."""
        return replace(read_memory(self._device), shares=self.shares())

    def shares(self) -> tuple[DividedShare, ...]:
        """Return what this rank holds of each role that is divided over the ranks."""
        shares = (engine.share(name) for name, engine in self._engines.items())
        return tuple(share for share in shares if share is not None)

    def stop(self) -> None:
        """Leave the process group."""
        self._engines.clear()
        leave()

    def _engine(self, role: RoleName) -> Engine:
        """Return the role's engine, and note the role as the one at work."""
        self._busy_with = role
        return self._engines[role]

    def _trained_engine(self, role: RoleName) -> TrainedEngine:
        assert isinstance(self._sources[role], TrainedRole), f"{role} is frozen"
        return cast(TrainedEngine, self._engine(role))


def _take_all(files: deque[CheckpointFile]) -> Iterator[CheckpointFile]:
    """Yield the files, and drop each when the next one is taken, so that its memory is free."""
    while files:
        yield files.popleft()
