"""The numbers of a published row: counts, and the peak with its unit and what was read."""

from __future__ import annotations

import math
import re
from typing import Literal

Metric = Literal["allocated", "reserved", "device", "unstated"]
Text = dict[str, str]
"""A row by column, in lower case."""


class NotKnown(Exception):
    """A value that nothing here knows."""

    def __init__(self, column: str, value: str) -> None:
        super().__init__(column, value)
        self.column, self.value = column, value


def integer(column: str, value: str) -> int:
    """A count, above 0; `4k` is 4,096, and what a parenthesis says is left out."""
    bare = re.sub(r"\(.*?\)|(?<=\d),(?=\d{3})", "", value.lower()).strip()
    found = re.fullmatch(r"(\d+)(?:\.0+)?(k?)(?: ?(?:tokens|gpus?|x|(?:/|per) ?gpu))?", bare)
    if not found or int(found[1]) == 0:
        raise NotKnown(column, value)
    return int(found[1]) * (1024 if found[2] else 1)


_UNITS = {"gib": 2**30, "mib": 2**20, "gb": 1e9, "g": 1e9, "mb": 1e6}
_NUMBER = r"(\d+(?:\.\d+)?)"
_PEAK = re.compile(
    r"(?:~|≈|about|around|roughly|approx(?:\.|imately)?|ca\.?|peak)? ?"
    rf"{_NUMBER}(?: ?(?:-|–|to) ?{_NUMBER})? ?"
    rf"({'|'.join(_UNITS)})?(?: ?(?:/|per) ?(?:gpu|card))?(?: \([a-z ]+\))?"
)
_RAN_OUT = r"\boom\b|out[- ]of[- ](?:gpu[- ])?memory|does(?: not|n't) fit"


def peak(value: str, notes: str) -> tuple[float | None, str]:
    """Bytes, None where it ran out; and what was read into the value. GiB and MiB only where it or
    the notes say so, and where it is what a card holds; of a range the upper end."""
    if re.search(_RAN_OUT, value):
        return None, ""
    found = _PEAK.fullmatch(re.sub(r"(?<=\d),(?=\d{3}\b)", "", value).strip())
    if not found or not float(found[1]):
        raise NotKnown("reported_peak_gb_per_gpu", value)
    said = found[3] or _unit(found[1], notes)
    if said == "gb" and re.search(r"gb of the card|2\*\*30|1024 ?(?:\*\*|\^) ?3", notes):
        said = "gib"
    read = f"peak {value} as its upper end" if found[2] else ""
    return max(float(found[1]), float(found[2] or 0)) * _UNITS[said], read


def _unit(number: str, notes: str) -> str:
    """What the notes name, alone or after that number: after others it is something else's."""
    for match in re.finditer(r"(?:(\d+(?:\.\d+)?) ?)?\b(gib|mib)\b", notes):
        if not match[1] or math.isclose(float(match[1]), float(number), rel_tol=0.02):
            return match[2]
    return "gb"


_METRICS: tuple[tuple[Metric, str], ...] = (
    ("reserved", "reserved"),
    ("allocated", "allocated|memory active|active memory|peak active|log_peak_memory_stats"),
    ("device", r"nvidia-smi|nvml|device[- ]used|system/gpu|wandb[^;]*gpu memory"),
)


def metric(notes: str) -> Metric:
    """What was read: the first that is named. Active memory is what is allocated, and what is freed
    as soon as another stream is done with it."""
    found = [
        (match.start(), name) for name, words in _METRICS if (match := re.search(words, notes))
    ]
    return min(found)[1] if found else "unstated"


def trl(text: Text) -> tuple[int, int]:
    """TRL's version, where one is named."""
    return version(text, "trl")


def version(text: Text, library: str) -> tuple[int, int]:
    """(0, 0) where none is named."""
    found = re.search(rf"\b{library}[ =v]*(\d+)\.(\d+)", f"{text['task']} {text['notes']}")
    return (int(found[1]), int(found[2])) if found else (0, 0)
