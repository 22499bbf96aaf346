"""Write files and directories atomically: completely or not at all.

Each file is written under a temporary name in the same directory and renamed when it is complete.
So no reader sees half a file. `is_temporary` recognizes the leftovers of a killed process.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from plimsoll.errors import CannotWrite, PlimsollError

_MARK = ".partial-"
_CANNOT_WRITE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
}
_RUST_NUMBER = re.compile(r"\(os error (\d+)\)")


def is_temporary(path: Path) -> bool:
    """Return whether a path has the name of an unfinished file or directory."""
    return path.name.startswith(".") and _MARK in path.name


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically; if it raises CannotWrite, the file has its old content."""
    data = content.encode() if isinstance(content, str) else content
    with whole_file(path) as partial:
        partial.write_bytes(data)


def append_whole(path: Path, data: bytes) -> None:
    """Append all of the data to a file; on an error append nothing and raise CannotWrite."""
    try:
        with path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                count = file.write(data)
                while count < len(data):
                    count += file.write(data[count:])
            except OSError:
                file.truncate(end)
                raise
    except OSError as error:
        raise CannotWrite(
            f"Cannot add to {path}: {error}. What it had is whole. "
            f"Free disk space or correct the rights, then resume the run."
        ) from error


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end of the block it replaces the file.

    After an error in the block the file keeps its old content.
    """
    partial = _sibling(path)
    with explaining_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with explaining_errors(path):
            yield partial
            sync(partial)
            partial.replace(path)
            sync(path.parent)
    finally:
        with suppress(OSError):  # it does not exist, or the file system is read-only
            partial.unlink()


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory to fill; at the end of the block it replaces the directory.

    After an error in the block the temporary directory is removed, and the old directory stays.
    Files get the read rights of the directory, as safetensors makes files that only their owner
    can read.
    """
    partial = _sibling(path)
    try:
        with explaining_errors(path):
            partial.mkdir(parents=True)
            yield partial
            readable = partial.stat().st_mode & 0o666
            for item in (*partial.rglob("*"), partial):
                if item.is_file():
                    with suppress(OSError):  # a file system without rights
                        item.chmod(readable)
                sync(item)
            aside = _put_aside(path)
            partial.replace(path)
            sync(path.parent)
            shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a directory if it exists. It is renamed first, so its path never holds half of it."""
    shutil.rmtree(_put_aside(path), ignore_errors=True)


def _put_aside(path: Path) -> Path:
    aside = _sibling(path)
    if path.exists():
        path.replace(aside)
    return aside


@contextmanager
def explaining_errors(path: Path) -> Iterator[None]:
    """Turn a file system error inside the block into a CannotWrite that says what to do."""
    try:
        yield
    except PlimsollError:
        raise
    except Exception as error:
        if _number(error) not in _CANNOT_WRITE:  # a connection, a time limit
            raise
        raise CannotWrite(
            f"Cannot write {path}: {error}. Nothing of it was kept. "
            f"Free disk space or correct the rights, or choose another directory."
        ) from error


def _number(error: Exception) -> int | None:
    """Return the errno of an error, or None.

    safetensors and tokenizers are written in Rust: their exceptions have the errno only in their
    text.
    """
    if isinstance(error, OSError):
        return error.errno
    match = _RUST_NUMBER.search(str(error))
    return int(match[1]) if match else None


def _sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}{_MARK}{uuid.uuid4().hex[:8]}")


def directory_bytes(path: Path) -> int:
    """Return the bytes of all files below a directory; 0 if there is none."""
    return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
