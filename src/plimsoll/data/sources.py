"""Read rows from files, directories, `datasets` directories and the hub, one at a time.

A row that cannot be read (broken JSON, bytes that are not UTF-8) gives a `BadRow` in its place, so
that one bad line never hides the others.

Values of Arrow's columns become those that the same rows would have in JSON. Arrow gives every
object of a column the keys of all objects, and fills missing keys with null. Within turns and tools
such a null is padding and is dropped, as a chat template writes every key that is present: {"town":
"T0", "a": null, "b": null} becomes {"town": "T0"}. In other columns nulls stay, for functions that
look a key up.

Text of the extension type arrow.json, which `datasets` writes where objects have different keys, is
parsed. Nulls in such text were in the data, and stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from plimsoll.config.data import SourceConfig
from plimsoll.config.files import nearest
from plimsoll.config.json_text import parse_json
from plimsoll.data.fields import BESIDE, BadRow, RawRow, RowProblem, nearest_file
from plimsoll.data.generated import generated_rows
from plimsoll.data.json_rows import not_utf8, read_json
from plimsoll.errors import ConfigError
from plimsoll.machine.faults import fault_point

ReadValue = Callable[[Any], object]
"""Converts a value as `to_pylist` gives it. The value is not None."""


def value_reader(
    kind: Any, name: str, without_padding: Collection[str], within: bool = False
) -> ReadValue | None:
    """Return the function that converts a column's values to JSON's; None if they need no change.

    Args:
        kind: the column's Arrow type.
        name: the column's name, dotted for a nested column.
        without_padding: the names of the columns whose objects lose their nulls.
        within: whether the column lies within one of these.
    """
    within = within or name in without_padding
    if isinstance(kind, pa.JsonType):
        return parse_json
    if pa.types.is_struct(kind):
        readers = {
            field.name: value_reader(field.type, f"{name}.{field.name}", without_padding, within)
            for field in kind
        }
        return partial(_read_object, readers, within) if within or any(readers.values()) else None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        read = value_reader(kind.value_type, name, without_padding, within)
        return None if read is None else partial(_read_list, read)
    return None


def _read_object(
    readers: Mapping[str, ReadValue | None], without_nulls: bool, value: Mapping[str, object]
) -> dict[str, object]:
    return {
        name: held if held is None or (read := readers[name]) is None else read(held)
        for name, held in value.items()
        if held is not None or not without_nulls
    }


def _read_list(read: ReadValue, value: list[object]) -> list[object]:
    return [None if held is None else read(held) for held in value]


LINES = (".jsonl", ".json", ".jsonl.gz")
SUFFIXES = (*LINES, ".parquet")
"""The ends of data files' names, in lower case."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
SPLIT_WORDS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
BATCH_ROWS = 1024
_BROKEN = (OSError, pa.ArrowException, IndexError, RecursionError)
"""The errors of Arrow's readers at a changed file, or at columns that nest too deeply."""

_TURNS = ("messages", "prompt", "response", "chosen", "rejected", "tools")
"""The settings of a source that name columns with turns or tools."""


@dataclass(frozen=True)
class Columns:
    """The columns to read, and how to read them."""

    named: frozenset[str]
    """The columns that the source names."""
    turns: frozenset[str]
    """The named columns that hold turns or tools. A null in them means that a key is missing."""
    whole: bool
    """Whether all other columns are read, too."""

    @classmethod
    def of(cls, source: SourceConfig, *, whole: bool = False) -> Columns:
        """Return the columns of a source."""
        turns = (getattr(source, setting) for setting in _TURNS)
        return cls(source.columns(), frozenset(name for name in turns if name), whole)

    def among(self, present: list[str]) -> list[str]:
        """Return the present columns to read; all if a named one is missing, for error messages."""
        tops = {top_of(column, present) for column in self.named}
        if self.whole or not tops or None in tops:
            return present
        return [name for name in present if name in tops or name in BESIDE]


def read_rows(source: SourceConfig, *, whole: bool = False) -> Iterator[RawRow | BadRow]:
    """Yield the source's rows in order, at most `source.limit` of them (bad ones count).

    Args:
        source: the settings of the source.
        whole: whether to read all columns, and not only those that the source names.

    Raises:
        ConfigError: a path that does not exist, an unknown format, a split that the source lacks, a
            `name` for data that has none, or a hub that does not answer.
    """
    columns = Columns.of(source, whole=whole)
    return add_nested(islice(_read(source, columns), source.limit), columns)


