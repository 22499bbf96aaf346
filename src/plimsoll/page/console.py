"""The end of what a run printed, as JSON: its run.log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plimsoll.page.watched import Watched
from plimsoll.run.responses import escape_controls

LOG = "run.log"
"""The file in a run's directory that holds what the run printed."""
_MOST_BYTES, _MOST_LINES = 64 * 2**10, 300


def log_bytes(run: Watched) -> int | None:
    """Return the size of a run's log, or None if the run writes none."""
    path = _path(run)
    return path.stat().st_size if path.is_file() else None


def console(run: Watched) -> dict[str, Any]:
    """Return the last lines of a run's log.

    `lines` are whole, except for the last, which may be incomplete; control codes are escaped.
    `cut` says whether there are lines before them. `bytes` is the size that `log_bytes` returns.
    """
    size = log_bytes(run)
    if size is None:
        return {"bytes": None, "cut": False, "lines": []}
    begin = max(0, size - _MOST_BYTES)
    with _path(run).open("rb") as file:
        file.seek(begin)
        text = file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    lines = text.split("\n")[1 if begin else 0 :]
    lines = lines[:-1] if lines and not lines[-1] else lines
    last_lines = lines[-_MOST_LINES:]
    cut = begin > 0 or len(last_lines) < len(lines)
    return {
        "bytes": size,
        "cut": cut,
        "lines": [escape_controls(line.rstrip("\r")) for line in last_lines],
    }


def _path(run: Watched) -> Path:
    return run.run.path / LOG
