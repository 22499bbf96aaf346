"""What can be seen before anything is loaded: files, directories, installed packages, lengths.

Free of torch. What only the hub, a GPU or the rows themselves can tell is left to those who
read them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from plimsoll.config.base import Choice
from plimsoll.config.data import SourceConfig
from plimsoll.config.jobs import JobConfig, PpoConfig
from plimsoll.config.model import ModelConfig
from plimsoll.config.problems import Problem, refuse, show
from plimsoll.config.run import RunConfig
from plimsoll.data.sources import SUFFIXES
from plimsoll.recipes.model_files import check_missing, check_model, read_model_json
from plimsoll.run.directory import RunDirectory

_SAVED_DATASET = ("dataset_dict.json", "state.json")


def check_inputs(config: JobConfig) -> None:
    """Refuse inputs that cannot work, all of them in one ConfigError: data, models, run directory,
    packages, names of losses and rewards, lengths."""
    refuse(_problems(config))


def _problems(config: JobConfig) -> Iterator[Problem]:
    yield from _run_directory(config.run)
    yield from _source("data.train", config.data.train)
    if config.data.eval is not None:
        yield from _source("data.eval", config.data.eval)
    models = _models(config)
    for key, model in models.items():
        yield from check_model(key, model, tokenizer=key == "actor.model")
        yield from _length(config, key, model)
    if config.cluster.where == "ray":
        yield from _package("ray", "cluster.where", "ray", "cluster.where: local (one rank)")
    if isinstance(config, PpoConfig):
        yield from _engines(config)
        yield from _choices(config)


def _models(config: JobConfig) -> dict[str, ModelConfig]:
    models = {"actor.model": config.actor.model}
    if isinstance(config, PpoConfig):
        models["critic.model"] = config.critic.model
        if config.reference is not None:
            models["reference.model"] = config.reference.model
    return models


def _run_directory(run: RunConfig) -> Iterator[Problem]:
    path = Path(run.directory)
    shown = show(run.directory)
    existing = next(p for p in [path, *path.absolute().parents] if p.exists())
    if not existing.is_dir():
        why = f"{existing} is a file, and a directory is needed."
        yield Problem("run.directory", shown, why, "choose another directory")
    elif not os.access(existing, os.W_OK | os.X_OK):
        why = f"{existing} cannot be written to."
        yield Problem("run.directory", shown, why, "choose another directory")
    elif run.resume == "never" and RunDirectory(path).holds_run():
        yield Problem(
            "run.directory",
            shown,
            "It already holds a run, and run.resume is never.",
            "run.resume: auto continues it; or choose another run.directory",
        )
    elif run.resume == "must" and RunDirectory(path).latest_checkpoint() is None:
        yield Problem(
            "run.directory",
            shown,
            "It holds no checkpoint to resume from, and run.resume is must.",
            "correct run.directory, or run.resume: auto",
        )


def _source(key: str, source: SourceConfig) -> Iterator[Problem]:
    path = Path(source.path).expanduser()
    shown = show(source.path)
    known = ", ".join(SUFFIXES)
    if path.is_dir():
        saved = any((path / name).is_file() for name in _SAVED_DATASET)
        if not saved and not any(file.suffix.lower() in SUFFIXES for file in path.iterdir()):
            why = f"The directory has no files that end in {known}, and is no saved data set."
            yield Problem(f"{key}.path", shown, why, "give the directory that holds the files")
    elif not path.is_file():
        if problem := check_missing(f"{key}.path", source.path, "a data file or directory"):
            yield problem
    elif path.suffix.lower() not in SUFFIXES:
        why = f"The format is told by the file's name, which must end in {known}."
        yield Problem(f"{key}.path", shown, why, "rename or convert the file")
    elif path.stat().st_size == 0:
        yield Problem(f"{key}.path", shown, "The file is empty.", "give a file that has rows")
    elif not os.access(path, os.R_OK):
        yield Problem(f"{key}.path", shown, "The file cannot be read.", "change its permissions")


def _length(config: JobConfig, key: str, model: ModelConfig) -> Iterator[Problem]:
    """The longest sequence against what the model has positions for."""
    positions = read_model_json(model.path).get("max_position_embeddings")
    longest, written = config.data.max_tokens, f"data.max_tokens = {config.data.max_tokens}"
    if isinstance(config, PpoConfig):
        sampled = config.rollout.sampling.max_new_tokens
        written += f", rollout.sampling.max_new_tokens = {sampled}"
        if config.eval_sampling is not None and key == "actor.model":
            written += f", eval_sampling.max_new_tokens = {config.eval_sampling.max_new_tokens}"
            sampled = max(sampled, config.eval_sampling.max_new_tokens)
        longest += sampled
    if isinstance(positions, int) and longest > positions:
        yield Problem(
            f"{key}.path",
            show(model.path),
            f"The model has {positions} positions (max_position_embeddings), and a sequence may "
            f"be {longest} tokens long ({written}).",
            "lower these lengths, or take a model with more positions",
        )


def _engines(config: PpoConfig) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.engine == "vllm":
        yield from _package("vllm", "rollout.engine", "vllm", "rollout.engine: transformers")
    heads = read_model_json(config.actor.model.path).get("num_attention_heads")
    if isinstance(heads, int) and heads % rollout.tensor_parallel:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        yield Problem(
            "rollout.tensor_parallel",
            str(rollout.tensor_parallel),
            f"It must divide the {heads} attention heads of {config.actor.model.path}.",
            f"one of {', '.join(divisors)}",
        )


def _package(module: str, key: str, value: str, other: str) -> Iterator[Problem]:
    if importlib.util.find_spec(module) is None:
        yield Problem(
            key,
            value,
            f"The package {module} is not installed.",
            f"install plimsoll-rl with its extra `cpu` or `gpu`, or write {other}",
        )


def _choices(config: PpoConfig) -> Iterator[Problem]:
    algorithm = "plimsoll.algorithm"
    chosen: dict[str, tuple[Choice, str]] = {
        "algorithm.advantage": (config.algorithm.advantage, f"{algorithm}.advantage"),
        "algorithm.policy_loss": (config.algorithm.policy_loss, f"{algorithm}.policy_loss"),
        **{f"rewards.{name}": (part, "plimsoll.reward") for name, part in config.rewards.items()},
    }
    for key, (choice, package) in chosen.items():
        if ":" not in choice.name:
            yield from _choice(f"{key}.name", choice.name, package)


def _choice(key: str, name: str, package: str) -> Iterator[Problem]:
    """A name must be a file of the package; its options are checked by who calls it."""
    files = [file.name for file in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    if name not in files:
        close = get_close_matches(name, files, n=1)
        near = f"did you mean {close[0]}?" if close else "write one of Plimsoll's names, or"
        own = "a function of your own is written my.module:my_function"
        yield Problem(key, show(name), "Plimsoll has nothing of this name.", f"{near} {own}")