def add_nested(rows: Iterable[RawRow | BadRow], columns: Columns) -> Iterator[RawRow | BadRow]:
    """Yield the rows, with values for nested columns that the source names, such as `a.b`."""
    for row in rows:
        if isinstance(row, RawRow):
            values = with_nested(row.values, columns.named)
            yield row if values is row.values else replace(row, values=values)
        else:
            yield row


def _read(source: SourceConfig, columns: Columns) -> Iterator[RawRow | BadRow]:
    fault_point("rows.read")
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
        return (row for file in files_of(path, source.split) for row in _read_file(file, columns))
    if is_hub_name(source.path):
        return _table_rows(source.path, load_hub(source), columns)
    raise ConfigError(_missing(path))


def _missing(path: Path) -> str:
    if path.exists():
        return f"{path} is neither a file nor a directory: write what it gives to a file."
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which is not there: mend the link."
    missing = next((p for p in reversed([path, *path.parents]) if not p.exists()), path)
    return (
        f"There is no {path}: `{missing.name}` is not in {missing.parent.absolute()}."
        f"{nearest_file(missing)}"
        f" Give the path of a file, of a directory, or the name of a data set of the hub."
    )


def _read_file(path: Path, columns: Columns) -> Iterator[RawRow | BadRow]:
    if path.is_fifo():  # opening it would wait for its writer
        raise ConfigError(_missing(path))
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


def is_hub_name(path: str) -> bool:
    """Return whether a path where nothing is may be the name of a data set of the hub."""
    return HUB_NAME.fullmatch(path) is not None and not path.lower().endswith(SUFFIXES)


def is_data(file: Path) -> bool:
    """Return whether a file has the name of a data file. Hidden files have not."""
    return file.name.lower().endswith(SUFFIXES) and not file.name.startswith(".")


def is_saved(path: Path) -> bool:
    """Return whether `datasets` saved this directory."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def files_of(path: Path, split: str) -> list[Path]:
    """Return a directory's data files of a split. Raise ConfigError if there are none."""
    files = sorted(filter(is_data, path.iterdir()))
    if not files:
        raise ConfigError(
            f"The directory {path} holds no data files: it needs files that end in"
            f" {', '.join(SUFFIXES)}, or what `Dataset.save_to_disk` writes."
        )
    return _files_of_split(path, files, split)


def _files_of_split(path: Path, files: list[Path], split: str) -> list[Path]:
    """Return all files; if files are named after splits (`train.jsonl`), those of the split.

    This keeps a run from training on the test set by accident.
    """
    words = {file: re.split(r"[-_.]", file.name)[0] for file in files}
    split_files = [file for file in files if words[file] == split]
    if not split_files and (split != "train" or SPLIT_WORDS & set(words.values())):
        raise ConfigError(
            f"No file of {path} belongs to the split `{split}`; there are"
            f" {', '.join(file.name for file in files)}: set `split`, or name one file as `path`."
        )
    return split_files or files


def _read_parquet(path: Path, columns: Columns) -> Iterator[RawRow | BadRow]:
    try:
        with pq.ParquetFile(path) as file:
            read = columns.among(file.schema_arrow.names)
            batches = file.iter_batches(BATCH_ROWS, columns=read)
            yield from arrow_rows(str(path), batches, columns)
    except _BROKEN as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error
    finally:
        pa.default_memory_pool().release_unused()  # Arrow would keep the memory for later reads.


def arrow_rows(file: str, batches: Iterable[Any], columns: Columns) -> Iterator[RawRow | BadRow]:
    """Yield the rows of Arrow record batches or tables, numbered from 1."""
    line = 0
    for batch in batches:
        for row in _batch_rows(batch, columns):
            line += 1
            if isinstance(row, RowProblem):
                yield BadRow(file, line, row.field, row.problem)
            else:
                yield RawRow(file, line, row)


