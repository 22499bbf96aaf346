"""Convert the sections of machines, roles, engines, data, batches and the run.

TRL counts the sequences of a process; Plimsoll counts the sequences of a step. TRL recognizes the
format of rows by column names. They are read if the data is a local file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from math import ceil, floor
from pathlib import Path
from typing import Any

from plimsoll.config.base import AUTO
from plimsoll.errors import ConfigError
from plimsoll_convert import rules
from plimsoll_convert.settings import Keys, Options, Sourced, Value, positive

_DIVIDES = ("zero_stage", "use_fsdp", "fsdp")
_EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
_PEFT_TARGETS = ("q_proj", "v_proj")
"""PEFT's default target modules for Llama, Qwen and most other models."""
_LONGEST = 1024
"""The longest sequence, in tokens, if TRL's setting is null (no limit)."""
_PROMPT = 2048
"""The longest prompt, in tokens, as TRL has no limit."""
_SIZE, _ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"
_SHARED_BY = ("parallelism_config_cp_size", "parallelism_config_sp_size")
_SAMPLED = (_SIZE, _ACCUMULATED, "generation_batch_size", "steps_per_generation", "num_generations")
_SOLVED = ("accuracy_reward", "reasoning_accuracy_reward")
"""TRL's reward functions that read the column `solution`."""
_WANTED = "`datasets` must be a list of mappings with a path each, as in TRL's docs"


def processes(o: Options) -> int:
    """Return the number of training processes on all machines."""
    if o["num_processes"] is not None:
        return int(o["num_processes"])
    machines = o.launch.nodes or o["num_machines"] or 1
    return 1 if _is_single(o) else int((o.launch.cards or o.cards or 1) * machines)


def _is_single(o: Options) -> bool:
    """Return whether `python` starts one process, without a launcher."""
    return o.launch.started_by.startswith("python") and o.launch.cards is None


def _streams(o: Options) -> int:
    """Return the number of processes that learn from sequences of their own."""
    return processes(o) // rules.shards_of(o, *_SHARED_BY)


