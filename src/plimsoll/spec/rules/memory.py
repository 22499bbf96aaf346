"""What must agree about where and how a trained role keeps its activations and states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll.config.engine import TrainedRole
from plimsoll.config.problems import Problem, Section
from plimsoll.run.counting import counted
from plimsoll.spec.run_spec import RunSpec


def memory_levers(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Checkpointing, dtype of states and ZeRO++ of the roles that learn."""
    for name, role in spec.trained.items():
        at = Section(name, role)
        yield from _checkpointing(at, role)
        for obstacle, instead in _against_narrow_states(name, role):
            fix = f"{instead}, or {name}.zero.state_dtype: float32"
            yield at.conflict("zero.state_dtype", obstacle, fix, "state-dtype")
        yield from _zero_plus_plus(at, role, spec.ranks_of(name))
    yield from _one_group(spec)


def _checkpointing(at: Section, role: TrainedRole) -> Iterator[Problem]:
    if role.model.gradient_checkpointing is not False:
        return
    for key, unset in (("checkpoint_every", 1), ("activation_offload", "none")):
        if getattr(role.model, key) != unset:
            why = f"No layer is checkpointed ({at.key}.model.gradient_checkpointing: false)."
            fix = f"{at.key}.model.gradient_checkpointing: true, or leave {at.key}.model.{key} out"
            yield at.conflict(f"model.{key}", why, fix, "checkpointing-off")


def _against_narrow_states(name: str, role: TrainedRole) -> Iterator[tuple[str, str]]:
    """(why not, what to write instead); as DeepSpeed 0.19 has it (runtime/config.py,
    runtime/engine.py, _do_optimizer_sanity_check)."""
    zero = role.zero
    if zero.state_dtype == "float32":
        return
    if role.model.dtype == "float32":
        yield "The weights are float32.", f"{name}.model.dtype: bfloat16"
    elif zero.stage == 0:
        yield "DeepSpeed narrows the states that it divides.", f"{name}.zero.stage: 1 or more"
    elif zero.stage == 1 and zero.optimizer_offload == "none" and zero.gradient_dtype != "bfloat16":
        yield (
            "At stage 1 with float32 gradients DeepSpeed's optimizer for bfloat16 keeps float32 "
            "states, and does not say so.",
            f"{name}.zero.stage: 2, or {name}.zero.gradient_dtype: bfloat16",
        )


def _zero_plus_plus(at: Section, role: TrainedRole, ranks: int) -> Iterator[Problem]:
    """ranks: that the role is divided over."""
    name, zero, size = at.key, role.zero, role.zero.hpz_partition_size
    asked = {
        "quantized_weights": zero.quantized_weights,
        "quantized_gradients": zero.quantized_gradients,
        "hpz_partition_size": size > 1,
    }
    for key, is_asked in asked.items():
        if is_asked and zero.stage != 3:
            why = f"ZeRO++ is of stage 3, which exchanges weights; the stage is {zero.stage}."
            fix = f"{name}.zero.stage: 3, or leave {name}.zero.{key} out"
            yield at.conflict(f"zero.{key}", why, fix, "zero-plus-plus")
    if zero.parameter_offload == "cpu" and size > 1:
        why = "The second copy would be in host memory, behind a slower link than the one it "
        why += f"spares ({name}.zero.parameter_offload: cpu)."
        fix = f"{name}.zero.parameter_offload: none, or leave {name}.zero.hpz_partition_size out"
        yield at.conflict("zero.hpz_partition_size", why, fix, "zero-plus-plus")
    if zero.stage == 3 and ranks % size:
        why = f"Groups of {size} ranks do not go into {counted(ranks, 'rank')}."
        fix = f"a number that divides {ranks}: the ranks of a node"
        yield at.conflict("zero.hpz_partition_size", why, fix, "zero-plus-plus")


def _one_group(spec: RunSpec[Any]) -> Iterator[Problem]:
    """deepspeed/utils/groups.py, _create_zero_param_parallel_group: one for a process."""
    at_3 = {name: role for name, role in spec.trained.items() if role.zero.stage == 3}
    if len(at_3) < 2 or spec.cluster.critic_ranks is not None:
        return
    for name, role in at_3.items():
        if role.zero.hpz_partition_size > 1:
            why = "Actor and critic share their ranks, and DeepSpeed makes such groups once in a "
            why += "process, for all that is at stage 3."
            fix = f"cluster.critic_ranks, or leave {name}.zero.hpz_partition_size out"
            at = Section(name, role)
            yield at.conflict("zero.hpz_partition_size", why, fix, "zero-plus-plus")
