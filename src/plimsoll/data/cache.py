"""Keep the tokenised rows of a source in a directory, so that later starts only map them.

An entry is a directory with the rows as an Arrow file, and what else is known of them as JSON. Its
name is a fingerprint of everything that decides about the rows: the bytes of the source's files,
its settings, the tokenizer, the chat template, the code that makes the rows and its libraries. An
entry is never changed. It is written whole or not at all, by one process; others wait for it.

Sources whose rows are small are not kept: to make them takes no longer than to look for them.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash
from filelock import FileLock, Timeout

import plimsoll
from plimsoll.config.data import EVALUATED, DataConfig, SourceConfig
from plimsoll.data.generated import LIBRARY
from plimsoll.data.sources import files_of, is_hub_name, is_saved, load_hub
from plimsoll.data.template import Template
from plimsoll.errors import ConfigError
from plimsoll.run.files import temporary_siblings, whole_directory
from plimsoll.run.numbers import bytes_text

VARIABLE = "PLIMSOLL_CACHE"
"""The environment variable that names the directory if the config does not."""
LEAST_BYTES = 2**22
"""Bytes of rows from which on they are kept: about a million tokens, which take two seconds."""

TOKEN_LIBRARIES = ("tokenizers", "transformers", "jinja2", "datasets", "pyarrow")
"""The libraries that read and tokenize rows."""

_JOINED_BYTES = 2**22
_ROWS, _FACTS = "rows.arrow", "facts.json"
_READ_AT_ONCE = 2**20
FEW_ROWS = 2**14
"""Rows that a `limit` takes, up to which they are not looked for."""
_HASHED_WITHOUT_WORD = 2**33
_ABANDONED_SECONDS = 24 * 3600.0
_NO_ROWS = {"weight", "chat_template", *EVALUATED}
_OF_ROWS = {"max_tokens", "over_long", "on_bad_row", "step_separator"}
_CODE = (
    "data/*.py", "process/template*.py", "records.py", "config/json_text.py",
    "run/stored_logprobs.py",
)  # fmt: skip
"""The code that makes rows of a source."""


Stamps = Sequence[tuple[Path, int, int]]
"""Files with their sizes in bytes and the times of their last changes."""


@dataclass(frozen=True)
class Entry:
    """The place of a source's rows in the cache.

    Attributes:
        path: the directory.
        source: the settings of the source.
        stamps: the files that the rows are read from, with their sizes and times when they were
            hashed. A file that changed since then is not the one that the entry is named after.
    """

    path: Path
    source: SourceConfig
    stamps: Stamps

    def is_current(self) -> bool:
        """Return whether the files are still those that the entry is named after."""
        try:
            return _stamps(_files(self.source) or ()) == self.stamps
        except OSError:  # one is gone
            return False


def find_entry(
    data: DataConfig,
    source: SourceConfig,
    template: Template,
    made_by: Sequence[object],
    note: Callable[[str], None],
) -> Entry | None:
    """Return the place of a source's rows; None if they cannot or must not be kept.

    Rows that a small `limit` takes of large files are not kept: to hash the files takes longer.

    Args:
        data: the settings under `data`.
        source: the settings of the source.
        template: the template of its rows.
        made_by: what else decides about the items, as JSON.
        note: takes a line for the user.
    """
    undated = template.writes_date and template.date is None
    few = source.limit is not None and source.limit <= FEW_ROWS
    if data.cache == "none" or undated or few or (files := _files(source)) is None:
        return None
    try:
        stamps = _stamps(files)
        if (size := sum(size for _, size, _ in stamps)) > _HASHED_WITHOUT_WORD:
            note(f"reading {bytes_text(size)} of {source.path}, to see whether its rows are kept")
        about = {
            "content": _hash_files(files),
            "source": source.model_dump(mode="json", exclude=_NO_ROWS),
            "data": data.model_dump(mode="json", include=_OF_ROWS),
            "template": [template.jinja, template.system, template.begin, template.specials],
            "date": template.dates,
            "vocabulary": template.vocabulary,
            "tokenizer": _hash_tokenizer(template),
            "made_by": made_by,
            "code": _hash_code(),
            "libraries": token_versions(),
        }
    except OSError:  # whoever reads the rows reports it
        return None
    if source.generate is not None:
        about[LIBRARY] = version("reasoning-gym")
    name = xxhash.xxh3_128_hexdigest(json.dumps(about, sort_keys=True).encode())
    try:
        return Entry(_directory(data) / f"rows-{name}", source, stamps)
    except RuntimeError:  # nobody has a home here
        return None


def _directory(data: DataConfig) -> Path:
    return Path(data.cache or os.environ.get(VARIABLE) or "~/.cache/plimsoll").expanduser()


def token_versions() -> dict[str, str]:
    """Return the versions of the libraries that read and tokenize rows."""
    return {name: version(name) for name in TOKEN_LIBRARIES}


def _files(source: SourceConfig) -> Sequence[Path] | None:
    """Return the files that a source's rows are read from; None if they are not known."""
    path = Path(source.path)
    try:
        if source.generate is not None:
            return []
        if path.is_file():
            return [path]
        if path.is_dir() and is_saved(path):
            split = path / source.split
            return sorted(filter(Path.is_file, (split if split.is_dir() else path).rglob("*")))
        if path.is_dir():
            return files_of(path, source.split)
        if path.exists() or not is_hub_name(source.path):
            return None
        return [Path(file["filename"]) for file in load_hub(source).cache_files] or None
    except ConfigError:  # whoever reads the rows raises it
        return None


