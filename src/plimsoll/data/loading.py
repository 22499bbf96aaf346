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
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import pyarrow as pa
import xxhash

from plimsoll.config.data import DataConfig, SourceConfig, set_name
from plimsoll.data.cache import Entry, Kept, RowFacts, find_entry, keep, read_entry
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
from plimsoll.data.several import MOST_PROCESSES, make_parts
from plimsoll.data.sources import names_of, read_rows
from plimsoll.data.stored import StoredRows, encode, hashed_parts
from plimsoll.data.streamed import StreamedRows, read_blocks
from plimsoll.data.template import Draft, Template, has_control_tokens, render_drafts
from plimsoll.errors import CannotWrite, ConfigError, DataError
from plimsoll.machine.host import usable_cores
from plimsoll.records import Prompt, Row
from plimsoll.run.numbers import plural

MOST_CHARACTERS = 4_000_000
"""Characters that one sequence may have: about a million tokens of English, which take some 4 s and
1 GB to tokenize.
"""

T = TypeVar("T")
ItemT = TypeVar("ItemT", bound=Row | Prompt)


def _ignore(rows: int) -> None:
    """Do nothing with a count of rows."""


def _print(text: str) -> None:
    print(text, file=sys.stderr)


@dataclass(frozen=True)
class Observer:
    """Is told of rows while they are read."""

    count: Callable[[int], None] = _ignore
    """Takes the number of rows that were read since the last call."""
    note: Callable[[str], None] = _print
    """Takes a line for the user, such as that another process is waited for."""


UNSEEN = Observer()
"""Shows no count."""


@dataclass(frozen=True)
class MarkedRows:
    """Rows of which something is to be reported."""

    rows: int = 0
    first: str = ""
    """The place of the first one, as `file:line`."""

    def add(self, more: Sequence[str]) -> MarkedRows:
        """Return these and further rows."""
        return MarkedRows(self.rows + len(more), self.first or next(iter(more), ""))


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """The items of a source, and what was left out."""

    items: Sequence[T]
    bad_rows: tuple[BadRow, ...]
    """The rows that cannot be used; empty unless `data.on_bad_row` is `skip`."""
    cut_rows: int
    """The number of rows cut to `data.max_tokens`; 0 unless `data.over_long` is `truncate`."""
    stripped: MarkedRows = MarkedRows()
    """The rows of which the chat template leaves out reasoning that would not be learned."""
    rendered: MarkedRows = MarkedRows()
    """The rows whose text has tokens of the chat template: it seems to be rendered already."""


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


@dataclass(frozen=True)
class RowKind(Generic[ItemT]):
    """How the rows of a source become items of a kind.

    With functions of modules, or partials of such, other processes can do the work.
    """

    name: str
    check: Callable[[RawRow, int, Template], CheckedRow]
    """Checks a row, or raises RowProblem. Takes the row, its number, and the template with its
    tools."""
    finish: Callable[[CheckedRow, Sequence[Tokenized]], Sequence[ItemT]]
    """Returns the items of a row and its tokenized sequences, or raises RowProblem."""
    made_by: Sequence[object] = ()
    """Values for JSON that decide about the items, beside the settings of the source."""
    whole: bool = False
    """Whether all columns are read, and not only those that the source names."""
    divides: bool = False
    """Whether a row that is too long is divided, so that none is cut."""
    alone: bool = False
    """Whether only this process can do the work."""


@dataclass(frozen=True)
class _Part:
    """What some rows became."""

    batch: pa.RecordBatch | None
    """The items, in order; None if there are none."""
    hashed: bytes
    """What the fingerprint is a hash of."""
    bad: list[BadRow]
    cut: int
    stripped: list[str]
    rendered: list[str]


@dataclass(frozen=True)
class _Work(Generic[ItemT]):
    """What makes parts of a source's rows."""

    kind: RowKind[ItemT]
    template: Template
    tools: str | None
    """The column with tools."""
    longest: int
    """The setting `data.max_tokens`."""

    def make(self, rows: Sequence[RawRow | BadRow], first: int) -> _Part:
        """Return what some rows become; `first` is the number of the first of them."""
        items: list[ItemT] = []
        part = _Part(None, b"", [], 0, [], [])
        cut = 0
        for finished in self._finish_rows(rows, first):
            if isinstance(finished, BadRow):
                part.bad.append(finished)
                continue
            more, row, longest = finished
            items += more
            cut += longest > self.longest and not self.kind.divides
            place = f"{row.row.row.file}:{row.row.row.line}"
            part.stripped.extend([place] if row.stripped else [])
            part.rendered.extend([place] if row.rendered else [])
        batch = encode(items) if items else None
        return replace(part, batch=batch, hashed=b"".join(hashed_parts(items)), cut=cut)

    def _finish_rows(
        self, rows: Sequence[RawRow | BadRow], first: int
    ) -> Iterator[tuple[Sequence[ItemT], _RenderedRow, int] | BadRow]:
        """Yield the items of each row, the row, and the tokens of its longest sequence."""
        kind = self.kind

        def check_row(row: RawRow, index: int) -> CheckedRow:
            add_tools = partial(self.template.with_tools, tools_of(row.values, self.tools))
            return kind.check(row, index, run_for_field(add_tools, self.tools or ""))

        checked = [
            row if isinstance(row, BadRow) else _attempt(row, partial(check_row, row, index))
            for index, row in enumerate(rows, start=first)
        ]
        rendered = _render_rows(checked)
        sequences = [s for r in rendered if isinstance(r, _RenderedRow) for s in r.sequences]
        tokenized = iter(self.template.tokenize(sequences))
        for row in rendered:
            if isinstance(row, BadRow):
                yield row
            else:
                tokens = [next(tokenized) for _ in row.sequences]
                items = _attempt(row.row.row, partial(kind.finish, row.row, tokens))
                longest = max(len(ids) for ids, _ in tokens)
                yield items if isinstance(items, BadRow) else (items, row, longest)


