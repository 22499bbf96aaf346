"""Rows from files, directories, `datasets` directories and the hub, one at a time.

A row that cannot even be read (broken JSON, bytes that are not UTF-8) comes out as a `BadRow`
in its place, so that one bad line never hides the others.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from plimsoll.config.data import SourceConfig
from plimsoll.data.report import BadRow, RowProblem, nearest
from plimsoll.errors import ConfigError

LINES = (".jsonl", ".json", ".jsonl.gz")
SUFFIXES = (*LINES, ".parquet")
"""How the names of data files end, in small letters."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
SPLIT_WORDS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})
BATCH_ROWS = 1024
_LOOKED_AT = 2**20
"""Bytes: what the first row is told from."""
# ShareGPT's names of turns, to those of messages.
_MESSAGES = (
    '[{"role": {"human": "user", "gpt": "assistant"}.get(t["from"], t["from"]), '
    '"content": t["value"]} for t in r["COLUMN"]]'
)


@dataclass(frozen=True)
class Row:
    """One row as read.

    file: the file, directory or hub name it came from.
    line: 1-based line in JSON lines, 1-based row number in Parquet and `datasets`.
    values: by column; of Parquet and `datasets` only those that the source names, where it has them
        all.
    """

    file: str
    line: int
    values: Mapping[str, object]


def read_rows(source: SourceConfig) -> Iterator[Row | BadRow]:
    """The source's rows in order, at most `source.limit` of them (bad ones count).

    Raises ConfigError for a path that is not there, a format that is not known, a split that
    the source lacks, a `name` where there can be none, or a hub that does not answer.
    """
    return islice(_read(source), source.limit)


def _read(source: SourceConfig) -> Iterator[Row | BadRow]:
    path = Path(source.path)
    if source.name is not None and path.exists():
        raise ConfigError(
            f"`name: {source.name}` chooses a configuration of a data set of the hub, and {path} is"
            f" here: leave it out, or give another `path`."
        )
    if path.is_file():
        return _read_file(path, source)
    if path.is_dir():
        return _read_directory(path, source)
    looks_like_file = path.name.lower().endswith(SUFFIXES)
    if HUB_NAME.fullmatch(source.path) and not looks_like_file:
        return _read_hub(source)
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


def _read_file(path: Path, source: SourceConfig) -> Iterator[Row | BadRow]:
    name = path.name.lower()
    if name.endswith(LINES):
        return _read_lines(path)
    if name.endswith(".parquet"):
        return _read_parquet(path, source)
    raise ConfigError(
        f"{path} ends in {path.suffix.lower() or 'no suffix'}, which is not a known format:"
        f" give a file that ends in {', '.join(SUFFIXES)} (unpack it first if it is compressed"
        f" otherwise)."
    )


def is_data(file: Path) -> bool:
    """Whether a file is named as data are; hidden ones, such as macOS leaves, are not."""
    return file.name.lower().endswith(SUFFIXES) and not file.name.startswith(".")


def _read_directory(path: Path, source: SourceConfig) -> Iterator[Row | BadRow]:
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _read_saved(path, source)
    files = sorted(filter(is_data, path.iterdir()))
    if not files:
        raise ConfigError(
            f"The directory {path} holds no data files: it needs files that end in"
            f" {', '.join(SUFFIXES)}, or what `Dataset.save_to_disk` writes."
        )
    mine = _of_split(path, files, source.split)
    return (row for file in mine for row in _read_file(file, source))


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


def _read_lines(path: Path) -> Iterator[Row | BadRow]:
    if path.suffix.lower() == ".json" and (how := conversion(path)):
        raise ConfigError(f"{path} holds one JSON array, but one object per line is needed: {how}")
    for line, raw in enumerate(_raw_lines(path), start=1):
        content = raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw
        if not content.strip():
            continue
        yield _parse_line(str(path), line, content)