def _stamps(files: Iterable[Path]) -> Stamps:
    stats = ((file, file.stat()) for file in files)
    return [(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats]


def _hash_files(files: Iterable[Path]) -> str:
    """Return a hash of all bytes of files: to read them takes a fraction of parsing them."""
    digest = xxhash.xxh3_128()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while part := file.read(_READ_AT_ONCE):
                digest.update(part)
    return digest.hexdigest()


def _hash_tokenizer(template: Template) -> str:
    tokenizer = template.tokenizer
    special = json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True)
    words = (type(tokenizer).__name__, special, tokenizer.backend_tokenizer.to_str())
    return xxhash.xxh3_128_hexdigest("\0".join(words).encode())


@functools.cache
def _hash_code() -> str:
    home = Path(plimsoll.__file__).parent
    return _hash_files(sorted(path for name in _CODE for path in home.glob(name)))


RowFacts = dict[str, Any]
"""What is known of rows beside the rows themselves; JSON."""
Kept = tuple[Sequence[pa.RecordBatch], RowFacts]
"""The batches of rows, and their facts."""


def read_entry(entry: Entry, note: Callable[[str], None]) -> Kept | None:
    """Return an entry's batches, mapped, and its facts.

    Return None if it is missing, damaged, or of another user, who may have put anything there.
    """
    try:
        if entry.path.stat().st_uid not in (os.getuid(), 0):
            note(f"{entry.path} is of another user, so it is not read")
            return None
    except OSError:
        return None
    try:
        facts = json.loads((entry.path / _FACTS).read_text(encoding="utf-8"))
        file = entry.path / _ROWS
        if _hash_files([file]) != facts["checksum"]:
            raise ValueError("its rows have another checksum than when they were written")
        return _map(file), facts["facts"]
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
        note(f"{entry.path} is damaged, so its rows are tokenised anew: {error}")
        return None


def keep(
    batches: Iterator[pa.RecordBatch],
    facts: Callable[[], RowFacts],
    entry: Entry | None,
    note: Callable[[str], None],
) -> Kept:
    """Take all batches, and return them and their facts; from the entry's file if they are many.

    If another process writes the entry, wait for it, and return what it wrote. Raises CannotWrite
    if the entry cannot be written; the batches are then gone.

    Args:
        batches: the batches.
        facts: returns what else is known of the rows, once all batches were taken.
        entry: the place to write to; None holds all of them in memory.
        note: takes a line for the user.
    """
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if entry is None or size < LEAST_BYTES:
            continue
        try:
            lock = _lock(entry, note)
        except OSError as error:
            note(f"rows are tokenised at each start, as data.cache cannot be used: {error}")
            entry = None
        else:
            with lock:
                kept = read_entry(entry, lambda _: None)
                return kept or _write(chain(held, batches), held[0].schema, facts, entry)
    return held, facts()


def _lock(entry: Entry, note: Callable[[str], None]) -> AbstractContextManager[object]:
    """Return the right to write an entry, taken; wait for another process that has it.

    Raises OSError if the cache cannot be used.
    """
    entry.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # On a disk without system locks, filelock's soft lock would outlive a killed process.
    lock = FileLock(entry.path.with_suffix(".lock"), thread_local=False, fallback_to_soft=False)
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        note(f"waiting for another process, which makes {entry.path}")
        return lock.acquire()


def _write(
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    facts: Callable[[], RowFacts],
    entry: Entry,
) -> Kept:
    for leftover in temporary_siblings(entry.path):  # of a process that was killed
        # Where locks hold on one node alone, another node may be writing a young one.
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
    mapped: Sequence[pa.RecordBatch] = ()
    with suppress(_SourceChanged), whole_directory(entry.path) as partial:
        file = partial / _ROWS
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in _join(batches):
                writer.write_batch(batch)
        about: Mapping[str, object] = {"checksum": _hash_files([file]), "facts": facts()}
        (partial / _FACTS).write_text(json.dumps(about), encoding="utf-8")
        mapped = _map(file)  # stays, wherever the file goes
        if not entry.is_current():
            raise _SourceChanged
    return mapped, facts()


class _SourceChanged(Exception):
    """The rows are of other files than those that the entry is named after."""


def _join(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in larger batches: a column of them is then on few pages of the file."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(batch.nbytes for batch in held) >= _JOINED_BYTES:
            yield pa.concat_batches(held)
            held = []
    if held:
        yield pa.concat_batches(held)


def _map(file: Path) -> Sequence[pa.RecordBatch]:
    with pa.ipc.open_file(pa.memory_map(str(file))) as reader:
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]
