"""Run a job in a child process, and start it again from its last checkpoint after a fault.

The supervisor loads nothing that a run needs, so that it outlives whatever kills the run.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from plimsoll.config.base import AUTO
from plimsoll.errors import Interrupted
from plimsoll.machine.processes import tracks_resources
from plimsoll.run.directory import RunDirectory
from plimsoll.run.ending import RunEnd, read_end
from plimsoll.run.output import tell
from plimsoll.run.phases import (
    BEAT_SECONDS,
    VARIABLE,
    CurrentPhase,
    OpenRun,
    count_of,
    read_current_phase,
    read_open_run,
    recent,
)

_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
"""Seconds before the first and before a later start; each wait is four times the one before."""
_TRACKERS_SECONDS = 10.0
"""How long processes may take that remove what others have left."""
_ASKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask the run to stop."""
_FROM_A_PROCESS = 0
"""The code (si_code, SI_USER) of a signal that `kill` sent; a terminal's reaches the child, too."""
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


@dataclass(frozen=True)
class Attempt:
    """One start of the run, after its end.

    Attributes:
        code: the exit code of the child process; negative: the signal that killed it.
        open: what the run told, if it came to read its settings.
        end: how it ended; None if it was killed.
        now: the phase that it was killed in, if it was killed.
        asked: whether it was asked to stop meanwhile.
        at: the time of its end, in seconds of the monotonic clock.
    """

    code: int
    open: OpenRun | None = None
    end: RunEnd | None = None
    now: CurrentPhase | None = None
    asked: bool = False
    at: float = 0.0

    @property
    def was_killed(self) -> bool:
        """Whether it ended without an error message."""
        is_begun = self.open is not None and (self.open.is_open or self.code < 0)
        return is_begun and self.end is None

    @property
    def is_error(self) -> bool:
        """Whether an error of the data or the program ended it, not a fault of the machine."""
        return self.end is not None and self.end.fault == "error"

    @property
    def step(self) -> int:
        """The step that was under way; 0 before the first."""
        return self.end.step if self.end is not None else 0 if self.now is None else self.now.step

    def same_error(self, other: Attempt) -> bool:
        """Return whether both ended by the same error of the same step, apart from numbers."""
        if self.end is None or other.end is None or not self.is_error:
            return False
        texts = [re.sub(r"\d+", "", end.why) for end in (self.end, other.end)]
        return self.end.step == other.end.step and texts[0] == texts[1]


def supervise(words: Sequence[str]) -> int:
    """Run `plimsoll WORDS...` in a child process, again after each fault; return the exit code.

    If the run was killed and is not started again, this process ends by the same signal.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)
    with _signals_waiting():
        return _end_alike(_supervise(words))


def _supervise(words: Sequence[str]) -> int:
    """Return the exit code of the last attempt; negative: the signal that killed it."""
    attempts: list[Attempt] = []
    while True:
        if any(attempt.open is not None and attempt.open.is_open for attempt in attempts):
            words = resuming(words, attempts[-1].end)
        last = _attempt(words)
        if attempts and last.open is None and last.code < 0:  # killed before it came so far
            last = replace(last, open=attempts[-1].open)
        attempts.append(last)
        reason = reason_to_stop(attempts)
        what_now = _start_text(attempts) if reason is None else reason
        if text := f"{_killed_text(last)}{what_now}".strip():
            tell(text)
            _tell_webhook(last, text)
        if reason is not None:
            return last.code
        times = [attempt.at for attempt in _alike(attempts)]
        wait = min(_FIRST_WAIT * 4 ** (recent(times) - 1), _LONGEST_WAIT)
        if signal.sigtimedwait(_ASKS, wait) is not None:
            return Interrupted.exit_code


def reason_to_stop(attempts: Sequence[Attempt]) -> str | None:
    """Return why the run is not started again, or "" if no reason is shown; None to start it."""
    last = attempts[-1]
    if last.open is None or last.asked or last.code == 0 or last.open.restarts == 0:
        return ""
    if last.end is not None and last.end.fault == "none":
        return ""
    if not last.open.is_open and last.code > 0:  # it has said what is wrong
        return ""
    if last.is_error and last.step == 0:
        return "The run is not started again: it failed before its first step, and would once more"
    if any(last.same_error(other) for other in attempts[:-1]):
        return (
            f"The run is not started again: step {last.step} ended by the same error twice, so "
            "that its data or the program is at fault, not the machine"
        )
    alike = _alike(attempts)
    number = recent([attempt.at for attempt in alike])
    if number > last.open.restarts:
        first, steps = alike[-number], {attempt.step for attempt in alike[-number:]}
        why = first.end.why if first.end is not None else f"the process ended by code {first.code}"
        rows = "; all came in this step, so its rows may be at fault" if len(steps) == 1 else ""
        return (
            f"The run is not started again: {number} {_kind(last)} within an hour, and "
            f"run.restarts is {last.open.restarts}. The first, in step {first.step}: {why}{rows}"
        )
    return None


def _alike(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts that count together with the last one."""
    return [attempt for attempt in attempts if attempt.is_error == attempts[-1].is_error]


def _kind(attempt: Attempt) -> str:
    return "errors" if attempt.is_error else "faults of the machine"


