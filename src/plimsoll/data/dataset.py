"""Rows of a source -> training samples (SFT) or prompts (RL), with the bad rows listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data.pieces import Messages, Piece, readable
from plimsoll.data.report import BadRow, BadRows, RowProblem
from plimsoll.data.rows import (
    Columns,
    check_columns,
    conversation_of,
    prompt_columns,
    prompt_of,
    reference_of,
    sample_columns,
)
from plimsoll.data.sources import Row, read_rows
from plimsoll.data.template import Template
from plimsoll.errors import DataError
from plimsoll.records import Bools, Ints, Prompt, Sample

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """What a source gave. bad_rows is empty unless `data.on_bad_row` is `skip`."""

    items: tuple[T, ...]
    bad_rows: tuple[BadRow, ...]


@dataclass(frozen=True)
class Checked:
    """A row that passed the checks of its fields, rendered and not yet tokenized.

    index: which row of the source it is, from 0, bad rows included.
    """

    row: Row
    index: int
    text: str
    pieces: tuple[Piece, ...]
    reference: str | None


def load_samples(data: DataConfig, source: SourceConfig, template: Template) -> Loaded[Sample]:
    """The training samples of a source (`data.train` or `data.eval`), in the source's order.

    Raises DataError for bad rows under `on_bad_row: stop` or when no good row is left, and
    ConfigError for settings that cannot be right for the source.
    """
    columns = sample_columns(source, _key(data, source))

    def check(row: Row, index: int) -> Checked:
        messages = conversation_of(row, columns)
        pieces = _rendered(template.render_conversation, messages, columns)
        return Checked(row, index, "", pieces, None)

    return _load(data, source, template, columns, check, partial(_sample, data, columns.turns))


def load_prompts(data: DataConfig, source: SourceConfig, template: Template) -> Loaded[Prompt]:
    """The prompts of a source, in the source's order; errors as in `load_samples`."""
    columns = prompt_columns(source, _key(data, source))

    def check(row: Row, index: int) -> Checked:
        messages = prompt_of(row, columns)
        reference = reference_of(row, columns.reference)
        pieces = _rendered(template.render_prompt, messages, columns)
        return Checked(row, index, readable(messages), pieces, reference)

    return _load(data, source, template, columns, check, partial(_prompt, data, columns.turns))


def _key(data: DataConfig, source: SourceConfig) -> str:
    return "data.eval" if source is data.eval else "data.train"


def _rendered(
    render: Callable[[Messages], tuple[Piece, ...]], messages: Messages, columns: Columns
) -> tuple[Piece, ...]:
    try:
        return render(messages)
    except DataError as error:
        raise RowProblem(columns.turns, str(error)) from error


def _load(
    data: DataConfig,
    source: SourceConfig,
    template: Template,
    columns: Columns,
    check: Callable[[Row, int], Checked],
    finish: Callable[[Checked, Ints, Bools], T],
) -> Loaded[T]:
    """Read, check and render every row, tokenize all at once, and sort good rows from bad."""
    rows = list(read_rows(source))
    check_columns(columns, [row for row in rows if isinstance(row, Row)], _key(data, source))
    checked = [
        row if isinstance(row, BadRow) else _attempt(row, partial(check, row, index))
        for index, row in enumerate(rows)
    ]
    tokenized = iter(template.tokenize([c.pieces for c in checked if isinstance(c, Checked)]))
    finished = [
        c if isinstance(c, BadRow) else _attempt(c.row, partial(finish, c, *next(tokenized)))
        for c in checked
    ]
    bad = tuple(outcome for outcome in finished if isinstance(outcome, BadRow))
    settled = BadRows(source.path, len(rows), bad).settle(data.on_bad_row)
    return Loaded(tuple(item for item in finished if not isinstance(item, BadRow)), settled)


def _attempt(row: Row, work: Callable[[], T]) -> T | BadRow:
    try:
        return work()
    except RowProblem as found:
        return BadRow(row.file, row.line, found.field, found.problem)


def _sample(data: DataConfig, field: str, row: Checked, tokens: Ints, learned: Bools) -> Sample:
    if len(tokens) > data.max_tokens:
        _refuse_long(data, field, len(tokens))
        tokens, learned = tokens[: data.max_tokens], learned[: data.max_tokens]
    if not learned.any():
        raise RowProblem(field, f"leaves no tokens to learn from within {data.max_tokens:,} tokens")
    return Sample(tokens, learned)


def _prompt(data: DataConfig, field: str, row: Checked, tokens: Ints, learned: Bools) -> Prompt:
    if len(tokens) == 0:
        raise RowProblem(field, "gives no tokens")
    if len(tokens) > data.max_tokens:
        _refuse_long(data, field, len(tokens))
        tokens = tokens[-data.max_tokens :]  # the end holds the question and the generation prompt
    return Prompt(row.index, tokens, row.text, row.reference)


def _refuse_long(data: DataConfig, field: str, length: int) -> None:
    if data.over_long == "refuse":
        raise RowProblem(
            field,
            f"has {length:,} tokens, over `data.max_tokens: {data.max_tokens}` (raise it, or cut"
            f" with `--data.over_long truncate`)",
        )
