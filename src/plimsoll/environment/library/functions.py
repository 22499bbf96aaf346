"""Plain functions as tools, without a state between their calls."""

from __future__ import annotations

from typing import Any


class Functions:
    """An environment whose tools are the functions in the config's `tools`.

    The row's prompt is the problem. It gives no reward: the run's `rewards` score the last reply.
    """

    def reset(self, **row: Any) -> None:
        """Start an episode; this environment has no state and adds no text to the prompt."""
