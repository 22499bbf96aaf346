"""The run directory: what is where, and what a run that resumes finds in it.

config.yaml  metrics.jsonl  bad_rows.jsonl  trajectories/step-000001.parquet
checkpoints/step-000010/  tensorboard/  model/  run.lock
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TextIO

from plimsoll.config.run import RunConfig
from plimsoll.errors import ConfigError
from plimsoll.records import Trajectory
from plimsoll.run import trajectories as trajectory_files
from plimsoll.run.files import is_temporary, remove_directory, write_whole
from plimsoll.run.lock import lock_directory
from plimsoll.run.rows import Row, append_row, keep_rows_until, write_rows

_STEP_NAME = re.compile(r"step-(\d{6,})(?:\.parquet)?")


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run and what is written there. `open_run` makes one to write to.

    path: the directory.
    lock: held until `close`; a directory that is only read has none.
    """

    path: Path
    lock: TextIO | None = field(default=None, repr=False, compare=False)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another process write to the directory."""
        if self.lock is not None:
            self.lock.close()

    @property
    def config_path(self) -> Path:
        """The resolved config, as YAML."""
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        """The metrics, a JSON line per step."""
        return self.path / "metrics.jsonl"

    @property
    def bad_rows_path(self) -> Path:
        """The rows of data that were skipped, as JSON lines."""
        return self.path / "bad_rows.jsonl"

    @property
    def tensorboard_path(self) -> Path:
        """The directory of the TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def model_path(self) -> Path:
        """The directory of the final model; written whole, at the end of the run."""
        return self.path / "model"

    def checkpoint_path(self, step: int) -> Path:
        """The directory of the checkpoint after a step; to be made with `whole_directory`."""
        return self.path / "checkpoints" / f"step-{step:06d}"

    def trajectories_path(self, step: int) -> Path:
        """The Parquet file with the trajectories of a step."""
        return self.path / "trajectories" / f"step-{step:06d}.parquet"

    def write_config(self, text: str) -> None:
        """Write the resolved config."""
        write_whole(self.config_path, text)

    def write_bad_rows(self, rows: Iterable[Row]) -> None:
        """Write the rows of data that were skipped."""
        write_rows(self.bad_rows_path, rows)

    def append_metrics(self, row: Row) -> None:
        """Add the row of a step; its `step` is the number of the step."""
        append_row(self.metrics_path, row)

    def write_trajectories(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        advantages_mean: Sequence[float] | None,
    ) -> None:
        """Write the trajectories of a step; advantages_mean: each one's mean advantage."""
        path = self.trajectories_path(step)
        trajectory_files.write_trajectories(path, step, trajectories, advantages_mean)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """The last step that has a whole checkpoint, and where it is.

        Checkpoints get their names when they are complete, so a half-written one is never found.
        """
        return max(_by_step(self.path / "checkpoints"), default=None)

    def prune_checkpoints(self, keep: int) -> None:
        """Remove all but the last `keep` checkpoints."""
        assert keep >= 1
        for _, path in sorted(_by_step(self.path / "checkpoints"))[:-keep]:
            remove_directory(path)

    def is_complete(self) -> bool:
        """Whether the run came to its end: the final model is there."""
        return self.model_path.is_dir()

    def holds_run(self) -> bool:
        """Whether a run got anywhere here; one that was refused before its first step did not."""
        traces = (self.metrics_path, self.model_path, self.path / "checkpoints")
        return any(path.exists() for path in traces)


def open_run(config: RunConfig) -> RunDirectory:
    """Make or reopen the directory as `run.resume` says, and lock it for this process.

    A run that resumes goes on after its latest checkpoint: metrics and trajectories of later
    steps, which will be done again, are dropped, and so is what a killed process left half
    written.

    Raises ConfigError where the directory must not, or cannot, be used.
    """
    path = Path(config.directory)
    run = RunDirectory(path, _locked(path))
    try:
        _check_resume(run, config)
        _tidy(run)
    except BaseException:
        run.close()
        raise
    return run


def _locked(path: Path) -> TextIO:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return lock_directory(path)
    except OSError as error:
        raise ConfigError(
            f"run.directory {str(path)!r} cannot be used: {error}. "
            f"Choose a directory that can be written to."
        ) from error


def _check_resume(run: RunDirectory, config: RunConfig) -> None:
    latest = run.latest_checkpoint()
    if config.resume == "never" and run.holds_run():
        state = f"its last checkpoint is of step {latest[0]}" if latest else "without a checkpoint"
        raise ConfigError(
            f"run.directory {config.directory!r} already holds a run ({state}), and run.resume "
            f"is 'never'. Set run.resume to 'auto' to continue it, choose another run.directory, "
            f"or remove the directory to start anew."
        )
    if config.resume == "must" and latest is None:
        raise ConfigError(
            f"run.directory {config.directory!r} holds no checkpoint to resume from, and "
            f"run.resume is 'must'. Correct run.directory, or set run.resume to 'auto' to start "
            f"at step 1 where there is none."
        )


def _tidy(run: RunDirectory) -> None:
    """Take away leftovers of killed processes, and what belongs to steps after the checkpoint."""
    for folder in (run.path, run.path / "checkpoints", run.path / "trajectories"):
        for item in _items(folder):
            if is_temporary(item) and item.is_dir():
                remove_directory(item)
            elif is_temporary(item):
                item.unlink()
    latest = run.latest_checkpoint()
    step = latest[0] if latest else 0
    keep_rows_until(run.metrics_path, step)
    for found, path in _by_step(run.path / "trajectories"):
        if found > step:
            path.unlink()


def _by_step(folder: Path) -> list[tuple[int, Path]]:
    matches = [(_STEP_NAME.fullmatch(item.name), item) for item in _items(folder)]
    return [(int(match[1]), item) for match, item in matches if match]


def _items(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
