"""Plain functions as tools, without a state between their calls."""

from __future__ import annotations

from typing import Any


class Functions:
    """The functions that `tools` names beside it, for the problem that the row's prompt gives.

    The run's `rewards` score the last reply.
    """

    def reset(self, **row: Any) -> None:
        """Add nothing to the prompt."""
