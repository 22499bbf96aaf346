"""ZeRO's requirements on a config and on a machine, and the messages about them.

To these belong DeepSpeed's installation: known faults of versions, and parts that are compiled at
their first use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from plimsoll.config.base import AUTO
from plimsoll.config.cluster import Device
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.problems import Problem, Section, find
from plimsoll.machine.local_host import LocalHost
from plimsoll.machine.versions import Failure, Package, package_finding
from plimsoll.resolve.engine_rules import Compiled, Installed, ToolNeed, TrainerRules
from plimsoll.resolve.roles import RoleName
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.numbers import plural
from plimsoll.trainer.zero.config import FrozenZeroConfig, ZeroConfig

DEEPSPEED = Package(
    "deepspeed",
    partial=(
        Failure(
            "<0.16.8",
            "Qwen3 under ZeRO-3 took so much more memory that 8B did not fit 8 H100.",
            "huggingface/open-r1#653, deepspeedai/DeepSpeed#7258",
        ),
    ),
)
PACKAGES = (DEEPSPEED,)

FOR_CPU_ADAM = ("g++", "ninja", "Python.h")
FOR_ZERO_PLUS_PLUS = ("nvcc", *FOR_CPU_ADAM)
COMPILED = (
    Compiled("Adam on the CPU (optimizer_offload)", FOR_CPU_ADAM, ("cpu", "cuda")),
    Compiled("ZeRO++ (quantized_weights, quantized_gradients)", FOR_ZERO_PLUS_PLUS, ("cuda",)),
)


def is_adam_built() -> bool:
    """Return whether DeepSpeed was installed with its Adam compiled (DS_BUILD_CPU_ADAM)."""
    deepspeed = importlib.util.find_spec("deepspeed")
    if deepspeed is None or deepspeed.origin is None:
        return False
    return any(Path(deepspeed.origin).parent.glob("ops/adam/cpu_adam_op*.so"))


def find_installed(seen: Installed) -> Iterator[Problem]:
    """Yield `plimsoll doctor`'s finding about DeepSpeed, which each run needs by default."""
    yield package_finding(DEEPSPEED, seen.versions[DEEPSPEED.name])


_STORAGE = Version("0.43")
"""The first bitsandbytes with quant_storage (bitsandbytes-foundation/bitsandbytes#970)."""

LOST_BELOW = 2.0**-14
"""The learning rate below which weights in bfloat16 lose updates. AdamW moves a weight by about the
learning rate. Near 0.02, the spread that transformers gives new weights (`initializer_range`), half
the distance of two bfloat16 numbers is 2^-14; a smaller move is rounded away."""


def _trained_roles(spec: RunSpec[Any]) -> Mapping[RoleName, tuple[TrainedRole, ZeroConfig]]:
    """Return the roles that ZeRO trains, with their settings."""
    return {
        name: (role, role.engine_settings)
        for name, role in spec.trained.items()
        if isinstance(role.engine_settings, ZeroConfig)
    }


def _frozen_roles(spec: RunSpec[Any]) -> Mapping[RoleName, tuple[FrozenRole, FrozenZeroConfig]]:
    """Return the roles that ZeRO holds without training them, with their settings."""
    return {
        name: (role, role.engine_settings)
        for name, role in spec.frozen.items()
        if isinstance(role.engine_settings, FrozenZeroConfig)
    }


def _offload(spec: RunSpec[Any]) -> Iterator[Problem]:
    for name, (role, zero) in _trained_roles(spec).items():
        at = Section(name, role)
        if zero.parameter_offload == "cpu" and zero.stage != 3:
            why = "Only ZeRO stage 3 divides the weights and can move them; the stage is "
            why += f"{zero.stage}."
            fix = f"{name}.zero.stage: 3, or {name}.zero.parameter_offload: none"
            yield at.conflict("zero.parameter_offload", why, fix, "offload-stage")
        if zero.optimizer_offload == "cpu" and zero.stage == 0:
            why = "DeepSpeed offloads the optimizer from ZeRO stage 1 on; the stage is 0."
            fix = f"{name}.zero.stage: 1 (one rank holds the same with it), "
            fix += f"or {name}.zero.optimizer_offload: none"
            yield at.conflict("zero.optimizer_offload", why, fix, "offload-stage")
        if zero.optimizer_offload == "cpu" and role.optimizer.kind != "adamw":
            why = "DeepSpeedCPUAdam, which steps on the host, is AdamW alone, and no "
            why += f"{role.optimizer.kind} ({name}.optimizer.kind)."
            fix = f"{name}.zero.optimizer_offload: none, or {name}.optimizer.kind: adamw"
            yield at.conflict("zero.optimizer_offload", why, fix, "adamw-8bit-offload")


