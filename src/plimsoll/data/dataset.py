"""Load the rows of a source as the items that a job learns from.

The items are samples (SFT, distillation), pairs, labelled responses (KTO), labelled steps (process
reward models), or prompts (RL). Rows that cannot be used are listed beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from plimsoll.config.data import DataConfig, LearnedTokens, SourceConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.data.fields import RawRow, ReferenceCheck, RowProblem, reference_text, text_of
from plimsoll.data.loading import (
    UNSEEN,
    CheckedRow,
    ItemT,
    Loaded,
    Observer,
    RowKind,
    Unrendered,
    load_rows,
    run_for_field,
    source_name,
)
from plimsoll.data.pairs import answers_of, margin_of, pair_of
from plimsoll.data.pieces import Tokenized, mark_unlearned, prompt_number, readable_text
from plimsoll.data.rows import (
    answer_of,
    check_answered,
    check_unmarked,
    conversation_of,
    environment_of,
    label_of,
    labels_of,
    limit_of,
    order_of,
    plain_columns,
    prompt_of,
    reference_of,
    sampled_prompt_of,
    step_parts,
    step_pieces,
    steps_of,
    turns_field,
)
from plimsoll.data.template import Draft, Template
from plimsoll.records import LabelledResponse, LabelledSteps, Pair, Prompt, Sample, TokenIds
from plimsoll.run.numbers import plural

_NO_TOKENS: TokenIds = np.empty(0, dtype=np.int64)


def load_samples(
    data: DataConfig,
    source: SourceConfig,
    template: Template,
    observer: Observer = UNSEEN,
    learned: LearnedTokens = "assistant",
) -> Loaded[Sample]:
    """Return the training samples of a source, in the source's order.

    Args:
        data: the settings under `data`.
        source: one of `data.train`, or `data.eval`.
        template: the template that renders the messages.
        observer: is told of each batch of rows.
        learned: which tokens of a conversation are learned. In documents of plain text, all
            are.

    Raises:
        DataError: there are bad rows and `on_bad_row` is `stop`, or no good row is left.
        ConfigError: a setting cannot be right for the source.
    """
    if source.text is not None:
        check_text = partial(_check_document, source.text)
        finish_text = partial(_finish_document, data.max_tokens, source.text)
        texts = RowKind("documents", check_text, finish_text, divides=True)
        return load_rows(data, source, template.plain(), texts, observer)
    field = turns_field(source)
    check = partial(_check_conversation, source, learned)
    kind = RowKind("samples", check, partial(_finish_sample, data, field), [learned])
    return load_rows(data, source, template, kind, observer)


def _check_conversation(
    source: SourceConfig, learned: LearnedTokens, row: RawRow, index: int, template: Template
) -> CheckedRow:
    field = turns_field(source)
    prompt, answer = conversation_of(row, source)
    if learned == "all":
        check_unmarked(answer, field)
        draft = Draft(template, "whole", [*prompt, *answer])
    else:
        check_answered(answer, field)
        draft = Draft(template, "conversation", [*mark_unlearned(prompt), *answer])
    return CheckedRow(row, index, "", (Unrendered(draft, field),))


def _finish_sample(
    data: DataConfig, field: str, row: CheckedRow, sequences: Sequence[Tokenized]
) -> list[Sample]:
    return [_sample(data, field, sequences[0])]


def _check_document(column: str, row: RawRow, index: int, template: Template) -> CheckedRow:
    document = [{"role": "assistant", "content": text_of(row.values, column)}]
    return CheckedRow(row, index, "", (Unrendered(Draft(template, "whole", document), column),))


def _finish_document(
    longest: int, column: str, row: CheckedRow, sequences: Sequence[Tokenized]
) -> tuple[Sample, ...]:
    return _cut_document(sequences[0][0], longest, column)


def _cut_document(tokens: TokenIds, longest: int, field: str) -> tuple[Sample, ...]:
    """Cut a document into samples of at most `longest` tokens.

    Each sample begins with the last token of the sample before it. So every token but the
    document's first is learned once: with longest = 3, [a b c d] gives [a b c] and [c d].

    Raises:
        RowProblem: the document leaves nothing to learn.
    """
    if min(longest, len(tokens)) < 2:
        raise RowProblem(field, f"leaves no tokens to learn from within {plural(longest, 'token')}")
    parts = [tokens[i : i + longest] for i in range(0, len(tokens) - 1, longest - 1)]
    return tuple(Sample(part, np.arange(len(part)) > 0) for part in parts)


def load_pairs(
    data: DataConfig, source: SourceConfig, template: Template, observer: Observer = UNSEEN
) -> Loaded[Pair]:
    """Return the preference pairs of a source, in the source's order; errors as `load_samples`."""
    return load_rows(data, source, template, _pairs(data, source, "pairs", _as_it_is), observer)


