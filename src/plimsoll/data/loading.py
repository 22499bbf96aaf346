"""Turn a source's rows into the items of a run: check, render, tokenize, finish.

Rows are handled in batches, so that of a large source only the finished items are in memory.

A template is a program, and may write less than a row holds: no system turn, no tool turn, no
reasoning. Text that is not written is neither learned nor read by the model, so a row with such a
turn is bad. There is one exception. Many templates (Qwen3's, for one) drop the reasoning of the
assistant's earlier turns, as they do when the model is used. If such a turn is not learned, the row
is good: the run counts such rows and reports the count.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from plimsoll.config.data import DataConfig, SourceConfig, set_name
from plimsoll.data.fields import BadRow, RawRow, RowProblem, settle
from plimsoll.data.pieces import (
    SYSTEM_ROLES,
    TOOL_ROLES,
    Messages,
    TextPiece,
    Tokenized,
    dense_text,
    is_learned,
    quote,
)
from plimsoll.data.rows import OF_EVERY_ROW, check_columns, tools_of
from plimsoll.data.sources import names_of, read_rows
from plimsoll.data.template import Draft, Template, has_control_tokens, render_drafts
from plimsoll.errors import ConfigError, DataError
from plimsoll.records import Prompt

ROWS_AT_ONCE = 256
"""Rows of one batch. It is small so that a count moves even if rows are slow, as LaTeX is."""

MOST_CHARACTERS = 4_000_000
"""Characters that one sequence may have: about a million tokens of English, which take some 4 s and
1 GB to tokenize.
"""

T = TypeVar("T")
CountRows = Callable[[int], None]
"""Takes the number of rows that were read since the last call."""


def ignore_rows(rows: int) -> None:
    """Do nothing with a count of rows."""


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """The items of a source, and what was left out."""

    items: tuple[T, ...]
    bad_rows: tuple[BadRow, ...]
    """The rows that cannot be used; empty unless `data.on_bad_row` is `skip`."""
    cut_rows: int
    """The number of rows cut to `data.max_tokens`; 0 unless `data.over_long` is `truncate`."""
    stripped: Sequence[str] = ()
    """The places, as `file:line`, of rows of which the chat template leaves out reasoning that
    would not be learned."""
    rendered: Sequence[str] = ()
    """The places of rows whose text has tokens of the chat template: it seems to be rendered
    already."""


def _keep(pieces: tuple[TextPiece, ...]) -> tuple[TextPiece, ...]:
    return pieces


@dataclass(frozen=True)
class Unrendered:
    """A conversation of a row that is to be rendered."""

    draft: Draft
    field: str
    """The column that errors name."""
    cut: Callable[[tuple[TextPiece, ...]], tuple[TextPiece, ...]] = _keep
    """Takes the rendered pieces and returns those of the sequence; raises DataError."""


@dataclass(frozen=True)
class CheckedRow:
    """A row whose fields are checked, but which is not yet rendered and tokenized."""

    row: RawRow
    index: int
    """The number of the row in its source, from 0, bad rows included."""
    text: str
    """The row's prompt as a person reads it; empty for jobs that do not need it."""
    sequences: tuple[Unrendered, ...]
    """The sequences that the row gives: one, or chosen and rejected."""
    prompt: Prompt | None = None
    """A row of prompts without its tokens; None for rows of other jobs."""


@dataclass(frozen=True)
class _RenderedRow:
    """A row that is rendered, but not yet tokenized."""

    row: CheckedRow
    sequences: tuple[tuple[TextPiece, ...], ...]
    """The pieces of each sequence."""
    stripped: bool
    """Whether the chat template leaves out reasoning that would not be learned."""
    rendered: bool
    """Whether the text of a turn has tokens of the chat template."""


CheckRow = Callable[[RawRow, int, Template], CheckedRow]
"""Checks a row. Takes the row, its number, and the template with its tools."""


def load_rows(
    data: DataConfig,
    source: SourceConfig,
    template: Template,
    check: CheckRow,
    finish: Callable[[CheckedRow, Sequence[Tokenized]], T],
    count_rows: CountRows,
    *,
    whole: bool = False,
) -> Loaded[T]:
    """Return the items of a source's rows, with the bad rows listed apart.

    Args:
        data: the settings under `data`.
        source: the settings of the source.
        template: the template of the run.
        check: checks a row, or raises RowProblem.
        finish: makes the item of a row and its tokenized sequences, or raises RowProblem.
        count_rows: called with the number of rows after each batch.
        whole: whether `check` and `finish` need all columns.
    """
    items: list[T] = []
    bad: list[BadRow] = []
    present: dict[str, None] = {}
    stripped: list[str] = []
    rendered: list[str] = []
    read, cut, key = 0, 0, source_key(data, source)
    rows = read_rows(source, whole=whole)
    while part := list(islice(rows, ROWS_AT_ONCE)):
        present |= _columns_of(part)
        for finished in _finish_rows(part, read, source.tools, template, check, finish):
            if isinstance(finished, BadRow):
                bad.append(finished)
                continue
            item, row, longest = finished
            items.append(item)
            cut += longest > data.max_tokens
            place = f"{row.row.row.file}:{row.row.row.line}"
            stripped += [place] if row.stripped else []
            rendered += [place] if row.rendered else []
        read += len(part)
        count_rows(len(part))
        if data.on_bad_row == "stop":  # a missing column stops the run: no need to read on
            check_columns(source, present, key)
    # Only some rows may have tools, so this column is checked after all rows are read.
    check_columns(source, present, key, (*OF_EVERY_ROW, "tools"))
    settle(source.path, read, bad, data.on_bad_row)
    return Loaded(tuple(items), tuple(bad), cut, stripped, rendered)


