"""The models that eval, export and merge are given by their paths: found, or refused, before
anything heavy is imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll.config.engine import ADAPTER_FILE
from plimsoll.config.flags import parse_flags
from plimsoll.config.problems import Problem, refuse
from plimsoll.errors import ConfigError
from plimsoll.jobs.which import load_any
from plimsoll.run.directory import RunDirectory
from plimsoll.spec.model_files import check_head, check_heads, check_model, has_tokenizer
from plimsoll.spec.roles import Role
from plimsoll.spec.rules.machine import missing_for_processes
from plimsoll.spec.run_spec import RunSpec, resolve


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint, and the run that wrote it."""

    path: Path
    spec: RunSpec[Any]


@dataclass(frozen=True)
class FoundModel:
    """What is measured: a model's path or name, as a run's job does. directory: where what
    comes of it is written."""

    path: str
    spec: RunSpec[Any]
    directory: Path


def refuse_existing(option: str, path: Path) -> None:
    """Raise ConfigError where something is there already, which the option would overwrite."""
    if path.exists():
        raise ConfigError(f"{option} {path} is there already. Choose another place.")


def find_checkpoint(source: Path, *, merge: bool) -> FoundCheckpoint:
    """The checkpoint at `source`, or the last one of the run there.

    merge: the run's adapter is to be merged into its base.

    Raises:
        ConfigError: there is none, its run's config is gone, or there is no adapter to merge.
    """
    if (source / "state.json").is_file():
        checkpoint, run = source, RunDirectory(source.absolute().parent.parent)
    else:
        run = RunDirectory(source)
        latest = run.latest_checkpoint()
        if latest is None and run.config_path.is_file():
            raise ConfigError(_no_checkpoint(run))
        if latest is None:
            raise ConfigError(
                f"{source} is neither a run with a checkpoint nor a checkpoint. Give a "
                f"run.directory, or one of its checkpoints/step-NNNNNN."
            )
        checkpoint = latest[1]
    if not run.config_path.is_file():
        raise ConfigError(
            f"{run.config_path} is not there, which says what model {checkpoint} is of. Give a "
            f"checkpoint in the run.directory that wrote it."
        )
    spec = _spec_of(run, [])
    refuse(check_model("actor.model.path", spec.actor.model.path, tokenizer=True))
    if not spec.trained:
        raise ConfigError(
            f"{source} was written by plimsoll {spec.job.name}, which trains nothing: it has no "
            f"weights. Give a run that trained."
        )
    if merge and spec.actor.adapter is None:
        raise ConfigError(
            f"--merge is given, and the run of {source} trains all weights: it has no adapter to "
            f"merge. Leave --merge out."
        )
    return FoundCheckpoint(checkpoint, spec)


def find_model(source: str, flags: list[str], model: str | None, out: str | None) -> FoundModel:
    """What `plimsoll eval` is to measure.

    source: a config, or a run.directory, whose config and final model are taken. model: a directory
    or name instead of that, or of the config's actor.model.path. out: default: the run.directory.

    Raises:
        ConfigError: there is no such config, run or model, the model is an adapter alone or has
            another head than the config's job needs, what it is measured with is not there, or Ray
            or vLLM lack what they need here.
    """
    if not Path(source).exists() and Path(source).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"There is no config and no run.directory {source!r}. Check the path.")
    run = Path(source) if Path(source).is_dir() else None
    spec = load_any(source, flags) if run is None else _spec_of(RunDirectory(run), flags)
    path = model or (spec.actor.model.path if run is None else _final_model(run))
    if is_adapter(Path(path)):
        raise ConfigError(
            f"{path} is an adapter alone. Merge it first, with `plimsoll merge {path} --out "
            f"DIRECTORY` or `plimsoll export {source} --merge --to DIRECTORY`, and give the result "
            f"with --model."
        )
    named = "--model" if model or run else "actor.model.path"
    refuse(_against_measuring(spec, named, path))
    return FoundModel(path, spec, Path(out) if out else run or Path(spec.run.directory))


def _against_measuring(spec: RunSpec[Any], key: str, path: str) -> Iterator[Problem]:
    """What is wrong with the model that `key` gives and with what it is measured with."""
    yield from check_model(key, path, tokenizer=True)
    actor = spec.roles.get("actor")  # only engines have that of `plimsoll sample`
    yield from check_head(key, path, scores=actor is not None and actor.head == "value")
    yield from check_heads(spec, key, path)
    beside = measure_with(spec)
    if beside is not None:
        yield from check_model(f"{beside.key}.model.path", beside.model.path, tokenizer=False)
    if spec.data.eval is not None:
        from plimsoll.commands.preflight import check_source  # imports NumPy and Arrow

        for name, source in spec.data.eval_sources().items():
            yield from check_source(name, source)
    yield from missing_for_processes(spec)


def measure_with(spec: RunSpec[Any]) -> Role | None:
    """The role that a model is measured with, where there is one."""
    return spec.roles.get("reference" if spec.sampling is None else "reward")


def _spec_of(run: RunDirectory, flags: list[str]) -> RunSpec[Any]:
    """A run's config. Its chat template is the one that the run was trained with, whatever has
    become of the file that it came from; flags win."""
    spec = load_any(str(run.config_path), flags)
    key = ("data", "chat_template")
    given = any(flag.path == key[: len(flag.path)] for flag in parse_flags(flags))
    if given or not run.template_path.is_file():
        return spec
    template = run.template_path.read_text(encoding="utf-8")
    data = spec.data.model_copy(update={"chat_template": template})
    return resolve(spec.job, spec.config.model_copy(update={"data": data}))


def _final_model(run: Path) -> str:
    found = RunDirectory(run)
    if found.model_path.is_dir():
        return str(found.model_path)
    if found.latest_checkpoint() is None:
        raise ConfigError(
            f"{_no_checkpoint(found)} It has no final model either. --model gives another one."
        )
    raise ConfigError(
        f"{run} has no final model. Write one from a checkpoint with `plimsoll export "
        f"{run} --to DIRECTORY`, and give it with --model."
    )


def _no_checkpoint(run: RunDirectory) -> str:
    """Say why a run has no checkpoint that a model could be written from."""
    if _spec_of(run, []).run.keep_checkpoints == 0:
        why = ": its run.keep_checkpoints is 0. Train it again with 1 or more."
    else:
        why = " yet. It writes one every run.save_every steps, at its end, and when it is stopped."
    model = f" Its final model is in {run.model_path}." if run.model_path.is_dir() else ""
    return f"The run {run.path} has no checkpoint{why}{model}"


def is_adapter(directory: Path) -> bool:
    """Whether PEFT's config of an adapter is there."""
    return (directory / ADAPTER_FILE).is_file()


def refuse_no_adapter(directory: Path, base: str | None) -> None:
    """Raise ConfigError where there is no adapter to merge, or not the base to merge it into.
    base: a path or name; default: what the adapter's config names."""
    if not is_adapter(directory):
        raise ConfigError(
            f"{str(directory)!r} is no adapter: it has no {ADAPTER_FILE}. Give a directory "
            "that PEFT or a run with an adapter has written, such as runs/NAME/model."
        )
    named = base or _base_of(directory)
    if named is not None:
        refuse(check_model("--base", named, tokenizer=not has_tokenizer(str(directory))))


def _base_of(adapter: Path) -> str | None:
    """None where the adapter's config cannot be read, which who reads it tells."""
    try:
        config = json.loads((adapter / ADAPTER_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    named = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    return named if isinstance(named, str) else None