def _gradient_dtype(spec: RunSpec[Any]) -> Iterator[Problem]:
    for name, (role, zero) in _trained_roles(spec).items():
        at, dtype = Section(name, role), role.model.dtype
        if zero.gradient_dtype == "float32" and zero.stage == 0 and dtype == "bfloat16":
            why = "At stage 0 DeepSpeed adds the gradients of bfloat16 weights in bfloat16."
            fix = f"{name}.zero.stage: 1 or more, or {name}.zero.gradient_dtype: auto"
            yield at.conflict("zero.gradient_dtype", why, fix, "gradient-dtype")
        if zero.gradient_dtype == "bfloat16" and dtype == "float32":
            why = f"The weights are float32 ({name}.model.dtype), and so are their gradients."
            fix = f"{name}.zero.gradient_dtype: auto, or {name}.model.dtype: bfloat16"
            yield at.conflict("zero.gradient_dtype", why, fix, "gradient-dtype")


def _narrow_states(spec: RunSpec[Any]) -> Iterator[Problem]:
    for name, (role, zero) in _trained_roles(spec).items():
        at = Section(name, role)
        for obstacle, instead in _against_narrow_states(name, role, zero):
            fix = f"{instead}, or {name}.zero.state_dtype: float32"
            yield at.conflict("zero.state_dtype", obstacle, fix, "state-dtype")
        if role.ema is not None and zero.state_dtype == "bfloat16":
            why = "The average changes places with the masters for evaluations, and would be "
            why += f"rounded to bfloat16 ({name}.zero.state_dtype)."
            fix = f"{name}.zero.state_dtype: float32, or leave {name}.ema out"
            yield at.conflict("ema", why, fix, "state-dtype")


def _against_narrow_states(
    name: str, role: TrainedRole, zero: ZeroConfig
) -> Iterator[tuple[str, str]]:
    """Yield (reason, remedy) if states cannot be bfloat16.

    The reasons are those of DeepSpeed 0.19 (runtime/config.py, runtime/engine.py,
    _do_optimizer_sanity_check).
    """
    if zero.state_dtype == "float32":
        return
    if role.model.dtype == "float32":
        yield "The weights are float32.", f"{name}.model.dtype: bfloat16"
    elif zero.stage == 0:
        yield "DeepSpeed narrows the states that it divides.", f"{name}.zero.stage: 1 or more"
    elif zero.stage == 1 and zero.optimizer_offload == "none" and zero.gradient_dtype != "bfloat16":
        why = "At stage 1 with float32 gradients DeepSpeed's optimizer for bfloat16 keeps float32 "
        why += "states, and does not say so."
        yield why, f"{name}.zero.stage: 2, or {name}.zero.gradient_dtype: bfloat16"


def _zero_plus_plus(spec: RunSpec[Any]) -> Iterator[Problem]:
    for name, (role, zero) in _trained_roles(spec).items():
        at, size, ranks = Section(name, role), zero.hpz_partition_size, spec.ranks_of(name)
        for key in _plus_plus_keys(zero):
            if zero.stage != 3:
                why = f"ZeRO++ is of stage 3, which exchanges weights; the stage is {zero.stage}."
                fix = f"{name}.zero.stage: 3, or leave {name}.zero.{key} out"
                yield at.conflict(f"zero.{key}", why, fix, "zero-plus-plus")
        if zero.parameter_offload == "cpu" and size > 1:
            why = "The second copy would be in host memory, behind a slower link than the one it "
            why += f"spares ({name}.zero.parameter_offload: cpu)."
            fix = f"{name}.zero.parameter_offload: none, or leave {name}.zero.hpz_partition_size "
            fix += "out"
            yield at.conflict("zero.hpz_partition_size", why, fix, "zero-plus-plus")
        if zero.stage == 3 and ranks % size:
            why = f"Groups of {size} ranks do not go into {plural(ranks, 'rank')}."
            fix = f"a number that divides {ranks}: the ranks of a node"
            yield at.conflict("zero.hpz_partition_size", why, fix, "zero-plus-plus")


