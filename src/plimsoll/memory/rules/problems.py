"""What is wrong with a plan, with stable codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plimsoll.config.codes import PlanCode

_ROOM: frozenset[PlanCode] = frozenset(
    {
        "device-memory",
        "disk-space",
        "host-memory",
        "less-than-planned",
        "more-ranks-than-gpus",
        "no-gpu",
        "tensor-parallel-node",
        "vllm-cache",
        "vllm-share",
        "vllm-share-beside-training",
        "vllm-share-not-free",
    }
)
"""What other hardware, or less of something, would mend."""


@dataclass(frozen=True)
class PlanProblem:
    """code: stable, such as `device-memory`. severity: an `error` does not work. what: the figures.
    why: the mechanism. fix: what to write or do instead."""

    code: PlanCode
    severity: Literal["error", "warning"]
    what: str
    why: str
    fix: str

    @property
    def is_conflict(self) -> bool:
        """An error that no room mends: settings that cannot work together (exit code 4, not 3)."""
        return self.severity == "error" and self.code not in _ROOM
