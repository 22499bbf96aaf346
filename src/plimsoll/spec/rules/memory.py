"""What must agree about where and how a trained role keeps its activations and states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll.config.engine import TrainedRole
from plimsoll.config.model import ModelConfig
from plimsoll.config.problems import Problem, conflict
from plimsoll.run.counting import counted
from plimsoll.spec.run_spec import RunSpec


def memory_levers(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Checkpointing, dtype of states and ZeRO++ of the roles that learn."""
    for name, role in spec.trained.items():
        yield from _levers(name, role, spec.ranks_of(name))
    yield from _one_group(spec)


def _levers(name: str, role: TrainedRole, ranks: int) -> Iterator[Problem]:
    """ranks: that the role is divided over."""
    yield from _checkpointing(name, role.model)
    for obstacle, instead in _against_narrow_states(name, role):
        yield conflict(
            f"{name}.zero.state_dtype",
            "bfloat16",
            obstacle,
            f"{instead}, or {name}.zero.state_dtype: float32",
            code="state-dtype",
        )
    yield from _zero_plus_plus(name, role, ranks)


def _checkpointing(name: str, model: ModelConfig) -> Iterator[Problem]:
    if model.gradient_checkpointing is not False:
        return
    unused = {"checkpoint_every": model.checkpoint_every, "activation_offload": "cpu"}
    if model.checkpoint_every == 1:
        del unused["checkpoint_every"]
    if model.activation_offload == "none":
        del unused["activation_offload"]
    for key, value in unused.items():
        yield conflict(
            f"{name}.model.{key}",
            str(value),
            f"No layer is checkpointed ({name}.model.gradient_checkpointing: false).",
            f"{name}.model.gradient_checkpointing: true, or leave {name}.model.{key} out",
            code="checkpointing-off",
        )


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


def _zero_plus_plus(name: str, role: TrainedRole, ranks: int) -> Iterator[Problem]:
    zero, size = role.zero, role.zero.hpz_partition_size
    asked = {
        "quantized_weights": "true" if zero.quantized_weights else "",
        "quantized_gradients": "true" if zero.quantized_gradients else "",
        "hpz_partition_size": str(size) if size > 1 else "",
    }
    for key, value in asked.items():
        if value and zero.stage != 3:
            yield conflict(
                f"{name}.zero.{key}",
                value,
                f"ZeRO++ is of stage 3, which exchanges weights; the stage is {zero.stage}.",
                f"{name}.zero.stage: 3, or leave {name}.zero.{key} out",
                code="zero-plus-plus",
            )
    if zero.parameter_offload == "cpu" and size > 1:
        yield conflict(
            f"{name}.zero.hpz_partition_size",
            str(size),
            "The second copy would be in host memory, behind a slower link than the one it spares "
            f"({name}.zero.parameter_offload: cpu).",
            f"{name}.zero.parameter_offload: none, or leave {name}.zero.hpz_partition_size out",
            code="zero-plus-plus",
        )
    if zero.stage == 3 and ranks % size:
        yield conflict(
            f"{name}.zero.hpz_partition_size",
            str(size),
            f"Groups of {size} ranks do not go into {counted(ranks, 'rank')}.",
            f"a number that divides {ranks}: the ranks of a node",
            code="zero-plus-plus",
        )


def _one_group(spec: RunSpec[Any]) -> Iterator[Problem]:
    """deepspeed/utils/groups.py, _create_zero_param_parallel_group: one for a process."""
    at_3 = {name: role for name, role in spec.trained.items() if role.zero.stage == 3}
    if len(at_3) < 2 or spec.cluster.critic_ranks is not None:
        return
    for name, role in at_3.items():
        if role.zero.hpz_partition_size > 1:
            yield conflict(
                f"{name}.zero.hpz_partition_size",
                str(role.zero.hpz_partition_size),
                "Actor and critic share their ranks, and DeepSpeed makes such groups once in a "
                "process, for all that is at stage 3.",
                f"cluster.critic_ranks, or leave {name}.zero.hpz_partition_size out",
                code="zero-plus-plus",
            )
