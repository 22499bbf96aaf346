"""Keep what was sampled and scored until a step has learned from it.

A run that was killed reads it back: no response is sampled twice, and no reward or tool is called
twice for an episode that ended. Records are appended to one file, each with its length and checksum
before it; a record that a kill has cut off is dropped when the file is opened again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock

import xxhash

from plimsoll.records import Trajectory
from plimsoll.run.files import append_whole, write_whole
from plimsoll.run.trajectories import from_bytes, to_bytes

RecordKey = tuple[str | int | float, ...]
"""What a record is about: its kind, then what tells it from others of the kind."""

_HEAD = struct.Struct("<QQ")
"""Length of a record in bytes, and its checksum (XXH3, 64 bits)."""
_LINEAGE: RecordKey = ("lineage",)
_MOST_DEAD = 2**24
"""Bytes of records that are over, at which the file is written anew without them."""


_Place = tuple[int, int]
"""Where a record's content is in the file: its start and its size."""


class Journal:
    """The journal of a run directory. Methods may be called from several threads."""

    def __init__(self, path: Path, lineage: str) -> None:
        """Open the journal, and drop what is in it if it is of another lineage.

        Args:
            path: the file, which the first record makes.
            lineage: a fingerprint of the settings that decide what is sampled.
        """
        self._path, self._lineage, self._lock = path, lineage.encode(), Lock()
        self._places = dict(_read_places(path))
        self._end = max(map(sum, self._places.values()), default=0)
        if self._read(_LINEAGE) != self._lineage:
            self._begin({})
        elif path.stat().st_size > self._end:
            with path.open("r+b") as file:
                file.truncate(self._end)

    def groups(self, key: RecordKey) -> list[Trajectory] | None:
        """Return the trajectories that were added under a key, or None."""
        content = self._read(key)
        return None if content is None else from_bytes(content)

    def add_groups(self, key: RecordKey, trajectories: Sequence[Trajectory]) -> None:
        """Add scored trajectories."""
        self._add(key, to_bytes(trajectories))

    def figures(self, key: RecordKey) -> dict[str, float] | None:
        """Return the figures that were added under a key, or None."""
        content = self._read(key)
        return None if content is None else dict(json.loads(content))

    def add_figures(self, key: RecordKey, figures: Mapping[str, float]) -> None:
        """Add figures by name."""
        self._add(key, json.dumps(dict(figures)).encode())

    def keep(self, is_open: Callable[[RecordKey], bool]) -> None:
        """Forget all records but those that are still open."""
        with self._lock:
            places = {key: place for key, place in self._places.items() if is_open(key)}
            if places and self._end - sum(size for _, size in places.values()) < _MOST_DEAD:
                self._places = places
            else:
                self._begin({key: self._content(place) for key, place in places.items()})

    def _begin(self, contents: Mapping[RecordKey, bytes]) -> None:
        """Write the file anew with these records, or remove it if there are none."""
        records = [_record(key, content) for key, content in contents.items()]
        if records:
            write_whole(self._path, b"".join([self._first(), *records]))
        else:
            self._path.unlink(missing_ok=True)
        self._places = dict(_read_places(self._path))
        self._end = self._path.stat().st_size if records else 0

    def _first(self) -> bytes:
        return _record(_LINEAGE, self._lineage)

    def _add(self, key: RecordKey, content: bytes) -> None:
        with self._lock:
            record = _record(key, content)
            record = record if self._end else self._first() + record
            append_whole(self._path, record)
            self._end += len(record)
            self._places[key] = self._end - len(content), len(content)

    def _read(self, key: RecordKey) -> bytes | None:
        with self._lock:
            place = self._places.get(key)
            return None if place is None else self._content(place)

    def _content(self, place: _Place) -> bytes:
        with self._path.open("rb") as file:
            file.seek(place[0])
            return file.read(place[1])


def _record(key: RecordKey, content: bytes) -> bytes:
    body = json.dumps(key).encode() + b"\n" + content
    return _HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def _read_places(path: Path) -> Iterator[tuple[RecordKey, _Place]]:
    """Yield the whole records of a file, up to the first that is cut off or damaged."""
    if not path.is_file():
        return
    size = path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            length, checksum = _HEAD.unpack(head)
            if length > size - file.tell():  # a damaged one may be larger than any memory
                return
            body = file.read(length)
            if xxhash.xxh3_64_intdigest(body) != checksum:
                return
            name, _, content = body.partition(b"\n")
            yield tuple(json.loads(name)), (file.tell() - len(content), len(content))
