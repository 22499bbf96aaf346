"""Plain functions as tools, without a state between their calls."""

from __future__ import annotations

from typing import Any


class Functions:
    """The tools are what `tools` names beside it. The row's prompt gives the problem; the run's
    `rewards` score the last reply."""

    def reset(self, **row: Any) -> None:
        """Add nothing to the prompt."""
