"""The run directory: which files it has, and what a resumed run finds in it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.config.problems import Problem, invalid, refuse, show
from plimsoll.config.run import RunConfig
from plimsoll.errors import ConfigError
from plimsoll.run.files import explaining_errors, is_temporary, remove_directory, sync, write_whole
from plimsoll.run.json_lines import keep_rows_until

if TYPE_CHECKING:
    from filelock import FileLock

_STEP_NAME = re.compile(r"step-(\d{6,})(?:\.parquet)?")


@dataclass(frozen=True)
class _Item:
    """A file or folder of a run directory."""

    name: str

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run, and functions that write to them; `open_run` makes one to write to."""

    path: Path
    lock: FileLock | None = field(default=None, repr=False, compare=False)
    """Lock that is held until `close`; None for a directory that is only read."""

    config_path = _Item("config.yaml")
    """The resolved config."""
    template_path = _Item("chat_template.jinja")
    """The chat template that the config gives, as it was when the run began."""
    plan_path = _Item("plan.json")
    """The plan of memory; missing for a model whose shape is unknown."""
    metrics_path = _Item("metrics.jsonl")
    """The metrics, one line per step."""
    ledger_path = _Item("ledger.jsonl")
    """Predicted and measured memory, one line per step, phase and process."""
    out_of_memory_path = _Item("out-of-memory.txt")
    """Why the run ran out of memory, if it did."""
    report_path = _Item("report.html")
    """The report that the end of a run and `plimsoll report` write."""
    calibration_path = _Item("calibration.svg")
    """How well a reward model's predictions came true at the last evaluation."""
    reference_logprobs_path = _Item("reference-logprobs.parquet")
    """The reference's log-probs, if they were computed before training."""
    bad_rows_path = _Item("bad_rows.jsonl")
    """The rows of data that were skipped."""
    log_path = _Item("run.log")
    """What the run showed on the console, and why it failed; its older part is `run-older.log`."""
    end_path = _Item("end.json")
    """How the run ended; missing while it goes on, or if it was killed."""
    now_path = _Item("now.json")
    """The current phase; exists only while a run goes on."""
    tensorboard_path = _Item("tensorboard")
    """The TensorBoard event files."""
    loggers_path = _Item("loggers.json")
    """The identities of the run in other loggers, if there are any."""
    best_path = _Item("best.jsonl")
    """The best response to each prompt, which `plimsoll sample` writes for SFT."""
    pairs_path = _Item("pairs.jsonl")
    """The best and the worst response to each prompt, which `plimsoll sample` writes for DPO."""
    model_path = _Item("model")
    """The final model; written whole, at the end of the run."""

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock is not None:
            with suppress(OSError):  # the error that the disk caused is reported instead
                # files that ranks write; other commands may write beside them
                _remove_leftovers(self.path, "checkpoints/.*", ".model.*")
        self.close()

    def close(self) -> None:
        """Let another process write to the directory."""
        if self.lock is not None:
            self.lock.release()

    def checkpoint_path(self, step: int) -> Path:
        """Return the directory of the checkpoint after a step; make it with `whole_directory`."""
        return self.path / "checkpoints" / f"step-{step:06d}"

    def trajectories_path(self, step: int) -> Path:
        """Return the Parquet file with the trajectories of a step."""
        return self.path / "trajectories" / f"step-{step:06d}.parquet"

    def write_config(self, text: str, template: str | None = None) -> None:
        """Write the resolved config, and the chat template that it gives."""
        if template is None:
            self.template_path.unlink(missing_ok=True)
        else:
            write_whole(self.template_path, template)
        write_whole(self.config_path, text)

    def write_plan(self, plan: str) -> None:
        """Write the plan of memory, which is JSON."""
        write_whole(self.plan_path, plan)

    def sync_rows(self) -> None:
        """Write metrics and ledger to the disk.

        Call it before a checkpoint: after a power failure a checkpoint must not be newer than the
        rows of its steps, which nothing would write again.
        """
        for path in (self.metrics_path, self.ledger_path, self.path):
            if path.exists():
                with explaining_errors(path):
                    sync(path)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Return the last step with a complete checkpoint and its path, or None."""
        return max(_by_step(self.path / "checkpoints"), default=None)

    def trajectories(self) -> dict[int, Path]:
        """Return the files of trajectories by step, in order."""
        return dict(sorted(_by_step(self.path / "trajectories")))

    def latest_trajectories(self) -> tuple[int, Path] | None:
        """Return the last step with trajectories and their file, or None."""
        return max(_by_step(self.path / "trajectories"), default=None)

    def prune_checkpoints(self, keep: int, best_step: int | None = None) -> None:
        """Remove all checkpoints but the last `keep` and that of the best step.

        A run that writes none (0) keeps the checkpoint that it resumed from.
        """
        if keep == 0:
            return
        for step, path in sorted(_by_step(self.path / "checkpoints"))[:-keep]:
            if step != best_step:
                remove_directory(path)

    def saved_bytes(self) -> int:
        """Return the bytes of checkpoints and final model on the disk."""
        saved = (path for _, path in _by_step(self.path / "checkpoints"))
        items = (item for folder in (*saved, self.model_path) for item in folder.rglob("*"))
        return sum(item.stat().st_size for item in items if item.is_file())

    def holds_run(self) -> bool:
        """Return whether a run did anything here, beyond being refused."""
        traces = (self.metrics_path, self.model_path, self.path / "checkpoints")
        return any(path.exists() for path in traces)


def existing_run(path: Path) -> RunDirectory:
    """Return the directory of a run, to read, or raise ConfigError if it is none."""
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory. Give the run.directory of a run.")
    return RunDirectory(path)


def open_run(config: RunConfig) -> RunDirectory:
    """Make or reopen the directory as `run.resume` says, and lock it for this process.

    A resumed run continues after its latest checkpoint. Metrics, ledger and trajectories of later
    steps are dropped, as these steps are done again; so are half-written files of a killed process.

    Raises ConfigError if the directory must not, or cannot, be used.
    """
    path = Path(config.directory)
    run = RunDirectory(path, _lock(path))
    try:
        refuse(resume_problems(config))
        _tidy(run)
    except BaseException:
        run.close()
        raise
    return run


def _lock(path: Path) -> FileLock:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return lock_directory(path)
    except OSError as error:
        raise ConfigError(
            f"run.directory {str(path)!r} cannot be used: {error}. "
            f"Choose a directory that can be written to."
        ) from error


def resume_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield why `run.resume` forbids the run to begin in its directory."""
    run, quoted = RunDirectory(Path(config.directory)), show(config.directory)
    latest = run.latest_checkpoint()
    if config.resume == "never" and run.holds_run():
        state = f"its last checkpoint is of step {latest[0]}" if latest else "without a checkpoint"
        auto = "continues it" if latest else "begins it anew"
        yield invalid(
            "run.directory",
            quoted,
            f"It already holds a run ({state}), and run.resume is never.",
            f"run.resume: auto {auto}; or choose another run.directory, or remove this one",
        )
    if config.resume == "must" and latest is None:
        yield invalid(
            "run.directory",
            quoted,
            "It holds no checkpoint to resume from, and run.resume is must.",
            "correct run.directory; or run.resume: auto, which starts anew where there is none",
        )


