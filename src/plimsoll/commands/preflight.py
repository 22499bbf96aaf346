"""Check files, directories, packages and lengths before anything is loaded.

No torch is imported. The hub is only asked whether it has a name. Files of the hub, GPUs and rows
are checked later, by the code that reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plimsoll.config.data import COLUMNS, SourceConfig
from plimsoll.config.engine import ADAPTER_FILE, ModelConfig
from plimsoll.config.files import nearest, usable_paths
from plimsoll.config.problems import Problem, Section, conflict, find, invalid, refuse, show
from plimsoll.config.yaml_tree import Origins
from plimsoll.data.fields import BadRow, RawRow, RowProblem
from plimsoll.data.first_rows import first_columns, first_rows, read_row
from plimsoll.data.generated import check_generated
from plimsoll.data.rows import OF_EVERY_ROW, missing_columns
from plimsoll.data.sources import SUFFIXES, is_data
from plimsoll.jobs.which import named_job
from plimsoll.resolve.choices import check_choices
from plimsoll.resolve.engine_rules import check_engine_model, engine_rules
from plimsoll.resolve.model_files import (
    check_codes,
    check_head,
    check_missing,
    check_model,
    check_template,
    models_by_key,
    read_model_json,
)
from plimsoll.resolve.rules.machine import missing_needs
from plimsoll.resolve.rules.stored import check_replayed
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.reward.references import check_columns, check_references, check_rewards, check_votes
from plimsoll.run.directory import RunDirectory, resume_problems
from plimsoll.run.files import nearest_existing
from plimsoll.run.numbers import plural
from plimsoll.shapes.families import longrope_positions
from plimsoll.train.notify import webhook_problems

_OF_THE_SYSTEM = ("/proc", "/sys", "/dev")
_SAVED_DATASET = ("dataset_dict.json", "state.json")


def _sources(spec: RunSpec[Any]) -> Iterator[Problem]:
    for key, source in spec.data.sources().items():
        unreadable = [*check_source(key, source)]
        yield from unreadable or check_first_columns(key, source, spec.data.on_bad_row)


def _models(spec: RunSpec[Any]) -> Iterator[Problem]:
    for key, model in models_by_key(spec).items():
        tokenizer = key in ("actor.model", "teacher.model")
        yield from check_model(f"{key}.path", model.path, tokenizer=tokenizer)
        yield from check_codes(f"{key}.path", model.path)
        yield from _length(spec, key, model)
    for name, role in spec.trained.items():
        path = role.adapter and role.adapter.path
        if path and not Path(path, ADAPTER_FILE).is_file():
            why = f"It has no {ADAPTER_FILE}, as PEFT and runs with an adapter write it."
            fix = "a directory such as runs/NAME/model, or leave it out for a new adapter"
            yield invalid(f"{name}.adapter.path", show(path), why, fix)
    for rules in engine_rules(spec):
        yield from rules.files(spec)


def _run_directory(spec: RunSpec[Any]) -> Iterator[Problem]:
    path, why = Path(spec.run.directory), ""
    existing = path if path.exists() else nearest_existing(path)
    system = next((p for p in _OF_THE_SYSTEM if existing.resolve().is_relative_to(p)), None)
    if not existing.is_dir():
        why = f"{existing} is a file, and a directory is needed."
    elif system is not None and not existing.resolve().is_relative_to("/dev/shm"):
        why = f"{system} is the system's own, and keeps no files."
    elif not os.access(existing, os.W_OK | os.X_OK):
        why = f"{existing} cannot be written to."
    if why:
        yield Section("run", spec.run).invalid("directory", why, "choose another directory")
    else:
        yield from resume_problems(spec.run)
        yield from webhook_problems(spec.run)
        yield from _other_job(spec)


def _other_job(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem if the run directory has a checkpoint of another job."""
    run = RunDirectory(Path(spec.run.directory))
    if spec.run.resume == "never" or run.latest_checkpoint() is None:
        return
    config_text = run.config_path.read_text(encoding="utf-8") if run.config_path.is_file() else ""
    before = named_job(config_text)
    if before is not None and before != spec.job.name:
        why = f"It holds a run of `plimsoll {before}`, which only that command can go on with."
        fix = "choose another run.directory; to begin with that run's model, give its model/ "
        fix += "as actor.model.path"
        yield Section("run", spec.run).invalid("directory", why, fix)


def check_source(key: str, source: SourceConfig) -> Iterator[Problem]:
    """Yield a problem for each fault of a source's path, name, split or file.

    `key` is the source's key in the config. Rows are not read.
    """
    if source.generate is not None:
        yield from check_generated(key, source)
        return
    at, path, suffixes = Section(key, source), Path(source.path), ", ".join(SUFFIXES)
    if source.name is not None and path.exists():
        why = f"Only data sets of the hub have configurations, and {path} is here."
        yield at.invalid("name", why, f"leave {key}.name out")
    if source.split != "train" and path.is_file():
        why = f"{path} is one file, all of which is read: it has no splits."
        yield at.invalid("split", why, f"leave {key}.split out")
    if path.is_dir():
        saved = any((path / name).is_file() for name in _SAVED_DATASET)
        if not saved and not any(map(is_data, path.iterdir())):
            why = f"The directory has no files that end in {suffixes}, and is no saved data set."
            yield at.invalid("path", why, "give the directory that holds the files")
    elif not path.is_file():
        if problem := check_missing(f"{key}.path", source.path, "dataset"):
            yield problem
    elif not path.name.lower().endswith(SUFFIXES):
        why = f"The file's name gives its format, and must end in {suffixes}."
        yield at.invalid("path", why, "rename or convert the file")
    elif path.stat().st_size == 0:
        yield at.invalid("path", "The file is empty.", "give a file that has rows")
    elif not os.access(path, os.R_OK):
        yield at.invalid("path", "The file cannot be read.", "change its permissions")


