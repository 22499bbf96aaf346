"""The run directory: the paths of its files, its lock, and its cleaning before a run resumes."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.config.problems import Problem, invalid, refuse, show
from plimsoll.config.run import RunConfig
from plimsoll.errors import CannotWrite, CheckpointDamaged, ConfigError, PlimsollError
from plimsoll.run.files import (
    directory_bytes,
    explaining_errors,
    is_temporary,
    remove_directory,
    sync,
    write_whole,
)
from plimsoll.run.json_lines import keep_rows_until
from plimsoll.run.numbers import gigabytes_text
from plimsoll.run.output import tell
from plimsoll.run.state import find_damage

if TYPE_CHECKING:
    from filelock import FileLock

ROWS_OF_A_GROUP = 512
"""Responses of a row group of trajectories: a reader of a few need read no others, and what writes
them holds no more at once."""

_FOLDER_STEPS = 1000
_SETTLED_NS = 2 * 10**9
"""Age in nanoseconds from which a folder's time of change tells it from what it becomes."""
_STEP_NAME = re.compile(r"step-(\d{6,})(?:\.parquet)?")


class _Item:
    """A file or folder of a run directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run, and functions that write to them. `open_run` returns it for writing."""

    path: Path
    lock: FileLock | None = field(default=None, repr=False, compare=False)
    """The lock that is held until `close`; None for a directory that is only read."""

    config_path = _Item("config.yaml")
    """The resolved config."""
    template_path = _Item("chat_template.jinja")
    """A copy of the chat template that the config gives, made when the run began."""
    plan_path = _Item("plan.json")
    """The memory plan; missing for a model whose shape is unknown."""
    metrics_path = _Item("metrics.jsonl")
    """The metrics, one line per step."""
    ledger_path = _Item("ledger.jsonl")
    """Predicted and measured memory: lines of processes and phases whose maxima moved."""
    leaks_path = _Item("leaks.jsonl")
    """The processes that held more memory with every step, if there are any."""
    out_of_memory_path = _Item("out-of-memory.txt")
    """Why the run ran out of memory, if it did."""
    shortage_path = _Item("shortage.txt")
    """Why memory ran out last in a step that was done anew with smaller micro-batches."""
    report_path = _Item("report.html")
    """The report that the end of a run and `plimsoll report` write."""
    calibration_path = _Item("calibration.svg")
    """A chart of the reward model's calibration at the last evaluation."""
    reference_logprobs_path = _Item("reference-logprobs.parquet")
    """The reference model's log-probs, if they were computed before training."""
    journal_path = _Item("journal.bin")
    """What was sampled and scored, and not yet learned from."""
    bad_rows_path = _Item("bad_rows.jsonl")
    """The rows of data that were skipped."""
    log_path = _Item("run.log")
    """The console output of the run, and why it failed; the older part is in `run-older.log`."""
    end_path = _Item("end.json")
    """How the run ended; missing while the run goes on, or if it was killed."""
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
    """The final model, written at the end of the run."""

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock is not None:
            with suppress(OSError):  # the error that the disk caused is reported instead
                # files that ranks write; other commands may write beside them
                _remove_leftovers(self.path, "checkpoints/.*", ".model.*")
        self.close()

    def close(self) -> None:
        """Release the lock, so that another process can write to the directory."""
        if self.lock is not None:
            self.lock.release()

    def checkpoint_path(self, step: int) -> Path:
        """Return the path of the checkpoint after an optimizer step.

        Write the checkpoint with `whole_directory`.
        """
        return self.path / "checkpoints" / f"step-{step:06d}"

    def trajectories_path(self, step: int) -> Path:
        """Return the path of the Parquet file with an optimizer step's trajectories.

        From step 1,000 on, each thousand has a folder, named after its first step.
        """
        folder, name = self.path / "trajectories", f"step-{step:06d}.parquet"
        if step < _FOLDER_STEPS or (folder / name).exists():  # an earlier version wrote it
            return folder / name
        return folder / f"{step // _FOLDER_STEPS * _FOLDER_STEPS:06d}" / name

    def write_config(self, text: str, template: str | None = None) -> None:
        """Write the resolved config and its chat template; without one, remove an old template.

        `none` is no template, either.
        """
        if template in (None, "none"):
            self.template_path.unlink(missing_ok=True)
        else:
            write_whole(self.template_path, template)
        write_whole(self.config_path, text)

    def sync_rows(self) -> None:
        """Flush the files of metrics, ledger and leaks to the disk (fsync).

        Call this before a checkpoint is written. Otherwise a power failure could leave a
        checkpoint without the rows of its steps, and nothing would write these rows again.
        """
        for path in (self.metrics_path, self.ledger_path, self.leaks_path, self.path):
            if path.exists():
                with explaining_errors(path):
                    sync(path)

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Return (step, path) of the last complete checkpoint, or None."""
        return max(self.checkpoints().items(), default=None)

    def checkpoints(self) -> dict[int, Path]:
        """Return the paths of the complete checkpoints by step, in the order of steps."""
        return _by_step(self.path / "checkpoints")

    def require_space(self, planned_bytes: int) -> None:
        """Raise CannotWrite if the disk has no room for one more checkpoint.

        A checkpoint takes what the last one takes; the first one takes `planned_bytes`.
        """
        latest = self.latest_checkpoint()
        needed = directory_bytes(latest[1]) if latest else planned_bytes
        with explaining_errors(self.path):
            free = shutil.disk_usage(self.path).free
        if needed > free:
            kept = f"the last one is {latest[1]}" if latest else "there is none yet"
            raise CannotWrite(
                f"The disk of {self.path} has no room for the next checkpoint: it takes "
                f"{gigabytes_text(needed)}, {gigabytes_text(free)} are free, and "
                f"{gigabytes_text(needed - free)} are missing. No checkpoint was removed for it "
                f"({kept}). Free disk space, then resume the run; a checkpoint is whole before "
                f"older ones go, so there is always one more than run.keep_checkpoints."
            )

    def trajectories(self) -> dict[int, Path]:
        """Return the paths of the trajectory files by step, in the order of steps."""
        folders = trajectory_folders(self.path)
        return dict(sorted(chain.from_iterable(_by_step(each).items() for each in folders)))

    def last_sampled_step(self) -> int | None:
        """Return the last step with trajectories, or None; reads few folders."""
        listed = map(_by_step, reversed(trajectory_folders(self.path)))
        return next((max(by_step) for by_step in listed if by_step), None)

    def sampled_step(self, step: int | None) -> tuple[int, Path]:
        """Return (step, path) of a step's trajectory file; of the last one if `step` is None.

        Raises ConfigError if there is none.
        """
        files = self.trajectories()
        number = max(files, default=0) if step is None else step
        if number not in files:
            kept = f"Give one of {min(files)} to {max(files)}" if files else "It has none at all"
            raise ConfigError(f"{self.path} has no trajectories of step {number}. {kept}.")
        return number, files[number]

    @property
    def streams_path(self) -> Path:
        """The file with the numbers of items in the blocks of streams of rows."""
        return self.path / "streams.jsonl"

    def bad_path(self, step: int) -> Path:
        """Return the path of the Parquet file with what a bad step would have learned from."""
        return self.path / "bad" / f"step-{step:06d}.parquet"

    def bad_steps(self) -> dict[int, Path]:
        """Return the paths of what bad steps would have learned from, by step."""
        return _by_step(self.path / "bad")

    def remove_trajectories_after(self, step: int) -> None:
        """Remove the trajectory files of later steps."""
        for written_step, path in self.trajectories().items():
            if written_step > step:
                path.unlink()

    def prune_checkpoints(self, keep: int, best_step: int | None = None) -> None:
        """Remove all checkpoints except the last `keep` and the checkpoint of `best_step`.

        If `keep` is 0, remove nothing: such a run writes no checkpoints, and keeps the checkpoint
        that it resumed from.
        """
        if keep == 0:
            return
        for step, path in [*self.checkpoints().items()][:-keep]:
            if step != best_step:
                remove_directory(path)

    def saved_bytes(self) -> int:
        """Return the bytes of all checkpoints and the final model on the disk."""
        return sum(map(directory_bytes, [*self.checkpoints().values(), self.model_path]))

    def holds_run(self) -> bool:
        """Return whether metrics, a checkpoint or a final model exist here."""
        traces = (self.metrics_path, self.model_path, self.path / "checkpoints")
        return any(path.exists() for path in traces)


class TrajectoryPruner:
    """Removes the trajectory files of a run that its settings do not keep, each once.

    Files of steps after the oldest of the last checkpoints stay: a resume learns from them again.
    """

    def __init__(self, run: RunDirectory, config: RunConfig) -> None:
        self._run, self._config = run, config
        self._pruned = 0

    def prune(self, step: int) -> None:
        """Remove what need not be kept, now that the file of `step` is there."""
        kept, config = self._config.keep_trajectories, self._config
        if kept.last is None:
            return
        until = step - kept.last
        if config.keep_checkpoints:
            last_checkpoints = [*self._run.checkpoints()][-config.keep_checkpoints :]
            if last_checkpoints or config.save_every or config.best:
                until = min(until, *last_checkpoints[:1] or [0])
        for old in range(self._pruned + 1, until + 1):
            if kept.every is None or old % kept.every:
                self._run.trajectories_path(old).unlink(missing_ok=True)
        self._pruned = max(self._pruned, until)


def existing_run(path: Path) -> RunDirectory:
    """Return the run directory at a path, for reading.

    Raises ConfigError if it is no directory, and the errors of `refuse_strange_files`.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is no directory. Give the run.directory of a run.")
    refuse_strange_files(path)
    return RunDirectory(path)


