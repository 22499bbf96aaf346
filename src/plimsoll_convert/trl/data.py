"""Convert the settings of data sets, columns, batch sizes, evaluation and checkpoints.

TRL counts the sequences of a process; Plimsoll counts the sequences of a step. TRL recognizes the
format of rows by column names. They are read if the data is a local file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from plimsoll.config.base import AUTO
from plimsoll.errors import ConfigError
from plimsoll_convert import mapping
from plimsoll_convert.options import Options, Remark
from plimsoll_convert.trl.roles import processes
from plimsoll_convert.values import Keys, Sourced, Value, positive

_LONGEST = 1024
"""The longest sequence, in tokens, if TRL's setting is null (no limit)."""
_PROMPT = 2048
"""The longest prompt, in tokens, as TRL has no limit."""
_SIZE, _ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"
_SAMPLED = (_SIZE, _ACCUMULATED, "generation_batch_size", "steps_per_generation", "num_generations")
_SOLVED = ("accuracy_reward", "reasoning_accuracy_reward")
"""TRL's reward functions that read the column `solution`."""
_WANTED = "`datasets` must be a list of mappings with a path each, as in TRL's docs"


@dataclass(frozen=True)
class Generation:
    """Numbers of one RL step: sampled responses, and optimizer steps that learn from them."""

    responses: int
    updates: int


