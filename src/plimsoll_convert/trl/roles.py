"""Convert the settings of ranks, ZeRO, dtypes, adapters, optimizers and engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import floor

from plimsoll.config.base import AUTO
from plimsoll.errors import ConfigError
from plimsoll_convert import mapping
from plimsoll_convert.options import Options, Remark
from plimsoll_convert.values import Keys, Value

_DIVIDES = ("zero_stage", "use_fsdp", "fsdp")
_EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
_PEFT_TARGETS = ("q_proj", "v_proj")
"""PEFT's default target modules for Llama, Qwen and most other models."""


def _machines(o: Options) -> int:
    return int(o.launch.nodes or o["num_machines"] or 1)


def processes(o: Options) -> int:
    """Return the number of training processes on all machines."""
    if o["num_processes"] is not None:
        return int(o["num_processes"])
    return 1 if _is_single(o) else (o.launch.cards or o.cards or 1) * _machines(o)


def _is_single(o: Options) -> bool:
    """Return whether `python` starts one process, without a launcher."""
    words = [word for word in o.launch.launcher if "=" not in word]
    return bool(words) and o.launch.started_by.startswith("python") and o.launch.cards is None


def machines(o: Options) -> Keys:
    """Return the cards and machines."""
    number, nodes = processes(o), _machines(o)
    check = ""
    if o["num_processes"] is None and o.launch.cards is None and not _is_single(o):
        check = "accelerate takes all cards, and nothing says how many they are: batches are "
        check += f"reckoned with {number}. --num_processes N of the command, or --cluster, says it"
    note = "python starts one process" if _is_single(o) else "a process a card"
    return {
        "ranks": o.trace(number, *o.given("num_processes"), note=note, check=check),
        "nodes": o.trace(nodes, *o.given("num_machines"), note="machines") if nodes > 1 else None,
        "device": o.take("use_cpu", lambda on: "cpu" if on else None),
        "address": mapping.ray_head(o, nodes),
    }


def _is_fsdp(o: Options) -> bool:
    return bool(o["use_fsdp"] or (o["fsdp"] and "".join(o["fsdp"])))


def frozen_stage(o: Options) -> Value:
    """Return ZeRO stage 3 for a role that only scores if weights are divided, else None."""
    stage = o["zero_stage"] if o["zero_stage"] is not None else 3 if _is_fsdp(o) else 0
    return o.trace(3, *o.given(*_DIVIDES), note="ZeRO") if stage == 3 else None


def _sharding(o: Options) -> Keys:
    fsdp, stage = _is_fsdp(o), o["zero_stage"]
    note = "" if stage is not None else "neither DeepSpeed nor FSDP: all of it on each"
    note = "FSDP divides weights, gradients and states" if fsdp else note
    stage = stage if stage is not None else 3 if fsdp else 0
    check = ""
    if o["dtype"] == "bfloat16" and not o["use_peft"] and not _asks_for_half(o):
        check = "TRL then keeps Adam's states in bfloat16, too, without fp32 masters; here both "
        check += "are in float32"
    return {
        "stage": o.trace(stage, *o.given(*_DIVIDES), note=note),
        "optimizer_offload": _offload(o, "offload_optimizer_device"),
        "parameter_offload": _offload(o, "offload_param_device"),
        "state_dtype": mapping.to_check(check) if check else None,
    }


def _offload(o: Options, device: str) -> Value:
    fsdp = o["fsdp_offload_params"] or "offload" in (o["fsdp"] or ())
    if not fsdp and o[device] not in ("cpu", "nvme"):
        return None
    return o.trace("cpu", *o.given(device, "fsdp_offload_params", "fsdp"))


def _asks_for_half(o: Options) -> bool:
    dtypes = (o["dtype"], o["mixed_precision"])
    return bool(o["fp16"]) or any(name in mapping.HALF_16 for name in dtypes)


def _dtype(o: Options) -> Value:
    flags = ("dtype", "bf16", "fp16", "mixed_precision")
    if _asks_for_half(o):
        return None
    if o["dtype"] in ("bfloat16", AUTO):
        return o.trace("bfloat16", *flags)
    if o["bf16"] is False or o["mixed_precision"] == "no":
        return o.trace("float32", *flags)
    note = "fp32 masters of the optimizer are what TRL's fp32 weights are under bf16"
    return o.trace("bfloat16", *flags, note=note)


def actor(o: Options) -> Keys:
    """Return the settings of the model that learns."""
    path = o.take("model_name_or_path")
    if path is None:
        raise ConfigError("--model_name_or_path is needed: the model to train.")
    offloads, quantizes = o["activation_offloading"], o["load_in_4bit"]
    flag = "gradient_checkpointing" if o["gradient_checkpointing"] else "activation_offloading"
    computes_again = o.trace(True, flag) if offloads else o.take("gradient_checkpointing")
    return {
        "model": {
            "path": path,
            "dtype": _dtype(o),
            "trust_remote_code": o.take("trust_remote_code"),
            "gradient_checkpointing": computes_again,
            "activation_offload": o.trace("cpu", "activation_offloading") if offloads else None,
            "quantization": o.trace("nf4", "load_in_4bit") if quantizes else None,
            "double_quantization": o.take("use_bnb_nested_quant") if quantizes else None,
        },
        "adapter": _adapter(o),
        "optimizer": _optimizer(o),
        "zero": _sharding(o),
    }


