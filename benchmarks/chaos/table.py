"""Show what faults did to runs: a table of all trials, and a line for each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

TrialRow = Mapping[str, Any]
"""A row of chaos.jsonl."""

_HEAD = ("", "fault", "process", "ended right", "starts", "seconds", "equal", "left")


def trial_cells(row: TrialRow) -> tuple[str, ...]:
    """Return the cells of a trial's line in the table."""
    fired: Sequence[Mapping[str, Any]] = row["fired"]
    processes = " ".join(dict.fromkeys(str(fault["process"]) for fault in fired))
    seconds = [fault["seconds"] for fault in fired]
    waits = " ".join("never" if wait is None else f"{wait:.1f}" for wait in seconds)
    return (
        str(row["number"]),
        str(row["faults"]),
        processes or "did not happen",
        "yes" if row["code"] == 0 else f"no ({_end(row)})",
        str(row["starts"]),
        waits or "-",
        differences(row) or "yes",
        str(len(row["left"])),
    )


def _end(row: TrialRow) -> str:
    return "hung" if row["code"] is None else f"code {row['code']}"


def differences(row: TrialRow) -> str:
    """Return what differs from the undisturbed run; "" if nothing does."""
    return "; ".join(f"{what}: {text}" for what, text in row["differs"].items() if text)


def table_text(rows: Sequence[TrialRow]) -> str:
    """Return the table of all trials as aligned text."""
    return _align([_HEAD, *map(trial_cells, rows)])


def summary_text(rows: Sequence[TrialRow]) -> str:
    """Return a line for each kind of fault: how many, how they ended, seconds to recover."""
    kinds: dict[str, list[TrialRow]] = {}
    for row in rows:
        kinds.setdefault(kind_of(row), []).append(row)
    head = ("kind", "faults", "ended right", "by itself", "equal", "median s", "slowest s", "left")
    return _align([head, *(_kind_cells(kind, kinds[kind]) for kind in sorted(kinds))])


def kind_of(row: TrialRow) -> str:
    """Return the kind of a trial's first fault."""
    return str(row["faults"]).split(":")[1].partition("=")[0]


def _kind_cells(kind: str, rows: Sequence[TrialRow]) -> tuple[str, ...]:
    fired = [fault for row in rows for fault in row["fired"]]
    seconds = [fault["seconds"] for fault in fired if fault["seconds"] is not None]
    return (
        kind,
        str(len(fired)),
        str(sum(row["code"] == 0 for row in rows)),
        str(sum(row["code"] == 0 and row["starts"] == 1 for row in rows)),
        str(sum(row["code"] == 0 and not differences(row) for row in rows)),
        f"{median(seconds):.1f}" if seconds else "-",
        f"{max(seconds):.1f}" if seconds else "-",
        str(sum(len(row["left"]) for row in rows)),
    )


def _align(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
