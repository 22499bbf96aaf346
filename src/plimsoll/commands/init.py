"""Write a first config for a job, with a given model and data, that fits on this machine.

`plimsoll init grpo --model Qwen/Qwen2.5-0.5B-Instruct --data prompts.jsonl`

Columns are guessed from the names in the first row; lengths, steps and the reward from the rows
(`init_rows`). If the config would not fit into memory, the planner changes settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from plimsoll.commands.init_rows import (
    LONGEST,
    LOOKED_AT,
    MOST_STEPS,
    DataRow,
    RewardChoice,
    choose_reward,
    choose_steps,
    first_rows,
    guess_columns,
    is_pair,
    longest_tokens,
)
from plimsoll.commands.planning import fit_values, hardware_of
from plimsoll.config.base import AUTO
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.flags import Flag, apply_flags, parse_flags
from plimsoll.config.keys import Key, find_key, keys_of
from plimsoll.config.load import MODEL, leaves
from plimsoll.config.problems import refuse, show
from plimsoll.config.yaml_tree import Tree, write_tree
from plimsoll.errors import ConfigError, DoesNotFit
from plimsoll.resolve.engine_rules import engine_for
from plimsoll.resolve.job import Job
from plimsoll.resolve.load import spec_of
from plimsoll.resolve.model_files import check_missing, check_model, lacks_template
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.numbers import plural
from plimsoll.shapes.known_models import known_models

Dotted = dict[str, object]
"""Values by dotted key."""

_SIZES = ("prompts", "responses", "sequences", "pairs")
"""Keys under `batch` for the size of an optimizer step."""

_TIMES_OF_ADAPTER = 10
_WIDTH = 96
_CLAUSE = re.compile(r"; |(?<=[.:])\s+(?=[A-Z`])|(?<=\.)\s+(?=\w+: )")
"""Separates the statements in a key's text."""
_PPO = re.compile(r"(?P<rows>[^:,]*), or in PPO (?P<rl>[^:,.]*)")
"""Matches what a text says of jobs that learn from rows, and of those that sample."""
_NAMED = re.compile(r"`?(?P<name>\w+)(?:`:?|:) ")
"""Matches a value in front of its meaning."""


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


