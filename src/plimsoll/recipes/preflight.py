"""What can be seen before anything is loaded: files, directories, installed packages, lengths.

Free of torch. The hub is only asked whether it has what a name means; what only its files, a GPU
or the rows themselves can tell is left to those who read them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.data import SourceConfig
from plimsoll.config.jobs import DpoConfig, JobConfig, PrmConfig, RlJobConfig, RmConfig
from plimsoll.config.model import ModelConfig
from plimsoll.config.problems import Problem, refuse, show
from plimsoll.config.reference import needs_reference
from plimsoll.config.which import JOBS, named_job
from plimsoll.config.yaml_tree import Origins
from plimsoll.data.json_array import conversion
from plimsoll.data.sources import SUFFIXES, is_data
from plimsoll.errors import ConfigError
from plimsoll.memory.price.work import longest_written
from plimsoll.memory.shapes.config_fields import longrope_positions
from plimsoll.recipes.chosen import check_choices
from plimsoll.recipes.model_files import (
    check_head,
    check_missing,
    check_model,
    check_template,
    models_by_key,
    read_model_json,
)
from plimsoll.recipes.needs import missing_needs
from plimsoll.recipes.ppo_inputs import check_heads
from plimsoll.run.directory import RunDirectory, resume_problems

_SAVED_DATASET = ("dataset_dict.json", "state.json")


def check_inputs(config: JobConfig, origins: Origins = MappingProxyType({})) -> None:
    """Refuse inputs that cannot work, all of them in one ConfigError: data, models, run directory,
    packages, names of losses and rewards, lengths.

    origins: where each key was written, as `read_config` gives them.
    """
    try:
        refuse(_problems(config), origins)
    except OSError as error:  # a name that the system does not take, a folder that it hides
        raise ConfigError(
            f"{error.filename}: {error.strerror}. Give another path, or correct its rights."
        ) from error


def _problems(config: JobConfig) -> Iterator[Problem]:
    yield from _run_directory(config)
    for name, source in config.data.sources().items():
        yield from check_source(name, source)
    yield from check_template(config.data, config.actor.model)
    models = models_by_key(config)
    for key, model in models.items():
        tokenizer = key in ("actor.model", "teacher.model")
        yield from check_model(f"{key}.path", model.path, tokenizer=tokenizer)
        yield from _length(config, key, model)
    yield from _heads(config, models)
    yield from missing_needs(config)
    yield from _nodes(config.cluster)
    yield from check_choices(config)
    if isinstance(config, RlJobConfig):
        yield from check_heads(config, "actor.model.path", config.actor.model.path)
    if isinstance(config, DpoConfig):
        yield from _reference(config)


def _run_directory(config: JobConfig) -> Iterator[Problem]:
    run, path = config.run, Path(config.run.directory)
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
        yield from _other_job(config)


def _other_job(config: JobConfig) -> Iterator[Problem]:
    """A run that goes on with the checkpoint of another job."""
    held = RunDirectory(Path(config.run.directory))
    if config.run.resume == "never" or held.latest_checkpoint() is None:
        return
    told = held.config_path.read_text(encoding="utf-8") if held.config_path.is_file() else ""
    before = named_job(told)
    if before is not None and not isinstance(config, JOBS[before]):
        why = f"It holds a run of `plimsoll {before}`, which only that command can go on with."
        instead = "choose another run.directory; to begin with that run's model, give its model/ "
        instead += "as actor.model.path"
        yield Problem("run.directory", show(config.run.directory), why, instead)


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


def _length(config: JobConfig, key: str, model: ModelConfig) -> Iterator[Problem]:
    """The longest sequence against what the model can take."""
    settings = read_model_json(model.path)
    longest, written = longest_written(config, sampling=key == "actor.model")
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


def _heads(config: JobConfig, models: Mapping[str, ModelConfig]) -> Iterator[Problem]:
    """A critic, and what `rm` and `prm` train, may begin with a head of either kind."""
    either = "actor.model" if isinstance(config, RmConfig | PrmConfig) else "critic.model"
    for key, model in models.items():
        if key != either:
            scores = key == "reward_model.role.model"
            yield from check_head(f"{key}.path", model.path, scores=scores)


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


def _reference(config: DpoConfig) -> Iterator[Problem]:
    if [*check_choices(config)] or needs_reference(config.algorithm.loss):
        return
    unused = {"reference": "given"} if config.reference is not None else {}
    if config.reference_logprobs.precompute:
        unused["reference_logprobs.precompute"] = "true"
    for key, value in unused.items():
        yield Problem(
            key,
            value,
            f"The loss {config.algorithm.loss.name} is reference-free: it would not be looked at.",
            f"leave {key} out, or algorithm.loss.name: dpo",
            code="reference-free-loss",
            conflict=True,
        )