def refuse_strange_files(path: Path) -> None:
    """Raise ConfigError if a link in a run directory leads out of it, or if a file is none.

    What is read of somebody else's run would be a file of one's own, and stand in a report; and
    reading a pipe has no end. Checkpoints, the final model and TensorBoard's files may be
    elsewhere.
    """
    home, now = path.resolve(), time.time_ns()
    for folder in (path, *trajectory_folders(path), path / "bad"):
        if folder.is_dir():
            # A watched run is looked at often. What has just changed may change once more at the
            # same time of its clock.
            changed = folder.stat().st_ctime_ns
            _refuse_strange_entries(folder, home, changed if now - changed > _SETTLED_NS else now)


@lru_cache(maxsize=1024)
def _refuse_strange_entries(folder: Path, home: Path, changed: int) -> None:
    """Refuse strange files of one folder, unless they were looked at after it `changed`."""
    elsewhere = {"checkpoints", "model", "tensorboard"}
    for entry in os.scandir(folder):  # entries know what they are without a call of the system
        item = Path(entry)
        may_lead_out = entry.is_symlink() and entry.name not in elsewhere
        if may_lead_out and not item.resolve().is_relative_to(home):
            raise ConfigError(
                f"{item} is a link to {item.resolve()}, which is outside of the run directory. "
                "Reports would show what is there. Put the file itself there, or remove the link."
            )
        if not (entry.is_file() or entry.is_dir()) and item.exists():
            raise ConfigError(f"{item} is neither a file nor a directory. Remove it.")


