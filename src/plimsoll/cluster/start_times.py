"""Tell for which processes a start waits, and how long such a start lasted the last time.

The times are in a small file of the user's cache. A file that cannot be read or written is as none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

from plimsoll.errors import PlimsollError
from plimsoll.rollout.protocol import EngineSpec
from plimsoll.run.files import write_whole

_SLOW_SECONDS = 30.0
"""After how long a start tells what it waits for."""
_MOST_KINDS = 100
"""Entries of the file; the oldest make room."""


def start_kind(specs: Sequence[EngineSpec]) -> str:
    """Return what the starts of two runs have in common if they take about as long."""
    if not specs:
        return "ranks"
    rollout, first = specs[0].rollout, specs[0]
    return f"{rollout.engine_name} on {rollout.parts} {first.device}: {first.model}"


def times_path() -> Path:
    """Return the file of start times: `$XDG_CACHE_HOME/plimsoll/start-seconds.json`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "plimsoll").expanduser() / (
        "start-seconds.json"
    )


def read_times(path: Path) -> dict[str, float]:
    """Return the seconds of the last start of each kind, the oldest first."""
    with suppress(OSError, ValueError):
        times = json.loads(path.read_text())
        if isinstance(times, dict):
            return {k: s for k, s in times.items() if isinstance(s, int | float)}
    return {}


def write_time(path: Path, kind: str, seconds: float) -> None:
    """Write the seconds of a start into the file; do nothing if it cannot be written."""
    times = read_times(path)
    times.pop(kind, None)
    times = dict([*times.items(), (kind, round(seconds, 1))][-_MOST_KINDS:])
    with suppress(OSError, PlimsollError):
        write_whole(path, json.dumps(times, indent=1))


def waiting_text(late: Sequence[str], waited: float, times: Mapping[str, float], kind: str) -> str:
    """Return the line about a start that takes long, with the time of the last such start."""
    usual = f"; the last start of this kind took {times[kind]:.0f} s" if kind in times else ""
    return f"waiting for {', '.join(late)} to start, for {waited:.0f} s now{usual}"


@contextmanager
def telling_of_start(
    kind: str, late: Callable[[], Sequence[str]], say: Callable[[str], None]
) -> Iterator[None]:
    """Say once what is waited for if the block takes long.

    Args:
        kind: what `start_kind` returns.
        late: returns the names of the processes that have not started yet.
        say: takes the line.
    """
    times = read_times(times_path())
    timer = Timer(_SLOW_SECONDS, lambda: say(waiting_text(late(), _SLOW_SECONDS, times, kind)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
