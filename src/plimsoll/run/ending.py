"""The end of a run: Ctrl-C, the file `end.json`, and advice on how to resume a failed run.

The first Ctrl-C stops the run at a point where nothing is lost, or at once while it loads. The
second stops it at once.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Literal

from plimsoll.config.secrets import mask_secrets
from plimsoll.errors import Interrupted, NodesMissing, PlimsollError, Recovery
from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import explaining_full_disk, first_line, read_record, write_whole
from plimsoll.run.output import RunLog, tell
from plimsoll.run.phases import read_current_phase

_Handler = Callable[[int, FrameType | None], object] | int | None


class StopRequest:
    """A context manager in which SIGINT and SIGTERM set `requested`, instead of ending the process.

    The loop checks `requested` at its safe points. The second signal raises KeyboardInterrupt, or
    the first signal while `at_once` is set. Works in the main thread only.
    """

    def __init__(self) -> None:
        self.requested = False
        self.full_node: str | None = None
        """Which node has hardly any memory left, if the run itself asks to stop for that."""
        self.at_once = False
        self._previous: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self.at_once:
            tell("\nstopping")
            raise KeyboardInterrupt
        tell("\nstopping after this step; Ctrl-C again to stop at once")


RESUME = "run the same command with --run.resume auto"


@dataclass(frozen=True)
class RunEnd:
    """How and when a run ended. A process that was killed writes no such record."""

    how: Literal["done", "stopped", "failed"]
    """`stopped` means on request."""
    why: str = ""
    """The first line of the error; empty if the run is done."""
    fault: Recovery = "none"
    """Whether another attempt may succeed."""
    flags: tuple[str, ...] = ()
    """Flags with which the run may go on; see `NodesMissing`."""
    step: int = 0
    """The step that was under way; 0 before the first."""
    at: float = field(default_factory=time.time)
    """Time of the end, in seconds since 1970."""

    def __str__(self) -> str:
        return f"failed: {self.why}" if self.how == "failed" else self.how


def read_end(path: Path) -> RunEnd | None:
    """Return the record in an `end.json`; None if there is no file, or another version wrote it."""
    return read_record(path, RunEnd)


@contextmanager
def recording_end(run: RunDirectory, log: RunLog) -> Iterator[None]:
    """Write to `end.json` how the block ended, and to the log the traceback of a failure.

    The error is raised again, with notes (PEP 678) that say how to resume and where the log is.
    """
    try:
        with explaining_full_disk(run.path):
            yield
    except Interrupted as error:
        log.add(str(error))
        _write(run, RunEnd("stopped", first_line(error)))
        raise
    except KeyboardInterrupt as error:
        log.add("".join(traceback.format_exception(error)))  # what was waited for
        _write(run, RunEnd("stopped", "interrupted"))
        raise
    except BaseException as error:
        if advice := how_to_go_on(run):
            error.add_note(f"  {advice}")
        log.add("".join(traceback.format_exception(error)))
        is_setting = isinstance(error, PlimsollError) and error.exit_code != PlimsollError.exit_code
        if not is_setting and run.log_path.is_file():
            error.add_note(f"  Log, with the traceback: {run.log_path}")
        if isinstance(error, PlimsollError):
            flags = error.flags if isinstance(error, NodesMissing) else ()
            _write(run, RunEnd("failed", first_line(error), error.fault, flags))
        else:
            why = f"unexpected {type(error).__name__}: {first_line(error)}"
            _write(run, RunEnd("failed", why.strip(), "error"))
        raise
    _write(run, RunEnd("done"))


def how_to_go_on(run: RunDirectory) -> str:
    """Return a sentence that says how to continue after a failure; "" if the run wrote nothing."""
    latest = run.latest_checkpoint()
    if latest is not None:
        step, path = latest
        return f"Saved: {path}. To go on after step {step}: {RESUME}"
    if run.holds_run():
        return f"No checkpoint was saved (run.save_every). To begin again: {RESUME}"
    return ""


def notes_of(error: BaseException) -> list[str]:
    """Return the notes (PEP 678) of an error; empty if it has none."""
    return [*getattr(error, "__notes__", ())]


def _write(run: RunDirectory, end: RunEnd) -> None:
    """Write the record, with the step that was under way, and remove what says the run goes on.

    An error of the disk is printed, not raised: it would hide the error that ended the run.
    """
    now = read_current_phase(run.now_path)
    # Here, as whoever reads the file may not have the variables whose values are secret.
    end = replace(end, step=0 if now is None else now.step, why=mask_secrets(end.why))
    text = json.dumps(asdict(end)) + "\n"
    try:
        write_whole(run.end_path, text)
        run.now_path.unlink(missing_ok=True)
    except PlimsollError as error:
        if not _write_over(run.now_path, text, run.end_path):
            tell(str(error))


def _write_over(path: Path, text: str, name: Path) -> bool:
    """Write a text over a small file and rename it, which a full disk has room for; return success.

    Without the record the command would start the run again, on the full disk.
    """
    try:
        with path.open("r+b") as file:
            file.write(text.encode())
            file.truncate()
        path.replace(name)
    except OSError:
        return False
    return True
