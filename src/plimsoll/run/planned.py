"""What was planned of a run before it began, as far as the run needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plimsoll.run.readings import Footprint

Footprints = dict[str, Footprint]
"""By phase."""


@dataclass(frozen=True)
class Planned:
    """plan: as JSON and as SVG; None where there is none. predicted: what
    each process should hold at its fullest, by process and phase. fits: False for a run that was
    forced, though its plan does not fit.
    """

    plan: tuple[str, str] | None = None
    predicted: Mapping[str, Footprints] = field(default_factory=dict)
    fits: bool = True
