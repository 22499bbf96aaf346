"""Ranks, ZeRO, dtypes, adapters and optimizers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import floor

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.errors import ConfigError

_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
_DIVIDED = ("zero_stage", "use_fsdp", "fsdp")
_EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
_PEFT_TARGETS = ("q_proj", "v_proj")
"""PEFT's own for Llama, Qwen and most others."""


def processes(o: Options) -> int:
    """Of all machines."""
    if o["num_processes"] is not None:
        return int(o["num_processes"])
    machines = o.launch.nodes or o["num_machines"] or 1
    if _of_one(o):
        return 1
    return (o.launch.cards or o.cards or 1) * machines


def _of_one(o: Options) -> bool:
    """Whether `python` starts it, without a launcher."""
    words = [word for word in o.launch.launcher if "=" not in word]
    return bool(words) and o.launch.started_by.startswith("python") and o.launch.cards is None


def ranks(o: Options) -> Iterator[Outcome]:
    number, machines = processes(o), int(o.launch.nodes or o["num_machines"] or 1)
    note = "python starts one process" if _of_one(o) else "a process a card"
    yield o.entry("cluster.ranks", number, *o.given("num_processes"), note=note)
    if o["num_processes"] is None and o.launch.cards is None and not _of_one(o):
        why = "accelerate takes all cards, and nothing says how many they are: batches are "
        why += f"reckoned with {number}. --num_processes N of the command, or --cluster, says it"
        yield Remark("check", "cluster.ranks", why)
    yield from o.same("one machine", "num_machines") if machines == 1 else ()
    if machines > 1:
        yield o.entry("cluster.nodes", machines, *o.given("num_machines"), note="machines")
        yield Remark("check", "cluster.address", "give HOST:PORT of Ray's head")


def _sharded(o: Options) -> bool:
    return bool(o["use_fsdp"] or (o["fsdp"] and "".join(o["fsdp"])))


def stage(o: Options) -> int:
    """Of ZeRO; FSDP divides what stage 3 does."""
    if o["zero_stage"] is not None:
        return int(o["zero_stage"])
    return 3 if _sharded(o) else 0


def zero(o: Options) -> Iterator[Outcome]:
    note = "" if o["zero_stage"] is not None else "neither DeepSpeed nor FSDP: all of it on each"
    note = "FSDP divides weights, gradients and states" if _sharded(o) else note
    yield o.entry("actor.zero.stage", stage(o), *o.given(*_DIVIDED), note=note)
    offload = o["fsdp_offload_params"] or "offload" in (o["fsdp"] or ())
    for kind, key in (("optimizer", "optimizer_offload"), ("param", "parameter_offload")):
        flag = f"offload_{kind}_device"
        if o[flag] in ("cpu", "nvme") or offload:
            if o[flag] == "nvme":
                yield Remark("lacking", flag, "states are kept in host memory, not on disks")
            yield o.entry(f"actor.zero.{key}", "cpu", *o.given(flag, "fsdp_offload_params", "fsdp"))
        else:
            yield from o.same("nothing is offloaded", flag)
    if stage(o) != 3:
        yield from o.idle("without FSDP there is nothing to divide", "use_fsdp", "fsdp")
    yield from o.same("as FSDP has it", "fsdp_offload_params") if not offload else ()


def reference(o: Options) -> Iterator[Outcome]:
    """The frozen policy is divided as the one that learns is."""
    adapter = o["use_peft"]
    if stage(o) == 3 and not adapter:
        path = o["model_name_or_path"]
        yield o.entry("reference.model.path", path, "model_name_or_path")
        yield o.entry("reference.stage", 3, *o.given(*_DIVIDED), note="ZeRO")


def precision(o: Options) -> Iterator[Outcome]:
    flags = ("dtype", "bf16", "fp16", "mixed_precision")
    if o["fp16"] or o["mixed_precision"] == "fp16" or o["dtype"] == "float16":
        yield from o.lacking("models are trained in bfloat16 or float32", *flags)
        return
    half = o["dtype"] in ("bfloat16", "auto")
    mixed = o["bf16"] is not False and o["mixed_precision"] != "no"
    if not half and not mixed:
        yield o.entry("actor.model.dtype", "float32", *flags)
        return
    note = "fp32 masters of the optimizer are what TRL's fp32 weights are under bf16"
    yield o.entry("actor.model.dtype", "bfloat16", *flags, note="" if half else note)
    if half and o["dtype"] == "bfloat16" and not o["use_peft"]:
        why = "TRL then keeps Adam's states in bfloat16, too, without fp32 masters; here both are "
        why += "in float32"
        yield Remark("check", "actor.zero.state_dtype", why)


