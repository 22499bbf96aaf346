"""Rows of a source -> training samples (SFT), pairs or prompts (RL), with the bad rows listed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from plimsoll.config.algorithm import LearnedTokens
from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data.documents import cut_document
from plimsoll.data.labels import answer_of, label_of, labelled_columns
from plimsoll.data.pairs import PairColumns, PairRow, margin_of, pair_columns, pair_of
from plimsoll.data.pieces import Piece, readable
from plimsoll.data.report import BadRow, BadRows, RowProblem
from plimsoll.data.rows import (
    check_answered,
    check_columns,
    conversation_of,
    prompt_columns,
    prompt_of,
    reference_of,
    sample_columns,
    text_of,
)
from plimsoll.data.sources import Row, read_rows
from plimsoll.data.steps import labels_of, step_columns, step_pieces, steps_of
from plimsoll.data.template import Template
from plimsoll.errors import DataError
from plimsoll.records import Bools, Ints, LabelledResponse, LabelledSteps, Pair, Prompt, Sample

T = TypeVar("T")
Tokens = tuple[Ints, Bools]
"""Tokens, and whether each is learned; both of shape [n]."""


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """What a source gave. bad_rows is empty unless `data.on_bad_row` is `skip`."""

    items: tuple[T, ...]
    bad_rows: tuple[BadRow, ...]


@dataclass(frozen=True)
class Checked:
    """A row that passed the checks of its fields, rendered and not yet tokenized.

    index: which row of the source it is, from 0, bad rows included.
    sequences: the pieces of each sequence that the row gives: one, or chosen and rejected.
    """

    row: Row
    index: int
    text: str
    sequences: tuple[tuple[Piece, ...], ...]
    reference: str | None


def load_samples(
    data: DataConfig,
    source: SourceConfig,
    template: Template,
    learned: LearnedTokens = "assistant",
) -> Loaded[Sample]:
    """The training samples of a source (one of `data.train`, or `data.eval`), in the source's
    order; learned: which tokens of a conversation. Of documents of plain text, all.

    Raises DataError for bad rows under `on_bad_row: stop` or when no good row is left, and
    ConfigError for settings that cannot be right for the source.
    """
    if source.text is not None:
        return _load_documents(data, source, template.plain(), source.text)
    columns = sample_columns(source, _key(data, source))

    def check(row: Row, index: int) -> Checked:
        messages = conversation_of(row, columns)
        render = template.render_whole
        if learned == "assistant":
            check_answered(messages, columns)
            render = template.render_conversation
        return Checked(row, index, "", (_rendered(partial(render, messages), columns.turns),), None)

    def finish(row: Checked, sequences: Sequence[Tokens]) -> Sample:
        return _sample(data, columns.turns, sequences[0])

    return _load(data, source, template, asdict(columns), check, finish)


def _load_documents(
    data: DataConfig, source: SourceConfig, template: Template, column: str
) -> Loaded[Sample]:
    def check(row: Row, index: int) -> Checked:
        document = [{"role": "assistant", "content": text_of(row.values, column)}]
        return Checked(row, index, "", (template.render_whole(document),), None)

    def finish(row: Checked, sequences: Sequence[Tokens]) -> tuple[Sample, ...]:
        return cut_document(sequences[0][0], data.max_tokens, column)

    documents = _load(data, source, template, {"text": column}, check, finish)
    return Loaded(tuple(itertools.chain.from_iterable(documents.items)), documents.bad_rows)


def load_pairs(data: DataConfig, source: SourceConfig, template: Template) -> Loaded[Pair]:
    """The preference pairs of a source, in the source's order; errors as in `load_samples`."""
    columns = pair_columns(source, _key(data, source))

    def check(row: Row, index: int) -> Checked:
        pair = pair_of(row, columns, plain=template.jinja is None)
        return Checked(row, index, "", _rendered_pair(template, pair, columns), None)

    def finish(row: Checked, sequences: Sequence[Tokens]) -> Pair:
        pair = _pair(data, columns, sequences)
        return replace(pair, margin=margin_of(row.row, columns.margin))

    return _load(data, source, template, asdict(columns), check, finish)


def load_steps(data: DataConfig, source: SourceConfig, template: Template) -> Loaded[LabelledSteps]:
    """The labelled steps of a source, in the source's order; errors as in `load_samples`."""
    columns = step_columns(source, _key(data, source))

    def check(row: Row, index: int) -> Checked:
        prompt, steps = prompt_of(row, columns.of_prompt), steps_of(row, columns)
        render = partial(step_pieces, template, prompt, steps, data.step_separator)
        return Checked(row, index, "", (_rendered(render, columns.steps),), None)

    def finish(row: Checked, sequences: Sequence[Tokens]) -> LabelledSteps:
        labels = labels_of(row.row, columns)
        if int(sequences[0][1].sum()) < len(labels):
            raise RowProblem(columns.steps, "has a step of which the tokenizer leaves nothing")
        sample = _sample(data, columns.steps, sequences[0])
        return LabelledSteps(sample, labels[: int(sample.learned.sum())])

    return _load(data, source, template, asdict(columns), check, finish)


