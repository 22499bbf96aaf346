"""Rows of a source -> what a job learns from, with the bad rows listed: samples (SFT, distilling),
pairs, labelled responses (KTO), labelled steps (process reward models), or prompts (RL).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from plimsoll.config.data import DataConfig, LearnedTokens, SourceConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.data.fields import reference_text, text_of
from plimsoll.data.loading import Checked, Loaded, Seen, load_rows, rendered, source_name, unseen
from plimsoll.data.pairs import PairColumns, margin_of, pair_of
from plimsoll.data.pieces import Messages, Piece, prompt_number, readable, unlearned
from plimsoll.data.report import Row, RowProblem
from plimsoll.data.rows import (
    answer_of,
    check_answered,
    check_unmarked,
    conversation_of,
    environment_of,
    further_columns,
    label_of,
    limit_of,
    order_of,
    prompt_of,
    reference_of,
    turns_field,
)
from plimsoll.data.steps import labels_of, step_pieces, steps_of
from plimsoll.data.template import Template
from plimsoll.data.tokenize import Tokenized
from plimsoll.data.written import check_written
from plimsoll.errors import ConfigError
from plimsoll.records import LabelledResponse, LabelledSteps, Pair, Prompt, Sample, TokenIds
from plimsoll.run.counting import counted

_NO_TOKENS: TokenIds = np.empty(0, dtype=np.int64)


def load_samples(
    data: DataConfig,
    source: SourceConfig,
    template: Template,
    seen: Seen = unseen,
    learned: LearnedTokens = "assistant",
) -> Loaded[Sample]:
    """The training samples of a source (one of `data.train`, or `data.eval`), in the source's
    order. seen: is told of rows as they are read. learned: which tokens of a conversation; of
    documents of plain text, all.

    Raises DataError for bad rows under `on_bad_row: stop` or when no good row is left, and
    ConfigError for settings that cannot be right for the source.
    """
    if source.text is not None:
        return _load_documents(data, source, template.plain(), source.text, seen)
    field = turns_field(source)

    def check(row: Row, index: int, template: Template) -> Checked:
        prompt, answer = conversation_of(row, source)
        if learned == "all":
            check_unmarked(answer, field)
            turns, render = [*prompt, *answer], template.render_whole
        else:
            check_answered(answer, field)
            turns, render = [*unlearned(prompt), *answer], template.render_conversation
        pieces, stripped = _written(template, render, turns, field)
        return Checked(row, index, "", (pieces,), stripped=stripped)

    def finish(row: Checked, sequences: Sequence[Tokenized]) -> Sample:
        return _sample(data, field, sequences[0])

    return load_rows(data, source, template, check, finish, seen)


def _written(
    template: Template,
    render: Callable[[Messages], tuple[Piece, ...]],
    turns: Messages,
    field: str,
) -> tuple[tuple[Piece, ...], bool]:
    """What a template makes of turns; and whether it leaves out reasoning of turns that are not
    learned. Raises RowProblem with the field if it leaves out anything else."""

    def check(pieces: Sequence[Piece]) -> bool:
        text = "".join(piece.text for piece in pieces)
        whole = None if template.jinja is None else text
        added = len(template.with_system(turns)) > len(turns)
        system = template.system if added else None
        return rendered(partial(check_written, turns, whole, system), field)

    try:
        pieces = rendered(partial(render, turns), field)
    except ConfigError:  # a template that rewrites earlier turns, often as it leaves something out
        check(rendered(partial(template.render_whole, turns), field))
        raise
    return pieces, check(pieces)


def _load_documents(
    data: DataConfig, source: SourceConfig, template: Template, column: str, seen: Seen
) -> Loaded[Sample]:
    def check(row: Row, index: int, template: Template) -> Checked:
        document = [{"role": "assistant", "content": text_of(row.values, column)}]
        return Checked(row, index, "", (template.render_whole(document),))

    def finish(row: Checked, sequences: Sequence[Tokenized]) -> tuple[Sample, ...]:
        return _cut_document(sequences[0][0], data.max_tokens, column)

    documents = load_rows(data, source, template, check, finish, seen)
    pieces = tuple(itertools.chain.from_iterable(documents.items))
    return Loaded(pieces, documents.bad_rows, cut_rows=0)  # into pieces: nothing is lost


def _cut_document(tokens: TokenIds, longest: int, field: str) -> tuple[Sample, ...]:
    """The samples of a document, none of more than `longest` tokens.

    Each begins with the last token of the one before it, so that every token but the document's
    first is learned, and none twice: with longest = 3, [a b c d] gives [a b c] and [c d].
    Raises RowProblem for the field where nothing can be learned.
    """
    if min(longest, len(tokens)) < 2:
        raise RowProblem(
            field, f"leaves no tokens to learn from within {counted(longest, 'token')}"
        )
    pieces = [tokens[i : i + longest] for i in range(0, len(tokens) - 1, longest - 1)]
    return tuple(Sample(piece, np.arange(len(piece)) > 0) for piece in pieces)


def load_pairs(
    data: DataConfig, source: SourceConfig, template: Template, seen: Seen = unseen
) -> Loaded[Pair]:
    """The preference pairs of a source, in the source's order; errors as in `load_samples`."""
    assert source.chosen is not None and source.rejected is not None
    columns = PairColumns(source.prompt, source.chosen, source.rejected)

    def check(row: Row, index: int, template: Template) -> Checked:
        pair = pair_of(row, columns, plain=template.jinja is None)
        prompt, render = unlearned(pair.prompt), template.render_conversation
        answers = ((columns.chosen, pair.chosen), (columns.rejected, pair.rejected))
        both = [_written(template, render, [*prompt, *own], name) for name, own in answers]
        sequences = tuple(pieces for pieces, _ in both)
        stripped = any(stripped for _, stripped in both)
        return Checked(row, index, readable(pair.prompt), sequences, stripped=stripped)

    def finish(row: Checked, sequences: Sequence[Tokenized]) -> Pair:
        pair = _pair(data, columns, sequences)
        margin = margin_of(row.row, source.margin)
        return replace(pair, margin=margin, prompt=prompt_number(row.text))

    return load_rows(data, source, template, check, finish, seen)