def source_key(data: DataConfig, source: SourceConfig) -> str:
    """Return the key of a source in the config, such as `data.eval`."""
    keys = (key for key, known in data.sources().items() if known is source)
    return next(keys, "data.train")


def source_name(data: DataConfig, source: SourceConfig) -> str:
    """Return the name of one of several sources; "" for a single source."""
    return set_name(source_key(data, source))


def _columns_of(part: Sequence[RawRow | BadRow]) -> dict[str, None]:
    """Return the columns of rows, with the nested columns of the first row."""
    rows = [row.values for row in part if isinstance(row, RawRow)]
    names = dict.fromkeys(name for values in rows for name in values)
    return names | dict.fromkeys(name for values in rows[:1] for name in names_of(values))


def _finish_rows(
    rows: Sequence[RawRow | BadRow],
    first: int,
    tools: str | None,
    template: Template,
    check: CheckRow,
    finish: Callable[[CheckedRow, Sequence[Tokenized]], T],
) -> Iterator[tuple[T, _RenderedRow, int] | BadRow]:
    """Yield the item of each row, the row, and the tokens of its longest sequence; in order.

    `first` is the number of the first of these rows in the source, `tools` the column with tools.
    """

    def check_row(row: RawRow, index: int) -> CheckedRow:
        add_tools = partial(template.with_tools, tools_of(row.values, tools))
        return check(row, index, run_for_field(add_tools, tools or ""))

    checked = [
        row if isinstance(row, BadRow) else _attempt(row, partial(check_row, row, index))
        for index, row in enumerate(rows, start=first)
    ]
    rendered = _render_rows(checked)
    tokenized = iter(
        template.tokenize([s for r in rendered if isinstance(r, _RenderedRow) for s in r.sequences])
    )
    for row in rendered:
        if isinstance(row, BadRow):
            yield row
        else:
            sequences = [next(tokenized) for _ in row.sequences]
            item = _attempt(row.row.row, partial(finish, row.row, sequences))
            longest = max(len(tokens) for tokens, _ in sequences)
            yield item if isinstance(item, BadRow) else (item, row, longest)


def _render_rows(rows: Sequence[CheckedRow | BadRow]) -> list[_RenderedRow | BadRow]:
    """Return the rows with the pieces of their sequences; all are rendered in one go."""
    good = [row for row in rows if isinstance(row, CheckedRow)]
    results = iter(render_drafts([part.draft for row in good for part in row.sequences]))

    def finish_row(row: CheckedRow) -> _RenderedRow:
        drafted = [(part, next(results)) for part in row.sequences]
        parts = [_finish_rendering(part, result) for part, result in drafted]
        stripped = any(stripped for _, stripped in parts)
        rendered = any(map(has_control_tokens, (part.draft for part in row.sequences)))
        sequences = tuple(pieces for pieces, _ in parts)
        _check_length(sequences)
        return _RenderedRow(row, sequences, stripped, rendered)

    return [
        row if isinstance(row, BadRow) else _attempt(row.row, partial(finish_row, row))
        for row in rows
    ]


def _finish_rendering(
    part: Unrendered, result: tuple[TextPiece, ...] | ConfigError
) -> tuple[tuple[TextPiece, ...], bool]:
    """Return the pieces of a sequence, and whether the template left reasoning out of them.

    The template may leave out only reasoning of turns that are not learned; else raise RowProblem.
    """
    draft, field = part.draft, part.field

    def check(pieces: Sequence[TextPiece]) -> bool:
        text = "".join(piece.text for piece in pieces)
        rendered = None if draft.template.jinja is None else text
        adds_system = len(draft.template.with_system(draft.turns)) > len(draft.turns)
        system = draft.template.system if adds_system else None
        return run_for_field(partial(check_written, draft.turns, rendered, system), field)

    if isinstance(result, DataError):
        raise RowProblem(field, str(result)) from result
    if isinstance(result, ConfigError):
        # The template rewrites earlier turns, often as it leaves something out.
        check(run_for_field(partial(draft.template.render_whole, draft.turns), field))
        raise result
    pieces = run_for_field(partial(part.cut, result), field)
    return pieces, check(pieces)


