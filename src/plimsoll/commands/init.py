"""Write a first config for a job, with a given model and data, that fits on this machine.

`plimsoll init grpo --model Qwen/Qwen2.5-0.5B-Instruct --data prompts.jsonl`

Columns are guessed from the names in the first row. If the config would not fit into memory, the
planner changes settings.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from plimsoll.commands.planning import fit_values, hardware_of
from plimsoll.config.base import AUTO
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import SourceConfig
from plimsoll.config.flags import Flag, apply_flags, parse_flags
from plimsoll.config.keys import Key, find_key, keys_of
from plimsoll.config.load import MODEL, leaves
from plimsoll.config.problems import refuse, show
from plimsoll.config.yaml_tree import Tree, write_tree
from plimsoll.data.report import BadRow
from plimsoll.data.sources import read_rows
from plimsoll.errors import ConfigError, DoesNotFit
from plimsoll.shapes.known_models import known_models
from plimsoll.spec.engine_rules import engine_for
from plimsoll.spec.job import Job
from plimsoll.spec.load import spec_of
from plimsoll.spec.model_files import check_missing, check_model, lacks_template
from plimsoll.spec.run_spec import RunSpec

DataRow = Mapping[str, Any]
Dotted = dict[str, object]
"""Values by dotted key."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "question", "instruction", "problem", "query", "input"),
    "response": ("response", "answer", "output", "completion", "solution"),
    "text": ("text", "content", "body", "document"),
    "chosen": ("chosen", "better", "preferred"),
    "rejected": ("rejected", "worse", "dispreferred"),
    "steps": ("steps", "completions"),
    "labels": ("labels",),
    "label": ("label", "desirable"),
    "reference": ("reference", "answer", "ground_truth", "solution", "label", "target"),
}
"""Usual names of columns, the likeliest first."""

WAYS = (
    ("prompt", "steps", "labels"),
    ("prompt", "response", "label"),
    ("messages", "label"),
    ("prompt", "chosen", "rejected"),
    ("chosen", "rejected"),
    ("messages", "reference"),
    ("messages",),
    ("prompt", "reference"),
    ("prompt", "response"),
    ("prompt",),
    ("text",),
)
"""Sets of columns that make a row; the first set that the data has and the job accepts is used."""

_SIZES = ("prompts", "responses", "sequences", "pairs")
"""Keys under `batch` for the size of an optimizer step."""

_WIDTH = 96
_CLAUSE = re.compile(r"; |(?<=[.:])\s+(?=[A-Z`])|(?<=\.)\s+(?=\w+: )")
"""Separates the statements in a key's text."""
_NAMED = re.compile(r"`?(?P<name>\w+)(?:`:?|:) ")
"""Matches a value in front of its meaning."""

LOOKED_AT = 500
"""Number of rows whose lengths are measured."""
SHORTEST, LONGEST = 256, 4096
CHARACTERS = 3
"""Characters per token, a low estimate for most languages."""


@dataclass(frozen=True)
class InitRequest:
    """The user's choices for a first config."""

    model: str
    """Value of `actor.model.path`."""
    data: str
    """Value of `data.train.path`."""
    held_out: str | None = None
    """Value of `data.eval.path`."""
    cluster: str | None = None
    """Value of `cluster.hardware`; None for this machine."""
    host_memory: str | None = None
    """Value of `cluster.host_memory`."""
    flags: Sequence[str] = ()
    """Further keys, such as `["--run.steps", "100"]`."""


@dataclass(frozen=True)
class NewConfig:
    """A first config as YAML text."""

    text: str
    remarks: tuple[str, ...]
    """Lines that say which columns were found and which settings were changed to fit."""


