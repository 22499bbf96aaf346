"""Rows from files, directories, `datasets` directories and the hub, one at a time.

A row that cannot even be read (broken JSON, bytes that are not UTF-8) comes out as a `BadRow`
in its place, so that one bad line never hides the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from plimsoll.config.data import SourceConfig
from plimsoll.data.arrow_values import Read, value_reader
from plimsoll.data.fields import SYSTEM
from plimsoll.data.generated import generated_rows
from plimsoll.data.json_rows import not_utf8, read_json
from plimsoll.data.report import BadRow, Row, RowProblem, nearest
from plimsoll.errors import ConfigError

LINES = (".jsonl", ".json", ".jsonl.gz")
SUFFIXES = (*LINES, ".parquet")
"""How the names of data files end, in small letters."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
SPLIT_WORDS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
BATCH_ROWS = 1024

_TURNS = ("messages", "prompt", "response", "chosen", "rejected", "tools")
"""The settings of a source that name columns with turns or tools."""


@dataclass(frozen=True)
class Columns:
    """Which columns are read, and how."""

    named: frozenset[str]
    """The columns that the source names."""
    turns: frozenset[str]
    """Those of them that hold turns or tools, where a null means that a key is not there."""
    whole: bool
    """Whether all other columns are read, too."""

    @classmethod
    def of(cls, source: SourceConfig, *, whole: bool = False) -> Columns:
        """Return the columns of a source."""
        turns = (getattr(source, setting) for setting in _TURNS)
        return cls(source.columns(), frozenset(name for name in turns if name), whole)

    def among(self, present: list[str]) -> list[str]:
        """Return the columns to read; all of them if one is missing, for a message."""
        tops = {top_of(column, present) for column in self.named}
        if self.whole or not tops or None in tops:
            return present
        return [name for name in present if name in tops or name == SYSTEM]


def read_rows(source: SourceConfig, *, whole: bool = False) -> Iterator[Row | BadRow]:
    """The source's rows in order, at most `source.limit` of them (bad ones count).

    whole: with all of their columns, not only those that the source names.

    Raises ConfigError for a path that is not there, a format that is not known, a split that
    the source lacks, a `name` where there can be none, or a hub that does not answer.
    """
    columns = Columns.of(source, whole=whole)
    return named_within(islice(_read(source, columns), source.limit), columns)


def named_within(rows: Iterable[Row | BadRow], columns: Columns) -> Iterator[Row | BadRow]:
    """Yield the rows, with the columns within columns that the source names."""
    return (_named_within(row, columns) for row in rows)


def _named_within(row: Row | BadRow, columns: Columns) -> Row | BadRow:
    if isinstance(row, BadRow):
        return row
    values = with_named(row.values, columns.named)
    return row if values is row.values else replace(row, values=values)


def _read(source: SourceConfig, columns: Columns) -> Iterator[Row | BadRow]:
    if source.generate is not None:
        return generated_rows(source)
    path = Path(source.path)
    if source.name is not None and path.exists():
        raise ConfigError(
            f"`name: {source.name}` chooses a configuration of a data set of the hub, and {path} is"
            f" here: leave it out, or give another `path`."
        )
    if path.is_file():
        return _read_file(path, columns)
    if path.is_dir() and is_saved(path):
        return _read_saved(path, source.split, columns)
    if path.is_dir():
        return (row for one in files_of(path, source.split) for row in _read_file(one, columns))
    looks_like_file = path.name.lower().endswith(SUFFIXES)
    if HUB_NAME.fullmatch(source.path) and not looks_like_file:
        return _read_hub(source, columns)
    raise ConfigError(_missing(path))


def _missing(path: Path) -> str:
    if path.exists():
        return f"{path} is neither a file nor a directory: write what it gives to a file."
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which is not there: mend the link."
    missing = next((p for p in reversed([path, *path.parents]) if not p.exists()), path)
    return (
        f"There is no {path}: `{missing.name}` is not in {missing.parent.absolute()}."
        f"{_neighbours(missing.name, missing.parent)}"
        f" Give the path of a file, of a directory, or the name of a data set of the hub."
    )


def _neighbours(name: str, directory: Path) -> str:
    if not directory.is_dir():
        return ""
    return nearest(name, (child.name for child in directory.iterdir()))


def _read_file(path: Path, columns: Columns) -> Iterator[Row | BadRow]:
    name = path.name.lower()
    if name.endswith(LINES):
        return read_json(path)
    if name.endswith(".parquet"):
        return _read_parquet(path, columns)
    raise ConfigError(
        f"{path} ends in {path.suffix.lower() or 'no suffix'}, which is not a known format:"
        f" give a file that ends in {', '.join(SUFFIXES)} (unpack it first if it is compressed"
        f" otherwise)."
    )


def is_data(file: Path) -> bool:
    """Whether a file is named as data are; hidden ones, such as macOS leaves, are not."""
    return file.name.lower().endswith(SUFFIXES) and not file.name.startswith(".")


