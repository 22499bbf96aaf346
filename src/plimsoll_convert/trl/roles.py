"""Convert the settings of ranks, ZeRO, dtypes, adapters, optimizers and engines."""

from __future__ import annotations

import json
from math import floor

from plimsoll.config.base import AUTO
from plimsoll.errors import ConfigError
from plimsoll_convert import rules
from plimsoll_convert.settings import Keys, Options, Value

_DIVIDES = ("zero_stage", "use_fsdp", "fsdp")
_EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
_PEFT_TARGETS = ("q_proj", "v_proj")
"""PEFT's default target modules for Llama, Qwen and most other models."""


def processes(o: Options) -> int:
    """Return the number of training processes on all machines."""
    if o["num_processes"] is not None:
        return int(o["num_processes"])
    machines = o.launch.nodes or o["num_machines"] or 1
    return 1 if _is_single(o) else int((o.launch.cards or o.cards or 1) * machines)


def _is_single(o: Options) -> bool:
    """Return whether `python` starts one process, without a launcher."""
    words = [word for word in o.launch.launcher if "=" not in word]
    return bool(words) and o.launch.started_by.startswith("python") and o.launch.cards is None


def machines(o: Options) -> Keys:
    """Return the cards and machines."""
    number, nodes = processes(o), int(o.launch.nodes or o["num_machines"] or 1)
    check = ""
    if o["num_processes"] is None and o.launch.cards is None and not _is_single(o):
        check = "accelerate takes all cards, and nothing says how many they are: batches are "
        check += f"reckoned with {number}. --num_processes N of the command, or --cluster, says it"
    note = "python starts one process" if _is_single(o) else "a process a card"
    return {
        "ranks": o.trace(number, *o.given("num_processes"), note=note, check=check),
        "nodes": o.trace_if(nodes > 1, nodes, *o.given("num_machines"), note="machines"),
        "address": rules.ray_head(o, nodes),
    }


def _stage(o: Options) -> int:
    """Return the ZeRO stage; 3 for FSDP, and 0 if nothing divides weights or states."""
    return int(o["zero_stage"]) if o["zero_stage"] is not None else 3 if _is_fsdp(o) else 0


def _is_fsdp(o: Options) -> bool:
    return bool(o["use_fsdp"] or (o["fsdp"] and "".join(o["fsdp"])))


def frozen_stage(o: Options) -> Value:
    """Return ZeRO stage 3 for a role that only scores if weights are divided, else None."""
    return o.trace_if(_stage(o) == 3, 3, *o.given(*_DIVIDES), note="ZeRO")


def _sharding(o: Options) -> Keys:
    note = "" if o["zero_stage"] is not None else "neither DeepSpeed nor FSDP: all of it on each"
    note = "FSDP divides weights, gradients and states" if _is_fsdp(o) else note
    check = "TRL then keeps Adam's states in bfloat16, too, without fp32 masters; here both "
    check += "are in float32"
    halves = o["dtype"] == "bfloat16" and not o["use_peft"] and not _asks_for_half(o)
    offloads = o["fsdp_offload_params"] or "offload" in (o["fsdp"] or ())
    devices = {"optimizer": "offload_optimizer_device", "parameter": "offload_param_device"}
    on_disks = [id for id in devices.values() if o[id] == "nvme"]
    return {
        "stage": o.trace(_stage(o), *o.given(*_DIVIDES), note=note),
        **{
            f"{states}_offload": o.trace_if(
                offloads or o[device] in ("cpu", "nvme"),
                "cpu",
                *o.given(device, "fsdp_offload_params", "fsdp"),
            )
            for states, device in devices.items()
        },
        "state_dtype": rules.to_check(check) if halves else None,
        "disks": o.leave_out("states are kept in host memory, not on disks", *on_disks),
    }


def _asks_for_half(o: Options) -> bool:
    dtypes = (o["dtype"], o["mixed_precision"])
    return bool(o["fp16"]) or any(name in rules.HALF_16 for name in dtypes)


def _dtype(o: Options) -> Keys | Value:
    flags = ("dtype", "bf16", "fp16", "mixed_precision")
    if _asks_for_half(o):
        why = "models are trained in bfloat16 or float32"
        return o.leave_out(why, "dtype", "fp16", "mixed_precision")
    if o["dtype"] in ("bfloat16", AUTO):
        return o.trace("bfloat16", *flags)
    if o["bf16"] is False or o["mixed_precision"] == "no":
        return o.trace("float32", *flags)
    note = "fp32 masters of the optimizer are what TRL's fp32 weights are under bf16"
    return o.trace("bfloat16", *flags, note=note)


