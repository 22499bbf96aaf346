"""Read a row's columns as the jobs do, before a template renders them.

A dry run reads the first rows this way. Only the run itself checks what needs a template or a
tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection

from plimsoll.config.data import SourceConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.data.fields import text_of
from plimsoll.data.pairs import PairColumns, margin_of, pair_of
from plimsoll.data.report import RawRow
from plimsoll.data.rows import (
    answer_of,
    conversation_of,
    environment_of,
    label_of,
    limit_of,
    order_of,
    prompt_of,
    reference_of,
    tools_of,
)


def read_row(
    row: RawRow,
    source: SourceConfig,
    sampling: SamplingConfig | None,
    environments: Collection[str] = (),
) -> None:
    """Raise RowProblem if a row's content cannot be read.

    Args:
        row: the row.
        source: the settings that name its columns.
        sampling: how the source's prompts are answered; None for a job that learns from rows.
        environments: the names of the environments that a row may name.
    """
    tools_of(row.values, source.tools)
    if source.text is not None:
        text_of(row.values, source.text)
    elif source.chosen is not None and source.rejected is not None:
        columns = PairColumns(source.prompt, source.chosen, source.rejected)
        pair_of(row, columns, plain=True)
        margin_of(row, source.margin)
    elif source.label is not None:
        label_of(row, source.label)
        answer_of(row, source)
    elif source.steps is not None and source.labels is not None:
        from plimsoll.data.steps import labels_of, steps_of  # NumPy, which no other row needs

        prompt_of(row, source)
        steps_of(row, source.steps)
        labels_of(row, source.labels, source.steps)
    elif sampling is None:
        conversation_of(row, source)
    else:
        prompt_of(row, source)
        reference_of(row, source.reference)
        environment_of(row, source.environment, environments)
        limit_of(row, source.max_new_tokens, sampling)
        order_of(row, source.order_by)
        if source.source is not None:
            text_of(row.values, source.source)
