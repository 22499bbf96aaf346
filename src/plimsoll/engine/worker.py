"""One training rank: the engines of all roles that live in its process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from plimsoll.algorithm.inputs import LossOutput, ValueLossInputs
from plimsoll.algorithm.nll import nll
from plimsoll.algorithm.sequences import sums
from plimsoll.algorithm.value_loss import value_loss
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.engine.export import AdapterFiles, adapter_files, write_adapter, write_model
from plimsoll.engine.meter import read_memory
from plimsoll.engine.policy import PolicyObjective, policy_losses
from plimsoll.engine.preference import PreferenceObjective, preference_losses
from plimsoll.engine.process_group import Place, join, leave
from plimsoll.engine.protocol import Engine, TrainedEngine
from plimsoll.engine.shares import share_of
from plimsoll.engine.shortage import telling_shortage
from plimsoll.engine.streams import PolicyStream, PreferenceStream, ValueStream
from plimsoll.engine.weights import WeightBucket, make_bucket, plain_weights, plan_buckets
from plimsoll.engine.without_adapter import WithoutAdapter
from plimsoll.engine.zero import FrozenEngine, ZeroEngine
from plimsoll.model.adapters import add_adapter
from plimsoll.model.load import load_policy, load_tokenizer, load_value
from plimsoll.model.policy import PackTensors, PolicyModel, hf_state_names
from plimsoll.model.value import ValueModel
from plimsoll.records import BatchCounts, Floats, Pack
from plimsoll.run.readings import Reading, Share

Role = Literal["actor", "critic", "reference", "reward"]


@dataclass(frozen=True)
class StepResult:
    """What one rank saw in one optimizer step.

    metrics: this rank's share of the batch's means; add over ranks.
    grad_norm: of the whole gradient, before clipping; the same on all ranks.
    """

    metrics: dict[str, float]
    grad_norm: float


class Worker:
    """Hosts the engines of a rank and does what the controller says, one call at a time.

    Consumes: calls, the same on every rank in the same order, each with the rank's own packs.
    Waits for: the other ranks, inside collectives. Unblocked by: their making the same call.
    Produces: log-probs, values, step results, weight buckets, files.
    Shut down by `stop`, or with its process.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._device = join(place)
        self._engines: dict[Role, Engine] = {}
        self._sources: dict[Role, TrainedRole | FrozenRole] = {}
        self._busy_with: Role | None = None

    def do(self, method: str, *arguments: object) -> Any:
        """Call a method; where memory runs out in it, OutOfMemory says for which role."""
        with telling_shortage(self._device, lambda: self._busy_with, self.shares):
            return getattr(self, method)(*arguments)

    def load_policy(
        self, name: Role, role: TrainedRole | FrozenRole, temperature: float, seed: int = 0
    ) -> int:
        """Load a policy; the seed decides a new adapter. Returns its number of parameters (of the
        whole model)."""
        self._busy_with = name
        policy = load_policy(role.model, self._device, temperature, cast=False)
        return self._adopt(name, role, policy, seed)

    def load_value(self, name: Role, role: TrainedRole | FrozenRole, seed: int) -> int:
        """Load a value function, or a reward model (a frozen one, whose head must be there); the
        seed decides what is new. Returns its number of parameters (of the whole model)."""
        self._busy_with = name
        head_seed = None if isinstance(role, FrozenRole) else seed
        value = load_value(role.model, self._device, head_seed, cast=False)
        return self._adopt(name, role, value, seed)

    def _adopt(
        self,
        name: Role,
        role: TrainedRole | FrozenRole,
        module: PolicyModel | ValueModel,
        seed: int,
    ) -> int:
        size = sum(p.numel() for p in module.parameters())
        if isinstance(role, TrainedRole) and role.adapter is not None:
            add_adapter(module, role.adapter, role.model.path, seed)
        engine = FrozenEngine if isinstance(role, FrozenRole) else ZeroEngine
        self._engines[name] = engine(module, role, self._place)  # type: ignore[arg-type]
        self._sources[name] = role
        return size

    def score_without_adapter(self, adapted: Role, name: Role) -> None:
        """Have `name` be what a loaded role was before its adapter learned: no second model."""
        self._engines[name] = WithoutAdapter(self._engines[adapted])

    def log_probs(self, role: Role, packs: Sequence[Pack]) -> list[Floats]:
        """The log-prob of every learned token, one array per pack; nats."""
        return self._score(role, packs, lambda engine, pack: engine.forward(pack, False)[0])

    def sequence_log_probs(self, role: Role, packs: Sequence[Pack]) -> list[Floats]:
        """The log-prob of each sequence's learned tokens together, one array [S] per pack; nats."""
        return self._score(
            role, packs, lambda engine, pack: sums(engine.forward(pack, False)[0], pack.cu_learned)
        )

    def probe_log_probs(self, role: Role, packs: Sequence[Pack]) -> list[Floats]:
        """As `log_probs`, but at temperature 1 whatever the role samples with."""
        with self._policy(role).at_temperature_one():
            return self.log_probs(role, packs)

    def values(self, role: Role, packs: Sequence[Pack]) -> list[Floats]:
        """The value before every learned token, one array per pack."""
        return self._score(role, packs, lambda engine, pack: engine.forward(pack))

    def _score(
        self, role: Role, packs: Sequence[Pack], forward: Callable[[Engine, PackTensors], Tensor]
    ) -> list[Floats]:
        engine = self._engine(role)
        with engine.scoring():
            return [
                forward(engine, PackTensors.from_pack(pack, self._device)).float().cpu().numpy()
                for pack in packs
            ]

    def nll(self, role: Role, packs: Sequence[Pack]) -> float:
        """The sum of -log p over the learned tokens of this rank's packs; nats."""
        return -float(sum(float(np.sum(x)) for x in self.log_probs(role, packs)))

    def train_sft(self, packs: Sequence[Pack], counts: BatchCounts, rate: float) -> StepResult:
        """One optimizer step on the mean negative log-likelihood of the learned tokens."""
        engine = self._trained("actor")

        def losses() -> Iterable[LossOutput]:
            for pack in packs:
                tensors = PackTensors.from_pack(pack, self._device)
                yield nll(engine.forward(tensors, False)[0], counts)

        return _step(engine, losses(), rate)

    def train_policy(
        self,
        packs: Sequence[Pack],
        streams: Sequence[PolicyStream],
        counts: BatchCounts,
        objective: PolicyObjective,
        rate: float,
    ) -> StepResult:
        """One optimizer step of the actor."""
        engine = self._trained("actor")
        losses = policy_losses(engine, packs, streams, counts, objective, self._device)
        return _step(engine, losses, rate)

    def train_preference(
        self,
        packs: Sequence[Pack],
        streams: Sequence[PreferenceStream],
        pairs: int,
        objective: PreferenceObjective,
        rate: float,
    ) -> StepResult:
        """One optimizer step of the actor on packs of pairs; pairs: of the step, over all ranks."""
        engine = self._trained("actor")
        losses = preference_losses(engine, packs, streams, pairs, objective, self._device)
        return _step(engine, losses, rate)

    def train_value(
        self,
        packs: Sequence[Pack],
        streams: Sequence[ValueStream],
        counts: BatchCounts,
        clip: float | None,
        rate: float,
    ) -> StepResult:
        """One optimizer step of the critic."""
        engine = self._trained("critic")

        def losses() -> Iterable[LossOutput]:
            for pack, stream in zip(packs, streams, strict=True):
                values_L = engine.forward(PackTensors.from_pack(pack, self._device))
                inputs = ValueLossInputs(
                    values_L=values_L,
                    old_values_L=self._tensor(stream.old_values_L),
                    returns_L=self._tensor(stream.returns_L),
                    counts=counts,
                )
                yield value_loss(inputs, clip)

        return _step(engine, losses(), rate)

    def weight_plan(self, role: Role, bucket_bytes: int) -> tuple[tuple[str, ...], ...]:
        """The parameters of each bucket of `weight_bucket`, by their names in the module."""
        return plan_buckets(self._engine(role), bucket_bytes)

    def weight_names(self, role: Role) -> tuple[str, ...]:
        """The Hugging Face names of all tensors that the buckets hold, tied heads included."""
        policy = self._policy(role)
        return (*hf_state_names(policy).values(), *policy.tied_names())

    def weight_bucket(self, role: Role, names: tuple[str, ...]) -> WeightBucket | None:
        """Gather these parameters (all ranks take part); rank 0 returns them, the others None."""
        with plain_weights(self._engine(role), names) as weights:
            if self._place.rank > 0:
                return None
            return make_bucket(_with_tied(self._policy(role), weights()))

    def adapter_files(self, role: Role, version: int) -> AdapterFiles | None:
        """The role's adapter alone (all ranks take part); rank 0 returns it, the others None."""
        return adapter_files(self._engine(role), version, self._place.rank)

    def save_checkpoint(self, role: Role, directory: Path) -> None:
        """Write a trained role's weights, masters and moments below the directory."""
        self._trained(role).save(directory)

    def load_checkpoint(self, role: Role, directory: Path) -> None:
        """Read them back, bit for bit."""
        self._trained(role).restore(directory)

    def save_model(self, role: Role, directory: Path) -> None:
        """Write a role in Hugging Face format, or only its adapter, as PEFT does."""
        engine = self._engine(role)
        source = self._sources[role]
        tokenizer = load_tokenizer(source.model.path, source.model.trust_remote_code)
        if isinstance(source, TrainedRole) and source.adapter is not None:
            write_adapter(engine, tokenizer, directory, self._place.rank)
        else:
            write_model(engine, tokenizer, directory, self._place.rank)

    def give_back(self) -> None:
        """Let go of what the allocator keeps for later, for who else uses the card."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def read_memory(self) -> Reading:
        """What the process holds, and its peaks since the last call."""
        return replace(read_memory(self._device), shares=self.shares())

    def shares(self) -> tuple[Share, ...]:
        """What the rank holds of each role that is divided over the ranks."""
        found = (
            share_of(name, role, self._engines[name], self._place.ranks)
            for name, role in self._sources.items()
        )
        return tuple(share for share in found if share is not None)

    def stop(self) -> None:
        """Leave the process group."""
        self._engines.clear()
        leave()

    def _engine(self, role: Role) -> Engine:
        """The engine of the role that is worked with from now on."""
        self._busy_with = role
        return self._engines[role]

    def _policy(self, role: Role) -> PolicyModel:
        module = self._engine(role).module
        assert isinstance(module, PolicyModel), f"{role} is not a policy"
        return module

    def _trained(self, role: Role) -> TrainedEngine:
        engine = self._engine(role)
        assert isinstance(engine, ZeroEngine), f"{role} is frozen"
        return engine

    def _tensor(self, array: Floats) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _step(engine: TrainedEngine, losses: Iterable[LossOutput], rate: float) -> StepResult:
    """Backward over the micro-batches' losses, then one update."""
    metrics: dict[str, float] = {}
    for output in losses:
        engine.backward(output.loss)
        metrics["loss"] = metrics.get("loss", 0.0) + float(output.loss.detach())
        for name, value in output.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
    return StepResult(metrics, engine.step(rate))


def _with_tied(policy: PolicyModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tied = {name: weights[of] for name, of in policy.tied_names().items() if of in weights}
    return {**weights, **tied}
