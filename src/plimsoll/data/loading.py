"""A source's rows on their way to the items of a run: checked, rendered, tokenized, finished.

A part of the rows at a time, so that of a large source only what is made of it is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from plimsoll.config.data import DataConfig, SourceConfig, set_name
from plimsoll.data.pieces import Piece
from plimsoll.data.report import BadRow, Row, RowProblem, settle
from plimsoll.data.rows import OF_EVERY_ROW, check_columns, tools_of
from plimsoll.data.sources import names_of, read_rows
from plimsoll.data.template import Template
from plimsoll.data.tokenize import Tokenized
from plimsoll.errors import DataError
from plimsoll.records import Prompt

ROWS_AT_ONCE = 256
"""So few that a count moves on while each row takes long, as LaTeX to read does."""

MOST_CHARACTERS = 4_000_000
"""Of a sequence: about a million tokens of English, which take some 4 s and 1 GB to tokenize."""

T = TypeVar("T")
Seen = Callable[[int], None]
"""Takes how many more rows were read."""


def unseen(rows: int) -> None:
    """Shows nobody how many rows were read."""


@dataclass(frozen=True)
class Stripped:
    """rows: how many there are. first: the place of the first, as `file:line`."""

    rows: int
    first: str


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """What a source gave. bad_rows is empty unless `data.on_bad_row` is `skip`, cut_rows (how many
    were over `data.max_tokens`) 0 unless `data.over_long` is `truncate`. stripped: the rows of
    which the chat template leaves out reasoning that would not be learned."""

    items: tuple[T, ...]
    bad_rows: tuple[BadRow, ...]
    cut_rows: int
    stripped: Stripped | None = None


@dataclass(frozen=True)
class Checked:
    """A row that passed the checks of its fields, rendered and not yet tokenized.

    index: which row of the source it is, from 0, bad rows included.
    text: its prompt as a person reads it; empty where nobody asks for it.
    sequences: the pieces of each sequence that the row gives: one, or chosen and rejected.
    prompt: what a row of prompts says, without its tokens yet; None for rows of other jobs.
    stripped: whether the chat template leaves out reasoning that would not be learned.
    """

    row: Row
    index: int
    text: str
    sequences: tuple[tuple[Piece, ...], ...]
    prompt: Prompt | None = None
    stripped: bool = False


Check = Callable[[Row, int, Template], Checked]


def load_rows(
    data: DataConfig,
    source: SourceConfig,
    template: Template,
    check: Check,
    finish: Callable[[Checked, Sequence[Tokenized]], T],
    seen: Seen,
    *,
    whole: bool = False,
) -> Loaded[T]:
    """What comes of a source's rows, the bad ones apart.

    check: a row, its place in the source, and the template that knows its tools. finish: a row and
    its sequences. Both raise RowProblem. whole: they look at all columns.
    """
    items: list[T] = []
    bad: list[BadRow] = []
    present: dict[str, None] = {}
    stripped: list[str] = []
    read, cut, key = 0, 0, source_key(data, source)
    rows = read_rows(source, whole=whole)
    while part := list(islice(rows, ROWS_AT_ONCE)):
        present |= _columns_of(part)
        for one in _finished(part, read, source.tools, template, check, finish):
            if isinstance(one.made, BadRow):
                bad.append(one.made)
            else:
                items.append(one.made)
                cut += one.longest > data.max_tokens
                stripped += [one.place] if one.stripped else []
        read += len(part)
        seen(len(part))
        if data.on_bad_row == "stop":  # rows without a column are bad: no need to read on
            check_columns(source, present, key)
    # Of many rows only some may have tools, so that all are to be seen first.
    check_columns(source, present, key, (*OF_EVERY_ROW, "tools"))
    settle(source.path, read, bad, data.on_bad_row)
    told = Stripped(len(stripped), stripped[0]) if stripped else None
    return Loaded(tuple(items), tuple(bad), cut, told)


def source_key(data: DataConfig, source: SourceConfig) -> str:
    """How the config calls a source, such as `data.eval`."""
    keys = (key for key, known in data.sources().items() if known is source)
    return next(keys, "data.train")


def source_name(data: DataConfig, source: SourceConfig) -> str:
    """How the config calls one of several sources; empty for a single one."""
    return set_name(source_key(data, source))


def _columns_of(part: Sequence[Row | BadRow]) -> dict[str, None]:
    """Of rows; the columns within columns are those of the first, to offer the nearest."""
    rows = [row.values for row in part if isinstance(row, Row)]
    found = dict.fromkeys(name for values in rows for name in values)
    return found | dict.fromkeys(name for values in rows[:1] for name in names_of(values))


@dataclass(frozen=True)
class _Finished(Generic[T]):
    """What came of a row. longest: the tokens of its longest sequence. place, stripped: where it
    is, and as of `Checked`."""

    made: T | BadRow
    longest: int = 0
    place: str = ""
    stripped: bool = False


def _finished(
    part: Sequence[Row | BadRow],
    first: int,
    tools: str | None,
    template: Template,
    check: Check,
    finish: Callable[[Checked, Sequence[Tokenized]], T],
) -> Iterator[_Finished[T]]:
    """What comes of rows, in their order. first: which of the source the first one is. tools: the
    column with them."""

    def checked_of(row: Row, index: int) -> Checked:
        known = partial(template.knowing, tools_of(row.values, tools))
        return _of_some_length(check(row, index, rendered(known, tools or "")))

    checked = [
        row if isinstance(row, BadRow) else _attempt(row, partial(checked_of, row, index))
        for index, row in enumerate(part, start=first)
    ]
    tokenized = iter(
        template.tokenize([s for c in checked if isinstance(c, Checked) for s in c.sequences])
    )
    for row in checked:
        if isinstance(row, BadRow):
            yield _Finished(row)
        else:
            sequences = [next(tokenized) for _ in row.sequences]
            longest = max(len(tokens) for tokens, _ in sequences)
            made = _attempt(row.row, partial(finish, row, sequences))
            yield _Finished(made, longest, f"{row.row.file}:{row.row.line}", row.stripped)


def _attempt(row: Row, work: Callable[[], T]) -> T | BadRow:
    try:
        return work()
    except RowProblem as found:
        return BadRow(row.file, row.line, found.field, found.problem)


def _of_some_length(row: Checked) -> Checked:
    """Return the row. Raises RowProblem for a text that would take minutes, and gigabytes, to
    tokenize."""
    longest = max(sum(len(piece.text) for piece in pieces) for pieces in row.sequences)
    if longest > MOST_CHARACTERS:
        raise RowProblem(
            "",
            f"has {longest:,} characters, over the {MOST_CHARACTERS:,} that one row may have: a "
            f"tokenizer would take gigabytes for it. Split it into several rows",
        )
    return row


def rendered(render: Callable[[], T], field: str) -> T:
    """What a template makes; a DataError becomes a RowProblem with the field."""
    try:
        return render()
    except DataError as error:
        raise RowProblem(field, str(error)) from error