def activations(o: Options) -> Iterator[Outcome]:
    if o["activation_offloading"]:
        yield o.entry("actor.model.activation_offload", "cpu", "activation_offloading")
        if not o["gradient_checkpointing"]:
            yield o.entry("actor.model.gradient_checkpointing", True, "activation_offloading")
    else:
        yield from o.same("activations stay on the card", "activation_offloading")


def adapters(o: Options) -> Iterator[Outcome]:
    if o["load_in_4bit"]:
        yield o.entry("actor.model.quantization", "nf4", "load_in_4bit")
        nested = "use_bnb_nested_quant"
        yield o.entry("actor.model.double_quantization", bool(o[nested]), nested)
    else:
        yield from o.same("weights are in 16 bits", "load_in_4bit")
        yield from o.idle("weights are in 16 bits", "use_bnb_nested_quant")
    parts = (
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "use_rslora",
        "use_dora",
    )
    if not o["use_peft"]:
        yield from o.same("all weights are trained", "use_peft")
        yield from o.idle("--use_peft is not given: no adapter", *parts)
        return
    key = "actor.adapter"
    yield o.entry(f"{key}.rank", o["lora_r"], "lora_r", "use_peft")
    yield o.entry(f"{key}.alpha", float(o["lora_alpha"]), "lora_alpha")
    if o.rl and o["lora_dropout"]:
        why = f"0 here: each pass would drop other inputs, so that with {o.shown('lora_dropout')} "
        yield Remark("check", f"{key}.dropout", f"{why}ratios of probabilities are noise")
        yield from o.lacking("ratios of probabilities would be noise", "lora_dropout")
    else:
        yield o.entry(f"{key}.dropout", o["lora_dropout"], "lora_dropout")
    targets = o["lora_target_modules"]
    note = "" if targets else "PEFT's own for Llama and Qwen"
    yield o.entry(f"{key}.targets", targets or _PEFT_TARGETS, "lora_target_modules", note=note)
    if not targets:
        yield Remark("check", f"{key}.targets", "what PEFT takes by itself depends on the model")
    for flag, name in (("use_rslora", "rslora"), ("use_dora", "dora")):
        yield o.entry(f"{key}.{name}", bool(o[flag]), flag)


def optimizer(o: Options) -> Iterator[Outcome]:
    name = str(o["optim"])
    if name in _EIGHT_BITS:
        yield o.entry("actor.optimizer.kind", "adamw_8bit", "optim")
    elif name.startswith("adamw") or name == "paged_adamw_32bit":
        yield o.entry("actor.optimizer.kind", "adamw", "optim")
    else:
        raise ConfigError(
            f"{o.shown('optim')}: not supported: weights are trained by AdamW, in 32 or in 8 bits. "
            "Leave it out, or train it with TRL."
        )


def schedule(o: Options) -> Iterator[Outcome]:
    key, name = "actor.optimizer", str(o["lr_scheduler_type"])
    if name not in _SCHEDULES:
        raise ConfigError(
            f"{o.shown('lr_scheduler_type')}: there is no such schedule here. Known: "
            f"{', '.join(_SCHEDULES)}."
        )
    yield o.entry(f"{key}.schedule", _SCHEDULES[name], "lr_scheduler_type")
    warmup = o["warmup_steps"] or 0
    flags = ("warmup_steps", "warmup_ratio")
    if name == "constant":
        yield from o.idle("the schedule `constant` has no warm-up", *flags)
    elif warmup >= 1:
        yield o.entry(f"{key}.warmup_steps", floor(warmup), "warmup_steps")
        yield from o.idle("steps are given", "warmup_ratio")
    else:
        yield o.entry(f"{key}.warmup_ratio", warmup or o["warmup_ratio"] or 0.0, *flags)
    yield from _end(o, name)


def _end(o: Options, name: str) -> Iterator[Outcome]:
    """Of `lr_scheduler_kwargs` what is one of a cosine's."""
    flag = "lr_scheduler_kwargs"
    if o[flag] is None:
        if name == "cosine_with_min_lr":
            raise ConfigError(f"{o.shown('lr_scheduler_type')} needs --{flag} with min_lr_rate.")
        yield from o.idle("it is empty", flag)
        return
    try:
        given = json.loads(o[flag])
    except ValueError as error:
        raise ConfigError(f"{o.shown(flag)}: it is no JSON: {error}. Write a mapping.") from error
    ratio = given.get("min_lr_rate") if isinstance(given, dict) else None
    if ratio is None and isinstance(given, dict) and isinstance(given.get("min_lr"), int | float):
        ratio = given["min_lr"] / o["learning_rate"]
    if name == "cosine_with_min_lr" and isinstance(ratio, int | float):
        yield o.entry("actor.optimizer.final_ratio", float(ratio), flag)
    else:
        yield Remark("lacking", flag, "a schedule has the settings of actor.optimizer alone")
