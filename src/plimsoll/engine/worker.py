"""One training rank: the engines of all roles that live in its process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from plimsoll.algorithm.choice import policy_loss
from plimsoll.algorithm.inputs import LossOutput, PolicyLossInputs, ValueLossInputs
from plimsoll.algorithm.nll import nll
from plimsoll.algorithm.policy_objective import PolicyObjectiveInputs, policy_objective
from plimsoll.algorithm.value_loss import value_loss
from plimsoll.config.base import Choice
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.engine.process_group import Place, join, leave
from plimsoll.engine.protocol import Engine, TrainedEngine
from plimsoll.engine.streams import PolicyStream, ValueStream
from plimsoll.engine.weights import WeightBucket, make_bucket, plan_buckets
from plimsoll.engine.zero import FrozenEngine, ZeroEngine
from plimsoll.model.load import load_policy, load_tokenizer, load_value
from plimsoll.model.policy import PackTensors, PolicyModel, hf_state_names, save_hf
from plimsoll.model.value import ValueModel
from plimsoll.records import BatchCounts, Floats, Pack
from plimsoll.run.memory import process_peak_bytes, reset_process_peak

Role = Literal["actor", "critic", "reference"]


@dataclass(frozen=True)
class PolicyObjective:
    """The policy's loss with everything but the batch: crosses to the ranks with every step."""

    loss: Choice
    kl_estimator: Literal["k1", "k2", "k3"]
    kl_coefficient: float
    entropy_bonus: float


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

    def load_policy(self, name: Role, role: TrainedRole | FrozenRole, temperature: float) -> int:
        """Load a policy; returns its number of parameters (of the whole model)."""
        return self._adopt(name, role, load_policy(role.model, self._device, temperature))

    def load_value(self, name: Role, role: TrainedRole, seed: int) -> int:
        """Load a value function; returns its number of parameters (of the whole model)."""
        return self._adopt(name, role, load_value(role.model, self._device, seed))

    def _adopt(self, name: Role, role: TrainedRole | FrozenRole, module: torch.nn.Module) -> int:
        size = sum(p.numel() for p in module.parameters())
        engine = FrozenEngine if isinstance(role, FrozenRole) else ZeroEngine
        self._engines[name] = engine(module, role, self._place)  # type: ignore[arg-type]
        self._sources[name] = role
        return size

    def log_probs(self, role: Role, packs: Sequence[Pack]) -> list[Floats]:
        """The log-prob of every learned token, one array per pack; nats."""
        return self._score(role, packs, lambda engine, pack: engine.forward(pack, False)[0])

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
        engine = self._engines[role]
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
        loss = policy_loss(objective.loss)

        def losses() -> Iterable[LossOutput]:
            for pack, stream in zip(packs, streams, strict=True):
                tensors = PackTensors.from_pack(pack, self._device)
                logprobs_L, entropy_L = engine.forward(tensors, True)
                inputs = self._policy_inputs(tensors, stream, logprobs_L, entropy_L, counts)
                yield policy_objective(
                    inputs,
                    loss,
                    objective.kl_estimator,
                    objective.kl_coefficient,
                    objective.entropy_bonus,
                )

        return _step(engine, losses(), rate)

    def _policy_inputs(
        self,
        tensors: PackTensors,
        stream: PolicyStream,
        logprobs_L: Tensor,
        entropy_L: Tensor,
        counts: BatchCounts,
    ) -> PolicyObjectiveInputs:
        old_L = stream.old_logprobs_L
        reference_L = stream.reference_logprobs_L
        policy = PolicyLossInputs(
            logprobs_L=logprobs_L,
            old_logprobs_L=logprobs_L.detach() if old_L is None else self._tensor(old_L),
            advantages_L=self._tensor(stream.advantages_L),
            cu_learned=tensors.cu_learned,
            counts=counts,
        )
        return PolicyObjectiveInputs(
            policy, entropy_L, None if reference_L is None else self._tensor(reference_L)
        )

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
        return plan_buckets(self._engines[role], bucket_bytes)

    def weight_names(self, role: Role) -> tuple[str, ...]:
        """The Hugging Face names of all tensors that the buckets hold, tied heads included."""
        policy = self._policy(role)
        return (*hf_state_names(policy).values(), *policy.tied_names())

    def weight_bucket(self, role: Role, names: tuple[str, ...]) -> WeightBucket | None:
        """Gather these parameters (all ranks take part); rank 0 returns them, the others None."""
        engine = self._engines[role]
        with engine.gathered(names) as tensors:
            if self._place.rank > 0:
                return None
            return make_bucket(_with_tied(self._policy(role), tensors))

    def save_checkpoint(self, role: Role, directory: Path) -> None:
        """Write a trained role's weights, masters and moments below the directory."""
        self._trained(role).save(directory)

    def load_checkpoint(self, role: Role, directory: Path) -> None:
        """Read them back, bit for bit."""
        self._trained(role).restore(directory)

    def save_model(self, role: Role, directory: Path) -> None:
        """Write a Hugging Face directory, gathered bucket by bucket to rank 0's host memory."""
        engine = self._engines[role]
        assert isinstance(engine.module, PolicyModel | ValueModel)
        hf_names = hf_state_names(engine.module)
        state: dict[str, Tensor] = {}
        for names in plan_buckets(engine, 2**30):
            with engine.gathered(names) as tensors:
                if self._place.rank == 0:
                    state |= {hf_names[n]: t.to("cpu", copy=True) for n, t in tensors.items()}
        if self._place.rank == 0:
            source = self._sources[role].model
            tokenizer = load_tokenizer(source.path, source.trust_remote_code)
            lm = engine.module.lm
            generation = lm.generation_config if lm.can_generate() else None
            save_hf(lm.config, state, tokenizer, directory, generation)

    def memory(self) -> int:
        """The process's peak since the last call: resident bytes, or CUDA's allocated bytes."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            return peak
        peak = process_peak_bytes().bytes
        reset_process_peak()
        return peak

    def stop(self) -> None:
        """Leave the process group."""
        self._engines.clear()
        leave()

    def _policy(self, role: Role) -> PolicyModel:
        module = self._engines[role].module
        assert isinstance(module, PolicyModel), f"{role} is not a policy"
        return module

    def _trained(self, role: Role) -> TrainedEngine:
        engine = self._engines[role]
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


def _with_tied(policy: PolicyModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    hf_names = hf_state_names(policy)
    named = {hf_names[name]: tensor for name, tensor in tensors.items()}
    tied = {name: named[of] for name, of in policy.tied_names().items() if of in named}
    return named | tied
