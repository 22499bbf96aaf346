"""A checkpoint's manifest: sizes and checksums of its files, by which a damaged one is found.

The process that writes a file also takes its checksum, so that no node reads what another wrote.
The manifest is written last. Checkpoints of earlier versions have none, and count as whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from plimsoll.run.files import write_whole

MANIFEST = "manifest.json"
_PIECE = 16 * 2**20
"""Bytes that are read at once."""
_READERS = 8
"""Files that are read at once: one stream does not fill a fast disk or a network."""


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint as it was written."""

    name: str
    """Its path below the checkpoint."""
    bytes: int
    xxh3: str
    """The xxh3 hash (64 bits, hexadecimal) of its content."""


def measure_file(directory: Path, name: str) -> SavedFile:
    """Return the size and the checksum of a file of a checkpoint; raise OSError if unreadable."""
    digest, size = xxhash.xxh3_64(), 0
    with (directory / name).open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
    return SavedFile(name, size, digest.hexdigest())


def manifest_text(files: Iterable[SavedFile]) -> str:
    """Return the text of the manifest of these files."""
    ordered = sorted(files, key=lambda file: file.name)
    content = {file.name: {"bytes": file.bytes, "xxh3": file.xxh3} for file in ordered}
    return json.dumps(content, indent=1) + "\n"


def parse_manifest(text: bytes) -> tuple[SavedFile, ...]:
    """Return the files that a manifest lists; raise ValueError if it is none."""
    try:
        content = json.loads(text)
        files = [SavedFile(name, file["bytes"], file["xxh3"]) for name, file in content.items()]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it lists no files ({error!r})") from error
    for file in files:
        if file.name.startswith("/") or ".." in file.name.split("/"):
            raise ValueError(f"{file.name} is outside of the checkpoint")
    return tuple(files)


def write_manifest(directory: Path, files: Iterable[SavedFile]) -> None:
    """Write the manifest of a checkpoint's files."""
    write_whole(directory / MANIFEST, manifest_text(files))


def read_manifest(directory: Path) -> tuple[SavedFile, ...]:
    """Return the files that a checkpoint's manifest lists; none if it has no manifest.

    Raises ValueError or OSError if the manifest cannot be read.
    """
    path = directory / MANIFEST
    return parse_manifest(path.read_bytes()) if path.exists() else ()


def find_damage(directory: Path) -> str:
    """Return what differs from a checkpoint's manifest: each file, expected and found; "" if whole.

    Sizes of all files are compared first. If they are right, all files are read.
    """
    try:
        files = read_manifest(directory)
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    differences = [*other_sizes(directory, files)]
    if not differences:
        with ThreadPoolExecutor(_READERS) as readers:
            found = readers.map(lambda file: _other_content(directory, file), files)
            differences = [difference for difference in found if difference]
    return "; ".join(differences)


def other_sizes(directory: Path, files: Iterable[SavedFile]) -> Iterator[str]:
    """Yield a text for each file that is missing or has another size, with both sizes."""
    for file in files:
        path = directory / file.name
        if not path.is_file():
            yield f"{file.name} is missing ({file.bytes:,} bytes expected)"
        elif (size := path.stat().st_size) != file.bytes:
            yield f"{file.name} has {size:,} bytes ({file.bytes:,} expected)"


def _other_content(directory: Path, file: SavedFile) -> str:
    try:
        found = measure_file(directory, file.name)
    except OSError as error:
        return f"{file.name} cannot be read: {error}"
    if found == file:
        return ""
    return f"{file.name} has the xxh3 checksum {found.xxh3} ({file.xxh3} expected)"
