"""Put all that a step of RL computed with into one file, and check such a file without weights.

`plimsoll rollouts RUN --bundle FILE` writes a step's rows, tokens, log-probs, rewards and
advantages, its config and its metrics, as a zip archive without compression. `plimsoll check-bundle
FILE` computes rewards, advantages and the loss again, on another machine, without the model.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from plimsoll import __version__
from plimsoll.algorithm.choice import correction, policy_loss
from plimsoll.algorithm.inputs import PolicyLossInputs
from plimsoll.algorithm.policy_objective import PolicyObjectiveInputs, policy_objective
from plimsoll.commands.found_models import refuse_code
from plimsoll.config.load import read_tree_of, validate
from plimsoll.config.rl import RlAlgorithm
from plimsoll.config.yaml_tree import Tree, value_at
from plimsoll.errors import ConfigError
from plimsoll.records import (
    ADVANTAGES,
    COLUMNS,
    RETURNS,
    TRAINER_LOGPROBS,
    BatchColumns,
    BatchCounts,
    Column,
    Trajectory,
)
from plimsoll.rl.batch import (
    Batch,
    estimate_advantages,
    masked,
    policy_columns,
    policy_logprobs,
    policy_terms,
    trajectory_metrics,
    with_columns,
)
from plimsoll.rl.layout import lay_out, learned_columns
from plimsoll.run.directory import existing_run
from plimsoll.run.files import whole_file
from plimsoll.run.json_lines import iter_rows
from plimsoll.run.numbers import bytes_text, plural
from plimsoll.run.trajectories import read_draw, read_trajectories

SCHEMA = 1
"""The version of a bundle's form; another one is refused."""
_ABOUT = "bundle.json"
_FILES = ("config.yaml", "metrics.json", "trajectories.parquet")
_MOST_JSON = 2**24
"""The most bytes of the description."""
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6
"""How far a number may be off that is computed again: sums in another order are rounded anew."""


