"""Read the columns and the first rows of a source before anything is loaded.

The hub is not asked: its data sets are checked when they are loaded. Columns of a row are read as
jobs read them, before a template renders them. Checks that need a template or a tokenizer happen
only in the run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from plimsoll.config.data import SourceConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.data.fields import BadRow, RawRow, text_of
from plimsoll.data.generated import COLUMNS
from plimsoll.data.pairs import margin_of, pair_of
from plimsoll.data.rows import (
    answer_of,
    conversation_of,
    environment_of,
    label_of,
    labels_of,
    limit_of,
    order_of,
    prompt_of,
    reference_of,
    steps_of,
    tools_of,
)
from plimsoll.data.sources import (
    Columns,
    add_nested,
    arrow_rows,
    files_of,
    is_saved,
    names_of,
    read_rows,
)
from plimsoll.errors import ConfigError


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
        pair_of(row, source, plain=True)
        margin_of(row, source.margin)
    elif source.label is not None:
        label_of(row, source.label)
        answer_of(row, source)
    elif source.steps is not None and source.labels is not None:
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


ROWS = 32
"""The number of rows that are read."""


@dataclass(frozen=True)
class FirstColumns:
    """The columns of a source, from its schema or its first rows."""

    names: tuple[str, ...]
    """The names of the columns, and dotted names of nested columns."""
    file: str
    """The file or directory that shows them."""
    all: bool
    """Whether `names` has every column of every row."""


def first_columns(source: SourceConfig) -> FirstColumns | None:
    """Return the known column names of a source; None if none are known.

    A source that cannot be read gives None, too: whoever reads its rows reports the error.
    """
    if source.generate is not None:
        return FirstColumns(COLUMNS, source.path, all=True)
    path = Path(source.path)
    try:
        if path.is_dir() and is_saved(path):
            return _columns_of_saved(path, source.split)
        files = files_of(path, source.split) if path.is_dir() else [path] if path.is_file() else []
        if not files:
            return None
        if files[0].suffix.lower() == ".parquet":
            schema = _schema_names(pq.read_schema(files[0]))
            return FirstColumns(schema, str(files[0]), all=len(files) == 1)
        return _columns_of_rows(source, str(files[0]))
    except (ConfigError, OSError, pa.ArrowException):
        return None


def _columns_of_rows(source: SourceConfig, file: str) -> FirstColumns | None:
    read = list(islice(read_rows(source), ROWS))
    rows = [row.values for row in read if isinstance(row, RawRow)]
    names = dict.fromkeys(name for values in rows for name in (*values, *names_of(values)))
    return FirstColumns(tuple(names), file, all=len(read) < ROWS) if names else None


def _columns_of_saved(path: Path, split: str) -> FirstColumns | None:
    """Return the columns of a saved data set, from the schema of its first file."""
    file = _first_saved(path, split)
    if file is None:
        return None
    with pa.memory_map(str(file)) as opened:
        schema = pa.ipc.open_stream(opened).schema
    return FirstColumns(_schema_names(schema), str(path), all=True)


def _first_saved(path: Path, split: str) -> Path | None:
    files = sorted((path / split if (path / split).is_dir() else path).glob("*.arrow"))
    return files[0] if files else None


def first_rows(source: SourceConfig) -> list[RawRow | BadRow]:
    """Return the first rows of a source, with the columns that the source names.

    The list is empty for data sets of the hub, for generated rows, and for data that cannot be
    read: whoever reads all rows reports the error.
    """
    path = Path(source.path)
    if source.generate is not None or not path.exists():
        return []
    most = min(ROWS, source.limit or ROWS)
    try:
        if path.is_dir() and is_saved(path):
            return _rows_of_saved(source, path)[:most]
        return list(islice(read_rows(source), most))
    except (ConfigError, OSError, pa.ArrowException):
        return []


def _rows_of_saved(source: SourceConfig, path: Path) -> list[RawRow | BadRow]:
    """Return the first rows of a saved data set without `datasets`, which is slow to import."""
    file, columns = _first_saved(path, source.split), Columns.of(source)
    if file is None:
        return []
    with pa.memory_map(str(file)) as opened:
        batch = next(iter(pa.ipc.open_stream(opened)), None)
        if batch is None:
            return []
        first = batch.slice(0, ROWS).select(columns.among(batch.schema.names))
        return [*add_nested(arrow_rows(str(path), [first], columns), columns)]


def _schema_names(schema: pa.Schema) -> tuple[str, ...]:
    return tuple(names_of({field.name: _struct_fields(field.type) for field in schema}))


def _struct_fields(kind: Any) -> Mapping[str, object] | None:
    """Return the nested fields of a struct type by name; None for other types."""
    if not pa.types.is_struct(kind):
        return None
    return {field.name: _struct_fields(field.type) for field in kind}
