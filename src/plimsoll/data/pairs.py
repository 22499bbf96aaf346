"""What a row of preference data must hold: a prompt, a better response and a worse one.

Three forms, told by the columns and by what they hold:
- a column with the prompt, and `chosen` and `rejected` with the two responses: each of the three
  is text, or a list of messages;
- no prompt column, and `chosen` and `rejected` as lists of messages: the turns that both begin
  with are the prompt, and the first turns that differ must be the assistant's;
- no prompt column, and `chosen` and `rejected` as text: dialogues as in HH-RLHF (Bai et al. 2022,
  https://arxiv.org/abs/2204.05862), with `\n\nHuman:` and `\n\nAssistant:` before the turns. The
  text that both begin with, up to its last `\n\nAssistant:`, is the prompt; what follows in each
  is the response, which must not hold a turn of the human's.

Every check raises `RowProblem` with the column's name as it is written in the config.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import inf

from plimsoll.data.fields import kind_of, text_of
from plimsoll.data.pieces import Messages
from plimsoll.data.report import Row, RowProblem
from plimsoll.data.rows import answered_in, asked_in, turns_of

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"


@dataclass(frozen=True)
class PairColumns:
    """The columns that hold pairs."""

    prompt: str | None
    chosen: str
    rejected: str


@dataclass(frozen=True)
class PairRow:
    """A row as messages: what both responses answer, and the responses."""

    prompt: Messages
    chosen: Messages
    rejected: Messages


def pair_of(row: Row, columns: PairColumns, *, plain: bool) -> PairRow:
    """The pair of a row, its responses different and not empty.

    plain: without a chat template; a dialogue's text is then left as it is, markers included.
    """
    if columns.prompt is not None:
        responses = (answered_in(row, name) for name in (columns.chosen, columns.rejected))
        pair = PairRow(asked_in(row, columns.prompt), *responses)
    elif isinstance(row.values.get(columns.chosen), list):
        pair = _of_messages(row, columns)
    else:
        pair = _of_dialogues(row, columns, plain=plain)
    if pair.chosen == pair.rejected:
        raise RowProblem(columns.rejected, f"equals `{columns.chosen}`, so neither is better")
    return pair


def margin_of(row: Row, column: str | None) -> float:
    """A pair's margin; 0 without a column for it."""
    if column is None:
        return 0.0
    value = row.values.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowProblem(column, f"must be a number, but is {kind_of(value)}")
    if not 0 <= value < inf:  # NaN is not, either
        raise RowProblem(column, f"is {value}, and a margin is a finite number from 0 on")
    return float(value)


def _user(content: str) -> Messages:
    return [{"role": "user", "content": content}]


def _assistant(content: str) -> Messages:
    return [{"role": "assistant", "content": content}]


def _texts(row: Row, columns: PairColumns) -> tuple[str, str]:
    return text_of(row.values, columns.chosen), text_of(row.values, columns.rejected)


def _of_messages(row: Row, columns: PairColumns) -> PairRow:
    chosen, rejected = turns_of(row, columns.chosen), turns_of(row, columns.rejected)
    same = _alike(chosen, rejected)
    if same == 0:
        raise RowProblem(
            columns.rejected,
            f"begins with another turn than `{columns.chosen}`: where a column of its own holds "
            "the prompt, give `prompt: COLUMN`",
        )
    if chosen != rejected:
        _check_answer(chosen, columns.chosen, same)
        _check_answer(rejected, columns.rejected, same)
    return PairRow(chosen[:same], chosen[same:], rejected[same:])


def _alike(one: Sequence[object], other: Sequence[object]) -> int:
    """How many items both begin with."""
    both = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda items: items[0] == items[1], both))


def _check_answer(messages: Messages, column: str, start: int) -> None:
    if start == len(messages):
        raise RowProblem(column, "ends where the other response begins, so it has none")
    role = messages[start]["role"]
    if role != "assistant":
        raise RowProblem(
            f"{column}[{start}].role",
            f"is `{role}`, but the first turns that differ must be the assistant's",
        )


def _of_dialogues(row: Row, columns: PairColumns, *, plain: bool) -> PairRow:
    chosen, rejected = _texts(row, columns)
    before, marker, _ = chosen[: _alike(chosen, rejected)].rpartition(ASSISTANT)
    if not marker:
        raise RowProblem(
            columns.rejected,
            f"shares no prompt with `{columns.chosen}`: without a column for the prompt, both must"
            f" be dialogues that begin alike, up to a {ASSISTANT!r}",
        )
    prompt = before + marker
    answers = (
        _response(chosen.removeprefix(prompt), columns.chosen),
        _response(rejected.removeprefix(prompt), columns.rejected),
    )
    if plain:
        return PairRow(_user(prompt), *map(_assistant, answers))
    turns = _turns(before, columns.chosen)
    return PairRow(turns, *(_assistant(answer.strip()) for answer in answers))


def _response(text: str, column: str) -> str:
    if not text.strip():
        raise RowProblem(column, f"is empty after the prompt's last {ASSISTANT!r}")
    if HUMAN in text:
        raise RowProblem(column, f"goes on with {HUMAN!r} after the dialogues differ")
    return text


def _turns(dialogue: str, column: str) -> Messages:
    """The turns of a dialogue as messages."""
    opening, *rest = re.split(f"({HUMAN}|{ASSISTANT})", dialogue)
    if opening.strip() or not rest:
        raise RowProblem(column, f"must begin with {HUMAN!r}")
    contents = [content.strip() for content in rest[1::2]]
    if "" in contents:
        raise RowProblem(column, f"has no text in turn {contents.index('') + 1}")
    return [
        {"role": "user" if marker == HUMAN else "assistant", "content": content}
        for marker, content in zip(rest[::2], contents, strict=True)
    ]