def check_first_columns(key: str, source: SourceConfig, on_bad_row: str) -> Iterator[Problem]:
    """Yield a problem for each column that a source's schema or first rows do not have.

    If bad rows are skipped, yield nothing for columns that later rows may have.
    """
    first = first_columns(source)
    if first is None or not (first.all or on_bad_row == "stop"):
        return
    settings = COLUMNS if first.all else OF_EVERY_ROW
    for setting, column in missing_columns(source, first.names, settings):
        names = ", ".join(f"`{name}`" for name in first.names)
        why = f"{first.file} has no column `{column}`; there are {names}."
        fix = nearest(column, first.names).strip() or "the name of one of its columns"
        yield Section(key, source).invalid(setting, why, fix, "data-columns")


def _rows(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem for each source whose first rows cannot be read.

    If the config skips bad rows, yield one only if all first rows are bad.
    """
    skips = spec.data.on_bad_row == "skip"
    for key, source in spec.data.sources().items():
        rows = first_rows(source)
        bad = [b for row in rows if (b := _read(spec, key, source, row)) is not None]
        if not bad or (skips and len(bad) < len(rows)):
            continue
        why = f"{len(bad)} of the first {plural(len(rows), 'row')} cannot be read, the first at "
        why += f"{bad[0]}."
        fix = "name other columns, or mend the rows"
        fix += "" if skips else " (--data.on_bad_row skip leaves out bad ones)"
        yield Section(key, source).invalid("path", why, fix)


def _read(
    spec: RunSpec[Any], key: str, source: SourceConfig, row: RawRow | BadRow
) -> BadRow | None:
    """Return a `BadRow` that says what is wrong with a row, or None if it can be read."""
    if isinstance(row, BadRow):
        return row
    sampling = None if spec.sampling is None else spec.sampling.rollout.sampling
    environments = () if spec.sampling is None else spec.sampling.environments
    answered = {s.key: s.sampling for s in spec.eval_sets}
    try:
        read_row(row, source, answered.get(key, sampling), environments)
    except RowProblem as problem:
        return BadRow(row.file, row.line, problem.field, problem.problem)
    return None


def _length(spec: RunSpec[Any], key: str, model: ModelConfig) -> Iterator[Problem]:
    """Yield a problem if a sequence may be longer than the model's number of positions."""
    settings = read_model_json(model.path)
    longest, how = spec.longest_sequence(held_out=key == "actor.model")
    positions, named = settings.get("max_position_embeddings"), "max_position_embeddings"
    beyond, remedy = "", "more positions"
    original = longrope_positions(settings)
    if original is not None:
        positions, named, remedy = original, "original_max_position_embeddings", "another rope_type"
        beyond = " Beyond them its longrope takes other angles, for all of a pack alike."
    if isinstance(positions, int) and longest > positions:
        why = f"The model has {positions} positions ({named}), and a sequence may "
        why += f"be {longest} tokens long ({how}).{beyond}"
        fix = f"lower these lengths, or take a model with {remedy}"
        yield conflict(f"{key}.path", show(model.path), why, fix, code="sequence-over-positions")


def _heads(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem for each model with the wrong head.

    A role that learns values may begin with either kind of head.
    """
    if "actor" not in spec.roles:  # only engines have it
        yield from check_head("actor.model.path", spec.actor.model.path, scores=False)
    for role in spec.roles.values():
        if role.given and not (role.trained and role.head == "value"):
            yield from check_head(
                f"{role.key}.model.path", role.model.path, scores=role.head == "value"
            )


def _nodes(spec: RunSpec[Any]) -> Iterator[Problem]:
    at, cluster = Section("cluster", spec.cluster), spec.cluster
    if cluster.nodes > 1 and cluster.address is None and cluster.where == "ray":
        why = "Without cluster.address the run would start a Ray of its own, on this machine alone."
        fix = "start Ray on all nodes (`ray start --head`, then `ray start --address=HOST:PORT`) "
        fix += "and give cluster.address: HOST:PORT"
        yield at.conflict("nodes", why, fix, "nodes-without-cluster")


def reward_problems(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield a problem for each reward that cannot be used here, or not with these rows."""
    if spec.sampling is None or spec.engines is None:
        return
    rewards = spec.sampling.rewards
    if unusable := [*check_rewards(rewards, spec.sampling.environments)]:
        yield from unusable
        return
    sources = spec.data.sources()
    firsts = {key: first_columns(source) for key, source in sources.items()}
    known = {key: first.names for key, first in firsts.items() if first is not None}
    yield from check_columns(rewards, known)
    yield from check_references(rewards, sources)
    yield from check_votes(rewards, spec.eval_sets, spec.run.best)


INPUT_RULES = (
    _run_directory,
    _sources,
    check_template,
    _models,
    _heads,
    missing_needs,
    _nodes,
    check_choices,
    lambda spec: check_engine_model(spec, "actor.model.path", spec.actor.model.path),
    reward_problems,
    check_replayed,
)


def check_rows(spec: RunSpec[Any], origins: Origins = MappingProxyType({})) -> None:
    """Raise ConfigError, naming all sources whose first rows cannot be read; for a dry run."""
    refuse(find((_rows,), spec), origins)


def check_inputs(spec: RunSpec[Any], origins: Origins = MappingProxyType({})) -> None:
    """Raise ConfigError, naming all inputs that cannot work; do nothing if all can.

    Inputs are data, models, run directory, packages, names of losses and rewards, and lengths.
    `origins` says where each key was written (see `read_spec`).
    """
    with usable_paths():
        refuse(find(INPUT_RULES, spec), origins)