def _tell_webhook(last: Attempt, text: str) -> None:
    """Tell the run's webhook of an end that its killed process cannot tell."""
    if last.open is None or last.open.notify is None or not last.was_killed:
        return
    from plimsoll.train.notify import notify_at_once

    if failure := notify_at_once(last.open.notify, last.open.directory, text):
        tell(failure)


def _killed_text(last: Attempt) -> str:
    if not last.was_killed:
        return ""
    where = "" if last.now is None else f" in the phase {last.now.phase} of step {last.now.step}"
    by = f" by signal {-last.code}" if last.code < 0 else f" with exit code {last.code}"
    return f"the process of the run ended{by}{where}, without an error message. "


def _start_text(attempts: Sequence[Attempt]) -> str:
    last, times = attempts[-1], [attempt.at for attempt in _alike(attempts)]
    assert last.open is not None
    flags = () if last.end is None else last.end.flags
    fewer = f", with {' '.join(flags)}" if flags else ""
    latest = RunDirectory(Path(last.open.directory)).latest_checkpoint()
    start = "from its beginning" if latest is None else f"after step {latest[0]}"
    count = count_of(times, last.open.restarts, _kind(last))
    return f"The run is started again {start}{fewer} ({count})"


@contextmanager
def _signals_waiting() -> Iterator[None]:
    """Have signals that ask for a stop, or tell of a child's end, wait until they are fetched."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_ASKS, signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _attempt(words: Sequence[str]) -> Attempt:
    """Run the command once, to its end, and end the processes that it leaves behind."""
    with tempfile.TemporaryDirectory(prefix="plimsoll-") as folder:
        told = Path(folder) / "run.json"
        child = subprocess.Popen(
            [*_program(), *words], env=os.environ | {VARIABLE: str(told)}, preexec_fn=_prepare_child
        )
        asked = _wait(child, told)
        run = read_open_run(told)
    _end_leftovers()
    end = now = None
    if run is not None and run.is_open:
        directory = RunDirectory(Path(run.directory))
        end, now = read_end(directory.end_path), read_current_phase(directory.now_path)
    return Attempt(child.returncode, run, end, now, asked, time.monotonic())


def resuming(words: Sequence[str], end: RunEnd | None = None) -> list[str]:
    """Return the words that go on with a run: `--run.resume auto`, and the flags that its end says.

    They replace what the words say of the same keys.
    """
    flags = ("--run.resume", AUTO, *(() if end is None else end.flags))
    kept: list[str] = []
    is_value = False
    for word in words:
        if not is_value and word.partition("=")[0] not in flags[::2]:
            kept.append(word)
        is_value = word in flags[::2]
    return [*kept, *flags]


def _program() -> list[str]:
    """Return the words that start this program once more."""
    script = Path(sys.argv[0])
    if script.is_file() and script.name != "__main__.py":
        return [sys.executable, str(script)]
    return [sys.executable, "-m", "plimsoll"]


def _prepare_child() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _wait(child: subprocess.Popen[bytes], told: Path) -> bool:
    """Wait for the child's end, and pass on signals; return whether it was asked to stop.

    A child that hangs is killed.
    """
    asked, silence = False, Silence(told)
    while child.poll() is None:
        info = signal.sigtimedwait((*_ASKS, signal.SIGCHLD), BEAT_SECONDS)
        if info is not None and info.si_signo in _ASKS:
            asked = True
            if info.si_code == _FROM_A_PROCESS:
                child.send_signal(info.si_signo)
        silence.look(time.monotonic())
        if silence.is_too_long:
            tell(
                f"the process of the run has given no sign of life for {silence.seconds:.0f} s "
                "(cluster.hang_timeout): it is ended"
            )
            child.kill()
            child.wait()
    return asked


class Silence:
    """How long a run has not touched the file by which it tells its supervisor that it lives.

    Time in which this process itself was stopped, with Ctrl-Z or with the machine, does not count.
    """

    def __init__(self, told: Path) -> None:
        self.told, self.seconds, self._touched = told, 0.0, 0
        self._looked: float | None = None

    def look(self, now: float) -> None:
        """Look whether the file was touched; `now`: seconds of a monotonic clock."""
        touched = self.told.stat().st_mtime_ns if self.told.exists() else 0
        passed = 0.0 if self._looked is None else min(now - self._looked, 2 * BEAT_SECONDS)
        self.seconds = self.seconds + passed if touched == self._touched else 0.0
        self._touched, self._looked = touched, now

    @property
    def is_too_long(self) -> bool:
        """Whether the run says that it hangs after a shorter silence."""
        if self.seconds <= 2 * BEAT_SECONDS:
            return False
        run = read_open_run(self.told)
        return run is not None and 0 < run.hang_seconds < self.seconds


def _end_leftovers() -> None:
    """Kill the processes of an ended run that are still there: they are this process's children.

    Trackers of resources come last, when they have removed what the others have left.
    """
    left = psutil.Process().children(recursive=True)
    trackers = [process for process in left if tracks_resources(process)]
    for process in left:
        if process not in trackers:
            with suppress(psutil.Error):
                process.kill()
    psutil.wait_procs(left, _TRACKERS_SECONDS)
    for process in trackers:
        with suppress(psutil.Error):
            process.kill()


def _end_alike(code: int) -> int:
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -code)
    return code


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