def _plus_plus_keys(zero: ZeroConfig) -> Iterator[str]:
    """Yield the keys that turn a part of ZeRO++ on."""
    if zero.quantized_weights:
        yield "quantized_weights"
    if zero.quantized_gradients:
        yield "quantized_gradients"
    if zero.hpz_partition_size > 1:
        yield "hpz_partition_size"


def _one_group(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Refuse hpZ for two roles of a process: DeepSpeed makes its groups once.

    See deepspeed/utils/groups.py, _create_zero_param_parallel_group.
    """
    trained = _trained_roles(spec).items()
    at_3 = {name: (role, zero) for name, (role, zero) in trained if zero.stage == 3}
    if len(at_3) == len({spec.rank_kind_of(name) for name in at_3}):
        return
    for name, (role, zero) in at_3.items():
        if zero.hpz_partition_size > 1:
            why = "Actor and critic share their ranks, and DeepSpeed makes such groups once in a "
            why += "process, for all that is at stage 3."
            fix = f"cluster.critic_ranks, or leave {name}.zero.hpz_partition_size out"
            at = Section(name, role)
            yield at.conflict("zero.hpz_partition_size", why, fix, "zero-plus-plus")


def _four_bits(spec: RunSpec[Any]) -> Iterator[Problem]:
    for name, (role, zero) in _trained_roles(spec).items():
        dora = role.adapter is not None and role.adapter.dora
        if dora and role.model.quantization == "nf4" and zero.stage == 3:
            why = "DoRA reads the base's weights outside of their layers, where ZeRO stage 3 has "
            why += "taken 4-bit weights apart."
            fix = f"{name}.zero.stage: 2, or {name}.model.quantization: none, or "
            fix += f"{name}.adapter.dora: false"
            yield Section(name, role).conflict("adapter.dora", why, fix, "four-bit-dora")
    for name, (frozen, zero_frozen) in _frozen_roles(spec).items():
        key, is_nf4 = spec.roles[name].key, frozen.model.quantization == "nf4"
        if spec.roles[name].given and is_nf4 and zero_frozen.offload == "cpu":
            why = "The scales of 4-bit weights stay on the device, so the weights cannot leave it."
            fix = f"{key}.zero.offload: none (4 bits are a quarter of bfloat16), or "
            fix += f"{key}.model.quantization: none"
            yield Section(key, frozen).conflict("zero.offload", why, fix, "four-bit-offload")


def _settings(spec: RunSpec[Any]) -> Iterator[Problem]:
    rules = (_offload, _gradient_dtype, _narrow_states, _zero_plus_plus, _one_group, _four_bits)
    return find(rules, spec)


def _plan(spec: RunSpec[Any], device: Device) -> Iterator[Problem]:
    yield from _lost_updates(spec)
    for name, (_, zero) in _trained_roles(spec).items():
        keys = [f"{name}.zero.{key}" for key in _plus_plus_keys(zero)]
        if keys and device == "cpu":
            what = f"{', '.join(keys)}: the run is on the CPU"
            why = "DeepSpeed quantises with CUDA kernels, and within a machine there is no slow "
            why += "link to spare"
            fix = "leave it out, or cluster.device: cuda"
            yield Problem("zero-plus-plus", "error", what, why, fix)


def _lost_updates(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Warn of states in bfloat16 beside a learning rate whose updates they lose."""
    for name, (role, zero) in _trained_roles(spec).items():
        rate = role.optimizer.learning_rate
        if zero.state_dtype == "bfloat16" and rate < LOST_BELOW:
            what = f"{name}.zero.state_dtype is bfloat16, and "
            what += f"{name}.optimizer.learning_rate {rate:g}"
            why = "bfloat16 numbers about 0.02, as weights are, lie 1.2e-4 apart; AdamW moves a "
            why += "weight by about the learning rate, and what is under half of that is rounded "
            why += "away"
            fix = f"{name}.zero.state_dtype: float32 (in host memory, with "
            fix += f"{name}.zero.optimizer_offload: cpu), or a rate of 1e-4 and more"
            yield Problem("lost-updates", "warning", what, why, fix)


def _tools(spec: RunSpec[Any]) -> Iterator[ToolNeed]:
    """Yield the tools that DeepSpeed compiles with; on CPUs none for ZeRO++, which is refused."""
    for name, (_, zero) in _trained_roles(spec).items():
        if zero.optimizer_offload == "cpu" and not is_adam_built():
            key = f"{name}.zero.optimizer_offload"
            what = "DeepSpeed's Adam for the CPU"
            yield ToolNeed(FOR_CPU_ADAM, key, "cpu", what, f"{key}: none")
        for setting in ("quantized_weights", "quantized_gradients"):
            if getattr(zero, setting) and spec.cluster.device != "cpu":
                key, what = f"{name}.zero.{setting}", "DeepSpeed's quantisation on GPUs"
                yield ToolNeed(FOR_ZERO_PLUS_PLUS, key, "true", what, f"{key}: false")


def _host(spec: RunSpec[Any], host: LocalHost) -> Iterator[Problem]:
    """Refuse 4-bit weights that are stored as bytes: stage 3 divides one floating dtype."""
    installed = host.versions.get("bitsandbytes")
    at_3 = [name for name, (_, zero) in _trained_roles(spec).items() if zero.stage == 3]
    at_3 += [name for name, (_, frozen) in _frozen_roles(spec).items() if frozen.stage == 3]
    divided = [n for n, model in spec.models.items() if model.quantization == "nf4" and n in at_3]
    if divided and installed is not None and Version(installed) < _STORAGE:
        what = f"{', '.join(divided)}: 4-bit weights under ZeRO stage 3, with bitsandbytes "
        what += installed
        why = "it stores 4-bit weights as bytes only, which stage 3 cannot divide beside bfloat16: "
        why += "runs end with `.to is not supported for 4-bit or 8-bit models`"
        fix = f"bitsandbytes {_STORAGE} or newer (Plimsoll then stores them in model.dtype), or "
        fix += "stage 2 (0 for a frozen role)"
        yield Problem("four-bit-storage", "error", what, why, fix)


def _offload_keys(role: TrainedRole | FrozenRole) -> tuple[str, ...]:
    if isinstance(role, FrozenRole):
        return ("zero.offload",) if role.settings_of(FrozenZeroConfig).offload == "cpu" else ()
    zero = role.settings_of(ZeroConfig)
    keys = ("parameter_offload", "optimizer_offload")
    return tuple(f"zero.{key}" for key in keys if getattr(zero, key) == "cpu")


def _describe(role: TrainedRole | FrozenRole) -> str:
    if isinstance(role, FrozenRole):
        frozen = role.settings_of(FrozenZeroConfig)
        where = "whole on every rank" if frozen.stage == 0 else "divided over the ranks"
        waits = ", in host memory while it does not score" if frozen.offload == "cpu" else ""
        return where + waits
    zero = role.settings_of(ZeroConfig)
    moved = {"optimizer": zero.optimizer_offload, "weights": zero.parameter_offload}
    on_host = [what for what, where in moved.items() if where == "cpu"]
    host = f", {' and '.join(on_host)} in host memory" if on_host else ""
    return f"ZeRO stage {zero.stage}{host}"


def _decide(role: TrainedRole) -> ZeroConfig:
    """Return the settings with `gradient_dtype: auto` replaced by the dtype that is used.

    At stage 0 with bfloat16 weights DeepSpeed has only bfloat16.
    """
    zero = role.settings_of(ZeroConfig)
    if zero.gradient_dtype != AUTO:
        return zero
    narrow = zero.stage == 0 and role.model.dtype == "bfloat16"
    return zero.model_copy(update={"gradient_dtype": "bfloat16" if narrow else "float32"})


def _measuring_settings(role: TrainedRole) -> FrozenZeroConfig:
    return FrozenZeroConfig(stage=3 if role.settings_of(ZeroConfig).stage == 3 else 0)


RULES = TrainerRules(
    settings=_settings,
    plan=_plan,
    tools=_tools,
    host=_host,
    packages=PACKAGES,
    offloaded=_offload_keys,
    describe=_describe,
    decide=_decide,
    measuring=_measuring_settings,
    doctor=find_installed,
    compiled=COMPILED,
)