def _tidy(run: RunDirectory) -> None:
    """Remove leftovers of killed processes, and what belongs to steps after the checkpoint."""
    folders = ("checkpoints", "trajectories", "tensorboard")
    _remove_leftovers(run.path, ".*", *(f"{folder}/.*" for folder in folders))
    run.out_of_memory_path.unlink(missing_ok=True)
    run.end_path.unlink(missing_ok=True)
    latest = run.latest_checkpoint()
    step = latest[0] if latest else -1  # without a checkpoint even step 0 is done again
    keep_rows_until(run.metrics_path, step)
    keep_rows_until(run.ledger_path, step)
    for written_step, path in _by_step(run.path / "trajectories"):
        if written_step > step:
            path.unlink()


def _remove_leftovers(path: Path, *patterns: str) -> None:
    """Remove the half-written files of processes that were killed."""
    for item in [item for pattern in patterns for item in path.glob(pattern)]:
        if is_temporary(item) and item.is_dir():
            remove_directory(item)
        elif is_temporary(item):
            item.unlink()


def _by_step(folder: Path) -> list[tuple[int, Path]]:
    items = folder.iterdir() if folder.is_dir() else ()
    matches = [(_STEP_NAME.fullmatch(item.name), item) for item in items]
    return [(int(match[1]), item) for match, item in matches if match]


LOCK_FILE = "run.lock"


def lock_directory(path: Path) -> FileLock:
    """Return a lock of the directory, held until its release or the end of the process.

    The system drops the lock of a killed process, so a file that is left is no lock.

    Raises ConfigError if another process holds the lock; the message has its number if it is known.
    """
    from filelock import FileLock, Timeout  # a plan needs no lock

    file = path / LOCK_FILE
    # On a disk without such locks, a lock that outlives its process would not help.
    lock = FileLock(file, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        owner = _owner(file.read_text(encoding="ascii").strip())
        raise ConfigError(
            f"The run directory {path} is in use by {owner}: two runs would overwrite "
            f"each other. Wait for it, stop it, or choose another run.directory. (The command is "
            f"started once, without torchrun or srun: it starts its cluster.ranks itself.)"
        ) from error
    file.write_text(f"{os.getpid()}\n", encoding="ascii")
    return lock


def _owner(number: str) -> str:
    """Return a name for the process that holds the lock.

    A process takes the lock before it writes its number, so the file may be empty or have the
    number of an earlier process.
    """
    alive = number.isdecimal() and Path(f"/proc/{number}").exists()
    return f"process {number}" if alive else "another process"
