"""Find and check what commands get by path, before heavy imports: runs, checkpoints and models.

A config of one's own is trusted. A run directory may be somebody else's and is not trusted: its
config can name functions, which would be imported as soon as the config is checked, and variables
that hold keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plimsoll.config.engine import ADAPTER_FILE
from plimsoll.config.files import loading_only
from plimsoll.config.flags import parse_flags
from plimsoll.config.json_text import parse_json
from plimsoll.config.load import KEY, leaves, read_tree_of
from plimsoll.config.problems import Problem, invalid, refuse, show
from plimsoll.config.yaml_tree import FLAG, Tree, value_at
from plimsoll.config.yaml_tree import Path as KeyPath
from plimsoll.errors import ConfigError
from plimsoll.jobs.which import load_any
from plimsoll.resolve.engine_rules import check_engine_model
from plimsoll.resolve.model_files import check_head, check_model, has_tokenizer
from plimsoll.resolve.roles import Role
from plimsoll.resolve.rules.machine import missing_for_processes
from plimsoll.resolve.run_spec import RunSpec, resolve_changed
from plimsoll.rl.presets import PRESETS
from plimsoll.run.directory import RunDirectory

TRUST = "--trust-run"
"""The flag that allows what the config of a run names."""
_IMPORTED = re.compile(r"(?s).*\.py(?::.*)?|[^\s/:][^/:]*:(?!\d[\d:]*\Z)[^\s/].*")
"""A function by its module or file, a file of Python, or an environment of another package.

Texts such as `Question: ...` are none; what is none of these and would be loaded is refused then.
"""
_RUNNING = {"command", "reasoning_gym"}
"""Names of environments and rewards that run what a config or a policy says, without a sandbox."""
_ARGUMENTS = ("rollout", "vllm", "arguments")


def load_run(run: RunDirectory, flags: Sequence[str], *, trusted: bool) -> RunSpec[Any]:
    """Return the spec of a run's config, changed by flags.

    Raises the errors of `load_any`, and ConfigError if the config names code and is not `trusted`.
    """
    path = str(run.config_path)
    if trusted:
        return load_any(path, flags)
    tree = read_tree_of(path, flags)
    refuse_code(path, tree)
    by_flags = {v for at, v in _every_value(tree.values, ()) if _is_of_flag(tree, at)}
    with loading_only({value for value in by_flags if isinstance(value, str)}):
        return load_any(path, flags)


def refuse_code(path: str, tree: Tree) -> None:
    """Raise ConfigError if values of a run's config name code or keys; values of flags may.

    `path` is the path of the config. Nothing is imported.
    """
    named = [
        f"\n  {'.'.join(at)}: {show(value)}"
        for at, value in _every_value(tree.values, ())
        if _is_code(at, value) and not _is_of_flag(tree, at)
    ]
    if named:
        raise ConfigError(
            f"{path} names code that would run as you, or keys and machines of yours that it would "
            f"use:{''.join(named)}\nA run directory may be of somebody else. If you trust whoever "
            f"wrote it, add {TRUST}; or replace these keys by flags."
        )


def _is_of_flag(tree: Tree, path: KeyPath) -> bool:
    above = (tree.origins.get(path[:length], "") for length in range(1, len(path) + 1))
    return any(at.startswith(FLAG) for at in above)


def _every_value(values: Mapping[str, Any], above: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    """Yield each single value with its path; the values of a list have the list's path."""
    for path, value in leaves(values, above).items():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Mapping):
                yield from _every_value(item, path)
            elif isinstance(item, tuple):
                yield from _every_value({path[-1]: item}, path[:-1])
            else:
                yield path, item


