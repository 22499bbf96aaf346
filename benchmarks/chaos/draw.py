"""Draw random faults from the occasions that an undisturbed run had for them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fault_injection.points import KINDS, NOTE, POINTS

from plimsoll.errors import ConfigError

RANDOM_KINDS = tuple(kind for kind in KINDS if kind != NOTE)
"""The kinds that can be drawn."""
_SECONDS = {"delay": "delay=3"}


@dataclass(frozen=True)
class Occasion:
    """A time at which a process of the undisturbed run reached a point."""

    point: str
    process: str
    """`controller`, or a rank or an engine, such as `rank=1`."""
    call: int

    def fault(self, kind: str) -> str:
        """Return the text of a fault of this kind at this time, which happens once."""
        where = "" if self.process == "controller" else f"+{self.process}"
        return f"{self.point}:{_SECONDS.get(kind, kind)}:call={self.call}{where}+once"


def noting_faults() -> str:
    """Return faults that do nothing but note every occasion."""
    return ",".join(f"{point}:{NOTE}" for point in POINTS)


def occasions_of(rows: Sequence[Mapping[str, object]]) -> list[Occasion]:
    """Return the occasions in the record of a run with `noting_faults`."""
    return [
        Occasion(str(row["fault"]).partition(":")[0], str(row["process"]), int(str(row["call"])))
        for row in rows
    ]


def draw_fault(number: int, seed: int, kinds: Sequence[str], occasions: Sequence[Occasion]) -> str:
    """Return the fault with a number, the same for the same seed; each kind comes in its turn.

    Within a kind every point is as likely as any other, and at a point every occasion.

    Raises:
        ConfigError: The run has no occasion for the kind.
    """
    kind = kinds[number % len(kinds)]
    points = sorted({o.point for o in occasions if kind in POINTS[o.point].kinds})
    if not points:
        possible = ", ".join(point.name for point in POINTS.values() if kind in point.kinds)
        raise ConfigError(
            f"--kinds: the run never reaches a point at which {kind} can happen ({possible}). "
            "Leave this kind out, or add more to --points."
        )
    draw = random.Random(f"{seed} {number}")
    point = draw.choice(points)
    return draw.choice([o for o in occasions if o.point == point]).fault(kind)
