"""Reward for an answer to a task of reasoning-gym, by the task's own score.

For rows of a source with `generate` (data/generated.py). Source: reasoning-gym 0.1.25, `dataset.py`
and `factory.py`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from plimsoll.errors import ConfigError, DataError
from plimsoll.records import Trajectory
from plimsoll.reward.marks import ANSWER_TAG, last_within
from plimsoll.reward.references import gives_answers

_COLUMN = "reasoning_gym"

Score = Callable[[str | None, Mapping[str, Any]], float]
"""Takes an answer and the whole entry that it answers."""


def answer(response: str, *, tag: str = ANSWER_TAG) -> str | None:
    """Return the text of the last `<tag>...</tag>`, without white space around it; None if there is
    none. Without a tag: the whole response."""
    return last_within(response, tag) if tag else response.strip()


@gives_answers(answer)
def reward(trajectory: Trajectory, *, tag: str = ANSWER_TAG) -> float:
    """What the task's `score_answer` gives, from 0 to 1; of some tasks a part for a part.

    tag: the answer is within these tags; `""`: it is the whole response.

    Some tasks raise where they cannot read an answer, and score 0 in all else: they do here, too,
    if they can read the right one. Raises DataError for a row that the library did not generate.
    """
    row = trajectory.prompt.columns.get(_COLUMN)
    if not isinstance(row, Mapping):
        raise DataError(
            "the row is of no task of reasoning-gym. Give data.train.generate, with path: "
            "reasoning_gym."
        )
    score = _score_of(row["task"], json.dumps(row["options"], sort_keys=True))
    given = answer(trajectory.response_text, tag=tag)
    try:
        return float(score(given, ast.literal_eval(row["entry"])))
    except Exception:  # noqa: BLE001  as the answer is
        entry = ast.literal_eval(row["entry"])
        score(entry["answer"], entry)
        return 0.0


@lru_cache
def _score_of(task: str, options: str) -> Score:
    """Of a task with its options, as JSON."""
    try:
        from reasoning_gym.factory import create_dataset  # takes seconds
    except ModuleNotFoundError as error:
        raise ConfigError(f"reasoning-gym cannot be imported: {error}. Install it.") from error
    score: Score = create_dataset(task, **json.loads(options)).score_answer
    return score
