"""Decide whether a run hangs: a process does not answer, or all answer and none works.

The decision uses only the answers of processes. Its clock runs only while they are watched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import psutil

LEAST_SECONDS = 60.0
"""The least seconds that a silence may last."""
FIRST_SECONDS = 600.0
"""The least seconds for a method's first calls, and for calls that load or save models."""
_SEVERAL = 5.0
"""A silence may last this many times as long as the longest silence before."""
_IDLE = 0.03
"""A process works if it uses more than this share of one core. A Ray process that only waits uses a
third of that. A rank on a card uses a whole core while it waits for others in a collective; so it
works if a call or a micro-batch has ended."""


@dataclass(frozen=True)
class Pulse:
    """A process's answer about itself and its descendants.

    Attributes:
        cpu_seconds: CPU time used since they began; 0 if it does not tell work from waiting.
        on_disk: Whether one of their threads waits for a disk.
        ends: How many calls and micro-batches have ended, if the process counts them.
    """

    cpu_seconds: float
    on_disk: bool
    ends: int = 0


@dataclass(frozen=True)
class Hang:
    """The processes that hang, and for how long.

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
    """The answers of processes, by their names, while the run waits for calls.

    All times are in seconds of watching, from the first watch on.

    Attributes:
        now: The time now.
        asked: When each process that has not answered yet was asked.
        pulses: The time of each process's last answer, and the answer.
        moved: When a process last worked, or a call ended.
        longest: The longest silence since `begin` that has ended, in seconds.
    """

    now: float = 0.0
    asked: Mapping[str, float] = field(default_factory=dict)
    pulses: Mapping[str, tuple[float, Pulse]] = field(default_factory=dict)
    moved: float = 0.0
    longest: float = 0.0

    def begin(self) -> Heartbeats:
        """Return the state at the beginning of a wait for other calls."""
        return replace(self, moved=self.now, longest=0.0)

    def later(self, seconds: float, at_most: float) -> Heartbeats:
        """Return the state after `seconds`, of which at most `at_most` count.

        More are not the processes' silence: the watching process itself was stopped, or the machine
        slept.
        """
        return replace(self, now=self.now + min(seconds, at_most))

    def ask(self, name: str) -> Heartbeats:
        """Return the state after a question to the process; an open question keeps its time."""
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
        works = pulse.on_disk or pulse.ends > before.ends or used > _IDLE * (self.now - then)
        return answered.move() if works else answered

    def forget(self, names: Collection[str]) -> Heartbeats:
        """Return the state without these processes."""
        asked = {name: since for name, since in self.asked.items() if name not in names}
        pulses = {name: pulse for name, pulse in self.pulses.items() if name not in names}
        return replace(self, asked=asked, pulses=pulses)

    def move(self) -> Heartbeats:
        """Return the state after a call has ended, or a process was seen to work."""
        return replace(self, moved=self.now, longest=max(self.longest, self.now - self.moved))

    def hang(self, allowed: float) -> Hang | None:
        """Return the hang if a silence lasts longer than `allowed` seconds; else None.

        A process that does not answer may be working. So "none works" is reported only if all
        answer.
        """
        late = {name: self.now - since for name, since in self.asked.items()}
        if not late and self.now - self.moved > allowed:
            return Hang((), self.now - self.moved, allowed)
        silent = sorted((name for name in late if late[name] > allowed), key=lambda n: -late[n])
        return Hang(tuple(silent), late[silent[0]], allowed) if silent else None


def allowance(hang_timeout: float | None, call: str, longest: float | None) -> float:
    """Return how many seconds a silence may last; infinity if `hang_timeout` is 0.

    Args:
        hang_timeout: the setting `cluster.hang_timeout`; None: derive the seconds from `longest`.
        call: the method of `Worker` or `RolloutEngine` that is waited for.
        longest: the longest silence in earlier calls of it; None if there were none.
    """
    if hang_timeout is not None:
        return hang_timeout or inf
    least = FIRST_SECONDS if longest is None or takes_whole_model(call) else LEAST_SECONDS
    return max(least, _SEVERAL * (longest or 0.0))


def takes_whole_model(call: str) -> bool:
    """Return whether a method reads or saves a whole model, which has no parts to count."""
    return call.startswith(("load_", "save_")) or call == "find_damage"


def read_pulse(ends: int = 0, *, spins: bool = False) -> Pulse:
    """Return the pulse of this process and its descendants.

    Args:
        ends: How many calls and micro-batches have ended here.
        spins: Whether the process may use a core while it only waits. A host that waits for a card
            does: CUDA asks the card again and again.
    """
    this_process = psutil.Process()
    pulses = [_pulse(process) for process in (this_process, *this_process.children(recursive=True))]
    cpu_seconds = 0.0 if spins else sum(p.cpu_seconds for p in pulses)
    return Pulse(cpu_seconds, any(p.on_disk for p in pulses), ends)


def _pulse(process: psutil.Process) -> Pulse:
    try:
        times = process.cpu_times()
        states = [_state(task) for task in Path(f"/proc/{process.pid}/task").glob("*/stat")]
    except (psutil.Error, OSError):  # it has just ended
        return Pulse(0.0, False)
    ended = times.children_user + times.children_system  # such as compilers
    return Pulse(times.user + times.system + ended, "D" in states)


def _state(stat: Path) -> str:
    """Return the letter of a thread's state, see proc(5). It follows a name with any characters."""
    return stat.read_text(errors="replace").rpartition(")")[2].split()[0]
