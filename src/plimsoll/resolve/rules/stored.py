"""Rules about the trajectories that a run replays: they exist, and fit the run's settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from plimsoll.config.problems import Problem, Section
from plimsoll.resolve.model_files import read_model_json
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.directory import RunDirectory
from plimsoll.run.numbers import plural

_TOKENS = ("prompt_tokens", "tokens")


def check_replayed(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield problems of the stored trajectories that this run replays (`rollout.replay`).

    Only the footers of the Parquet files are read: columns, row counts and ranges of values.
    """
    path = None if spec.sampling is None else spec.sampling.rollout.replay
    if path is None:
        return
    at, run = Section("rollout", spec.config.rollout), RunDirectory(Path(path))
    files = run.trajectories()
    if run.path.resolve() == Path(spec.run.directory).resolve():
        why = "It is run.directory itself, whose trajectories this run writes."
        yield at.invalid("replay", why, "another run.directory", "replay-steps")
    elif not run.path.is_dir():
        why = "There is no such directory."
        yield at.invalid("replay", why, "the run.directory of a run that sampled", "replay-steps")
    elif not files:
        why = "It holds no trajectories: no run of reinforcement learning has done a step there, "
        why += "or its run.keep_trajectories was false."
        fix = "the run.directory of a run that kept them"
        yield at.invalid("replay", why, fix, "replay-steps")
    else:
        yield from _steps(at, files, spec)


def _steps(at: Section, files: Mapping[int, Path], spec: RunSpec[Any]) -> Iterator[Problem]:
    last = spec.known_steps
    lacking = [step for step in range(1, (last or 1) + 1) if step not in files]
    if lacking:
        there = f"It has the trajectories of {plural(len(files), 'step')}, up to step {max(files)}"
        why = f"{there}, and not of step {lacking[0]}, which run.steps or run.epochs ask for."
        before = next(step for step in range(len(files) + 1) if step + 1 not in files)
        fix = f"run.steps: {before}" if before else "the run.directory of a whole run"
        yield at.invalid("replay", why, fix, "replay-steps")
        return
    for step in range(1, (last or max(files)) + 1):
        if step in files and (problem := _file(at, files[step], spec)) is not None:
            yield problem
            return


def _file(at: Section, path: Path, spec: RunSpec[Any]) -> Problem | None:
    """Return the first problem of a step's file, or None."""
    try:
        metadata = pq.read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        why = f"{path} cannot be read: {error}."
        return at.invalid("replay", why, "a run whose files are whole", "replay-steps")
    assert spec.sampling is not None
    step_size, sampling = spec.sampling.sequences, spec.sampling
    if metadata.num_rows != step_size:
        why = f"{path} has {metadata.num_rows:,} trajectories, and a step of "
        why += f"this run learns from {sampling.prompts} x {sampling.responses} = {step_size} "
        why += "(batch.prompts, batch.responses)."
        fix = "batch.prompts and batch.responses as that run had them"
        return at.conflict("replay", why, fix, "replay-batch")
    names = {metadata.schema.column(i).path.partition(".")[0] for i in range(metadata.num_columns)}
    if sampling.rollout.routing == "sampled" and "routing" not in names:
        why = f"{path} has no experts (the column routing), which rollout.routing: sampled takes."
        fix = "rollout.routing: live, or a run that sampled with rollout.routing: sampled"
        return at.conflict("replay", why, fix, "sampled-routing")
    rows, most = read_model_json(spec.actor.model.path).get("vocab_size"), _largest_token(metadata)
    if isinstance(rows, int) and most is not None and most >= rows:
        why = f"{path} has the token {most}, and the vocabulary of {spec.actor.model.path} "
        why += f"(actor.model.path) ends at {rows - 1}."
        fix = "the run of a model with the same tokenizer"
        return at.conflict("replay", why, fix, "replay-vocabulary")
    return None


def _largest_token(metadata: pq.FileMetaData) -> int | None:
    """Return the largest token id of prompts and responses, or None if the footer lacks it."""
    largest = []
    for group in range(metadata.num_row_groups):
        columns = (metadata.row_group(group).column(i) for i in range(metadata.num_columns))
        for column in columns:
            name, statistics = column.path_in_schema.partition(".")[0], column.statistics
            if name in _TOKENS and statistics and statistics.has_min_max:
                largest.append(int(statistics.max))
    return max(largest, default=None)
