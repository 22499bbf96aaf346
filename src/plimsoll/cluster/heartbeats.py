"""The decision whether a run hangs: a process that does not answer, or no process that works.

It is taken from signs of life alone, by a clock that stands still while nobody watches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import psutil

LEAST_SECONDS = 60.0
"""The shortest allowed silence."""
FIRST_SECONDS = 600.0
"""The shortest allowed silence of first calls, and of calls that read or write whole models."""
_SEVERAL = 5.0
"""How many times as long as the longest silence before a silence may be."""
_IDLE = 0.03
"""The share of one core above which a process works; a process of Ray's that only waits takes a
third of it."""


@dataclass(frozen=True)
class Pulse:
    """A process's answer about itself and its descendants.

    Attributes:
        cpu_seconds: CPU time used since they began.
        on_disk: Whether one of their threads waits for a disk.
    """

    cpu_seconds: float
    on_disk: bool


@dataclass(frozen=True)
class Hang:
    """What hangs, and for how long.

    Attributes:
        silent: The processes that do not answer, the longest silence first; empty if all answer and
            none works.
        seconds: How long the silence has lasted.
        allowed: How long it could have lasted, in seconds.
    """

    silent: tuple[str, ...]
    seconds: float
    allowed: float


@dataclass(frozen=True)
class Heartbeats:
    """What was seen of processes, by their names, while calls were waited for.

    Times are seconds of watching.

    Attributes:
        now: The time now.
        asked: When each process that has not answered yet was asked.
        pulses: When each process answered last, and its answer.
        moved: When a process was last seen to work, or a call ended.
        longest: The longest silence that ended since `begin`.
    """

    now: float = 0.0
    asked: Mapping[str, float] = field(default_factory=dict)
    pulses: Mapping[str, tuple[float, Pulse]] = field(default_factory=dict)
    moved: float = 0.0
    longest: float = 0.0

    def begin(self) -> Heartbeats:
        """Return the state in which other calls are waited for from now on."""
        return replace(self, moved=self.now, longest=0.0)

    def later(self, seconds: float, at_most: float) -> Heartbeats:
        """Return the state after so many seconds.

        Seconds above `at_most` are not the processes' silence: the watching process was stopped
        itself, or the machine slept.
        """
        return replace(self, now=self.now + min(seconds, at_most))

    def ask(self, name: str) -> Heartbeats:
        """Return the state in which the process is asked, or still is."""
        return replace(self, asked={name: self.now, **self.asked})

    def answer(self, name: str, pulse: Pulse) -> Heartbeats:
        """Return the state after the answer of a process that was asked."""
        then, before = self.pulses.get(name, (self.now, pulse))
        used = pulse.cpu_seconds - before.cpu_seconds
        answered = replace(
            self,
            asked={waiting: since for waiting, since in self.asked.items() if waiting != name},
            pulses={**self.pulses, name: (self.now, pulse)},
            longest=max(self.longest, self.now - self.asked.get(name, self.now)),
        )
        works = pulse.on_disk or used > _IDLE * (self.now - then)
        return answered.move() if works else answered

    def move(self) -> Heartbeats:
        """Return the state after a call has ended, or a process was seen to work."""
        return replace(self, moved=self.now, longest=max(self.longest, self.now - self.moved))

    def hang(self, allowed: float) -> Hang | None:
        """Return what hangs, if a silence lasts longer than the allowed seconds; else None.

        A process that does not answer may work: only if all answer is it known that none works.
        """
        late = {name: self.now - since for name, since in self.asked.items()}
        if not late and self.now - self.moved > allowed:
            return Hang((), self.now - self.moved, allowed)
        silent = sorted((name for name in late if late[name] > allowed), key=lambda n: -late[n])
        return Hang(tuple(silent), late[silent[0]], allowed) if silent else None


def allowance(hang_timeout: float | None, call: str, longest: float | None) -> float:
    """Return the seconds that a silence may last in calls of a `Worker` or `RolloutEngine` method.

    `longest` is the longest silence in such calls before, or None if these are the first.
    """
    if hang_timeout is not None:
        return hang_timeout or inf
    whole_model = call.startswith(("load_", "save_"))
    least = FIRST_SECONDS if longest is None or whole_model else LEAST_SECONDS
    return max(least, _SEVERAL * (longest or 0.0))


def read_pulse() -> Pulse:
    """Return the pulse of this process and its descendants."""
    this_process = psutil.Process()
    pulses = [_pulse(process) for process in (this_process, *this_process.children(recursive=True))]
    return Pulse(sum(p.cpu_seconds for p in pulses), any(p.on_disk for p in pulses))


def _pulse(process: psutil.Process) -> Pulse:
    try:
        times = process.cpu_times()
        states = [_state(task) for task in Path(f"/proc/{process.pid}/task").glob("*/stat")]
    except (psutil.Error, OSError):  # it has just ended
        return Pulse(0.0, False)
    ended = times.children_user + times.children_system  # such as compilers
    return Pulse(times.user + times.system + ended, "D" in states)


def _state(stat: Path) -> str:
    """Return a thread's state by its letter in proc(5); the name before it may hold anything."""
    return stat.read_text(errors="replace").rpartition(")")[2].split()[0]