def _batch_rows(batch: Any, columns: Columns) -> Iterable[dict[str, object] | RowProblem]:
    all_readers = {f.name: value_reader(f.type, f.name, columns.turns) for f in batch.schema}
    readers = {name: read for name, read in all_readers.items() if read is not None}
    try:
        batch.validate(full=True)  # else a changed file could have texts read beyond their buffer
        rows: list[dict[str, object]] = batch.to_pylist()
        return [_convert(row, readers) for row in rows]
    # Arrow has unchecked strings, and times that Python lacks: convert row by row to find them.
    except (ValueError, OverflowError, pa.ArrowException):
        return (_single_row(batch.slice(i, 1), readers) for i in range(batch.num_rows))


def _convert(row: Mapping[str, object], readers: Mapping[str, ReadValue]) -> dict[str, object]:
    converted = {name: read(row[name]) for name, read in readers.items() if row[name] is not None}
    return {**row, **converted}


def _single_row(row: Any, readers: Mapping[str, ReadValue]) -> dict[str, object] | RowProblem:
    values: dict[str, object] = {}
    for name in row.schema.names:
        try:
            _check_offsets(row.column(name))
            value = row.column(name)[0].as_py()
            read = readers.get(name)
            values[name] = value if value is None or read is None else read(value)
        except UnicodeDecodeError as error:
            return RowProblem(name, not_utf8(error))
        except (ValueError, OverflowError, IndexError, pa.ArrowException) as error:
            return RowProblem(name, f"cannot be read: {error}")
    return values


def _check_offsets(column: Any) -> None:
    """Raise ArrowInvalid if a column would be read beyond its buffers."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):  # which reading the text explains better
            raise


def _read_saved(path: Path, split: str, columns: Columns) -> Iterator[RawRow | BadRow]:
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


def load_hub(source: SourceConfig) -> Any:
    """Return a data set of the hub, from its cache if it is there; raise ConfigError."""
    import datasets  # slow to import and needed only here

    path, name, split = source.path, source.name, source.split
    try:
        # datasets >= 4 never runs code of a data set.
        return datasets.load_dataset(path, name, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f"`{path}` is no file or directory here, and as a data set of the hub (split `{split}`"
            f"{f', name `{name}`' if name else ''}) it could not be loaded: {error}\nGive the path"
            f" of a file or directory, or check path, `name`, `split` and the network."
            f"{nearest_file(Path(path))}"
        ) from error


def _table_rows(file: str, table: Any, columns: Columns) -> Iterator[RawRow | BadRow]:
    """Yield the rows of a data set of `datasets`."""
    read = table.select_columns(columns.among(table.column_names))
    try:
        yield from arrow_rows(file, read.with_format("arrow").iter(BATCH_ROWS), columns)
    except _BROKEN as error:
        raise ConfigError(f"{file} cannot be read as a saved data set: {error}") from error


_MISSING = object()


def with_nested(values: Mapping[str, object], columns: Collection[str]) -> Mapping[str, object]:
    """Return a row's values, with those of nested columns under their dotted names."""
    nested = {n: _value_at(values, n) for n in columns if "." in n and n not in values}
    present = {name: value for name, value in nested.items() if value is not _MISSING}
    return {**values, **present} if present else values


def top_of(column: str, present: Collection[str]) -> str | None:
    """Return the present column that a dotted name means or is nested in; None if there is none."""
    beginnings = (head for head, _ in _splits_at_dots(column))
    return next((name for name in (column, *beginnings) if name in present), None)


def names_of(values: Mapping[str, object], above: str = "") -> Iterator[str]:
    """Yield all names that a column may have, nested ones dotted.

    Args:
        values: a row's values, or a schema of the same form.
        above: the dotted name of the object that holds them, with a dot at its end.
    """
    for name, value in values.items():
        yield f"{above}{name}"
        if isinstance(value, Mapping):
            yield from names_of(value, f"{above}{name}.")


def _value_at(values: Mapping[str, object], column: str) -> object:
    if column in values:
        return values[column]
    for head, rest in _splits_at_dots(column):
        within = values.get(head)
        if isinstance(within, Mapping) and (value := _value_at(within, rest)) is not _MISSING:
            return value
    return _MISSING


def _splits_at_dots(column: str) -> Iterator[tuple[str, str]]:
    """Yield the ways to cut a name in two at one of its dots, the shortest beginning first."""
    parts = column.split(".")
    for i in range(1, len(parts)):
        yield ".".join(parts[:i]), ".".join(parts[i:])
