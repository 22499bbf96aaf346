"""Convert the settings of rows, lengths, batch sizes, the run's length and its checkpoints.

verl's rows are Parquet files with prompts as lists of turns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from plimsoll.config.base import AUTO
from plimsoll.errors import ConfigError
from plimsoll_convert import mapping
from plimsoll_convert.options import Options, Remark
from plimsoll_convert.values import Keys, Sourced, Value, positive
from plimsoll_convert.verl import roles

_ACTOR = "actor_rollout_ref.actor"
_ANSWER = "reward_model.ground_truth"
"""The column of verl's data that has the reference answer."""
_METRICS = (None, "reward", "seq_reward", "score", "acc", "seq_final_reward")
"""Metrics by which verl may filter groups. Each is equal in a group if the rewards are equal."""
_GROUPS = "algorithm.filter_groups"
PROMPT, RESPONSE = "data.max_prompt_length", "data.max_response_length"


def files(o: Options, flag: str) -> list[str]:
    """Return the file paths in a setting, with `~` expanded; empty if it is not set."""
    return [os.path.expanduser(path) for path in o[flag] or ()]


def data(o: Options) -> Keys:
    """Return the settings of all data sets: training and held-out rows, lengths and template."""
    paths = files(o, "data.train_files")
    if not paths:
        raise ConfigError("data.train_files=... is needed: the rows to learn from.")
    limit = o.take("data.train_max_samples", positive)
    tools = o.take("data.tools_key") if not o.rl and o.given("data.tools_key") else None
    columns = {**_columns(o), **({} if tools is None else {"tools": tools})}
    if "prompt" in columns:
        why = "the tokenizer's chat template is put around them, as there"
        columns["prompt"] = mapping.with_check(columns["prompt"], why)
    rows = [{"path": o.trace(p, "data.train_files"), **columns, "limit": limit} for p in paths]
    template = "model" if o.command == "sft" else "actor_rollout_ref.model"
    return {
        "train": mapping.mixture_of(mapping.source_names(paths), rows, weighted=False),
        "eval": _held_out(o),
        "max_tokens": o.take("data.max_length" if o.command == "sft" else PROMPT),
        "over_long": _over_long(o),
        "on_bad_row": o.trace("skip", "data.filter_overlong_prompts")
        if o["data.filter_overlong_prompts"]
        else None,
        "shuffle": o.take("data.shuffle"),
        "chat_template": o.take(f"{template}.custom_chat_template"),
    }


def _over_long(o: Options) -> Value:
    flag = "data.truncation"
    if o["data.filter_overlong_prompts"]:
        return None
    if o[flag] == "error":
        return o.trace("refuse", flag)
    note = "" if o[flag] == "right" else "there another part is cut off"
    return o.trace("truncate", flag, note=note)


def _column(o: Options, name: str, *flags: str) -> Sourced:
    given = o.given(*flags)
    return o.trace(name, *given, note="" if given else "verl's name")


def _columns(o: Options) -> dict[str, Sourced]:
    """Return the columns of a data set by their purpose."""
    if o.command == "sft":
        return _sft_columns(o)
    columns = {"messages": _column(o, str(o["data.prompt_key"]), "data.prompt_key")}
    if not o["reward.reward_model.enable"]:
        columns["reference"] = _column(o, _ANSWER)
        columns["source"] = _column(o, str(o["data.reward_fn_key"]), "data.reward_fn_key")
    return columns


def _sft_columns(o: Options) -> dict[str, Sourced]:
    keys = ("data.prompt_key", "data.response_key")
    whole = ("data.messages_key", "data.multiturn.enable")
    turns = o["data.multiturn.enable"] or o.given("data.messages_key")
    if turns or any(o[key] is None for key in keys):
        return {"messages": _column(o, str(o["data.messages_key"]), *whole)}
    inner = ("data.prompt_dict_keys", "data.response_dict_keys")
    paths = (".".join([o[key], *(o[path] or ())]) for key, path in zip(keys, inner, strict=True))
    return {
        name: _column(o, path, key, within)
        for name, path, key, within in zip(("prompt", "response"), paths, keys, inner, strict=True)
    }