def open_run(
    config: RunConfig,
    note: Callable[[str], None] = tell,
    fetch: Callable[[RunDirectory, RunConfig], None] | None = None,
) -> RunDirectory:
    """Return the config's run directory, locked for this process; make it if it is missing.

    A resumed run continues after its last whole checkpoint; damaged checkpoints after that one are
    put aside, and `note` gets a message for each. `fetch` may then add a newer one. Metrics and
    ledger rows of later steps are removed, as these steps are done again. Half-written files of a
    killed process are removed, too.

    Raises ConfigError if the directory cannot be used, if `run.resume` forbids it, or if all
    checkpoints are damaged.
    """
    path = Path(config.directory)
    run = RunDirectory(path, lock_directory(path))
    try:
        refuse(resume_problems(config))
        _put_damaged_aside(run, note)
        if fetch is not None:
            fetch(run, config)
            refuse(_missing_checkpoint(config))
        _tidy(run)
    except BaseException:
        run.close()
        raise
    return run


def resume_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each reason why `run.resume` forbids a run in its directory."""
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
    if config.mirror is None:  # else there may be one to fetch
        yield from _missing_checkpoint(config)


def _missing_checkpoint(config: RunConfig) -> Iterator[Problem]:
    if config.resume == "must" and RunDirectory(Path(config.directory)).latest_checkpoint() is None:
        yield invalid(
            "run.directory",
            show(config.directory),
            "It holds no checkpoint to resume from, and run.resume is must.",
            "correct run.directory; or run.resume: auto, which starts anew where there is none",
        )


def _put_damaged_aside(run: RunDirectory, note: Callable[[str], None]) -> None:
    """Rename the damaged checkpoints after the last whole one, so that the run goes on from that.

    The sizes of all files are compared, and the content of those that are no role's: a role's are
    compared by the ranks that read them.

    Raises ConfigError if no checkpoint is whole; then all keep their names.
    """
    damages: dict[Path, str] = {}
    last_whole = None
    for path in reversed(run.checkpoints().values()):
        damage = find_damage(path, with_roles=False)
        if not damage:
            last_whole = path
            break
        damages[path] = damage
    if last_whole is None and damages:
        raise _none_is_whole(run, damages)
    for path, damage in damages.items():
        note(_put_aside(path, damage, last_whole))


def leave_out_damaged(run: RunDirectory, step: int, damage: str) -> PlimsollError:
    """Rename the checkpoint of a step, which ranks found damaged; return the error for it.

    It is a CheckpointDamaged: the run goes on from the checkpoint before. If there is none, it is a
    ConfigError, and the checkpoint keeps its name.
    """
    path = run.checkpoint_path(step)
    earlier = [other for number, other in run.checkpoints().items() if number < step]
    if not earlier:
        return _none_is_whole(run, {path: damage})
    return CheckpointDamaged(_put_aside(path, damage, earlier[-1]))


def _put_aside(path: Path, damage: str, instead: Path | None) -> str:
    """Rename a damaged checkpoint, and return a text that says so."""
    names = (f"{path.name}.damaged{f'-{n}' * (n > 1)}" for n in count(1))
    aside = next(free for free in map(path.with_name, names) if not free.exists())
    with explaining_errors(aside):
        path.replace(aside)
    return (
        f"{path} is damaged: {damage}. It is kept as {aside.name}, and the run goes on from "
        f"{instead}"
    )


def _none_is_whole(run: RunDirectory, damages: Mapping[Path, str]) -> ConfigError:
    lines = "".join(f"\n  {path}: {damage}" for path, damage in damages.items())
    return ConfigError(
        f"No checkpoint of {run.path} is whole, so the run cannot go on from one. These keep their "
        f"names. Put the files back from a copy, or choose another run.directory. To begin this "
        f"run anew, move {run.path / 'checkpoints'} away.{lines}"
    )


def _tidy(run: RunDirectory) -> None:
    """Remove leftovers of killed processes, and rows of steps after the checkpoint."""
    folders = ("checkpoints", "trajectories", "trajectories/*", "tensorboard")
    _remove_leftovers(run.path, ".*", *(f"{folder}/.*" for folder in folders))
    run.out_of_memory_path.unlink(missing_ok=True)
    run.end_path.unlink(missing_ok=True)
    latest = run.latest_checkpoint()
    step = latest[0] if latest else -1  # without a checkpoint even step 0 is done again
    for rows_path in (run.metrics_path, run.ledger_path, run.leaks_path):
        keep_rows_until(rows_path, step)


def _remove_leftovers(path: Path, *patterns: str) -> None:
    """Remove half-written files and directories that match the patterns."""
    for item in [item for pattern in patterns for item in path.glob(pattern)]:
        if is_temporary(item) and item.is_dir():
            remove_directory(item)
        elif is_temporary(item):
            item.unlink()


def is_checkpoint_name(name: str) -> bool:
    """Return whether a directory of this name is a checkpoint."""
    return re.fullmatch(r"step-\d{6,}", name) is not None


def trajectory_folders(run: Path) -> list[Path]:
    """Return the folders of a run's trajectories, those of the first steps before others."""
    folder = run / "trajectories"
    entries = os.scandir(folder) if folder.is_dir() else ()
    thousands = sorted((e.name for e in entries if e.name.isdecimal() and e.is_dir()), key=int)
    return [folder, *(folder / name for name in thousands)] if folder.is_dir() else []