def _generation(o: Options) -> Generation:
    """Return the numbers of an RL step, from TRL's generation batch and its steps."""
    once, accumulated = o[_SIZE] * processes(o), o[_ACCUMULATED]
    given = o["generation_batch_size"]
    if given is not None and given % once:
        raise ConfigError(
            f"{o.show('generation_batch_size')} must be a multiple of the {once} sequences that "
            f"{processes(o)} processes learn at once ({o.show(_SIZE)})."
        )
    steps = o["steps_per_generation"] or accumulated if given is None else given // once
    if max(steps, accumulated) % min(steps, accumulated):
        raise ConfigError(
            f"A generation of {steps} steps and {o.show(_ACCUMULATED)}: one must be a multiple of "
            "the other, so that a step here samples and learns whole batches."
        )
    return Generation(once * max(steps, accumulated), max(1, steps // accumulated))


def updates(o: Options) -> int:
    """Return the number of optimizer steps per RL step; 1 for other jobs."""
    return _generation(o).updates * int(o["num_iterations"]) if o.rl else 1


def mini_batches(o: Options) -> Value:
    """Return the number of mini-batches of an RL step; None for other jobs."""
    return o.trace(_generation(o).updates, *_SAMPLED[:-1]) if o.rl else None


def batch(o: Options) -> Keys:
    """Return the batch sizes of a step."""
    if o.rl:
        return _sampled_batch(o)
    note = f"{o[_SIZE]} * {o[_ACCUMULATED]} of each of {processes(o)} processes"
    number = o[_SIZE] * o[_ACCUMULATED] * processes(o)
    size = o.trace(number, _SIZE, _ACCUMULATED, note=note)
    if o["packing"]:
        why = "with --packing TRL counts packs of max_length, which hold several rows; here rows "
        why += "are counted: multiply by how many rows a pack held"
        size = mapping.with_check(size, why)
    longest = (o["max_length"] or _LONGEST) * (2 if o.pairs else 1)
    return {
        "sequences": None if o.pairs else size,
        "pairs": size if o.pairs else None,
        "micro_batch_tokens": mapping.micro_batch(o, _SIZE, o[_SIZE], longest, "max_length"),
    }


def _sampled_batch(o: Options) -> Keys:
    responses, each = _generation(o).responses, int(o["num_generations"])
    if responses % each:
        raise ConfigError(
            f"{o.show('num_generations')} does not divide the {responses} responses of a "
            f"generation ({processes(o)} processes, {o.show(_SIZE)}, {o.show(_ACCUMULATED)}). "
            "Give --generation_batch_size or another number."
        )
    longest = _longest_prompt(o) + o["max_completion_length"]
    return {
        "prompts": o.trace(responses // each, *_SAMPLED, note=f"{responses} responses / {each}"),
        "responses": o.take("num_generations"),
        "micro_batch_tokens": mapping.micro_batch(
            o, _SIZE, o[_SIZE], longest, "max_completion_length"
        ),
    }


def _longest_prompt(o: Options) -> int:
    if o["max_prompt_length"] is not None:
        return int(o["max_prompt_length"])
    whole = o["vllm_max_model_length"]
    return max(1, whole - o["max_completion_length"]) if whole is not None else _PROMPT


def _longest(o: Options) -> Sourced:
    """Return the longest prompt in RL, else the longest sequence, in tokens."""
    if o.rl:
        flags = o.given("max_prompt_length", "vllm_max_model_length")[:1]
        why = f"TRL bounds no prompt: {_PROMPT} tokens are Plimsoll's default. Longer ones are "
        why += "refused: set it as your rows need"
        return o.trace(_longest_prompt(o), *flags) if flags else mapping.to_check(why)
    why = f"TRL then bounds no length; here {_LONGEST}: set it as your rows and cards allow"
    length = o["max_length"]
    return o.trace(length or _LONGEST, "max_length", check="" if length else why)


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
        prompt = {"prompt": _column("prompt")} if _has_prompt(row) else {}
        return {**prompt, "chosen": _column("chosen"), "rejected": _column("rejected"), **tools}
    if o.command == "kto":
        response = {"response": _column("completion")}
        return {"prompt": _column("prompt"), "label": _column("label"), **response, **tools}
    columns = _sft_columns(o, row)
    return columns if "text" in columns else {**columns, **tools}


def _sft_columns(o: Options, row: Mapping[str, object] | None) -> dict[str, Sourced]:
    """Return the columns of SFT rows by purpose; TRL's order decides if several forms fit."""
    text = {"text": _column(str(o["dataset_text_field"]), *o.given("dataset_text_field"))}
    flags = o.given("completion_only_loss")
    answered = {"prompt": _column("prompt", *flags), "response": _column("completion", *flags)}
    if row is None:
        if o.given("dataset_text_field"):
            return text
        return answered if o["completion_only_loss"] else {"messages": _column("messages")}
    for name in ("messages", "conversations"):
        if name in row:
            return {"messages": _column(name)}
    return answered if "prompt" in row and "completion" in row else text


def _has_prompt(row: Mapping[str, object] | None) -> bool:
    """Return whether the prompts of pairs are in a separate column `prompt`."""
    if row is None or row.get("prompt") is None:
        return False
    chosen = row.get("chosen")
    first = chosen[0] if isinstance(chosen, list) and chosen else None
    return not (isinstance(first, dict) and first.get("role") != "assistant")


def _with_checks(o: Options, columns: dict[str, Sourced]) -> dict[str, Sourced]:
    """Return guessed columns, as no row is known, with checks for the user."""
    why = ""
    if o.pairs:
        why = (
            "if prompts are in a column `prompt`, write prompt: prompt; without it both responses "
        )
        why += "hold the whole conversation"
    elif "messages" in columns:
        why = "if the rows have `prompt` and `completion`, write prompt: prompt and response: "
        why += "completion; if they have plain text, write text: text"
    name = "chosen" if o.pairs else "messages"
    return {**columns, name: mapping.with_check(columns[name], why)} if why else columns


def _sources(o: Options) -> list[tuple[str, Keys]]:
    """Return (path, data set) for each data set."""
    if o["datasets"] is not None:
        return [_rows_of_entry(i, source) for i, source in enumerate(_read_mixture(o), 1)]
    if not o["dataset_name"]:
        raise ConfigError("--dataset_name (or `datasets` of the YAML) is needed: the rows.")
    rows = {
        "path": o.take("dataset_name"),
        "name": o.trace(o["dataset_config"], "dataset_name", "dataset_config")
        if o["dataset_config"]
        else None,
        "split": o.trace(o["dataset_train_split"], "dataset_name", "dataset_train_split"),
    }
    return [(o["dataset_name"], rows)]


def _read_mixture(o: Options) -> Sequence[Mapping[str, Any]]:
    """Return the entries of the setting `datasets`; raise ConfigError if they are wrong."""
    try:
        entries = json.loads(o["datasets"])
    except ValueError as error:
        raise ConfigError(f"{_WANTED}: {error}.") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{_WANTED}.")
    if not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{_WANTED}.")
    if len({_fraction(entry) is None for entry in entries}) > 1:
        raise ConfigError("`datasets`: give all of them a fraction, or none.")
    return entries


def _fraction(entry: Mapping[str, Any]) -> float | None:
    share = entry.get("fraction")
    return float(share) if isinstance(share, int | float) and share > 0 else None


def _rows_of_entry(number: int, entry: Mapping[str, Any]) -> tuple[str, Keys]:
    file = entry.get("data_files") if isinstance(entry.get("data_files"), str) else None
    path = file or entry.get("data_dir") or entry.get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{_WANTED}: number {number} has none.")
    name, weight = entry.get("name"), _fraction(entry)
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
        rows[0] = {**rows[0], **_with_checks(o, _columns(o, None))}
    names = [f"{_stem(path)}_{number}" for number, (path, _) in enumerate(sources, 1)]
    path = str(o["chat_template_path"])
    in_order = o["train_sampling_strategy"] == "sequential" and not o["shuffle_dataset"]
    cuts = o["max_prompt_length"] is not None
    return {
        "train": mapping.mixture_of(names, rows, weighted=rows[0].get("weight") is not None),
        "eval": _held_out(o, *sources[0]),
        "max_tokens": _longest(o),
        "over_long": (o.trace("truncate", "max_prompt_length") if cuts else None)
        if o.rl
        else o.trace("truncate", "truncation_mode", note="TRL cuts what is longer"),
        "shuffle": o.trace(False, "train_sampling_strategy", "shuffle_dataset")
        if in_order
        else None,
        "chat_template": o.take("chat_template_path") if _is_template(path) else None,
    }


def _stem(path: str) -> str:
    stem = path.rstrip("/").rpartition("/")[2].partition(".")[0]
    return re.sub(r"\W+", "_", stem).strip("_") or "rows"


def _is_template(path: str) -> bool:
    return path.endswith((".jinja", ".j2", ".txt"))


def _held_out(o: Options, path: str, rows: Keys) -> Keys | None:
    """Return the held-out rows of the first data set, or None without evaluation."""
    if o["eval_strategy"] == "no":
        return None
    number = o["num_generations_eval"] or o["num_generations"]
    return {
        "path": rows["path"],
        "name": rows["name"],
        "split": o.take("dataset_test_split") if rows["split"] is not None else None,
        **_columns(o, first_row(path)),
        "responses": o.trace(number, "num_generations_eval", "num_generations") if o.rl else None,
    }


def learned_tokens(o: Options) -> Value:
    """Return "assistant" or "all": which turns are learned; None for jobs or rows without turns."""
    read = _columns(o, first_row(_sources(o)[0][0]))
    if o.command != "sft" or "text" in read:
        return None
    answers = o["completion_only_loss"]
    assistant_only = o["assistant_only_loss"] or (
        "response" in read if answers is None else answers
    )
    note = (
        "" if assistant_only else "TRL learns the other turns, too, but of prompts and completions"
    )
    flags = ("assistant_only_loss", "completion_only_loss")
    return o.trace("assistant" if assistant_only else "all", *flags, note=note)


def _every(o: Options, flag: str) -> int | None:
    """Convert a number of optimizer steps to Plimsoll's steps; None if it is a share of the run."""
    return max(1, round(o[flag] / updates(o))) if o[flag] >= 1 else None


def run(o: Options) -> Keys:
    """Return the length of the run, and its checkpoints and logs."""
    each = updates(o)
    counted = o["max_steps"] > 0
    resumes = o["resume_from_checkpoint"] not in (None, "False", "false")
    loggers = mapping.known_loggers(_logger_names(o))
    note = f"of {each} optimizer steps" if each > 1 else ""
    return {
        "directory": o.take("output_dir"),
        "seed": o.take("seed"),
        "steps": o.trace(ceil(o["max_steps"] / each), "max_steps", note=note) if counted else None,
        "epochs": None if counted else o.take("num_train_epochs", float),
        "save_every": _save_every(o),
        "keep_checkpoints": o.take("save_total_limit", positive, note="the last ones"),
        "resume": o.trace(AUTO, "resume_from_checkpoint") if resumes else None,
        "eval_every": _eval_every(o),
        "best": _best(o),
        "loggers": o.trace(loggers, "report_to") if loggers else None,
        "logger_project": o.take("project") if loggers and o.given("project") else None,
    }


def _save_every(o: Options) -> Value:
    number = _every(o, "save_steps")
    if o["save_strategy"] == "steps" and number is not None:
        return o.trace(number, "save_steps", "save_strategy")
    why = f"{o.show('save_strategy')}: a checkpoint is kept every so many steps: write how many"
    return None if o["save_strategy"] == "no" else mapping.to_check(why)


def _eval_every(o: Options) -> Value:
    if o["eval_strategy"] == "no":
        return None
    flag = "eval_steps" if o["eval_steps"] else "logging_steps"
    number = _every(o, flag)
    if o["eval_strategy"] == "steps" and number is not None:
        return o.trace(number, flag, "eval_strategy")
    return mapping.to_check(f"{o.show('eval_strategy')}: in how many steps that is, the rows say")


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


def _logger_names(o: Options) -> list[str]:
    return [n.strip() for word in o["report_to"] or () for n in word.split(",") if n.strip()]


def remarks(o: Options) -> Iterator[Remark]:
    """Yield remarks on settings that have no counterpart in combination with others."""
    yield from mapping.unknown_loggers("report_to", _logger_names(o), ("none",))
    if o.given("truncation_mode") and o["truncation_mode"] == "keep_end":
        why = "the end of what is longer is cut, not its beginning"
        yield Remark("lacking", "truncation_mode", why)
    if o["chat_template_path"] is not None and not _is_template(str(o["chat_template_path"])):
        why = "the template of another model's tokenizer: write it into a .jinja file"
        yield Remark("lacking", "chat_template_path", why)
    if o.given("eos_token"):
        yield Remark(
            "idle",
            "eos_token",
            "the end of the template's turns ends responses, and is saved so",
        )