def load_scored_pairs(
    data: DataConfig, source: SourceConfig, template: Template, observer: Observer = UNSEEN
) -> Loaded[Pair]:
    """Return the pairs of `load_pairs`; each loss mask marks only the token that is scored."""
    kind = _pairs(data, source, "scored pairs", _to_responses)
    return load_rows(data, source, template, kind, observer)


def _pairs(
    data: DataConfig, source: SourceConfig, name: str, items_of: Callable[[Pair], Sequence[ItemT]]
) -> RowKind[ItemT]:
    """Return how rows of pairs become items; `items_of` returns those of a pair."""
    finish = partial(_finish_pair, data, source, items_of)
    return RowKind(name, partial(_check_pair, source), finish)


def _check_pair(source: SourceConfig, row: RawRow, index: int, template: Template) -> CheckedRow:
    pair = pair_of(row, source, plain=template.jinja is None)
    prompt = mark_unlearned(pair.prompt)
    sequences = tuple(
        Unrendered(Draft(template, "conversation", [*prompt, *answer]), name)
        for name, answer in zip(answers_of(source), (pair.chosen, pair.rejected), strict=True)
    )
    return CheckedRow(row, index, readable_text(pair.prompt), sequences)


def _finish_pair(
    data: DataConfig,
    source: SourceConfig,
    items_of: Callable[[Pair], Sequence[ItemT]],
    row: CheckedRow,
    sequences: Sequence[Tokenized],
) -> Sequence[ItemT]:
    pair = _pair(data, source, sequences)
    margin = margin_of(row.row, source.margin)
    return items_of(replace(pair, margin=margin, prompt=prompt_number(row.text)))


def _as_it_is(pair: Pair) -> list[Pair]:
    return [pair]


def _to_responses(pair: Pair) -> list[Pair]:
    chosen, rejected = map(cut_to_response, pair.samples)
    return [replace(pair, chosen=chosen, rejected=rejected)]


def cut_to_response(sample: Sample) -> Sample:
    """Return the sample cut after its last learned token; only this token is marked."""
    end = int(np.flatnonzero(sample.loss_mask)[-1])
    return Sample(sample.tokens[: end + 1], np.arange(end + 1) == end)


def _both_responses(pair: Pair) -> list[LabelledResponse]:
    return [
        LabelledResponse(sample, desirable, prompt=pair.prompt)
        for sample, desirable in ((pair.chosen, True), (pair.rejected, False))
    ]


def load_steps(
    data: DataConfig, source: SourceConfig, template: Template, observer: Observer = UNSEEN
) -> Loaded[LabelledSteps]:
    """Return the labelled steps of a source, in the source's order; errors as `load_samples`."""
    check, finish = partial(_check_steps, data, source), partial(_finish_steps, data, source)
    return load_rows(data, source, template, RowKind("steps", check, finish), observer)


def _steps_columns(source: SourceConfig) -> tuple[str, str]:
    assert source.steps is not None and source.labels is not None
    return source.steps, source.labels