def machines(o: Options) -> Keys:
    """Return the cards and machines."""
    number, nodes = processes(o), int(o.launch.nodes or o["num_machines"] or 1)
    check = ""
    if o["num_processes"] is None and o.launch.cards is None and not _is_single(o):
        check = f"nothing says how many cards there are: reckoned with {number}. --num_processes N "
        check += "of the command, or --cluster, says it"
    note = "python starts one process" if _is_single(o) else "a process a card"
    return {
        "ranks": o.trace(number, *o.given("num_processes"), note=note, check=check),
        "sequence_parallel": rules.sequence_parallel(o, number, *_SHARED_BY),
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
    check = "TRL keeps Adam's states in bfloat16, too, without fp32 masters; here both are float32"
    halves = o["dtype"] == "bfloat16" and not o["use_peft"] and not _asks_for_half(o)
    devices = ("offload_optimizer_device", "offload_param_device")
    on_disks = [id for id in devices if o[id] == "nvme"]

    def offload(device: str) -> Value:
        of_all = o["fsdp_offload_params"] or "offload" in (o["fsdp"] or ())
        flags = o.given(device, "fsdp_offload_params", "fsdp")
        return o.trace_if(of_all or o[device] in ("cpu", "nvme"), "cpu", *flags)

    return {
        "stage": o.trace(_stage(o), *o.given(*_DIVIDES), note=note),
        "optimizer_offload": offload(devices[0]),
        "parameter_offload": offload(devices[1]),
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
    o.require_given("model_name_or_path", "the model to train")
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
    is_adamw = name.startswith("adamw") or name in (*_EIGHT_BITS, "paged_adamw_32bit")
    o.require(is_adamw, "not supported: weights are trained by AdamW, in 32 or in 8 bits", "optim")
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
        why = f"it needs --{flag} with min_lr_rate"
        o.require(name != "cosine_with_min_lr", why, "lr_scheduler_type")
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
    if not o["use_vllm"]:
        engine, shared = o.trace({}, "use_vllm"), o.trace("shared", "use_vllm")
        return {"vllm": None, "transformers": engine, "placement": shared}
    if o["vllm_mode"] == "server":
        why = "set rollout.engines and rollout.vllm.tensor_parallel as the server was started"
        engine, apart = o.trace({}, "use_vllm"), o.trace("own", "vllm_mode")
        return {"vllm": engine, "placement": apart, "engines": rules.to_check(why)}
    flag, number = "vllm_tensor_parallel_size", processes(o)
    note = f"{number} processes / {o[flag]}"
    return {
        "placement": o.trace("shared", "vllm_mode", "use_vllm"),
        "engines": o.trace(max(1, number // o[flag]), flag, note=note),
    }


def _generation(o: Options) -> tuple[int, int]:
    """Return the sampled responses of an RL step, and the optimizer steps that learn from them.

    They follow from TRL's generation batch and its steps.
    """
    once, accumulated = o[_SIZE] * _streams(o), o[_ACCUMULATED]
    given = o["generation_batch_size"]
    why = f"it must be a multiple of the {once} sequences that {_streams(o)} processes learn at "
    o.require((given or 0) % once == 0, f"{why}once", "generation_batch_size", _SIZE)
    steps = o["steps_per_generation"] or accumulated if given is None else given // once
    most, least = max(steps, accumulated), min(steps, accumulated)
    why = f"this and the {steps} steps of a generation: one must be a multiple of the other"
    o.require(most % least == 0, why, _ACCUMULATED)
    return once * most, max(1, steps // accumulated)


def updates(o: Options) -> int:
    """Return the number of optimizer steps per RL step; 1 for other jobs."""
    return _generation(o)[1] * int(o["num_iterations"]) if o.rl else 1


def mini_batches(o: Options) -> Sourced:
    """Return the number of mini-batches of an RL step."""
    return o.trace(_generation(o)[1], *_SAMPLED[:-1])


def batch(o: Options) -> Keys:
    """Return the batch sizes of a step, without the responses to a prompt."""
    if o.rl:
        (responses, _), each = _generation(o), int(o["num_generations"])
        why = f"it does not divide the {responses} responses of a generation of {_streams(o)} "
        why += "processes. Give --generation_batch_size or another number"
        o.require(responses % each == 0, why, "num_generations", _SIZE, _ACCUMULATED)
        bound, note = "max_completion_length", f"{responses} responses / {each}"
        longest = _longest_prompt(o) + o[bound]
        return {
            "prompts": o.trace(responses // each, *_SAMPLED, note=note),
            "micro_batch_tokens": _micro_batch(o, longest, bound),
        }
    number = o[_SIZE] * o[_ACCUMULATED] * _streams(o)
    note = f"{o[_SIZE]} * {o[_ACCUMULATED]} of each of {_streams(o)} processes"
    check = ""
    if o["packing"]:
        check = "with --packing TRL counts packs, here rows are counted: multiply by rows a pack"
    longest = (o["max_length"] or _LONGEST) * (2 if o.pairs else 1)
    size = o.trace(number, _SIZE, _ACCUMULATED, note=note, check=check)
    return {
        "pairs" if o.pairs else "sequences": size,
        "micro_batch_tokens": _micro_batch(o, longest, "max_length"),
    }


def _micro_batch(o: Options, longest: int, bound: str) -> Sourced:
    shared_by = rules.shards_of(o, *_SHARED_BY)
    return rules.micro_batch(o, _SIZE, o[_SIZE], longest, bound, shards=shared_by)


def _longest_prompt(o: Options) -> int:
    if o["max_prompt_length"] is not None:
        return int(o["max_prompt_length"])
    whole = o["vllm_max_model_length"]
    return max(1, whole - o["max_completion_length"]) if whole is not None else _PROMPT


@cache
def first_row(path: str) -> Mapping[str, object] | None:
    """Return the first row of a local file or folder; None if there is none or it is unreadable."""
    if not Path(path).exists():
        return None
    from plimsoll.config.data import SourceConfig
    from plimsoll.data.fields import RawRow
    from plimsoll.data.sources import read_rows

    try:
        row = next(iter(read_rows(SourceConfig(path=path, limit=1), whole=True)), None)
    except (ConfigError, OSError):
        return None
    return row.values if isinstance(row, RawRow) else None


def _column(name: str, *flags: str) -> Sourced:
    return Sourced(name, flags, "TRL's name")


def _columns(o: Options, row: Mapping[str, object] | None) -> dict[str, Sourced]:
    """Return the columns of a data set by their purpose. `row` is the first row, if known."""
    if o.rl:
        solved = any(name in _SOLVED for name in o["reward_funcs"] or ())
        answers = {"reference": _column("solution", "reward_funcs")} if solved else {}
        return {"prompt": _column("prompt"), **answers}
    tools = {"tools": _column("tools")} if row is not None and row.get("tools") else {}
    if o.pairs:
        chosen = row.get("chosen") if row is not None else None
        first = chosen[0] if isinstance(chosen, list) and chosen else None
        is_whole = isinstance(first, dict) and first.get("role") != "assistant"
        apart = row is not None and row.get("prompt") is not None and not is_whole
        prompt = {"prompt": _column("prompt")} if apart else {}
        return {**prompt, "chosen": _column("chosen"), "rejected": _column("rejected"), **tools}
    if o.command == "kto":
        response = {"response": _column("completion")}
        return {"prompt": _column("prompt"), "label": _column("label"), **response, **tools}
    # SFT: TRL's order decides if several forms fit
    text = {"text": _column(str(o["dataset_text_field"]), *o.given("dataset_text_field"))}
    flags = o.given("completion_only_loss")
    answered = {"prompt": _column("prompt", *flags), "response": _column("completion", *flags)}
    if row is None and o.given("dataset_text_field"):
        return text
    if row is None:
        return answered if o["completion_only_loss"] else {"messages": _column("messages")}
    for name in ("messages", "conversations"):
        if name in row:
            return {"messages": _column(name), **tools}
    return {**answered, **tools} if "prompt" in row and "completion" in row else text


def _guessed_columns(o: Options) -> dict[str, Sourced]:
    """Return the columns of rows that are not known, with checks for the user."""
    columns = _columns(o, None)
    if o.pairs:
        why = "if prompts are in a column `prompt`, write prompt: prompt"
        columns["chosen"] = rules.with_check(columns["chosen"], why)
    elif "messages" in columns:
        why = "if the rows have `prompt` and `completion`, write prompt: prompt and response: "
        why += "completion; if they have plain text, write text: text"
        columns["messages"] = rules.with_check(columns["messages"], why)
    return columns


def _sources(o: Options) -> list[tuple[str, Keys]]:
    """Return (path, data set) for each data set.

    Raises:
        ConfigError: There is none, or the entries of the setting `datasets` are wrong.
    """
    if o["datasets"] is None:
        path, name, split = "dataset_name", "dataset_config", "dataset_train_split"
        o.require_given(path, "the rows to learn from; or `datasets` of the YAML")
        rows = {
            "path": o.take(path),
            "name": o.trace_if(o[name], o[name], path, name),
            "split": o.trace(o[split], path, split),
        }
        return [(o[path], rows)]
    try:
        entries = json.loads(o["datasets"])
    except ValueError as error:
        raise ConfigError(f"{_WANTED}: {error}.") from error
    if not (isinstance(entries, list) and entries and all(isinstance(e, dict) for e in entries)):
        raise ConfigError(f"{_WANTED}.")
    sources = [_source_of(number, entry) for number, entry in enumerate(entries, 1)]
    if len({source["weight"] is None for _, source in sources}) > 1:
        raise ConfigError("`datasets`: give all of them a fraction, or none.")
    return sources


def _source_of(number: int, entry: Mapping[str, Any]) -> tuple[str, Keys]:
    """Return the path and the data set of an entry of `datasets`."""
    file = entry.get("data_files") if isinstance(entry.get("data_files"), str) else None
    path = file or entry.get("data_dir") or entry.get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{_WANTED}: number {number} has none.")
    name, share = entry.get("name"), entry.get("fraction")
    weight = float(share) if isinstance(share, int | float) and share > 0 else None
    given = ("datasets",)
    return path, {
        "path": Sourced(path, given),
        "name": None if name is None else Sourced(name, given),
        "split": None if file is not None else Sourced(entry.get("split", "train"), given),
        "weight": None if weight is None else Sourced(weight, given),
    }


def data(o: Options) -> Keys:
    """Return the settings of all data sets: training and held-out rows, lengths and template."""
    sources = _sources(o)
    rows = [{**source, **_columns(o, first_row(path))} for path, source in sources]
    if first_row(sources[0][0]) is None:
        rows[0] = {**rows[0], **_guessed_columns(o)}
    template = "chat_template_path"
    is_template = str(o[template]).endswith((".jinja", ".j2", ".txt"))
    other = "the template of another model's tokenizer: write it into a .jinja file"
    end = "the end of what is longer is cut, not its beginning"
    in_order = o["train_sampling_strategy"] == "sequential" and not o["shuffle_dataset"]
    if o.rl:
        flags = o.given("max_prompt_length", "vllm_max_model_length")[:1]
        why = f"TRL bounds no prompt; here more than {_PROMPT} tokens are refused: set it as needed"
        longest = o.trace(_longest_prompt(o), *flags) if flags else rules.to_check(why)
        cuts = o["max_prompt_length"] is not None
        over_long = o.trace_if(cuts, "truncate", "max_prompt_length")
    else:
        why = f"TRL then bounds no length; here {_LONGEST}: set it as your rows and cards allow"
        length = o["max_length"]
        longest = o.trace(length or _LONGEST, "max_length", check="" if length else why)
        over_long = o.trace("truncate", "truncation_mode", note="TRL cuts what is longer")
    return {
        "train": rules.mixture_of([path for path, _ in sources], rows),
        "eval": _held_out(o, *sources[0]),
        "max_tokens": longest,
        "over_long": over_long,
        "shuffle": o.trace_if(in_order, False, "train_sampling_strategy", "shuffle_dataset"),
        "chat_template": o.take_if(is_template, template),
        "other_template": o.leave_out(other, template, when=not is_template),
        "cut_end": o.leave_out(end, "truncation_mode", when=o["truncation_mode"] == "keep_end"),
    }


def _held_out(o: Options, path: str, rows: Keys) -> Keys | None:
    """Return the held-out rows of the first data set, or None without evaluation."""
    if o["eval_strategy"] == "no":
        return None
    number = o["num_generations_eval"] or o["num_generations"]
    return {
        "path": rows["path"],
        "name": rows["name"],
        "split": o.take_if(rows["split"] is not None, "dataset_test_split"),
        **_columns(o, first_row(path)),
        "responses": o.trace_if(o.rl, number, "num_generations_eval", "num_generations"),
    }


def learned_tokens(o: Options) -> Value:
    """Return "assistant" or "all": which turns SFT learns; None for rows without turns."""
    read = _columns(o, first_row(_sources(o)[0][0]))
    if "text" in read:
        return None
    answers = "response" in read if o["completion_only_loss"] is None else o["completion_only_loss"]
    assistant_only = o["assistant_only_loss"] or answers
    note = "TRL learns the other turns, too, but of prompts and completions"
    name, note = ("assistant", "") if assistant_only else ("all", note)
    return o.trace(name, "assistant_only_loss", "completion_only_loss", note=note)


def run(o: Options) -> Keys:
    """Return the length of the run, and its checkpoints and logs."""
    each, counted = updates(o), o["max_steps"] > 0
    resumes = o["resume_from_checkpoint"] not in (None, "False", "false")
    note = f"of {each} optimizer steps" if each > 1 else ""
    save = f"{o.show('save_strategy')}: a checkpoint is kept every so many steps: write how many"
    measure = f"{o.show('eval_strategy')}: in how many steps that is, the rows say"
    interval = "eval_steps" if o["eval_steps"] else "logging_steps"
    loggers = [n.strip() for word in o["report_to"] or () for n in word.split(",") if n.strip()]
    return {
        "steps": o.trace_if(counted, ceil(o["max_steps"] / each), "max_steps", note=note),
        "epochs": o.take_if(not counted, "num_train_epochs"),
        "save_every": _every(o, "save_steps", "save_strategy", save),
        "keep_checkpoints": o.take("save_total_limit", positive, note="the last ones"),
        "resume": o.trace_if(resumes, AUTO, "resume_from_checkpoint"),
        "eval_every": _every(o, interval, "eval_strategy", measure),
        "best": _best(o),
        **rules.loggers_of(o, loggers, "report_to", "project" if o.given("project") else ""),
    }


def _every(o: Options, flag: str, strategy: str, why: str) -> Value:
    """Return an interval in steps of Plimsoll, or a check if it is not given in steps.

    Args:
        o: The settings.
        flag: The setting with the number of optimizer steps; below 1 it is a share of the run.
        strategy: The setting that says whether the interval is in steps.
        why: The check.
    """
    if o[strategy] == "no":
        return None
    if o[strategy] != "steps" or o[flag] < 1:
        return rules.to_check(why)
    return o.trace(max(1, round(o[flag] / updates(o))), flag, strategy)


def _best(o: Options) -> Keys | None:
    if not o["load_best_model_at_end"] or o["eval_strategy"] == "no":
        return None
    metric, greater = "metric_for_best_model", "greater_is_better"
    name = str(o[metric] or "loss").removeprefix("eval_")
    higher = o[greater] if o[greater] is not None else not name.endswith("loss")
    check = "" if name == "loss" else "metrics have other names: see metrics.jsonl of a run"
    return {
        "metric": o.trace(f"eval/{name}", "load_best_model_at_end", metric, check=check),
        "goal": o.trace("highest" if higher else "lowest", metric, greater),
    }