def make_config(job: Job[Any], request: InitRequest) -> NewConfig:
    """Return a config for a job that fits into memory.

    If the model's shape is unknown, the config is not checked, and a remark says so.

    Raises ConfigError if the data has no rows, if the job does not accept its columns, or if a key
    is wrong; DoesNotFit if no change that was tried makes the config fit.
    """
    rows = _first_rows(request.data)
    columns = guess_columns(job, request, rows[0])
    first = [Flag(tuple(k.split(".")), v) for k, v in _first(job, request, columns, rows).items()]
    parsed = parse_flags(request.flags)
    spec, _ = spec_of(job, apply_flags(Tree({}, {}), [*first, *parsed]))
    step = [Flag(("batch", name), size) for name, size in _step_sizes(spec).items()]
    values = apply_flags(Tree({}, {}), [*first, *step, *parsed]).values
    remarks = [f"{key} is the column {column!r}" for key, column in columns.items()]
    try:
        fitting = fit_values(spec, values)
    except ConfigError as error:
        why, *_ = str(error).splitlines()
        return NewConfig(_text(job, values), (*remarks, f"it has no plan of memory: {why}"))
    where = request.cluster or "this machine"
    if fitting is None:
        raise DoesNotFit(
            f"{request.model} does not fit on {where}, and nothing that was tried would make it. "
            "Take a smaller model, or other cards: --cluster 8xA100-80GB."
        )
    before = leaves(values)
    changed = {path: value for path, value in leaves(fitting).items() if before.get(path) != value}
    if changed:
        remarks.append(f"it fits on {where} with these changes:")
        remarks += [f"  {'.'.join(path)}: {show(value)}" for path, value in changed.items()]
    else:
        remarks.append(f"it fits on {where} as it is")
    return NewConfig(_text(job, fitting), tuple(remarks))


def _step_sizes(spec: RunSpec[Any]) -> Dotted:
    """Return the default sizes of an optimizer step, by their names under `batch`.

    They are written into the config, as users change them first.
    """
    batch = spec.config.batch
    return {name: getattr(batch, name) for name in _SIZES if name in type(batch).model_fields}


def check_given(name: str, name_or_path: str) -> None:
    """Raise ConfigError if a model or data set does not exist.

    `name` is the option's name: "model", "data" or "eval". A model of known shape is always
    accepted, even if the hub cannot be reached.
    """
    if name == "model":
        if name_or_path not in known_models():
            refuse(check_model("--model", name_or_path, tokenizer=True))
    elif not Path(name_or_path).exists():
        refuse(filter(None, [check_missing(f"--{name}", name_or_path, "dataset")]))


def guess_columns(job: Job[Any], request: InitRequest, row: DataRow) -> dict[str, str]:
    """Return the column for each setting under `data.train`, guessed from a row's column names.

    Return an empty dict if flags set keys of `data.train`. Otherwise raise ConfigError if the job
    accepts no guess.
    """
    for way in WAYS:
        columns = {setting: column for setting in way if (column := _column_for(setting, row))}
        if len(columns) == len(way) == len(set(columns.values())):
            source = SourceConfig.model_validate({"path": request.data, **columns})
            if not any(True for _ in job.columns("data.train", source)):
                return columns
    if any(flag.path[:2] == ("data", "train") for flag in parse_flags(request.flags)):
        return {}
    raise ConfigError(
        f"{request.data}: the names of its columns do not say which ones `plimsoll {job.name}` "
        f"reads: {', '.join(row)}. Name them, such as --data.train.prompt COLUMN."
    )


def _column_for(setting: str, row: DataRow) -> str | None:
    return next((name for name in NAMES[setting] if name in row), None)


def _first_rows(path: str) -> list[DataRow]:
    rows = list(islice(read_rows(SourceConfig(path=path), whole=True), LOOKED_AT))
    good = [row.values for row in rows if not isinstance(row, BadRow)]
    if not good:
        raise ConfigError(next(map(str, rows), f"{path} has no rows."))
    return good