def load_responses(
    data: DataConfig, source: SourceConfig, template: Template
) -> Loaded[LabelledResponse]:
    """The labelled responses of a source, in the source's order; of a pair the chosen one, which is
    desirable, before the rejected one, which is not. Errors as in `load_samples`."""
    if source.chosen is not None:
        pairs = load_pairs(data, source, template)
        both = [((pair.chosen, True), (pair.rejected, False)) for pair in pairs.items]
        items = (LabelledResponse(*one) for one in itertools.chain.from_iterable(both))
        return Loaded(tuple(items), pairs.bad_rows)
    columns = labelled_columns(source, _key(data, source))
    field = columns.turns.turns

    def check(row: Row, index: int) -> Checked:
        label_of(row, columns.label)
        pieces = _rendered(partial(template.render_answer, *answer_of(row, columns.turns)), field)
        return Checked(row, index, "", (pieces,), None)

    def finish(row: Checked, sequences: Sequence[Tokens]) -> LabelledResponse:
        sample = _sample(data, field, sequences[0])
        return LabelledResponse(sample, label_of(row.row, columns.label))

    named = asdict(columns.turns) | {"label": columns.label}
    return _load(data, source, template, named, check, finish)


def load_prompts(data: DataConfig, source: SourceConfig, template: Template) -> Loaded[Prompt]:
    """The prompts of a source, in the source's order; errors as in `load_samples`."""
    columns = prompt_columns(source, _key(data, source))

    def check(row: Row, index: int) -> Checked:
        messages = prompt_of(row, columns)
        reference = reference_of(row, columns.reference)
        pieces = _rendered(partial(template.render_prompt, messages), columns.turns)
        return Checked(row, index, readable(messages), (pieces,), reference)

    def finish(row: Checked, sequences: Sequence[Tokens]) -> Prompt:
        return _prompt(data, columns.turns, row, sequences[0])

    return _load(data, source, template, asdict(columns), check, finish)


def _key(data: DataConfig, source: SourceConfig) -> str:
    keys = (key for key, known in data.sources().items() if known is source)
    return next(keys, "data.train")


def _rendered(render: Callable[[], tuple[Piece, ...]], field: str) -> tuple[Piece, ...]:
    try:
        return render()
    except DataError as error:
        raise RowProblem(field, str(error)) from error


def _rendered_pair(
    template: Template, pair: PairRow, columns: PairColumns
) -> tuple[tuple[Piece, ...], ...]:
    answers = ((columns.chosen, pair.chosen), (columns.rejected, pair.rejected))
    return tuple(
        _rendered(partial(template.render_answer, pair.prompt, answer), column)
        for column, answer in answers
    )


def _load(
    data: DataConfig,
    source: SourceConfig,
    template: Template,
    columns: Mapping[str, str | None],
    check: Callable[[Row, int], Checked],
    finish: Callable[[Checked, Sequence[Tokens]], T],
) -> Loaded[T]:
    """Read, check and render every row, tokenize all at once, and sort good rows from bad."""
    rows = list(read_rows(source))
    check_columns(columns, [row for row in rows if isinstance(row, Row)], _key(data, source))
    checked = [
        row if isinstance(row, BadRow) else _attempt(row, partial(check, row, index))
        for index, row in enumerate(rows)
    ]
    rendered = [s for c in checked if isinstance(c, Checked) for s in c.sequences]
    tokenized = iter(template.tokenize(rendered))
    finished = [
        c
        if isinstance(c, BadRow)
        else _attempt(c.row, partial(finish, c, [next(tokenized) for _ in c.sequences]))
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


def _sample(data: DataConfig, field: str, sequence: Tokens) -> Sample:
    tokens, learned = sequence
    first = int(np.argmax(learned))
    if first >= data.max_tokens:
        raise RowProblem(
            field,
            f"is first learned at token {first + 1:,}, beyond `data.max_tokens: {data.max_tokens}`"
            f" (raise it)",
        )
    if len(tokens) > data.max_tokens:
        _refuse_long(data, field, len(tokens))
        tokens, learned = tokens[: data.max_tokens], learned[: data.max_tokens]
    if not learned.any():
        raise RowProblem(field, f"leaves no tokens to learn from within {data.max_tokens:,} tokens")
    return Sample(tokens, learned)


def _pair(data: DataConfig, columns: PairColumns, sequences: Sequence[Tokens]) -> Pair:
    chosen, rejected = sequences
    prompt = int(np.argmax(chosen[1]))
    if prompt >= data.max_tokens:
        raise RowProblem(
            columns.prompt or columns.chosen,
            f"has a prompt of {prompt:,} tokens, which leaves none for a response within"
            f" `data.max_tokens: {data.max_tokens}` (raise it)",
        )
    pair = Pair(_sample(data, columns.chosen, chosen), _sample(data, columns.rejected, rejected))
    if np.array_equal(pair.chosen.tokens, pair.rejected.tokens):
        raise RowProblem(
            columns.rejected,
            f"equals `{columns.chosen}` within `data.max_tokens: {data.max_tokens}` (raise it)",
        )
    return pair


def _prompt(data: DataConfig, field: str, row: Checked, sequence: Tokens) -> Prompt:
    tokens, _ = sequence
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