def _adapter(o: Options) -> Keys | None:
    adapter = mapping.adapter_of(o, "lora_r", "lora_alpha", "lora_target_modules", "lora_dropout")
    if not o["use_peft"] or adapter is None:
        return None
    if not o["lora_target_modules"]:
        note, check = "PEFT's own for Llama and Qwen", "what PEFT takes depends on the model"
        targets = o.trace(_PEFT_TARGETS, "lora_target_modules", note=note, check=check)
        adapter = {**adapter, "targets": targets}
    if o.rl and o["lora_dropout"]:
        why = f"0 here: with {o.show('lora_dropout')} ratios of probabilities are noise"
        adapter = {**adapter, "dropout": mapping.to_check(why)}
    return {
        **adapter,
        "rank": o.trace(o["lora_r"], "lora_r", "use_peft"),
        "rslora": o.take("use_rslora"),
        "dora": o.take("use_dora"),
        "modules_to_save": o.take("lora_modules_to_save"),
    }


def _optimizer(o: Options) -> Keys:
    name = str(o["optim"])
    if name not in _EIGHT_BITS and not name.startswith("adamw") and name != "paged_adamw_32bit":
        raise ConfigError(
            f"{o.show('optim')}: not supported: weights are trained by AdamW, in 32 or in 8 bits. "
            "Leave it out, or train it with TRL."
        )
    warmup = o["warmup_steps"] or 0
    rising = ("warmup_steps", "warmup_ratio")
    return {
        "kind": o.trace("adamw_8bit" if name in _EIGHT_BITS else "adamw", "optim"),
        "learning_rate": o.take("learning_rate"),
        "beta1": o.take("adam_beta1"),
        "beta2": o.take("adam_beta2"),
        "eps": o.take("adam_epsilon"),
        "weight_decay": o.take("weight_decay"),
        "max_grad_norm": o.take("max_grad_norm"),
        **mapping.schedule_of(
            o,
            "lr_scheduler_type",
            default="linear",
            warmup=o.trace(floor(warmup), "warmup_steps")
            if warmup >= 1
            else o.trace(float(warmup or o["warmup_ratio"] or 0.0), *rising),
            final=final_ratio(o),
        ),
    }


def final_ratio(o: Options) -> Value:
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
    return {"model": {"path": o.take("model_name_or_path")}, "zero.stage": stage}


def rollout(o: Options) -> Keys | None:
    """Return the engines that sample, with sampling settings; None if the command samples nothing.

    They are vLLM on separate cards or on the ranks' cards, or transformers.
    """
    if not o.rl:
        return None
    sampling = {
        "max_new_tokens": o.take("max_completion_length"),
        "temperature": o.take("temperature"),
        "top_p": o.take("top_p"),
        "top_k": o.take("top_k", lambda k: max(0, k)),
        "min_p": o.take("min_p"),
    }
    held_out = {
        "max_new_tokens": o.take("max_completion_length"),
        "temperature": o.take("temperature"),
    }
    name = o.trace("vllm" if o["use_vllm"] else "transformers", "use_vllm")
    rollout = {
        **mapping.engine_of(name, {}),
        "placement": o.trace(
            "shared", *(("vllm_mode", "use_vllm") if o["use_vllm"] else ("use_vllm",))
        ),
        "sampling": sampling,
        "/eval_sampling": held_out if o["eval_strategy"] != "no" else None,
    }
    if not o["use_vllm"]:
        return rollout
    if o["vllm_mode"] == "server":
        why = "the server's cards are engines of Plimsoll's: set rollout.engines and "
        why += "rollout.vllm.tensor_parallel as it was started"
        own = {"placement": o.trace("own", "vllm_mode"), "engines": mapping.to_check(why)}
        return {**rollout, **own}
    flag, number = "vllm_tensor_parallel_size", processes(o)
    note = f"{number} processes / {o[flag]}"
    settings = {
        "tensor_parallel": o.take(flag),
        "memory_share": o.take("vllm_gpu_memory_utilization"),
        "sleep_level": mapping.sleep_level(o, "vllm_enable_sleep_mode"),
    }
    engines = o.trace(max(1, number // o[flag]), flag, note=note)
    return {**rollout, **mapping.engine_of(name, settings), "engines": engines}


def remarks(o: Options) -> Iterator[Remark]:
    """Yield remarks on settings that have no counterpart in combination with others."""
    if _asks_for_half(o):
        why = "models are trained in bfloat16 or float32"
        yield from (
            Remark("lacking", id, why) for id in o.given("dtype", "fp16", "mixed_precision")
        )
    for device in o.given("offload_optimizer_device", "offload_param_device"):
        if o[device] == "nvme":
            yield Remark("lacking", device, "states are kept in host memory, not on disks")
    if o["use_peft"] and o.rl and o.given("lora_dropout") and o["lora_dropout"]:
        yield Remark("lacking", "lora_dropout", "ratios of probabilities would be noise")
    if o.given("lr_scheduler_kwargs") and final_ratio(o) is None:
        yield Remark("lacking", "lr_scheduler_kwargs", "a cosine's end is read alone")