def _first(
    job: Job[Any], request: InitRequest, columns: Mapping[str, str], rows: Sequence[DataRow]
) -> Dotted:
    """Return the first values of the config by dotted key, before the planner changes any."""
    cards = _cards(request)
    tokens = _tokens(rows)
    train = {f"data.train.{setting}": column for setting, column in columns.items()}
    values: Dotted = {"run.directory": f"runs/{job.name}", "run.steps": 200, "run.save_every": 50}
    values |= {"run.keep_checkpoints": 2, "run.save_model": True, "run.resume": AUTO}
    where = "ray" if cards else "local"
    values |= {"cluster.where": where}
    values |= {"cluster.ranks": cards} if cards else {}
    values |= {"cluster.hardware": request.cluster} if request.cluster else {}
    values |= {"cluster.host_memory": request.host_memory} if request.host_memory else {}
    values |= {"data.train.path": request.data, **train}
    if request.held_out is not None:
        values |= {"run.eval_every": 50, "data.eval.path": request.held_out}
        values |= {key.replace("train", "eval", 1): column for key, column in train.items()}
    if lacks_template(request.model):
        values["data.chat_template"] = "none"
    values |= {"data.max_tokens": tokens, "batch.micro_batch_tokens": max(4096, 2 * tokens)}
    start = {key: request.model if value == MODEL else value for key, value in job.start.items()}
    values |= {"actor.model.path": request.model, **start}
    fields = job.config.model_fields
    if "rollout" in fields:
        values |= {f"rollout.{engine_for(where)}": {}}
        values |= {"rollout.engines": cards} if cards else {}
    if "rewards" in fields and "reference" in columns:
        values |= {"rewards.correct.name": "math_answer"}
    if cards:
        models = [key for key in values if key.endswith(".model.path")]
        values |= {key.replace(".path", ".gradient_checkpointing"): True for key in models}
    return values


def _cards(request: InitRequest) -> int:
    machine = {"hardware": request.cluster, "host_memory": request.host_memory}
    return hardware_of(ClusterConfig.model_validate(machine)).cards


def _tokens(rows: Sequence[DataRow]) -> int:
    """Return a power of two: an estimated number of tokens that 99 % of the rows do not exceed.

    It is at least `SHORTEST` and at most `LONGEST`.
    """
    sizes = sorted(len(json.dumps(row, ensure_ascii=False, default=str)) for row in rows)
    most = max(1, sizes[int(0.99 * (len(sizes) - 1))] / CHARACTERS)
    return int(min(LONGEST, max(SHORTEST, 2 ** math.ceil(math.log2(most)))))


def _text(job: Job[Any], values: dict[str, Any]) -> str:
    """Return the values as YAML, with a comment about each key if there is room."""
    keys = tuple(keys_of(job.config))
    lines = [f"# {job.name}: every key is in `plimsoll {job.name} --help`"]
    path: list[str] = []
    for line in write_tree(values).splitlines():
        name, _, value = line.partition(":")
        path = [*path[: (len(name) - len(name.lstrip())) // 2], name.strip()]
        key = find_key(keys, tuple(path))
        meanings = describe_value(key, value.strip()) if key is not None and value else ()
        fitting = (meaning for meaning in meanings if len(line) + len(meaning) < _WIDTH)
        comment = next(fitting, "")
        lines.append(f"{line}  # {comment}" if comment else line)
    return "\n".join(lines) + "\n"


def describe_value(key: Key, value: str) -> tuple[str, ...]:
    """Return possible comments on a key with a value: a longer comment first, then a shorter one.

    The longer comment has the sentence about the key and the meaning of the value; the shorter has
    only the sentence. Neither has the meaning of another value. `value` is YAML.
    """
    about: list[str] = []
    means = ""
    for clause in _CLAUSE.split(key.doc.rstrip(".")):
        named = _NAMED.match(clause)
        if named is None or named["name"] not in key.kind.split(" | "):
            about.append(clause)
        elif named["name"] == value:
            means = clause[named.end() :]
    lead = about[0].rstrip(".:") if about and key.doc.startswith(about[0]) else ""
    both = f"{lead}: {means}" if lead and means else means
    return tuple(filter(None, (both, lead)))
