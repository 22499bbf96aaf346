"""Two turns: the policy answers, reads whether the answer is right, and answers again.

Only the second answer counts, as in SCoRe (Kumar et al., 2024, arXiv 2409.12917). In SCoRe, the
policy does not learn whether the first answer was right.
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
    """Two tries at the problem that the row's prompt gives.

    The row's column `reference` (or `answer`) is the solution, which is never shown. The reward is
    1 if the second answer is right, else 0.
    """

    def __init__(self, *, marker: str = "####") -> None:
        """Set the marker.

        Args:
            marker: the text that an answer follows; a reply without it has no answer.
        """
        self._marker, self._reference = marker, ""
        self._right: list[bool] = []

    def reset(self, row: Mapping[str, Any]) -> list[Any]:
        """Start an episode without text for the prompt.

        Raises DataError for a row without a solution.
        """
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
        """Return whether the first answer is right, or end the episode after the second."""
        answer = read_answer(reply.text, self._marker)
        self._right.append(is_same(answer, self._reference))
        if len(self._right) == 1:
            return Step(self._verdict(answer), False)
        first, second = self._right
        figures = {
            "first_right": float(first),
            "second_right": float(second),
            "corrected": float(second and not first),
            "spoilt": float(first and not second),
        }
        return Step([], True, figures=figures)

    def get_reward(self) -> float:
        """Return 1 if the second answer is right, else 0."""
        return float(len(self._right) == 2 and self._right[1])

    def _verdict(self, given: str | None) -> str:
        how = f"Write your answer after {self._marker}."
        if given is None:
            return f"There is no answer after {self._marker}. Solve the problem. {how}"
        if self._right[0]:
            return f"Your answer is right. Give it again. {how}"
        return f"Your answer is wrong. Find the mistake, and solve the problem again. {how}"


def read_answer(text: str, marker: str) -> str | None:
    """Return the text after the last marker, up to its line's end; None without a marker."""
    _, last_marker, after = text.rpartition(marker)
    return (after.strip().splitlines() or [""])[0] if last_marker else None


def is_same(answer: str | None, reference: str) -> bool:
    """Return whether an answer equals the solution: numbers by value, other text exactly."""
    if answer is None:
        return False
    texts = _plain(answer), _plain(reference)
    numbers = _number(texts[0]), _number(texts[1])
    return texts[0] == texts[1] if None in numbers else numbers[0] == numbers[1]


def _plain(text: str) -> str:
    return _TEXT.sub("", text).strip()


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", "").removeprefix("$"))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
