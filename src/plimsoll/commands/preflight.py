"""What can be seen before anything is loaded: files, directories, installed packages, lengths.

Free of torch. The hub is only asked whether it has what a name means; what only its files, a GPU
or the rows themselves can tell is left to those who read them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plimsoll.commands.heads import check_heads
from plimsoll.commands.needs import missing_needs
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import SourceConfig
from plimsoll.config.model import ModelConfig
from plimsoll.config.problems import Problem, refuse, show
from plimsoll.config.yaml_tree import Origins
from plimsoll.data.sources import SUFFIXES, conversion, is_data
from plimsoll.errors import ConfigError
from plimsoll.jobs.which import named_job
from plimsoll.reward.references import check_references, check_rewards
from plimsoll.run.directory import RunDirectory, resume_problems
from plimsoll.shapes.config_fields import longrope_positions
from plimsoll.spec.choices import check_choices
from plimsoll.spec.model_files import (
    check_head,
    check_missing,
    check_model,
    check_template,
    models_by_key,
    read_model_json,
)
from plimsoll.spec.run_spec import RunSpec

_SAVED_DATASET = ("dataset_dict.json", "state.json")


def check_inputs(spec: RunSpec[Any], origins: Origins = MappingProxyType({})) -> None:
    """Refuse inputs that cannot work, all of them in one ConfigError: data, models, run directory,
    packages, names of losses and rewards, lengths.

    origins: where each key was written, as `read_config` gives them.
    """
    try:
        refuse(_problems(spec), origins)
    except OSError as error:  # a name that the system does not take, a folder that it hides
        raise ConfigError(
            f"{error.filename}: {error.strerror}. Give another path, or correct its rights."
        ) from error


def _problems(spec: RunSpec[Any]) -> Iterator[Problem]:
    yield from _run_directory(spec)
    for name, source in spec.data.sources().items():
        yield from check_source(name, source)
    yield from check_template(spec.data, spec.actor.model)
    models = models_by_key(spec)
    for key, model in models.items():
        tokenizer = key in ("actor.model", "teacher.model")
        yield from check_model(f"{key}.path", model.path, tokenizer=tokenizer)
        yield from _length(spec, key, model)
    yield from _heads(spec)
    yield from missing_needs(spec)
    yield from _nodes(spec.cluster)
    yield from check_choices(spec.job.choices(spec.config))
    yield from check_heads(spec, "actor.model.path", spec.actor.model.path)
    if spec.sampling is not None:
        unusable = [*check_rewards(spec.sampling.rewards)]
        yield from unusable or check_references(spec.sampling.rewards, spec.data.sources())


def _run_directory(spec: RunSpec[Any]) -> Iterator[Problem]:
    run, path = spec.run, Path(spec.run.directory)
    shown = show(run.directory)
    existing = next(p for p in [path, *path.absolute().parents] if p.exists())
    if not existing.is_dir():
        why = f"{existing} is a file, and a directory is needed."
        yield Problem("run.directory", shown, why, "choose another directory")
    elif not os.access(existing, os.W_OK | os.X_OK):
        why = f"{existing} cannot be written to."
        yield Problem("run.directory", shown, why, "choose another directory")
    else:
        yield from resume_problems(run)
        yield from _other_job(spec)


def _other_job(spec: RunSpec[Any]) -> Iterator[Problem]:
    """A run that goes on with the checkpoint of another job."""
    held = RunDirectory(Path(spec.run.directory))
    if spec.run.resume == "never" or held.latest_checkpoint() is None:
        return
    told = held.config_path.read_text(encoding="utf-8") if held.config_path.is_file() else ""
    before = named_job(told)
    if before is not None and before != spec.job.name:
        why = f"It holds a run of `plimsoll {before}`, which only that command can go on with."
        instead = "choose another run.directory; to begin with that run's model, give its model/ "
        instead += "as actor.model.path"
        yield Problem("run.directory", show(spec.run.directory), why, instead)


def check_source(key: str, source: SourceConfig) -> Iterator[Problem]:
    """What is wrong with the rows that `key` gives, as far as their files tell."""
    path = Path(source.path)
    shown = show(source.path)
    known = ", ".join(SUFFIXES)
    if source.name is not None and path.exists():
        why = f"Only data sets of the hub have configurations, and {path} is here."
        yield Problem(f"{key}.name", show(source.name), why, f"leave {key}.name out")
    if source.split != "train" and path.is_file():
        why = f"{path} is one file, all of which is read: it has no splits."
        yield Problem(f"{key}.split", show(source.split), why, f"leave {key}.split out")
    if path.is_dir():
        saved = any((path / name).is_file() for name in _SAVED_DATASET)
        if not saved and not any(map(is_data, path.iterdir())):
            why = f"The directory has no files that end in {known}, and is no saved data set."
            yield Problem(f"{key}.path", shown, why, "give the directory that holds the files")
    elif not path.is_file():
        if problem := check_missing(f"{key}.path", source.path, "dataset"):
            yield problem
    elif not path.name.lower().endswith(SUFFIXES):
        why = f"The format is told by the file's name, which must end in {known}."
        yield Problem(f"{key}.path", shown, why, "rename or convert the file")
    elif path.stat().st_size == 0:
        yield Problem(f"{key}.path", shown, "The file is empty.", "give a file that has rows")
    elif not os.access(path, os.R_OK):
        yield Problem(f"{key}.path", shown, "The file cannot be read.", "change its permissions")
    elif path.suffix.lower() == ".json" and (how := conversion(path)):
        why = "The file holds one JSON array, and one object per line is needed."
        yield Problem(f"{key}.path", shown, why, how)


def _length(spec: RunSpec[Any], key: str, model: ModelConfig) -> Iterator[Problem]:
    """The longest sequence against what the model can take."""
    settings = read_model_json(model.path)
    longest, written = spec.longest_of("actor" if key == "actor.model" else "critic")
    positions, named = settings.get("max_position_embeddings"), "max_position_embeddings"
    why, other = "", "more positions"
    original = longrope_positions(settings)
    if original is not None:
        positions, named, other = original, "original_max_position_embeddings", "another rope_type"
        why = " Beyond them its longrope takes other angles, for all of a pack alike."
    if isinstance(positions, int) and longest > positions:
        yield Problem(
            f"{key}.path",
            show(model.path),
            f"The model has {positions} positions ({named}), and a sequence may "
            f"be {longest} tokens long ({written}).{why}",
            f"lower these lengths, or take a model with {other}",
            code="sequence-over-positions",
            conflict=True,
        )


def _heads(spec: RunSpec[Any]) -> Iterator[Problem]:
    """A role that learns a value function may begin with a head of either kind."""
    for role in spec.roles.values():
        if role.given and not (role.trained and role.head == "value"):
            yield from check_head(
                f"{role.key}.model.path", role.model.path, scores=role.head == "value"
            )


def _nodes(cluster: ClusterConfig) -> Iterator[Problem]:
    if cluster.nodes > 1 and cluster.address is None and cluster.where == "ray":
        yield Problem(
            "cluster.nodes",
            str(cluster.nodes),
            "Without cluster.address the run would start a Ray of its own, on this machine alone.",
            "start Ray on all nodes (`ray start --head`, then `ray start --address=HOST:PORT`) and "
            "give cluster.address: HOST:PORT",
            code="nodes-without-cluster",
            conflict=True,
        )
