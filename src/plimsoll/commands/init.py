"""A first config of a job: of a model and data, for the machine at hand.

    plimsoll init grpo --model Qwen/Qwen2.5-0.5B-Instruct --data prompts.jsonl

Columns are guessed from the first row by their names, and taken where the job takes them. The
planner changes what would not fit.
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
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import SourceConfig
from plimsoll.config.flags import Flag, apply_flags, parse_flags
from plimsoll.config.keys import Key, find_key, keys_of
from plimsoll.config.presets import MODEL, leaves
from plimsoll.config.problems import refuse, show
from plimsoll.config.yaml_tree import Tree, write_tree
from plimsoll.data.report import BadRow
from plimsoll.data.sources import read_rows
from plimsoll.errors import ConfigError, DoesNotFit
from plimsoll.shapes.known_models import known_models
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
"""What columns are usually called, the likeliest first."""

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
"""Columns that rows are read from together; of those that a job takes, the first."""

_SIZES = ("prompts", "responses", "sequences", "pairs")
"""Under `batch`: what a step holds."""

_WIDTH = 96
_CLAUSE = re.compile(r"; |(?<=[.:])\s+(?=[A-Z`])|(?<=\.)\s+(?=\w+: )")
"""Between what a key's text says, one thing after another."""
_NAMED = re.compile(r"`?(?P<name>\w+)(?:`:?|:) ")
"""A value before what it means."""

LOOKED_AT = 500
"""Rows whose lengths are looked at."""
SHORTEST, LONGEST = 256, 4096
CHARACTERS = 3
"""Of a token, at least, in most languages."""


@dataclass(frozen=True)
class InitRequest:
    """What a first config is made of.

    model, data, held_out: as in `actor.model.path` and `data.train.path`. cluster, host_memory: of
    other machines than this one. flags: further keys, such as `["--run.steps", "100"]`.
    """

    model: str
    data: str
    held_out: str | None = None
    cluster: str | None = None
    host_memory: str | None = None
    flags: Sequence[str] = ()


@dataclass(frozen=True)
class NewConfig:
    """text: of the config. said: what was found and decided, a line each."""

    text: str
    said: tuple[str, ...]


def make_config(job: Job[Any], asked: InitRequest) -> NewConfig:
    """A config that fits.

    Raises ConfigError for data without a row, or whose columns the job does not take, and for a
    key that is wrong; DoesNotFit where nothing that was tried would fit.
    """
    rows = _first_rows(asked.data)
    columns = guess_columns(job, asked, rows[0])
    first = [Flag(tuple(k.split(".")), v) for k, v in _first(job, asked, columns, rows).items()]
    parsed = parse_flags(asked.flags)
    spec, _ = spec_of(job, apply_flags(Tree({}, {}), [*first, *parsed]))
    step = [Flag(("batch", name), size) for name, size in _step_sizes(spec).items()]
    values = apply_flags(Tree({}, {}), [*first, *step, *parsed]).values
    said = [f"{key} is the column {column!r}" for key, column in columns.items()]
    try:
        fitting = fit_values(spec, values)
    except ConfigError as error:
        why, *_ = str(error).splitlines()
        return NewConfig(_text(job, values), (*said, f"it has no plan of memory: {why}"))
    where = asked.cluster or "this machine"
    if fitting is None:
        raise DoesNotFit(
            f"{asked.model} does not fit on {where}, and nothing that was tried would make it. "
            "Take a smaller model, or other cards: --cluster 8xA100-80GB."
        )
    before = leaves(values)
    changed = {path: value for path, value in leaves(fitting).items() if before.get(path) != value}
    if changed:
        said.append(f"it fits on {where} with these changes:")
        said += [f"  {'.'.join(path)}: {show(value)}" for path, value in changed.items()]
    else:
        said.append(f"it fits on {where} as it is")
    return NewConfig(_text(job, fitting), tuple(said))


def _step_sizes(spec: RunSpec[Any]) -> Dotted:
    """Return how much a step holds, by the names under `batch`: what users change first."""
    batch = spec.config.batch
    return {name: getattr(batch, name) for name in _SIZES if name in type(batch).model_fields}


def check_given(name: str, given: str) -> None:
    """Raise ConfigError for a model or data that is not there, before anything is made of it.

    A model whose shape is known may be named where the hub cannot be asked.

    Args:
        name: of the option: "model", "data" or "eval".
    """
    if name == "model":
        if given not in known_models():
            refuse(check_model("--model", given, tokenizer=True))
    elif not Path(given).exists():
        refuse(filter(None, [check_missing(f"--{name}", given, "dataset")]))