def make_config(job: Job[Any], request: InitRequest) -> tuple[str, list[str]]:
    """Return a config for a job that fits into memory, as YAML text.

    Return also remarks: lines that say which columns were found, and which settings were changed to
    fit. If the model's shape is unknown, the config is not checked, and a remark says so.

    Raises ConfigError if the data has no rows, if the job does not accept its columns, or if a key
    is wrong; DoesNotFit if no change that was tried makes the config fit.
    """
    rows = first_rows(request.data)
    columns = _columns(job, request, rows[0])
    tokens = longest_tokens(job, columns, rows)
    parsed = parse_flags(request.flags)
    reward = _reward(job, columns, rows)
    first = _first(job, request, columns, min(tokens, LONGEST))
    if reward is not None and reward.skips_rows:
        first["data.on_bad_row"] = "skip"
    if reward is not None and reward.name is not None:
        first["rewards.correct.name"] = reward.name
    try:
        spec, _ = spec_of(job, apply_flags(Tree({}, {}), [*_flags(first), *parsed]))
    except ConfigError as error:
        for hint in _hints(rows, columns, reward):
            error.add_note(f"  {hint}")
        raise
    batch = spec.config.batch
    sizes = {name: getattr(batch, name) for name in _SIZES if name in type(batch).model_fields}
    first |= {f"batch.{name}": size for name, size in sizes.items()}  # users change them first
    if any(flag.path == ("run", "epochs") for flag in parsed):
        del first["run.steps"]
    else:
        # Four checkpoints, and as many evaluations, within the run's length.
        steps = choose_steps(len(rows), sizes)
        every = max(1, min(50, -(-steps // 4)))
        first |= {"run.steps": steps, "run.save_every": every}
        first |= {} if request.held_out is None else {"run.eval_every": every}
    values = apply_flags(Tree({}, {}), [*_flags(first), *parsed]).values
    remarks = [f"{key} is the column {column!r}" for key, column in columns.items()]
    remarks += _remarks(request, rows, columns, values, tokens)
    remarks += [] if reward is None else [str(reward)]
    remarks += _slow_on_cpu(spec, values)
    try:
        fitting = fit_values(spec, values)
    except ConfigError as error:
        why, *_ = str(error).splitlines()
        unplanned = _with_adapter_rates(job, values, parsed)
        return _text(job, unplanned), [*remarks, f"it has no plan of memory: {why}"]
    where = request.cluster or "this machine"
    if fitting is None:
        raise DoesNotFit(
            f"{request.model} does not fit on {where}, and nothing that was tried would make it. "
            "Take a smaller model, or other cards: --cluster 8xA100-80GB."
        )
    if changes := list(_changes(values, fitting)):
        remarks += [f"it fits on {where} with these changes:", *changes]
    else:
        remarks.append(f"it fits on {where} as it is")
    new_values = _with_adapter_rates(job, fitting, parsed)
    if changes := list(_changes(fitting, new_values)):
        remarks += [f"adapters learn at {_TIMES_OF_ADAPTER} times the rate:", *changes]
    return _text(job, new_values), remarks


def _slow_on_cpu(spec: RunSpec[Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a remark if a CPU is to sample: what fits in memory may take days."""
    if spec.sampling is None or spec.cluster.device != "cpu":
        return
    batch = values["batch"]
    longest = max(spec.sampling.longest_responses.values())
    tokens = batch["prompts"] * batch["responses"] * longest
    short = "--run.steps 1 --batch.prompts 2 --batch.responses 2"
    yield f"a step samples up to {tokens:,} tokens, for which a CPU may need hours: try {short}"


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key whose value is new or differs."""
    values = leaves(before)
    for path, value in leaves(after).items():
        if values.get(path) != value:
            yield f"  {'.'.join(path)}: {show(value)}"


def _flags(values: Mapping[str, Any]) -> list[Flag]:
    return [Flag(tuple(key.split(".")), value) for key, value in values.items()]


def _reward(
    job: Job[Any], columns: Mapping[str, str], rows: Sequence[DataRow]
) -> RewardChoice | None:
    """Return the result of `choose_reward`; None for a job or rows without references."""
    if "rewards" not in job.config.model_fields or "reference" not in columns:
        return None
    return choose_reward([row.get(columns["reference"]) for row in rows])


def _remarks(
    request: InitRequest,
    rows: Sequence[DataRow],
    columns: Mapping[str, str],
    values: Mapping[str, Any],
    tokens: int,
) -> Iterator[str]:
    """Yield what the rows say about the values, and what else could be done with the rows."""
    count = plural(len(rows), "row") + (" or more" if len(rows) == LOOKED_AT else "")
    name = next(name for name in _SIZES if name in values["batch"])
    if steps := values["run"].get("steps"):
        epochs = steps * values["batch"][name] / len(rows)
        of_step = f"{steps} of {values['batch'][name]} {name}"
        yield f"run.steps is {of_step}: {epochs:.2g} epochs of {count}"
    if tokens > LONGEST:
        yield (
            f"data.max_tokens is {values['data']['max_tokens']}, and some rows may have up to "
            f"{tokens}: longer ones end the run. Raise it, or set data.over_long: truncate"
        )
    if request.held_out is None and (share := min(200, len(rows) // 10)):
        yield f"no rows are held out: --eval FILE, or --eval {share} to hold out {share} of {count}"
    yield from _hints(rows, columns)


def _hints(
    rows: Sequence[DataRow], columns: Mapping[str, str], reward: RewardChoice | None = None
) -> Iterator[str]:
    """Yield what else the rows are good for, and why no reward was chosen."""
    if is_pair(rows[0]) and "chosen" not in columns:
        yield "The rows are preference pairs: `plimsoll init dpo` learns from both responses"
    if reward is not None and reward.name is None:
        yield str(reward)


def _with_adapter_rates(
    job: Job[Any], values: Mapping[str, Any], given: Sequence[Flag]
) -> dict[str, Any]:
    """Return the values with ten times the first learning rate where an adapter learns.

    Low-rank adapters need about ten times the rate of all weights (Schulman et al. 2025, "LoRA
    Without Regret"). A rate that a flag sets stays.
    """
    fixed = {flag.path for flag in given}
    rates = []
    for flag in _flags(job.start):
        is_rate = flag.path[1:] == ("optimizer", "learning_rate") and flag.path not in fixed
        has_adapter = (values.get(flag.path[0]) or {}).get("adapter")
        if is_rate and has_adapter and isinstance(flag.value, float):
            rates.append(Flag(flag.path, float(f"{_TIMES_OF_ADAPTER * flag.value:.3g}")))
    return apply_flags(Tree(dict(values), {}), rates).values


def check_given(name: str, name_or_path: str) -> None:
    """Raise ConfigError if a model or data set does not exist.

    `name` is the option's name: "model", "data" or "eval", which may be a number of rows. A model
    of known shape is always accepted, even if the hub cannot be reached.
    """
    if name == "model":
        if name_or_path not in known_models():
            refuse(check_model("--model", name_or_path, tokenizer=True))
    elif not (Path(name_or_path).exists() or (name == "eval" and name_or_path.isdigit())):
        refuse(filter(None, [check_missing(f"--{name}", name_or_path, "dataset")]))


def _columns(job: Job[Any], request: InitRequest, row: DataRow) -> dict[str, str]:
    """Return the columns of the data by setting; none if flags set keys of `data.train`.

    Raises ConfigError if the names of the columns do not say which ones the job reads.
    """
    columns = guess_columns(job, request.data, row)
    if columns is not None:
        return columns
    if any(flag.path[:2] == ("data", "train") for flag in parse_flags(request.flags)):
        return {}
    pairs = " They are preference pairs, which dpo and rm learn from." if is_pair(row) else ""
    raise ConfigError(
        f"{request.data}: the names of its columns do not say which ones `plimsoll {job.name}` "
        f"reads: {', '.join(row)}.{pairs} Name them, such as --data.train.prompt COLUMN."
    )


def _first(job: Job[Any], request: InitRequest, columns: Mapping[str, str], tokens: int) -> Dotted:
    """Return the first values of the config by dotted key, before the planner changes any."""
    machine = {"hardware": request.cluster, "host_memory": request.host_memory}
    cards = hardware_of(ClusterConfig.model_validate(machine)).cards
    train = {f"data.train.{setting}": column for setting, column in columns.items()}
    values: Dotted = {"run.directory": f"runs/{job.name}", "run.steps": MOST_STEPS}
    values |= {"run.save_every": 50, "run.keep_checkpoints": 2, "run.save_model": True}
    where = "ray" if cards else "local"
    values |= {"run.resume": AUTO, "cluster.where": where}
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
    if cards:
        models = [key for key in values if key.endswith(".model.path")]
        values |= {key.replace(".path", ".gradient_checkpointing"): True for key in models}
    return values


def _text(job: Job[Any], values: dict[str, Any]) -> str:
    """Return the values as YAML, with a comment about each key if there is room."""
    keys = tuple(keys_of(job.config))
    lines = [f"# {job.name}: every key is in `plimsoll {job.name} --help`"]
    path: list[str] = []
    for line in write_tree(values).splitlines():
        name, _, value = line.partition(":")
        path = [*path[: (len(name) - len(name.lstrip())) // 2], name.strip()]
        key = find_key(keys, tuple(path))
        if key is not None and value:
            samples = "rollout" in job.config.model_fields
            meanings = describe_value(key, value.strip(), samples=samples)
            fitting = (meaning for meaning in meanings if len(line) + len(meaning) < _WIDTH)
            line += "".join(f"  # {meaning}" for meaning in islice(fitting, 1))
        lines.append(line)
    return "\n".join(lines) + "\n"


def _of_rl(match: re.Match[str]) -> str:
    before = match["rows"]
    text = match["rl"]
    return f" {text}" if before.startswith(" ") else text[:1].upper() + text[1:]


def describe_value(key: Key, value: str, *, samples: bool) -> tuple[str, ...]:
    """Return possible comments on a key with a value: a longer comment first, then a shorter one.

    The longer comment has the sentence about the key and the meaning of the value; the shorter has
    only the sentence. Neither has the meaning of another value, nor what holds for other jobs.

    Args:
        key: the key.
        value: its value as YAML.
        samples: whether the job is one of RL, which the keys' texts call PPO.
    """
    about: list[str] = []
    means = ""
    doc = _PPO.sub(_of_rl if samples else r"\g<rows>", key.doc)
    for clause in _CLAUSE.split(doc.rstrip(".")):
        named = _NAMED.match(clause)
        if named is None or named["name"] not in key.kind.split(" | "):
            about.append(clause)
        elif named["name"] == value:
            means = clause[named.end() :]
    lead = about[0].rstrip(".:") if about and doc.startswith(about[0]) else ""
    both = f"{lead}: {means}" if lead and means else means
    return tuple(filter(None, (both, lead)))