def conversion(path: Path) -> str | None:
    """A command that makes JSON lines of a file with one array, and what to give then; None where
    the file holds no array, or cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.read(_LOOKED_AT).removeprefix(codecs.BOM_UTF8).lstrip()
    except OSError:  # who reads all of it says why
        return None
    if not start.startswith(b"["):
        return None
    turns = _shared_turns(_first_row(start[1:].decode("utf-8", errors="replace").lstrip()))
    row = f'r | {{"{turns}": {_MESSAGES.replace("COLUMN", turns)}}}' if turns else "r"
    made = f"{path.stem}.jsonl"
    code = f'import json; [print(json.dumps({row})) for r in json.load(open("{path}"))]'
    named = f" and messages: {turns}" if turns else ""
    return f"run  python3 -c '{code}' > {made}  and give path: {made}{named}"


def _first_row(text: str) -> object:
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except ValueError:
        return None


def _shared_turns(row: object) -> str:
    """The column with turns of ShareGPT's form, `from` and `value`; empty where there is none."""
    if not isinstance(row, dict):
        return ""
    return next((name for name, value in row.items() if _are_turns(value)), "")


def _are_turns(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in value)
    )


def _raw_lines(path: Path) -> Iterator[bytes]:
    packed = path.suffix.lower() == ".gz"
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            yield from file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path} cannot be unpacked: {str(error).rstrip('.')}. Copy the file again; or, if it "
            f"is not compressed, rename it to {path.stem}."
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _parse_line(file: str, line: int, content: bytes) -> Row | BadRow:
    try:
        values = json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        return BadRow(file, line, "", _not_utf8(error))
    except json.JSONDecodeError as error:
        return BadRow(file, line, "", f"is not JSON: {error.msg}, at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return BadRow(file, line, "", f"is not JSON: {error}")
    if not isinstance(values, dict):
        return BadRow(file, line, "", f"is a JSON {type(values).__name__}, not an object")
    return Row(file, line, values)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key `{counts.most_common(1)[0][0]}` is there twice")
    return values


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"


def _read_parquet(path: Path, source: SourceConfig) -> Iterator[Row | BadRow]:
    try:
        yield from _parquet_rows(path, source)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error
    finally:
        pa.default_memory_pool().release_unused()  # what it read, Arrow keeps for more


def _parquet_rows(path: Path, source: SourceConfig) -> Iterator[Row | BadRow]:
    with pq.ParquetFile(path) as file:
        columns = _named(source, file.schema_arrow.names)
        yield from _arrow_rows(str(path), file.iter_batches(BATCH_ROWS, columns=columns))


def _named(source: SourceConfig, present: list[str]) -> list[str]:
    """The columns to read: those that the source names; where one is missing all, for a message."""
    wanted = source.columns()
    return [name for name in present if name in wanted] if wanted <= {*present} else present


def _arrow_rows(file: str, batches: Iterable[Any]) -> Iterator[Row | BadRow]:
    """Rows of Arrow record batches or tables, numbered from 1."""
    line = 0
    for batch in batches:
        for row in _batch_rows(batch):
            line += 1
            if isinstance(row, RowProblem):
                yield BadRow(file, line, row.field, row.problem)
            else:
                yield Row(file, line, row)


def _batch_rows(batch: Any) -> Iterable[dict[str, object] | RowProblem]:
    try:
        rows: list[dict[str, object]] = batch.to_pylist()
        return rows
    # Arrow does not check its strings, and has times that Python has not: find the rows one by one.
    except (ValueError, OverflowError):
        return (_single_row(batch.slice(i, 1)) for i in range(batch.num_rows))


def _single_row(row: Any) -> dict[str, object] | RowProblem:
    values: dict[str, object] = {}
    for name in row.schema.names:
        try:
            values[name] = row.column(name)[0].as_py()
        except UnicodeDecodeError as error:
            return RowProblem(name, _not_utf8(error))
        except (ValueError, OverflowError) as error:
            return RowProblem(name, f"cannot be read: {error}")
    return values


def _read_saved(path: Path, source: SourceConfig) -> Iterator[Row | BadRow]:
    import datasets  # slow to import and needed only here

    split = source.split
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
    columns = _named(source, saved.column_names)
    return _arrow_rows(
        str(path), saved.select_columns(columns).with_format("arrow").iter(BATCH_ROWS)
    )


def _read_hub(source: SourceConfig) -> Iterator[Row | BadRow]:
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
    columns = _named(source, loaded.column_names)
    return _arrow_rows(path, loaded.select_columns(columns).with_format("arrow").iter(BATCH_ROWS))