def _is_code(path: KeyPath, value: object) -> bool:
    last = path[-1]
    if not isinstance(value, str):
        return last == "trust_remote_code" and value is True
    if path == (KEY,):
        return value not in PRESETS  # a file, whose values are not in the tree
    if path[: len(_ARGUMENTS)] == _ARGUMENTS:
        return not value.isidentifier()
    by_key = last == "api_key" or path == ("cluster", "address")
    by_value = (last == "name" and value in _RUNNING) or (last == "sandbox" and value == "none")
    return by_key or by_value or _IMPORTED.fullmatch(value) is not None


@dataclass(frozen=True)
class FoundModel:
    """A model to evaluate, and the spec whose job evaluates it."""

    path: str
    """Path or name of the model, or the path of an adapter."""
    spec: RunSpec[Any]
    directory: Path
    """The directory to which the results are written."""
    adapter: bool = False
    """Whether the model is an adapter alone, beside which its base is needed."""


def refuse_existing(option: str, path: Path) -> None:
    """Raise ConfigError, naming the option, if `path` exists: it would be overwritten."""
    if path.exists():
        raise ConfigError(f"{option} {path} is there already. Choose another place.")


def find_checkpoint(
    source: Path, *, merge: bool, trusted: bool = False
) -> tuple[Path, RunSpec[Any]]:
    """Return the checkpoint at `source`, or the last one of the run directory `source`.

    The second value is the spec of the run that wrote it. `merge` says whether the run's adapter
    will be merged into its base, `trusted` whether the run's config may name code.

    Raises ConfigError if there is no checkpoint, no config of its run, no trained weights, or no
    adapter to merge, and the errors of `load_run`.
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
            f"{run.config_path} is missing, and the model of {checkpoint} is unknown without it. "
            f"Give a checkpoint in the run.directory that wrote it."
        )
    spec = _spec_of(run, [], trusted)
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
    return checkpoint, spec


def find_model(
    source: str, flags: list[str], model: str | None, out: str | None, *, trusted: bool = False
) -> FoundModel:
    """Return the model that `plimsoll eval` is to evaluate, with spec and output directory.

    Args:
        source: A config, or a run.directory, whose config and final model are used.
        flags: Flags that change the config.
        model: Replaces the run's final model, or the config's actor.model.path.
        out: The output directory; the run.directory by default.
        trusted: Whether the config of a run.directory may name code.

    Raises the errors of `load_run`, and ConfigError if there is no such config, run or model, if
    the model or an adapter's base has another head than the job needs or is missing, if the
    comparison model is missing, or if Ray or vLLM cannot run here.
    """
    if not Path(source).exists() and Path(source).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"There is no config and no run.directory {source!r}. Check the path.")
    run = Path(source) if Path(source).is_dir() else None
    spec = load_any(source, flags) if run is None else _spec_of(RunDirectory(run), flags, trusted)
    path = model or (spec.actor.model.path if run is None else _final_model(run))
    named, directory = "--model" if model or run else "actor.model.path", Path(out or run or "")
    directory = directory if out or run else Path(spec.run.directory)
    adapter = is_adapter(Path(path))
    problems = (_adapter_problems if adapter else _model_problems)(spec, named, path)
    refuse([*problems, *_beside_the_model(spec)])
    return FoundModel(path, spec, directory, adapter)


def _adapter_problems(spec: RunSpec[Any], key: str, path: str) -> Iterator[Problem]:
    """Yield problems of an adapter to measure, and of its base."""
    base, scores = _of_adapter(Path(path), "base_model_name_or_path"), _measures_scores(spec)
    if base is None:
        why = "The adapter does not name its base."
        yield invalid(key, show(path), why, "what `plimsoll merge --base BASE` makes of it")
        return
    yield from check_model(f"the base of {key}", base, tokenizer=not has_tokenizer(path))
    if scores != (_of_adapter(Path(path), "task_type") == "SEQ_CLS"):
        why = f"It is an adapter of a {'language' if scores else 'reward'} model."
        kind = "reward" if scores else "language"
        yield invalid(key, show(path), why, f"an adapter of a {kind} model")
    yield from check_engine_model(spec, f"the base of {key}", base)


def _model_problems(spec: RunSpec[Any], key: str, path: str) -> Iterator[Problem]:
    """Yield problems of the model of `key`."""
    yield from check_model(key, path, tokenizer=True)
    yield from check_head(key, path, scores=_measures_scores(spec))
    yield from check_engine_model(spec, key, path)


def _measures_scores(spec: RunSpec[Any]) -> bool:
    actor = spec.roles.get("actor")  # in `plimsoll sample` only engines have it
    return actor is not None and actor.head == "value"


def _beside_the_model(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield problems of the comparison model, the eval data and the machine."""
    compared = comparison_role(spec)
    if compared is not None:
        yield from check_model(f"{compared.key}.model.path", compared.model.path, tokenizer=False)
    if spec.data.eval is not None:
        from plimsoll.commands.preflight import check_source  # imports NumPy and Arrow

        for name, source in spec.data.eval_sources().items():
            yield from check_source(name, source)
    yield from missing_for_processes(spec)