def _check_steps(
    data: DataConfig, source: SourceConfig, row: RawRow, index: int, template: Template
) -> CheckedRow:
    column, _ = _steps_columns(source)
    prompt, steps = prompt_of(row, source), steps_of(row, column)
    parts = step_parts(steps, data.step_separator, plain=template.jinja is None)
    answer = {"role": "assistant", "content": "".join(parts)}
    draft = Draft(template, "conversation", [*mark_unlearned(prompt), answer])
    part = Unrendered(draft, column, partial(step_pieces, parts))
    return CheckedRow(row, index, readable_text(prompt), (part,))


def _finish_steps(
    data: DataConfig, source: SourceConfig, row: CheckedRow, sequences: Sequence[Tokenized]
) -> list[LabelledSteps]:
    column, labels_column = _steps_columns(source)
    labels = labels_of(row.row, labels_column, column)
    if int(sequences[0][1].sum()) < len(labels):
        raise RowProblem(column, "has a step of which the tokenizer leaves nothing")
    sample = _sample(data, column, sequences[0])
    kept_labels = labels[: int(sample.loss_mask.sum())]
    return [LabelledSteps(sample, kept_labels, prompt=prompt_number(row.text))]


def load_responses(
    data: DataConfig, source: SourceConfig, template: Template, observer: Observer = UNSEEN
) -> Loaded[LabelledResponse]:
    """Return the labelled responses of a source, in the source's order; errors as `load_samples`.

    A pair gives two: the chosen response, which is desirable, then the rejected one, which is not.
    """
    if source.chosen is not None:
        kind = _pairs(data, source, "responses of pairs", _both_responses)
    else:
        check, finish = partial(_check_response, source), partial(_finish_response, data, source)
        kind = RowKind("responses", check, finish)
    return load_rows(data, source, template, kind, observer)


def _label(source: SourceConfig, row: RawRow) -> bool:
    assert source.label is not None
    return label_of(row, source.label)


def _check_response(
    source: SourceConfig, row: RawRow, index: int, template: Template
) -> CheckedRow:
    _label(source, row)
    prompt, answer = answer_of(row, source)
    draft = Draft(template, "conversation", [*mark_unlearned(prompt), *answer])
    part = Unrendered(draft, turns_field(source))
    return CheckedRow(row, index, readable_text(prompt), (part,))


def _finish_response(
    data: DataConfig, source: SourceConfig, row: CheckedRow, sequences: Sequence[Tokenized]
) -> list[LabelledResponse]:
    sample = _sample(data, turns_field(source), sequences[0])
    return [LabelledResponse(sample, _label(source, row.row), prompt=prompt_number(row.text))]


def load_prompts(
    data: DataConfig,
    source: SourceConfig,
    template: Template,
    observer: Observer = UNSEEN,
    references: ReferenceCheck | None = None,
    sampling: SamplingConfig | None = None,
    environments: Collection[str] = (),
) -> Loaded[Prompt]:
    """Return the prompts of a source, in the source's order, with all columns of their rows.

    Args:
        data: the settings under `data`.
        source: the settings of the source.
        template: the template that renders the messages.
        observer: is told of each batch of rows.
        references: the check of reference answers; None accepts all.
        sampling: how the prompts are answered. A row with a limit that sampling cannot keep is bad.
        environments: the names of the environments that a row may name.

    Raises:
        DataError, ConfigError: as `load_samples`.
    """
    limits = sampling or SamplingConfig()
    check = partial(_check_prompt, source, references, limits, environments)
    finish = partial(_finish_prompt, data, turns_field(source), source_name(data, source))
    about = [limits.min_new_tokens, limits.max_new_tokens, sorted(environments)]
    about += [] if references is None else references.made_by
    alone = references is not None  # it may ask processes of this one
    kind = RowKind("prompts", check, finish, about, whole=True, alone=alone)
    return load_rows(data, source, template, kind, observer)


def _check_prompt(
    source: SourceConfig,
    references: ReferenceCheck | None,
    sampling: SamplingConfig,
    environments: Collection[str],
    row: RawRow,
    index: int,
    template: Template,
) -> CheckedRow:
    prompt = read_prompt(row, index, source, sampling, environments)
    if references is not None and (reference := prompt.given_reference) is not None:
        run_for_field(partial(references.check, reference), source.reference or "")
    draft = Draft(template, "prompt", mark_unlearned(prompt.messages))
    return CheckedRow(row, index, prompt.text, (Unrendered(draft, turns_field(source)),), prompt)