def _attempt(row: RawRow, work: Callable[[], T]) -> T | BadRow:
    try:
        return work()
    except RowProblem as error:
        return BadRow(row.file, row.line, error.field, error.problem)


def _check_length(sequences: Sequence[tuple[TextPiece, ...]]) -> None:
    """Raise RowProblem if tokenizing a row's sequences would take minutes and gigabytes."""
    longest = max(sum(len(piece.text) for piece in pieces) for pieces in sequences)
    if longest > MOST_CHARACTERS:
        raise RowProblem(
            "",
            f"has {longest:,} characters, over the {MOST_CHARACTERS:,} that one row may have: a "
            f"tokenizer would take gigabytes for it. Split it into several rows",
        )


def run_for_field(work: Callable[[], T], field: str) -> T:
    """Return what `work` returns. If it raises DataError, raise RowProblem for the field."""
    try:
        return work()
    except DataError as error:
        raise RowProblem(field, str(error)) from error


REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a turn that hold the assistant's reasoning before its answer."""


@dataclass(frozen=True)
class _TurnText:
    """One text of a turn: its content, or its reasoning."""

    number: int
    """The number of the turn, from 1; 0 for the system message of the settings."""
    role: str
    key: str
    """The key of the turn that holds the text."""
    text: str
    thought: bool
    """Whether the text is reasoning."""
    learned: bool
    """Whether the turn is learned."""


def check_written(turns: Messages, text: str | None, system: str | None = None) -> bool:
    """Return whether the template leaves out reasoning of a turn that is not learned.

    Args:
        turns: the conversation, with its marks of what is learned.
        text: the conversation as the template renders it; None: its contents are joined as plain
            text.
        system: the system message of the settings, if the conversation has none.

    Raises:
        DataError: anything else is left out. The message names the turn and the key.
    """
    texts = [*_turn_texts(turns)]
    if system is not None:
        texts.append(_TurnText(0, "system", "content", system, thought=False, learned=False))
    texts = [part for part in texts if part.text.strip()]
    if text is None:
        missing = [part for part in texts if part.key != "content"]
    else:
        missing = [*_find_missing(texts, dense_text(text))]
    for part in missing:
        if part.learned or not part.thought:
            raise DataError(_describe_omission(part, plain=text is None))
    return bool(missing)


def _turn_texts(turns: Messages) -> Iterator[_TurnText]:
    for number, turn in enumerate(turns, start=1):
        role, content, learned = str(turn["role"]), str(turn["content"]), is_learned(turn)
        if role == "assistant":
            thoughts = {key: turn[key] for key in REASONING if isinstance(turn.get(key), str)}
            head, mark, answer = content.rpartition("</think>")
            if mark:  # as templates divide a turn's content
                thoughts["content"], content = head.rpartition("<think>")[2], answer
            for key, thought in thoughts.items():
                yield _TurnText(number, role, key, thought, thought=True, learned=learned)
        yield _TurnText(number, role, "content", content, thought=False, learned=learned)


def _find_missing(texts: Sequence[_TurnText], rendered: str) -> Iterator[_TurnText]:
    """Yield the texts that are rendered less often than turns have them.

    If several turns have the same text, the text that templates are likeliest to leave out is
    missing. White space does not count, as many templates trim it. A text may be written as it is
    or within a JSON string.
    """
    expected: Counter[str] = Counter()
    for part in sorted(texts, key=_omission_order):
        as_is = dense_text(part.text)
        in_json = dense_text(json.dumps(part.text.strip(), ensure_ascii=False)[1:-1])
        expected[as_is] += 1
        if sum(map(rendered.count, {as_is, in_json})) < expected[as_is]:
            yield part


def _omission_order(part: _TurnText) -> tuple[bool, bool, bool]:
    """Return a sort key: texts that templates are likelier to leave out come later."""
    return part.thought, part.thought and not part.learned, part.role in SYSTEM_ROLES + TOOL_ROLES


def _describe_omission(part: _TurnText, *, plain: bool) -> str:
    renderer = "plain text" if plain else "the chat template"
    fix = "Write it into the content" if plain else "Set `data.chat_template` to one that has it"
    quoted = quote(part.text.strip())
    if part.number == 0:
        return (
            f"would begin with `data.system`, which {renderer} leaves out: {quoted}. "
            f"{fix}, or leave it out"
        )
    what = "text"
    if part.thought:
        what = "reasoning"
        fix += ", mark the turn `train: false` (it is then not learned)"
    return (
        f"has a turn {part.number} ({part.role}) with {what} in its `{part.key}` that {renderer} "
        f"leaves out: {quoted}. {fix}, or take it out of the row"
    )