def _evaluates(o: Options) -> bool:
    return _steps(o, "trainer.test_freq") is not None and bool(o["data.val_files"])


def _held_out(o: Options) -> Keys | Mapping[str, Keys] | None:
    if not _evaluates(o):
        return None
    paths = files(o, "data.val_files")[: None if o.rl else 1]
    rows = {
        **_columns(o),
        "limit": o.take("data.val_max_samples", positive),
        "responses": o.take("actor_rollout_ref.rollout.val_kwargs.n"),
    }
    sets = [{**rows, "path": o.trace(path, "data.val_files")} for path in paths]
    return mapping.one_or_named(mapping.source_names(paths), sets)


def eval_sampling(o: Options) -> Keys | None:
    """Return how responses to held-out prompts are sampled; None without evaluation.

    The default is greedy decoding (temperature 0).
    """
    if not _evaluates(o):
        return None
    sample, temperature, top_p, top_k = (
        f"actor_rollout_ref.rollout.val_kwargs.{name}"
        for name in ("do_sample", "temperature", "top_p", "top_k")
    )
    value = o[temperature] if o[sample] or o.given(temperature) else 0.0
    return {
        "temperature": o.trace(value, temperature, sample),
        "max_new_tokens": o.take(RESPONSE),
        "top_p": o.take(top_p) if value > 0 else None,
        "top_k": o.take(top_k, lambda k: max(0, k)) if value > 0 else None,
    }


def batch(o: Options) -> Keys:
    """Return the batch sizes of a step."""
    size = o.take("data.train_batch_size")
    return {
        "sequences": None if o.rl else size,
        "prompts": size if o.rl else None,
        "responses": o.take("actor_rollout_ref.rollout.n"),
        "micro_batch_tokens": _micro_batch(o),
        "dynamic_sampling": _dynamic_sampling(o),
    }


def mini_batches(o: Options, size: str) -> Value:
    """Return the number of optimizer steps per RL step; None if the setting `size` is not set."""
    if o[size] is None:
        return None
    prompts = "data.train_batch_size"
    steps = mapping.equal_parts(o, size, o[prompts], "prompts", prompts)
    return o.trace(steps, *((prompts,) if size.startswith(_ACTOR) else ()), size)


def _micro_batch(o: Options) -> Sourced:
    if o.command == "sft":
        bounds: tuple[str, ...] = ("data.max_length",)
        names = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu")
        dynamic, tokens, size = (f"data.{name}" for name in names)
    else:
        bounds = (PROMPT, RESPONSE)
        names = ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
        dynamic, tokens, size = (f"{_ACTOR}.{name}" for name in names)
    longest = sum(o[bound] for bound in bounds)
    if o[dynamic]:
        return mapping.token_budget(o, tokens, dynamic, longest, *bounds)
    of_all = size.removesuffix("_per_gpu")
    if o[of_all] and not o.given(size):
        return _share_of_all(o, of_all, longest, *bounds)
    why = "" if o[size] else f"{o.names[size]} says how many sequences: reckoned with 1"
    return mapping.with_check(mapping.micro_batch(o, size, o[size] or 1, longest, *bounds), why)