def guess_columns(job: Job[Any], asked: InitRequest, row: DataRow) -> dict[str, str]:
    """The columns of a row that the job takes, by setting. Raises ConfigError where it takes none
    that are known by name."""
    for way in WAYS:
        found = {setting: column for setting in way if (column := _called(setting, row))}
        if len(found) == len(way) == len(set(found.values())):
            source = SourceConfig.model_validate({"path": asked.data, **found})
            if not any(True for _ in job.columns("data.train", source)):
                return found
    if any(flag.path[:2] == ("data", "train") for flag in parse_flags(asked.flags)):
        return {}
    raise ConfigError(
        f"{asked.data}: which columns `plimsoll {job.name}` is to read cannot be told from their "
        f"names: {', '.join(row)}. Name them, such as --data.train.prompt COLUMN."
    )


def _called(setting: str, row: DataRow) -> str | None:
    return next((name for name in NAMES[setting] if name in row), None)


def _first_rows(path: str) -> list[DataRow]:
    rows = list(islice(read_rows(SourceConfig(path=path), whole=True), LOOKED_AT))
    good = [row.values for row in rows if not isinstance(row, BadRow)]
    if not good:
        raise ConfigError(next(map(str, rows), f"{path} has no rows."))
    return good


def _first(
    job: Job[Any], asked: InitRequest, columns: Mapping[str, str], rows: Sequence[DataRow]
) -> Dotted:
    """What is there before the planner has looked at it."""
    cards = _cards(asked)
    tokens = _tokens(rows)
    train = {f"data.train.{setting}": column for setting, column in columns.items()}
    found: Dotted = {"run.directory": f"runs/{job.name}", "run.steps": 200, "run.save_every": 50}
    found |= {"run.keep_checkpoints": 2, "run.save_model": True, "run.resume": "auto"}
    found |= {"cluster.where": "ray" if cards else "local"}
    found |= {"cluster.ranks": cards} if cards else {}
    found |= {"cluster.hardware": asked.cluster} if asked.cluster else {}
    found |= {"cluster.host_memory": asked.host_memory} if asked.host_memory else {}
    found |= {"data.train.path": asked.data, **train}
    if asked.held_out is not None:
        found |= {"run.eval_every": 50, "data.eval.path": asked.held_out}
        found |= {key.replace("train", "eval", 1): column for key, column in train.items()}
    if lacks_template(asked.model):
        found["data.chat_template"] = "none"
    found |= {"data.max_tokens": tokens, "batch.micro_batch_tokens": max(4096, 2 * tokens)}
    start = {key: asked.model if value == MODEL else value for key, value in job.start.items()}
    found |= {"actor.model.path": asked.model, **start}
    fields = job.config.model_fields
    if "rollout" in fields:
        found |= {"rollout.engine": "vllm" if cards else "transformers"}
        found |= {"rollout.engines": cards} if cards else {}
    if "rewards" in fields and "reference" in columns:
        found |= {"rewards.correct.name": "math_answer"}
    if cards:
        models = [key for key in found if key.endswith(".model.path")]
        found |= {key.replace(".path", ".gradient_checkpointing"): True for key in models}
    return found


def _cards(asked: InitRequest) -> int:
    given = {"hardware": asked.cluster, "host_memory": asked.host_memory}
    return hardware_of(ClusterConfig.model_validate(given)).cards


def _tokens(rows: Sequence[DataRow]) -> int:
    """Enough for almost all rows, as a power of two."""
    sizes = sorted(len(json.dumps(row, ensure_ascii=False, default=str)) for row in rows)
    most = max(1, sizes[int(0.99 * (len(sizes) - 1))] / CHARACTERS)
    return int(min(LONGEST, max(SHORTEST, 2 ** math.ceil(math.log2(most)))))


def _text(job: Job[Any], values: dict[str, Any]) -> str:
    """As YAML; each key with what it means."""
    keys = tuple(keys_of(job.config))
    lines = [f"# {job.name}: every key is in `plimsoll {job.name} --help`"]
    path: list[str] = []
    for line in write_tree(values).splitlines():
        name, _, value = line.partition(":")
        path = [*path[: (len(name) - len(name.lstrip())) // 2], name.strip()]
        key = find_key(keys, tuple(path))
        told = describe_value(key, value.strip()) if key is not None and value else ()
        fitting = (one for one in told if len(line) + len(one) < _WIDTH)
        comment = next(fitting, "")
        lines.append(f"{line}  # {comment}" if comment else line)
    return "\n".join(lines) + "\n"


def describe_value(key: Key, value: str) -> tuple[str, ...]:
    """Return what can be said of a key with a value, the most telling first: the first sentence
    about the key with what the value means; that sentence alone. Never what another value means.

    Args:
        value: as YAML.
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