def comparison_role(spec: RunSpec[Any]) -> Role | None:
    """Return the role with which the job compares a model (reference, or reward), or None."""
    return spec.roles.get("reference" if spec.sampling is None else "reward")


def _spec_of(run: RunDirectory, flags: list[str], trusted: bool) -> RunSpec[Any]:
    """Return a run's spec with the chat template of its training, unless flags give a template."""
    spec = load_run(run, flags, trusted=trusted)
    key = ("data", "chat_template")
    is_given = any(flag.path == key[: len(flag.path)] for flag in parse_flags(flags))
    if is_given or not run.template_path.is_file():
        return spec
    template = run.template_path.read_text(encoding="utf-8")
    data = spec.data.model_copy(update={"chat_template": template})
    return resolve_changed(spec, {"data": data})


def _final_model(path: Path) -> str:
    run = RunDirectory(path)
    if run.model_path.is_dir():
        return str(run.model_path)
    if run.latest_checkpoint() is None:
        why = _no_checkpoint(run)
        raise ConfigError(f"{why} It has no final model either. --model gives another one.")
    raise ConfigError(
        f"{path} has no final model. Write one from a checkpoint with `plimsoll export "
        f"{path} --to DIRECTORY`, and give it with --model."
    )


def _no_checkpoint(run: RunDirectory) -> str:
    """Return sentences that say why a run has no checkpoint, and where its model is."""
    values = read_tree_of(str(run.config_path), []).values
    if value_at(values, ("run", "keep_checkpoints")) == 0:
        why = ": its run.keep_checkpoints is 0. Train it again with 1 or more."
    else:
        why = " yet. It writes one every run.save_every steps, at its end, and when it is stopped."
    model = f" Its final model is in {run.model_path}." if run.model_path.is_dir() else ""
    return f"The run {run.path} has no checkpoint{why}{model}"


def is_adapter(directory: Path) -> bool:
    """Return whether a directory has the config file of a PEFT adapter."""
    return (directory / ADAPTER_FILE).is_file()


def refuse_no_adapter(directory: Path, base: str | None) -> None:
    """Raise ConfigError if a directory has no adapter, or the adapter's base is missing.

    `base` is the path or name of the base; None for the base that the adapter's config names.
    """
    if not is_adapter(directory):
        raise ConfigError(
            f"{str(directory)!r} is no adapter: it has no {ADAPTER_FILE}. Give a directory "
            "that PEFT or a run with an adapter has written, such as runs/NAME/model."
        )
    named = base or _of_adapter(directory, "base_model_name_or_path")
    if named is not None:
        refuse(check_model("--base", named, tokenizer=not has_tokenizer(str(directory))))


def _of_adapter(adapter: Path, key: str) -> str | None:
    """Return a text of an adapter's config, or None if it cannot be read."""
    try:
        config = parse_json((adapter / ADAPTER_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    value = config.get(key) if isinstance(config, dict) else None
    return value if isinstance(value, str) else None