def _share_of_all(o: Options, size: str, longest: int, *bounds: str) -> Sourced:
    """Return a card's micro-batch from an older setting, which counts those of all cards."""
    cards = roles.cards_of(o)
    number = max(1, o[size] // cards)
    budget = mapping.micro_batch(o, size, number, longest, *bounds)
    note = f"{o[size]} sequences of all {cards} cards: {budget.note} on each"
    rest = f"{o[size]} sequences do not divide among {cards} cards" if o[size] % cards else ""
    return mapping.with_check(replace(budget, note=note), rest)


def _dynamic_sampling(o: Options) -> Keys | None:
    enable, metric, most = (
        f"{_GROUPS}.{name}" for name in ("enable", "metric", "max_num_gen_batches")
    )
    if not o[enable]:
        return None
    generated, prompts = o["data.gen_batch_size"], o["data.train_batch_size"]
    more = generated is not None and generated > prompts
    modelled = o["reward.reward_model.enable"]
    has_score = o["reward.custom_reward_function.path"] is not None or not modelled
    penalised = o["reward.reward_kwargs.overlong_buffer_cfg.enable"]
    apart = has_score and penalised and o[metric] in ("acc", "score")
    limit = float(o[most]) if (o[most] or 0) > 0 else 4.0
    flags = ("data.gen_batch_size", "data.train_batch_size")
    return {
        "max_drawn": o.trace(limit, enable, most),
        "by": o.trace("score", metric, note="without the penalty") if apart else None,
        "oversampling": o.trace(generated / prompts, *flags) if more else None,
    }


def _steps(o: Options, flag: str) -> int | None:
    """Return an interval in steps from a setting; None for -1 or `after_each_epoch`."""
    if str(o[flag]) == "after_each_epoch":
        return None
    try:
        number = int(o[flag] if o[flag] is not None else -1)
    except ValueError as error:
        raise ConfigError(f"{o.show(flag)}: It must be a whole number of steps.") from error
    return number if number > 0 else None


def run(o: Options) -> Keys:
    """Return the length of the run, and its checkpoints and logs."""
    folder, project, name = (
        f"trainer.{part}" for part in ("default_local_dir", "project_name", "experiment_name")
    )
    path = o.trace(f"checkpoints/{o[project]}/{o[name]}", project, name)
    loggers = mapping.known_loggers(_logger_names(o))
    steps, evaluates = "trainer.total_training_steps", _evaluates(o)
    resume = "never" if o["trainer.resume_mode"] == "disable" else AUTO
    return {
        "directory": o.take(folder) or path,
        "seed": o.take("trainer.seed"),
        "steps": o.take(steps),
        "epochs": o.take("trainer.total_epochs", float) if o[steps] is None else None,
        "save_every": _save_every(o),
        "keep_checkpoints": o.take(
            "trainer.max_actor_ckpt_to_keep", positive, note="the last ones"
        ),
        "resume": o.trace(resume, "trainer.resume_mode"),
        "eval_every": o.take("trainer.test_freq", int) if evaluates else None,
        "loggers": o.trace(loggers, "trainer.logger") if loggers else None,
        "logger_project": o.take(project) if loggers else None,
    }


def _save_every(o: Options) -> Value:
    flag = "trainer.save_freq"
    if str(o[flag]) == "after_each_epoch":
        return mapping.to_check(f"{o.show(flag)}: in how many steps an epoch ends, the rows say")
    number = _steps(o, flag)
    return None if number is None else o.trace(number, flag)


def _logger_names(o: Options) -> list[str]:
    return [str(name) for name in o["trainer.logger"] or ()]


def remarks(o: Options) -> Iterator[Remark]:
    """Yield remarks on settings that have no counterpart in combination with others."""
    yield from mapping.unknown_loggers("trainer.logger", _logger_names(o), ("console", "file"))
    if o.given("trainer.resume_from_path"):
        yield Remark("lacking", "trainer.resume_from_path", "a run goes on from run.directory")
    metric = f"{_GROUPS}.metric"
    if o.rl and o[f"{_GROUPS}.enable"] and o.given(metric) and o[metric] not in _METRICS:
        yield Remark("lacking", metric, "groups are looked at by their rewards")
    if o.given("data.val_files") and _steps(o, "trainer.test_freq") is None:
        why = "trainer.test_freq asks for no evaluation: for one, set data.eval and run.eval_every"
        yield Remark("idle", "data.val_files", why)
    if not o.rl and _evaluates(o) and len(files(o, "data.val_files")) > 1:
        why = "jobs that learn from rows have one held-out file; the first"
        yield Remark("lacking", "data.val_files", why)