def is_saved(path: Path) -> bool:
    """Whether a directory is what `datasets` saves."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def files_of(path: Path, split: str) -> list[Path]:
    """The data files of a directory that belong to a split; ConfigError where there are none."""
    files = sorted(filter(is_data, path.iterdir()))
    if not files:
        raise ConfigError(
            f"The directory {path} holds no data files: it needs files that end in"
            f" {', '.join(SUFFIXES)}, or what `Dataset.save_to_disk` writes."
        )
    return _of_split(path, files, split)


def _of_split(path: Path, files: list[Path], split: str) -> list[Path]:
    """All files; but where files are named after splits (`train.jsonl`, `test-00000.parquet`),
    only those of the split, so that nobody trains on the test set by accident."""
    words = {file: re.split(r"[-_.]", file.name)[0] for file in files}
    mine = [file for file in files if words[file] == split]
    if not mine and (split != "train" or SPLIT_WORDS & set(words.values())):
        raise ConfigError(
            f"No file of {path} belongs to the split `{split}`; there are"
            f" {', '.join(file.name for file in files)}: set `split`, or name one file as `path`."
        )
    return mine or files


def _read_parquet(path: Path, columns: Columns) -> Iterator[Row | BadRow]:
    try:
        with pq.ParquetFile(path) as file:
            read = columns.among(file.schema_arrow.names)
            batches = file.iter_batches(BATCH_ROWS, columns=read)
            yield from arrow_rows(str(path), batches, columns)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error
    finally:
        pa.default_memory_pool().release_unused()  # what it read, Arrow keeps for more


def arrow_rows(file: str, batches: Iterable[Any], columns: Columns) -> Iterator[Row | BadRow]:
    """Yield the rows of Arrow record batches or tables, numbered from 1."""
    line = 0
    for batch in batches:
        for row in _batch_rows(batch, columns):
            line += 1
            if isinstance(row, RowProblem):
                yield BadRow(file, line, row.field, row.problem)
            else:
                yield Row(file, line, row)


def _batch_rows(batch: Any, columns: Columns) -> Iterable[dict[str, object] | RowProblem]:
    all_readers = {f.name: value_reader(f.type, f.name, columns.turns) for f in batch.schema}
    readers = {name: read for name, read in all_readers.items() if read is not None}
    try:
        rows: list[dict[str, object]] = batch.to_pylist()
        return [_converted(row, readers) for row in rows]
    # Arrow does not check its strings, and has times that Python has not: find the rows one by one.
    except (ValueError, OverflowError):
        return (_single_row(batch.slice(i, 1), readers) for i in range(batch.num_rows))


def _converted(row: Mapping[str, object], readers: Mapping[str, Read]) -> dict[str, object]:
    converted = {name: read(row[name]) for name, read in readers.items() if row[name] is not None}
    return {**row, **converted}


def _single_row(row: Any, readers: Mapping[str, Read]) -> dict[str, object] | RowProblem:
    values: dict[str, object] = {}
    for name in row.schema.names:
        try:
            value = row.column(name)[0].as_py()
            read = readers.get(name)
            values[name] = value if value is None or read is None else read(value)
        except UnicodeDecodeError as error:
            return RowProblem(name, not_utf8(error))
        except (ValueError, OverflowError) as error:
            return RowProblem(name, f"cannot be read: {error}")
    return values


def _read_saved(path: Path, split: str, columns: Columns) -> Iterator[Row | BadRow]:
    import datasets  # slow to import and needed only here

    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as a saved data set: {error}") from error
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ConfigError(
                f"{path} has no split `{split}`; it has {', '.join(saved)}.{nearest(split, saved)}"
            )
        saved = saved[split]
    elif split not in ("train", str(saved.split)):
        raise ConfigError(f"{path} is one data set, without the split `{split}`: leave it out.")
    return _table_rows(str(path), saved, columns)


def _read_hub(source: SourceConfig, columns: Columns) -> Iterator[Row | BadRow]:
    import datasets  # slow to import and needed only here

    path, name, split = source.path, source.name, source.split
    try:
        # datasets >= 4 never runs code of the data set
        loaded = datasets.load_dataset(path, name, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"`{path}` is no file or directory here, and as a data set of the hub (split `{split}`"
            f"{f', name `{name}`' if name else ''}) it could not be loaded: {error}\nGive the path"
            f" of a file or directory, or check path, `name`, `split` and the network."
            f"{_neighbours(Path(path).name, Path(path).parent)}"
        ) from error
    return _table_rows(path, loaded, columns)


def _table_rows(file: str, table: Any, columns: Columns) -> Iterator[Row | BadRow]:
    """Yield the rows of a data set of `datasets`."""
    read = table.select_columns(columns.among(table.column_names))
    return arrow_rows(file, read.with_format("arrow").iter(BATCH_ROWS), columns)


_MISSING = object()


def with_named(values: Mapping[str, object], columns: Collection[str]) -> Mapping[str, object]:
    """A row's values, and under their dotted names those of the columns that lie within others."""
    found = {name: _at(values, name) for name in columns if "." in name and name not in values}
    there = {name: value for name, value in found.items() if value is not _MISSING}
    return {**values, **there} if there else values


def top_of(column: str, present: Collection[str]) -> str | None:
    """The column, of those that are present, that is named or that what is named lies within; None
    where there is none."""
    beginnings = (head for head, _ in _cuts(column))
    return next((name for name in (column, *beginnings) if name in present), None)


def names_of(values: Mapping[str, object], above: str = "") -> Iterator[str]:
    """All that a column could be named by, in a row's values or in a schema of the same form."""
    for name, value in values.items():
        yield f"{above}{name}"
        if isinstance(value, Mapping):
            yield from names_of(value, f"{above}{name}.")


def _at(values: Mapping[str, object], column: str) -> object:
    if column in values:
        return values[column]
    for head, rest in _cuts(column):
        within = values.get(head)
        if isinstance(within, Mapping) and (found := _at(within, rest)) is not _MISSING:
            return found
    return _MISSING


def _cuts(column: str) -> Iterator[tuple[str, str]]:
    """The ways to cut a name in two at one of its dots, the shortest beginning first."""
    parts = column.split(".")
    for i in range(1, len(parts)):
        yield ".".join(parts[:i]), ".".join(parts[i:])