def load_rows(
    data: DataConfig,
    source: SourceConfig,
    template: Template,
    kind: RowKind[ItemT],
    observer: Observer,
) -> Loaded[ItemT]:
    """Return the items of a source's rows, with the bad rows listed apart.

    Rows that an earlier start, or another process, made of the same source are taken from the
    cache.
    """
    if source.streaming:
        return _stream(data, source, template, kind, observer)
    made_by = [kind.name, source_name(data, source), *kind.made_by]
    entry = find_entry(data, source, template, made_by, observer.note)
    kept = None if entry is None else read_entry(entry, observer.note)
    try:
        return _loaded(*(kept or _make(data, source, template, kind, observer, entry)))
    except CannotWrite as error:  # after all that was made is gone
        observer.note(f"rows are made again, and not kept (data.cache): {error}")
        return _loaded(*_make(data, source, template, kind, observer, None))


def _stream(
    data: DataConfig,
    source: SourceConfig,
    template: Template,
    kind: RowKind[ItemT],
    observer: Observer,
) -> Loaded[ItemT]:
    """Return the items of a stream; its first block has been made."""

    def read() -> Iterator[RawRow | BadRow]:
        return read_rows(source, whole=kind.whole)

    def make(block: Sequence[RawRow | BadRow]) -> Sequence[ItemT]:
        quiet = Observer(note=observer.note)
        try:
            kept = _make(data, source, template, kind, quiet, None, block)
        except DataError as error:
            if data.on_bad_row == "stop":
                raise
            observer.note(f"skipped {plural(len(block), 'row')} of a stream: {error}")
            return ()
        loaded: Loaded[ItemT] = _loaded(*kept)
        if bad := loaded.bad_rows:
            observer.note(f"skipped {plural(len(bad), 'bad row')}, the first {bad[0]}")
        return loaded.items

    first = next(read_blocks(read))
    loaded: Loaded[ItemT] = _loaded(*_make(data, source, template, kind, observer, None, first))
    assert isinstance(loaded.items, StoredRows)
    return replace(loaded, items=StreamedRows(loaded.items, read, make))


def _make(
    data: DataConfig,
    source: SourceConfig,
    template: Template,
    kind: RowKind[ItemT],
    observer: Observer,
    entry: Entry | None,
    block: Sequence[RawRow | BadRow] | None = None,
) -> Kept:
    """Make the items of a source, keep them in the cache, and return them with their facts.

    `block` has the rows of a block of a stream, which are checked as they are; None reads all.
    """
    work = _Work(kind, template, source.tools, data.max_tokens)
    bad: list[BadRow] = []
    present: dict[str, None] = {}
    stripped, rendered = MarkedRows(), MarkedRows()
    read, cut, key = 0, 0, source_key(data, source)
    digest = xxhash.xxh3_64()

    def make_batches() -> Iterator[pa.RecordBatch]:
        nonlocal present, stripped, rendered, read, cut
        rows = read_rows(source, whole=kind.whole) if block is None else iter(block)
        most = data.processes or min(usable_cores(), MOST_PROCESSES)
        processes = 1 if kind.alone or block else most
        for raw, part in make_parts(rows, work.make, processes):
            present |= _columns_of(raw)
            bad.extend(part.bad)
            cut += part.cut
            stripped, rendered = stripped.add(part.stripped), rendered.add(part.rendered)
            digest.update(part.hashed)
            read += len(raw)
            observer.count(len(raw))
            if data.on_bad_row == "stop":  # a missing column stops the run: no need to read on
                check_columns(source, present, key)
            if part.batch is not None:
                yield part.batch
        # Only some rows may have tools, so this column is checked after all rows are read.
        if block is None:
            check_columns(source, present, key, (*OF_EVERY_ROW, "tools"))
        settle(source.path, read, bad, data.on_bad_row)

    def facts() -> RowFacts:
        return {
            "bad_rows": [vars(row) for row in bad],
            "cut_rows": cut,
            "stripped": vars(stripped),
            "rendered": vars(rendered),
            "fingerprint": digest.hexdigest(),
        }

    return keep(make_batches(), facts, entry, observer.note)


def _loaded(batches: Sequence[pa.RecordBatch], facts: RowFacts) -> Loaded[ItemT]:
    items: StoredRows[ItemT] = StoredRows(batches, facts["fingerprint"])
    bad_rows = tuple(BadRow(**row) for row in facts["bad_rows"])
    marked = (MarkedRows(**facts[name]) for name in ("stripped", "rendered"))
    return Loaded(items, bad_rows, facts["cut_rows"], *marked)


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
    place = 0
    for part in sorted(texts, key=lambda part: part.number):  # nearly always, all come so
        dense = dense_text(part.text)
        if (place := rendered.find(dense, place)) < 0:
            break
        place += len(dense)
    else:
        return
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