def load_steps(
    data: DataConfig, source: SourceConfig, template: Template, seen: Seen = unseen
) -> Loaded[LabelledSteps]:
    """The labelled steps of a source, in the source's order; errors as in `load_samples`."""
    steps_column, labels_column = source.steps, source.labels
    assert steps_column is not None and labels_column is not None

    def check(row: Row, index: int, template: Template) -> Checked:
        prompt, steps = prompt_of(row, source), steps_of(row, steps_column)

        def render(prompt: Messages) -> tuple[Piece, ...]:
            return step_pieces(template, prompt, steps, data.step_separator)

        pieces, stripped = _written(template, render, unlearned(prompt), steps_column)
        return Checked(row, index, readable(prompt), (pieces,), stripped=stripped)

    def finish(row: Checked, sequences: Sequence[Tokenized]) -> LabelledSteps:
        labels = labels_of(row.row, labels_column, steps_column)
        if int(sequences[0][1].sum()) < len(labels):
            raise RowProblem(steps_column, "has a step of which the tokenizer leaves nothing")
        sample = _sample(data, steps_column, sequences[0])
        within = labels[: int(sample.loss_mask.sum())]
        return LabelledSteps(sample, within, prompt=prompt_number(row.text))

    return load_rows(data, source, template, check, finish, seen)


def load_responses(
    data: DataConfig, source: SourceConfig, template: Template, seen: Seen = unseen
) -> Loaded[LabelledResponse]:
    """The labelled responses of a source, in the source's order; of a pair the chosen one, which is
    desirable, before the rejected one, which is not. Errors as in `load_samples`."""
    if source.chosen is not None:
        pairs = load_pairs(data, source, template, seen)
        items = tuple(
            LabelledResponse(sample, desirable, prompt=pair.prompt)
            for pair in pairs.items
            for sample, desirable in ((pair.chosen, True), (pair.rejected, False))
        )
        return Loaded(items, pairs.bad_rows, pairs.cut_rows, pairs.stripped)
    field, label_column = turns_field(source), source.label
    assert label_column is not None

    def check(row: Row, index: int, template: Template) -> Checked:
        label_of(row, label_column)
        prompt, answer = answer_of(row, source)
        turns, render = [*unlearned(prompt), *answer], template.render_conversation
        pieces, stripped = _written(template, render, turns, field)
        return Checked(row, index, readable(prompt), (pieces,), stripped=stripped)

    def finish(row: Checked, sequences: Sequence[Tokenized]) -> LabelledResponse:
        sample = _sample(data, field, sequences[0])
        label = label_of(row.row, label_column)
        return LabelledResponse(sample, label, prompt=prompt_number(row.text))

    return load_rows(data, source, template, check, finish, seen)