def write_bundle(directory: Path, wanted: int | None, out: Path) -> str:
    """Write a step (None: the last that was sampled) as one file; return what was written.

    Raises ConfigError if `out` exists, or the run has no trajectories or metrics of the step.
    """
    run = existing_run(directory)
    step, trajectories = run.sampled_step(wanted)
    if out.exists():
        raise ConfigError(f"--bundle {out} exists. Remove it, or give another file.")
    rows = (row for row in iter_rows(run.metrics_path) if row.get("step") == step)
    metrics = next(rows, None)
    if metrics is None:
        raise ConfigError(
            f"{run.metrics_path} has no row of step {step}: the step did not end. Give an earlier "
            "--step."
        )
    contents = {
        "config.yaml": run.config_path.read_bytes(),
        "metrics.json": json.dumps(metrics).encode(),
        "trajectories.parquet": trajectories.read_bytes(),
    }
    about = {
        "schema": SCHEMA,
        "plimsoll": __version__,
        "step": step,
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    with whole_file(out) as partial, zipfile.ZipFile(partial, "w") as archive:
        archive.writestr(_ABOUT, json.dumps(about, indent=1))
        for name, content in contents.items():
            archive.writestr(name, content)
    size = bytes_text(out.stat().st_size)
    return (
        f"Step {step} of {directory} is in {out} ({size}): prompts, responses, rewards, config. "
        f"Check it anywhere by: plimsoll check-bundle {shlex.quote(str(out))}"
    )


def check_bundle(path: Path, *, trusted: bool) -> tuple[list[str], list[str]]:
    """Compute again what a bundle's step computed, and compare.

    Return a line for all that was compared, and the lines of what is not as it was written.

    Raises ConfigError if the file is no bundle, is damaged or of another schema, or if its config
    names code of its own for advantage or loss and is not `trusted`.
    """
    with TemporaryDirectory() as folder:
        about = _unpack(path, Path(folder))
        files = {name: Path(folder) / name for name in _FILES}
        tree = read_tree_of(str(files["config.yaml"]), [])
        metrics = json.loads(files["metrics.json"].read_text())
        values = value_at(tree.values, ("algorithm",)) or {}
        if not trusted:
            refuse_code(str(path), Tree({"algorithm": values}, {}))
        step = _Step(
            algorithm=validate(RlAlgorithm, Tree(values, {})),
            longest=_longest(tree),
            metrics={k: v for k, v in dict(metrics).items() if isinstance(v, int | float)},
            episodes=read_trajectories(files["trajectories.parquet"], COLUMNS.values()),
            greedy=getattr(read_draw(files["trajectories.parquet"]), "baselines", {}),
        )
        head = f"step {about['step']}, schema {SCHEMA}, written by plimsoll {about['plimsoll']}"
        found = [*_compare(step)]
    lines = [f"{head}: {plural(len(step.episodes), 'response')}", *(line for line, _ in found)]
    return lines, [line for line, is_equal in found if not is_equal]


def _unpack(path: Path, folder: Path) -> dict[str, Any]:
    """Write a bundle's files to a folder, and return what it says about itself."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}
            stored = all(info.compress_type == zipfile.ZIP_STORED for info in members.values())
            if {*members} != {_ABOUT, *_FILES} or len(archive.infolist()) != len(members):
                raise ValueError(f"it has {', '.join(sorted(members)) or 'no files'}")
            if not stored or members[_ABOUT].file_size > _MOST_JSON:
                raise ValueError("its files are compressed, or larger than a bundle's")
            about = json.loads(archive.read(_ABOUT))
            if about["schema"] != SCHEMA:
                raise ConfigError(
                    f"{path} is a bundle of schema {about['schema']}, written by plimsoll "
                    f"{about['plimsoll']}. This is {__version__}, which reads schema {SCHEMA}: "
                    "check it with that version."
                )
            for name in _FILES:
                content = archive.read(name)
                if hashlib.sha256(content).hexdigest() != about["sha256"][name]:
                    raise ValueError(f"{name} has another SHA-256 than the bundle says")
                (folder / name).write_bytes(content)
            about = {key: about[key] for key in ("step", "plimsoll")}
            dict(json.loads((folder / "metrics.json").read_text()))
    except (
        *(OSError, zipfile.BadZipFile, RuntimeError, ValueError, LookupError, TypeError),
        *(AttributeError, pa.ArrowException),
    ) as error:
        raise ConfigError(
            f"{path} is no whole bundle: {error}. Copy it again, or write it by `plimsoll rollouts "
            "RUN --step N --bundle FILE`."
        ) from error
    return about


def _longest(tree: Tree) -> int | None:
    """Return the most tokens of a response, or of an episode; None if the config does not say."""
    environments = value_at(tree.values, ("environments",)) or {}
    if not environments:
        return cast(int | None, value_at(tree.values, ("rollout", "sampling", "max_new_tokens")))
    limits = [value_at(environments, (name, "max_tokens")) for name in environments]
    return max(limits) if all(isinstance(limit, int) for limit in limits) else None


@dataclass(frozen=True)
class _Step:
    """A step as it was written."""

    algorithm: RlAlgorithm
    longest: int | None
    """The most tokens of a response; None if the config does not say."""
    metrics: Mapping[str, float]
    episodes: list[Trajectory]
    greedy: Mapping[int, float]


_Line = tuple[str, bool]
"""What was compared, and whether it is equal."""


def _compare(step: _Step) -> Iterator[_Line]:
    if len({tuple(part.name for part in t.rewards) for t in step.episodes}) != 1:
        yield "rewards: not every response has the same parts, or there is no response", False
        return
    yield from _compare_metrics(step)
    if ADVANTAGES not in step.episodes[0].columns:
        yield "advantages: none were estimated", True
        return
    batch, columns = _batch(step)
    coefficient = step.metrics.get("kl_coefficient", 0.0)
    estimated = estimate_advantages(batch, columns, step.algorithm, coefficient, step.greedy)
    again = with_columns(step.episodes, batch, estimated)
    for column in (ADVANTAGES, RETURNS):
        yield from _compare_tokens(column, _arrays(step.episodes, column), _arrays(again, column))
    yield _compare_loss(step, batch, {**columns, **estimated})


def _batch(step: _Step) -> tuple[Batch, BatchColumns]:
    """Return the step's episodes as one pack each, and the numbers that were computed for them."""
    episodes = masked(step.episodes, step.algorithm)
    branches = [branch for episode in episodes for branch in episode.branches]
    longest = max(len(t.prompt.tokens) + len(t.response_tokens) for t in branches)
    minis = lay_out(branches, [np.arange(len(branches))], 1, longest, beside=None)
    batch = Batch(episodes, branches, minis, minis, (0, 0))
    return batch, learned_columns(branches, COLUMNS.values())


def _arrays(episodes: Sequence[Trajectory], column: Column) -> list[NDArray[Any]]:
    """Return the column of each branch; nothing if the trajectories lack it."""
    branches = [branch for episode in episodes for branch in episode.branches]
    return [branch.columns[column] for branch in branches if column in branch.columns]


def _compare_metrics(step: _Step) -> Iterator[_Line]:
    """Compare the metrics of rewards and lengths with those of the trajectories."""
    again = trajectory_metrics(step.episodes)
    known = {name: value for name, value in again.items() if name in step.metrics}
    wrong = {
        name: value
        for name, value in known.items()
        if not np.isclose(value, step.metrics[name], _RELATIVE, _ABSOLUTE, equal_nan=True)
    }
    yield f"metrics: {len(known) - len(wrong)} of {len(known)} equal", True
    for name, value in wrong.items():
        yield f"metrics: {name} was {step.metrics[name]:.6g}, and is {value:.6g}", False


def _compare_tokens(
    column: Column, written: Sequence[NDArray[Any]], again: Sequence[NDArray[Any]]
) -> Iterator[_Line]:
    if not written or not again:
        if written or again:
            yield f"{column.name}: in the bundle or in its config alone", False
        return
    one, other = np.concatenate(written), np.concatenate(again)
    off = ~np.isclose(one, other, _RELATIVE, _ABSOLUTE)
    most = float(np.abs(one - other).max(initial=0.0))
    equal = f"{len(one) - int(off.sum()):,} of {plural(len(one), 'token')} equal"
    yield f"{column.name}: {equal}, largest difference {most:.3g}", not off.any()


def _compare_loss(step: _Step, batch: Batch, columns: BatchColumns) -> _Line:
    """Compare the policy loss at the weights that sampled with that of the metrics."""
    algorithm = step.algorithm
    if algorithm.aggregation == "constant" and not (algorithm.aggregation_tokens or step.longest):
        return "policy loss: the config does not say algorithm.aggregation_tokens", True
    written = step.metrics.get("policy_loss")
    if written is None:
        return "policy loss: the step learned by none", True
    loss = _policy_loss(step, batch, columns, shift=0.0)
    text = f"policy loss: {loss:.6g} at the weights that sampled, and {written:.6g} was learned"
    if algorithm.epochs * algorithm.mini_batches > 1:
        return f"{text} (a mean of updates whose later weights are not here)", True
    equal = bool(np.isclose(loss, written, rtol=1e-4, atol=1e-6))
    shifted = _policy_loss(step, batch, columns, shift=-0.5)
    if TRAINER_LOGPROBS not in columns and not np.isclose(loss, shifted, _RELATIVE, _ABSOLUTE):
        return f"{text} (it depends on log-probs of the update, which are not here)", True
    return text, equal


def _policy_loss(step: _Step, batch: Batch, columns: BatchColumns, *, shift: float) -> float:
    """Return the policy loss of a policy that is the old one, its log-probs shifted by a number."""
    algorithm = step.algorithm
    tensors = {
        column: torch.from_numpy(np.concatenate(entries))
        for column, entries in policy_columns(columns, kl_loss=False).items()
    }
    old_L = torch.from_numpy(np.concatenate(policy_logprobs(columns)) + shift)
    lengths = [len(own) for own in columns[ADVANTAGES]]
    cu_loss_tokens = torch.from_numpy(np.cumsum([0, *lengths]))
    policy = PolicyLossInputs(old_L, old_L, tensors[ADVANTAGES], cu_loss_tokens, tensors)
    inputs = PolicyObjectiveInputs(policy, torch.zeros_like(old_L))
    found = policy_objective(
        inputs,
        BatchCounts(len(old_L), len(batch.trajectories)),
        policy_terms(algorithm, step.longest or 1, 0.0),
        policy_loss(algorithm.policy_loss),
        None if algorithm.correction is None else correction(algorithm.correction),
    )
    return float(found.metrics["policy_loss"])
