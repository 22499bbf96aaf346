"""Plain functions as tools, without a state between their calls."""

from __future__ import annotations

from typing import Any


class Functions:
    """Its tools are what `tools` names beside it. The row's prompt gives the problem; the reward is
    the run's own, of the last thing that is said."""

    def reset(self, **row: Any) -> None:
        """Nothing is added to the prompt."""