def _by_step(folder: Path) -> dict[int, Path]:
    """Return the items of a folder that are named after a step, in the order of steps."""
    items = folder.iterdir() if folder.is_dir() else ()
    matches = [(_STEP_NAME.fullmatch(item.name), item) for item in items]
    return dict(sorted((int(match[1]), item) for match, item in matches if match))


LOCK_FILE = "run.lock"


def lock_directory(path: Path) -> FileLock:
    """Make and lock a directory. The lock is held until its release or the end of the process.

    The system drops the lock of a killed process. So a lock file that remains locks nothing.

    Raises ConfigError if the directory cannot be used, or if another process holds the lock; the
    message has its pid if it is known.
    """
    from filelock import FileLock, Timeout  # a plan needs no lock

    file = path / LOCK_FILE
    # On a disk without system locks, filelock's soft lock would outlive a killed process.
    lock = FileLock(file, blocking=False, thread_local=False, fallback_to_soft=False)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        owner = _owner(file.read_text(encoding="ascii").strip())
        raise ConfigError(
            f"The run directory {path} is in use by {owner}: two runs would overwrite "
            f"each other. Wait for it, stop it, or choose another run.directory. (The command is "
            f"started once, without torchrun or srun: it starts its cluster.ranks itself.)"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"run.directory {str(path)!r} cannot be used: {error}. "
            f"Choose a directory that can be written to."
        ) from error
    file.write_text(f"{os.getpid()}\n", encoding="ascii")
    return lock


def _owner(number: str) -> str:
    """Return a name for the process that holds the lock: `process PID` if it is running.

    A process takes the lock before it writes its pid. So the file may be empty, or have the pid of
    an earlier process; then the name is `another process`.
    """
    alive = number.isdecimal() and Path(f"/proc/{number}").exists()
    return f"process {number}" if alive else "another process"
