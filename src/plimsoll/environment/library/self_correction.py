"""Two turns: an answer, whether it is right, and another answer, which counts.

As in SCoRe (Kumar et al., 2024, arXiv 2409.12917) the second of two turns counts; there, the policy
is not told whether the first answer was right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from plimsoll.environment.protocol import Reply, Step
from plimsoll.errors import DataError

_TEXT = re.compile(r"[\s.]+$")


class SelfCorrection:
    """The row's prompt gives the problem and its column `reference` (or `answer`) the solution,
    which is never shown. The reward is 1 where the second answer is right, else 0.

    marker: what an answer follows; a reply without it has none.
    """

    def __init__(self, *, marker: str = "####") -> None:
        self._marker, self._reference = marker, ""
        self._right: list[bool] = []

    def reset(self, row: Mapping[str, Any]) -> list[Any]:
        """Nothing is added to the prompt. Raises DataError for a row without a solution."""
        reference = row.get("reference", row.get("answer"))
        if reference is None or not str(reference).strip():
            raise DataError(
                f"self_correction needs a solution in the column `reference` or `answer`, and the "
                f"row has neither, only: {', '.join(map(str, row)) or 'nothing'}."
            )
        _, _, after = str(reference).rpartition(self._marker)
        self._reference, self._right = after, []
        return []

    def step(self, reply: Reply) -> Step:
        """Whether the first answer is right; or the end."""
        self._right.append(same(answer(reply.text, self._marker), self._reference))
        if len(self._right) == 1:
            return Step(self._told(answer(reply.text, self._marker)), False)
        first, second = self._right
        figures = {
            "first_right": float(first),
            "second_right": float(second),
            "corrected": float(second and not first),
            "spoilt": float(first and not second),
        }
        return Step([], True, figures=figures)

    def get_reward(self) -> float:
        """Of the second answer."""
        return float(len(self._right) == 2 and self._right[1])

    def _told(self, given: str | None) -> str:
        how = f"Write your answer after {self._marker}."
        if given is None:
            return f"There is no answer after {self._marker}. Solve the problem. {how}"
        if self._right[0]:
            return f"Your answer is right. Give it again. {how}"
        return f"Your answer is wrong. Find the mistake, and solve the problem again. {how}"


def answer(text: str, marker: str) -> str | None:
    """What stands after the last marker, on its line; None where there is no marker."""
    _, found, after = text.rpartition(marker)
    return (after.strip().splitlines() or [""])[0] if found else None


def same(given: str | None, reference: str) -> bool:
    """Whether an answer is the solution: letter by letter, or by value where both are numbers."""
    if given is None:
        return False
    one, other = _plain(given), _plain(reference)
    numbers = _number(one), _number(other)
    return one == other if None in numbers else numbers[0] == numbers[1]


def _plain(text: str) -> str:
    return _TEXT.sub("", text).strip()


def _number(text: str) -> Decimal | None:
    try:
        found = Decimal(text.replace(",", "").removeprefix("$"))
    except InvalidOperation:
        return None
    return found if found.is_finite() else None
