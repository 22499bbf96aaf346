"""What the rows of a data set say about a first config: columns, lengths, steps and a reward."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from plimsoll.config.data import SourceConfig
from plimsoll.data.fields import BadRow
from plimsoll.data.sources import read_rows
from plimsoll.errors import ConfigError
from plimsoll.resolve.job import Job
from plimsoll.reward import code, exact_match
from plimsoll.reward.answers import reference_answer
from plimsoll.run.files import write_whole
from plimsoll.run.numbers import plural, strict_json

DataRow = Mapping[str, Any]

NAMES: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "question", "instruction", "problem", "query", "input"),
    "response": ("response", "answer", "output", "completion", "solution"),
    "text": ("text", "content", "body", "document"),
    "chosen": ("chosen", "better", "preferred"),
    "rejected": ("rejected", "worse", "dispreferred"),
    "steps": ("steps", "completions"),
    "labels": ("labels",),
    "label": ("label", "desirable"),
    "reference": (
        *("tests", "test_list", "test_cases", "input_output", "reference", "answer"),
        *("ground_truth", "solution", "label", "target"),
    ),
}
"""Usual names of columns, the likeliest first."""

WAYS = (
    ("prompt", "steps", "labels"),
    ("prompt", "response", "label"),
    ("messages", "label"),
    ("prompt", "chosen", "rejected"),
    ("chosen", "rejected"),
    ("messages", "reference"),
    ("messages",),
    ("prompt", "reference"),
    ("prompt", "response"),
    ("prompt",),
    ("text",),
)
"""Sets of columns that make a row; the first set that the data has and the job accepts is used."""

LOOKED_AT = 50_000
"""The most rows that are read."""
SHORTEST, LONGEST = 256, 4096
BYTES = 3
"""Bytes of UTF-8 per token, a low estimate for most languages."""
TEMPLATE = 64
"""Tokens of a chat template, a high estimate."""

EPOCHS = {"prompts": 10, "sequences": 3, "pairs": 1}
"""How often a first run sees each row, by the rows that a step counts."""
MOST_STEPS = 200
_CHECKED = 500
"""The most references that are looked at."""
_FEW = 0.1
"""The largest share of references without mathematics whose rows are skipped."""
_TESTS = re.compile(r'\bassert\b|\\?"inputs?\\?"\s*:')
"""Matches in the text of a program's tests, in one of the forms of `reward.code`."""


def first_rows(path: str) -> list[DataRow]:
    """Return the first rows of a data set that can be read, at most `LOOKED_AT`.

    Raises ConfigError if there are none.
    """
    good, bad = _read_rows(path, LOOKED_AT)
    if not good:
        raise ConfigError(next(map(str, bad), f"{path} has no rows."))
    return good


def _read_rows(path: str, most: int | None = None) -> tuple[list[DataRow], list[BadRow]]:
    """Return the first rows of a data set: those that can be read, and the others."""
    rows = list(islice(read_rows(SourceConfig(path=path), whole=True), most))
    good = [row.values for row in rows if not isinstance(row, BadRow)]
    return good, [row for row in rows if isinstance(row, BadRow)]


def guess_columns(job: Job[Any], path: str, row: DataRow) -> dict[str, str] | None:
    """Return the column for each setting under `data.train`, guessed from a row's column names.

    Return None if the job accepts no guess.
    """
    for way in WAYS:
        columns = {setting: column for setting in way if (column := _column_for(setting, row))}
        if len(columns) == len(way) == len(set(columns.values())):
            source = SourceConfig.model_validate({"path": path, **columns})
            if not any(True for _ in job.columns("data.train", source)):
                return columns
    return None


def is_pair(row: DataRow) -> bool:
    """Return whether a row has the names of a preference pair: a better and a worse response."""
    return all(_column_for(setting, row) for setting in ("chosen", "rejected"))


def _column_for(setting: str, row: DataRow) -> str | None:
    return next((name for name in NAMES[setting] if name in row), None)


def longest_tokens(job: Job[Any], columns: Mapping[str, str], rows: Sequence[DataRow]) -> int:
    """Return a power of two: an estimated number of tokens that no row exceeds.

    It is at least `SHORTEST`. Only what the job reads counts: of RL the prompts; all columns if
    `columns` is empty.
    """
    given = ("prompt", "messages") if "rollout" in job.config.model_fields else _SEQUENCE
    read = [columns[setting] for setting in given if setting in columns]
    either = [columns[setting] for setting in ("chosen", "rejected") if setting in columns]

    def length(row: DataRow) -> int:
        names = read if read or either else [*row]
        longer = max((_bytes(row.get(name)) for name in either), default=0)
        return longer + sum(_bytes(row.get(name)) for name in names)

    tokens = max(map(length, rows)) / BYTES + TEMPLATE
    return int(max(SHORTEST, 2 ** math.ceil(math.log2(tokens))))


