r"""Read a row of preference data: a prompt, a better response and a worse one.

There are three forms, which differ in their columns and values:
- a column with the prompt, and `chosen` and `rejected` with the two responses: each of the three is
  text, or a list of messages;
- no prompt column, and `chosen` and `rejected` as lists of messages: the turns that both begin with
  are the prompt, and the first turns that differ must be the assistant's;
- no prompt column, and `chosen` and `rejected` as text: dialogues as in HH-RLHF (Bai et al. 2022,
  https://arxiv.org/abs/2204.05862), with `\n\nHuman:` and `\n\nAssistant:` before the turns. The
  text that both begin with, up to its last `\n\nAssistant:`, is the prompt. The text after it is
  the response, which must not hold a turn of the human's.

Every check raises `RowProblem` with the column's name as the config writes it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf

from plimsoll.config.data import SourceConfig
from plimsoll.data.fields import RawRow, RowProblem, kind_of, text_of
from plimsoll.data.pieces import Messages, count_alike
from plimsoll.data.rows import prompt_turns, response_turns, turns_of, with_system

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"


@dataclass(frozen=True)
class PairRow:
    """A pair as messages: the prompt of both responses, and the responses."""

    prompt: Messages
    chosen: Messages
    rejected: Messages


def pair_of(row: RawRow, source: SourceConfig, *, plain: bool) -> PairRow:
    """Return the pair of a row. Its responses differ, and neither is empty.

    Args:
        row: the row.
        source: the settings that name the columns of its parts.
        plain: whether there is no chat template. A dialogue's text then keeps its markers.
    """
    names = chosen, rejected = answers_of(source)
    if source.prompt is not None:
        responses = (response_turns(row, name) for name in names)
        pair = PairRow(prompt_turns(row, source.prompt), *responses)
    elif isinstance(row.values.get(chosen), list):
        pair = _pair_of_messages(row, chosen, rejected)
    else:
        pair = _pair_of_dialogues(row, chosen, rejected, plain=plain)
    if pair.chosen == pair.rejected:
        raise RowProblem(rejected, f"equals `{chosen}`, so neither is better")
    return pair


def answers_of(source: SourceConfig) -> tuple[str, str]:
    """Return the columns of the better and of the worse response."""
    assert source.chosen is not None and source.rejected is not None
    return source.chosen, source.rejected


def margin_of(row: RawRow, column: str | None) -> float:
    """Return a pair's margin; 0 if there is no column for it."""
    if column is None:
        return 0.0
    value = row.values.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowProblem(column, f"must be a number, but is {kind_of(value)}")
    if not 0 <= value < inf:  # also false for NaN
        raise RowProblem(column, f"is {value}, and a margin is a finite number from 0 on")
    return float(value)


def _pair_of_messages(row: RawRow, better: str, worse: str) -> PairRow:
    chosen, rejected = turns_of(row, better), turns_of(row, worse)
    shared = count_alike(chosen, rejected)
    if shared == 0:
        raise RowProblem(
            worse,
            f"begins with another turn than `{better}`: where a column of its own holds "
            "the prompt, give `prompt: COLUMN`",
        )
    if chosen != rejected:
        _check_answer(chosen, better, shared)
        _check_answer(rejected, worse, shared)
    return PairRow(chosen[:shared], chosen[shared:], rejected[shared:])


def _check_answer(messages: Messages, column: str, start: int) -> None:
    if start == len(messages):
        raise RowProblem(column, "ends where the other response begins, so it has none")
    role = messages[start]["role"]
    if role != "assistant":
        raise RowProblem(
            f"{column}[{start}].role",
            f"is `{role}`, but the first turns that differ must be the assistant's",
        )


def _pair_of_dialogues(row: RawRow, better: str, worse: str, *, plain: bool) -> PairRow:
    chosen, rejected = (text_of(row.values, name) for name in (better, worse))
    before, marker, _ = chosen[: count_alike(chosen, rejected)].rpartition(ASSISTANT)
    if not marker:
        raise RowProblem(
            worse,
            f"shares no prompt with `{better}`: without a column for the prompt, both must"
            f" be dialogues that begin alike, up to a {ASSISTANT!r}",
        )
    prompt = before + marker
    answers = [
        _check_response(chosen.removeprefix(prompt), better),
        _check_response(rejected.removeprefix(prompt), worse),
    ]
    turns: Messages = [{"role": "user", "content": prompt}]
    if not plain:
        turns = _dialogue_turns(before, better)
        answers = [answer.strip() for answer in answers]
    turns = with_system(turns, row, better)
    return PairRow(turns, *([{"role": "assistant", "content": answer}] for answer in answers))


def _check_response(text: str, column: str) -> str:
    if not text.strip():
        raise RowProblem(column, f"is empty after the prompt's last {ASSISTANT!r}")
    if HUMAN in text:
        raise RowProblem(column, f"goes on with {HUMAN!r} after the dialogues differ")
    return text


def _dialogue_turns(dialogue: str, column: str) -> Messages:
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