def load_prompts(
    data: DataConfig,
    source: SourceConfig,
    template: Template,
    seen: Seen = unseen,
    check_reference: Callable[[object], object] | None = None,
    sampling: SamplingConfig | None = None,
    environments: Collection[str] = (),
) -> Loaded[Prompt]:
    """The prompts of a source with all columns of their rows, in the source's order; errors as in
    `load_samples`.

    check_reference: takes a reference as its row has it, and raises DataError if it cannot be used;
    the row is then bad.
    sampling: how these prompts are answered; a limit that it cannot keep makes a row bad, too.
    environments: the names of those that a row may name.
    """
    field, name = turns_field(source), source_name(data, source)
    answered = sampling or SamplingConfig()

    def check(row: Row, index: int, template: Template) -> Checked:
        messages = prompt_of(row, source)
        reference = reference_of(row, source.reference)
        environment = environment_of(row, source.environment, environments)
        pieces, stripped = _written(template, template.render_prompt, unlearned(messages), field)
        if check_reference is not None and reference is not None:
            rendered(partial(check_reference, reference), source.reference or "")
        prompt = Prompt(
            index,
            _NO_TOKENS,
            readable(messages),
            None if reference is None else reference_text(reference),
            reference_value=None if isinstance(reference, str) else reference,
            messages=tuple(messages),
            max_new_tokens=limit_of(row, source.max_new_tokens, answered),
            order_by=order_of(row, source.order_by),
            environment=environment,
            is_text=source.messages is None,
        )
        return Checked(row, index, prompt.text, (pieces,), prompt, stripped)

    def finish(row: Checked, sequences: Sequence[Tokenized]) -> Prompt:
        assert row.prompt is not None
        return replace(
            row.prompt,
            tokens=_prompt_tokens(data, field, sequences[0]),
            source=name if source.source is None else text_of(row.row.values, source.source),
            columns=further_columns(row.row, source),
        )

    return load_rows(data, source, template, check, finish, seen, whole=True)


def _sample(data: DataConfig, field: str, sequence: Tokenized) -> Sample:
    tokens, loss_mask = sequence
    first = _first_in_loss(field, sequence)
    if first >= data.max_tokens:
        raise RowProblem(
            field,
            f"is first learned at token {first + 1:,}, beyond `data.max_tokens: {data.max_tokens}`"
            f" (raise it)",
        )
    if len(tokens) > data.max_tokens:
        _refuse_long(data, field, len(tokens))
        # copies, as a part of an array keeps all of it
        tokens, loss_mask = tokens[: data.max_tokens].copy(), loss_mask[: data.max_tokens].copy()
    return Sample(tokens, loss_mask)


def _first_in_loss(field: str, sequence: Tokenized) -> int:
    loss_mask = np.flatnonzero(sequence[1])
    if len(loss_mask) == 0:
        raise RowProblem(field, "leaves no tokens to learn from")
    return int(loss_mask[0])


def _pair(data: DataConfig, columns: PairColumns, sequences: Sequence[Tokenized]) -> Pair:
    chosen, rejected = sequences
    prompt = _first_in_loss(columns.chosen, chosen)
    if prompt >= data.max_tokens:
        raise RowProblem(
            columns.prompt or columns.chosen,
            f"has a prompt of {counted(prompt, 'token')}, which leaves none for a response within"
            f" `data.max_tokens: {data.max_tokens}` (raise it)",
        )
    pair = Pair(_sample(data, columns.chosen, chosen), _sample(data, columns.rejected, rejected))
    if np.array_equal(pair.chosen.tokens, pair.rejected.tokens):
        cut = len(chosen[0]) > data.max_tokens or len(rejected[0]) > data.max_tokens
        within = f" within `data.max_tokens: {data.max_tokens}` (raise it)"
        raise RowProblem(
            columns.rejected,
            f"equals `{columns.chosen}`{within}"
            if cut
            else f"has the tokens of `{columns.chosen}`, which the tokenizer makes of both texts",
        )
    return pair


def _prompt_tokens(data: DataConfig, field: str, sequence: Tokenized) -> TokenIds:
    """Return the tokens of a prompt, cut at the front to `data.max_tokens`."""
    tokens, _ = sequence
    if len(tokens) == 0:
        raise RowProblem(field, "gives no tokens")
    if len(tokens) > data.max_tokens:
        _refuse_long(data, field, len(tokens))
        # the end holds the question and the generation prompt
        tokens = tokens[-data.max_tokens :].copy()
    return tokens


def _refuse_long(data: DataConfig, field: str, length: int) -> None:
    if data.over_long == "refuse":
        raise RowProblem(
            field,
            f"has {length:,} tokens, over `data.max_tokens: {data.max_tokens}` (raise it, or cut"
            f" with `--data.over_long truncate`)",
        )