def actor(o: Options) -> Keys:
    """Return the settings of the model that learns."""
    if o["model_name_or_path"] is None:
        raise ConfigError("--model_name_or_path is needed: the model to train.")
    offloads = o["activation_offloading"]
    flag = "gradient_checkpointing" if o["gradient_checkpointing"] else "activation_offloading"
    why = "ratios of probabilities would be noise"
    noisy = o["use_peft"] and o.rl and o["lora_dropout"]
    computes_again = o.trace(True, flag) if offloads else o.take("gradient_checkpointing")
    return {
        "model.dtype": _dtype(o),
        "model.gradient_checkpointing": computes_again,
        "model.double_quantization": o.take_if(o["load_in_4bit"], "use_bnb_nested_quant"),
        "adapter": _adapter(o),
        "optimizer": _optimizer(o),
        "zero": _sharding(o),
        "dropout": o.leave_out(why, "lora_dropout", when=noisy),
    }


def _adapter(o: Options) -> Keys | None:
    """Return what the table does not say of an adapter; None if there is none."""
    if not o["use_peft"] or not o["lora_r"]:
        return None
    keys: dict[str, Value] = {"rank": o.trace(o["lora_r"], "lora_r", "use_peft")}
    if o.rl and o["lora_dropout"]:
        why = f"0 here: with {o.show('lora_dropout')} ratios of probabilities are noise"
        keys["dropout"] = rules.to_check(why)
    if not o["lora_target_modules"]:
        note, check = "PEFT's own for Llama and Qwen", "what PEFT takes depends on the model"
        keys["targets"] = o.trace(_PEFT_TARGETS, "lora_target_modules", note=note, check=check)
    return keys


def _optimizer(o: Options) -> Keys:
    name = str(o["optim"])
    if name not in _EIGHT_BITS and not name.startswith("adamw") and name != "paged_adamw_32bit":
        raise ConfigError(
            f"{o.show('optim')}: not supported: weights are trained by AdamW, in 32 or in 8 bits. "
            "Leave it out, or train it with TRL."
        )
    steps = o["warmup_steps"] or 0
    warmup = o.trace(floor(steps), "warmup_steps")
    if steps < 1:
        share = float(steps or o["warmup_ratio"] or 0.0)
        warmup = o.trace(share, "warmup_steps", "warmup_ratio")
    shape, flag, final = "lr_scheduler_type", "lr_scheduler_kwargs", _final_ratio(o)
    return {
        "kind": o.trace("adamw_8bit" if name in _EIGHT_BITS else "adamw", "optim"),
        **rules.schedule_of(o, shape, default="linear", warmup=warmup, final=final),
        flag: o.leave_out("a cosine's end is read alone", flag, when=final is None),
    }


def _final_ratio(o: Options) -> Value:
    """Return the final rate of a cosine schedule as a share of the peak rate, or None.

    It is read from `lr_scheduler_kwargs`.
    """
    flag, name = "lr_scheduler_kwargs", str(o["lr_scheduler_type"])
    if o[flag] is None:
        if name == "cosine_with_min_lr":
            raise ConfigError(f"{o.show('lr_scheduler_type')} needs --{flag} with min_lr_rate.")
        return None
    try:
        given = json.loads(o[flag])
    except ValueError as error:
        raise ConfigError(f"{o.show(flag)}: it is no JSON: {error}. Write a mapping.") from error
    given = given if isinstance(given, dict) else {}
    ratio, least = given.get("min_lr_rate"), given.get("min_lr")
    if ratio is None and isinstance(least, int | float):
        ratio = least / o["learning_rate"]
    if name != "cosine_with_min_lr" or not isinstance(ratio, int | float):
        return None
    return o.trace(float(ratio), flag)


def reference(o: Options) -> Keys | None:
    """Return the reference model, or None if the config needs no section for it.

    The config needs it only if weights are divided and the actor has no adapter. With an adapter
    the reference is the actor without its adapter.
    """
    uses = (o.rl and o["beta"]) or o.command in ("dpo", "kto")
    stage = frozen_stage(o)
    if not uses or stage is None or o["use_peft"]:
        return None
    return {"model.path": o.take("model_name_or_path"), "zero.stage": stage}


def rollout(o: Options) -> Keys | None:
    """Return the engines that sample; None if the command samples nothing.

    They are vLLM on separate cards or on the ranks' cards, or transformers.
    """
    if not o.rl:
        return None
    evaluates: Keys = {} if o["eval_strategy"] != "no" else {"/eval_sampling": None}
    if not o["use_vllm"]:
        engine = o.trace({}, "use_vllm")
        placement = o.trace("shared", "use_vllm")
        return {"vllm": None, "transformers": engine, "placement": placement, **evaluates}
    if o["vllm_mode"] == "server":
        why = "the server's cards are engines of Plimsoll's: set rollout.engines and "
        why += "rollout.vllm.tensor_parallel as it was started"
        return {
            "vllm": o.trace({}, "use_vllm"),
            "placement": o.trace("own", "vllm_mode"),
            "engines": rules.to_check(why),
            **evaluates,
        }
    flag, number = "vllm_tensor_parallel_size", processes(o)
    note = f"{number} processes / {o[flag]}"
    return {
        "vllm.sleep_level": rules.sleep_level(o, "vllm_enable_sleep_mode"),
        "placement": o.trace("shared", "vllm_mode", "use_vllm"),
        "engines": o.trace(max(1, number // o[flag]), flag, note=note),
        **evaluates,
    }