def _finish_prompt(
    data: DataConfig, field: str, name: str, row: CheckedRow, sequences: Sequence[Tokenized]
) -> list[Prompt]:
    assert row.prompt is not None
    tokens = _prompt_tokens(data, field, sequences[0])
    return [replace(row.prompt, tokens=tokens, source=row.prompt.source or name)]


def read_prompt(
    row: RawRow,
    index: int,
    source: SourceConfig,
    sampling: SamplingConfig,
    environments: Collection[str] = (),
) -> Prompt:
    """Return the prompt of a row without its tokens; raise RowProblem if the row is bad."""
    messages, reference = sampled_prompt_of(row, source), reference_of(row, source.reference)
    if environments and messages[-1]["role"] == "assistant":
        raise RowProblem(
            turns_field(source), "ends with the assistant's turn, which no environment continues"
        )
    named, columns = plain_columns(row, source)
    return Prompt(
        index,
        _NO_TOKENS,
        readable_text(messages),
        None if reference is None else reference_text(reference),
        source="" if source.source is None else text_of(row.values, source.source),
        columns=columns,
        named=named,
        reference_value=None if isinstance(reference, str) else reference,
        messages=tuple(messages),
        max_new_tokens=limit_of(row, source.max_new_tokens, sampling),
        order_by=order_of(row, source.order_by),
        environment=environment_of(row, source.environment, environments),
        is_text=len(messages) == 1 and isinstance(row.values.get(turns_field(source)), str),
    )


def _sample(data: DataConfig, field: str, sequence: Tokenized) -> Sample:
    tokens, loss_mask = sequence
    first = _first_learned(field, sequence)
    if first >= data.max_tokens:
        raise RowProblem(
            field,
            f"is first learned at token {first + 1:,}, beyond `data.max_tokens: {data.max_tokens}`"
            f" (raise it)",
        )
    if len(tokens) > data.max_tokens:
        _refuse_long(data, field, len(tokens))
        tokens, loss_mask = tokens[: data.max_tokens], loss_mask[: data.max_tokens]
    return Sample(tokens, loss_mask)


def _first_learned(field: str, sequence: Tokenized) -> int:
    loss_mask = np.flatnonzero(sequence[1])
    if len(loss_mask) == 0:
        raise RowProblem(field, "leaves no tokens to learn from")
    return int(loss_mask[0])


def _pair(data: DataConfig, source: SourceConfig, sequences: Sequence[Tokenized]) -> Pair:
    (chosen, rejected), (better, worse) = sequences, answers_of(source)
    prompt = _first_learned(better, chosen)
    if prompt >= data.max_tokens:
        raise RowProblem(
            source.prompt or better,
            f"has a prompt of {plural(prompt, 'token')}, which leaves none for a"
            f" response within `data.max_tokens: {data.max_tokens}` (raise it)",
        )
    pair = Pair(_sample(data, better, chosen), _sample(data, worse, rejected))
    if np.array_equal(pair.chosen.tokens, pair.rejected.tokens):
        cut = len(chosen[0]) > data.max_tokens or len(rejected[0]) > data.max_tokens
        within = f" within `data.max_tokens: {data.max_tokens}` (raise it)"
        raise RowProblem(
            worse,
            f"equals `{better}`{within}"
            if cut
            else f"has the tokens of `{better}`, which the tokenizer makes of both texts",
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
        tokens = tokens[-data.max_tokens :]
    return tokens


def _refuse_long(data: DataConfig, field: str, length: int) -> None:
    if data.over_long == "refuse":
        raise RowProblem(
            field,
            f"has {length:,} tokens, over `data.max_tokens: {data.max_tokens}` (raise it, or cut"
            f" with `--data.over_long truncate`)",
        )