_SEQUENCE = ("prompt", "messages", "response", "text", "steps")
"""The settings of columns whose texts follow each other in a sequence."""


def _bytes(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False, default=str).encode(errors="replace"))


def choose_steps(rows: int, sizes: Mapping[str, int]) -> int:
    """Return the steps of a first run, so that it sees each row a few times (`EPOCHS`).

    `sizes` has the rows of a step, by their names under `batch`. There are at most `MOST_STEPS`.
    """
    name = next(name for name in EPOCHS if name in sizes)
    return max(1, min(MOST_STEPS, math.ceil(EPOCHS[name] * rows / sizes[name])))


@dataclass(frozen=True)
class RewardChoice:
    """The built-in reward that fits the references of rows."""

    name: str | None
    """The rule's name; None if no rule fits."""
    why: str
    skips_rows: bool = False
    """Whether the rule refuses the references of a few rows, which are skipped."""

    def __str__(self) -> str:
        return self.why if self.name is None else f"rewards.correct is {self.name}: {self.why}"


def choose_reward(references: Sequence[object]) -> RewardChoice:
    """Return the rule that fits the references.

    Tests of programs are run (`code`), mathematics is compared by its value (`math_answer`), and
    other text by its letters (`exact_match`).
    """
    seen = references[:_CHECKED]
    if all(map(_is_tests, seen)):
        return RewardChoice("code", "the references are tests of programs")
    texts = [str(value) for value in seen if isinstance(value, str | int | float)]
    if len(texts) < len(seen) or any(isinstance(value, bool) for value in seen):
        return RewardChoice(
            None,
            "no built-in reward takes references that are missing, true, false, a list or an "
            "object. Name a function of yours: rewards.correct.name: my_rewards.py:correct",
        )
    others = [text for text in texts if not _is_mathematics(text)]
    if not others:
        return RewardChoice("math_answer", "the references are numbers or mathematics")
    if len(others) <= _FEW * len(texts):
        of_rows = f"{plural(len(others), 'reference')} of {len(texts)}"
        why = f"{of_rows} hold no mathematics, as {others[0]!r}: such rows are skipped"
        return RewardChoice("math_answer", why, skips_rows=True)
    if all(text.strip() and _passes(exact_match.check, text) for text in texts):
        return RewardChoice("exact_match", "the references are text")
    return RewardChoice(
        None,
        "some references are no mathematics, and some hold a marker that no answer holds. Choose "
        "rewards.correct.name yourself",
    )


def _is_tests(reference: object) -> bool:
    text = reference if isinstance(reference, str) else json.dumps(reference, default=str)
    return _TESTS.search(text) is not None and _passes(code.check, reference)


def _passes(check: Callable[[Any], object], value: object) -> bool:
    """Return whether a reward accepts a reference."""
    try:
        check(value)
    except ValueError:
        return False
    return True


def _is_mathematics(text: str) -> bool:
    """Return whether a text is mathematics; a single letter is more often the answer to a quiz."""
    return bool(re.search(r"[\d\\]", text)) and reference_answer(text) is not None


def hold_out(path: str, count: int, train: Path, held_out: Path) -> None:
    """Write the rows of a data set to two files: `count` of them, drawn at random, to the second.

    The draw is always the same. Raises ConfigError if nothing would be left to learn from, or if
    rows cannot be written as JSON.
    """
    rows, _ = _read_rows(path)
    if not 0 < count < len(rows):
        raise ConfigError(
            f"--eval {count}: {plural(len(rows), 'row')} cannot be divided so. Give a number of "
            f"rows from 1 to {len(rows) - 1}, or a file."
        )
    drawn = {*random.Random(0).sample(range(len(rows)), count)}
    try:
        lines = [f"{strict_json(row)}\n" for row in rows]
    except TypeError as error:
        raise ConfigError(
            f"--eval {count}: the rows of {path} cannot be written as JSON lines ({error}). Divide "
            "the data yourself, and give the held-out file: --eval FILE."
        ) from error
    for file, is_drawn in ((train, False), (held_out, True)):
        chosen = (line for place, line in enumerate(lines) if (place in drawn) is is_drawn)
        write_whole(file, "".join(chosen))
