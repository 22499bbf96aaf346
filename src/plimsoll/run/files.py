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
from typing import TypeVar

from plimsoll.config.json_text import parse_json
from plimsoll.errors import CannotWrite, PlimsollError

RecordT = TypeVar("RecordT")

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
_FULL = {errno.ENOSPC, errno.EDQUOT}
_LEAST_FREE = 4096
"""Free bytes of a disk below which it is full: a file of one byte takes a block."""
_NUMBER_IN_TEXT = re.compile(r"(?:\(os error |\[[Ee]rrno )(\d+)[)\]]")


def is_temporary(path: Path) -> bool:
    """Return whether a path has the name of an unfinished file or directory."""
    return path.name.startswith(".") and _MARK in path.name


def temporary_siblings(path: Path) -> Iterator[Path]:
    """Yield what killed processes left of writing this file or directory."""
    return path.parent.glob(f".{path.name}{_MARK}*")


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
            f"Cannot add to {path}: {_full_disk(path, error) or error}. What it had is whole. "
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
        full = _full_disk(path, error)
        if full is None and _number(error) not in _CANNOT_WRITE:  # a connection, a time limit
            raise
        raise CannotWrite(
            f"Cannot write {path}: {full or error}. Nothing of it was kept. "
            f"Free disk space or correct the rights, or choose another directory."
        ) from error


@contextmanager
def explaining_full_disk(directory: Path) -> Iterator[None]:
    """Turn an unexpected error inside the block into a CannotWrite if the directory's disk is full.

    Libraries report a full disk by errors of their own, such as torch's "file write failed".
    """
    try:
        yield
    except Exception as error:
        is_unexpected = not isinstance(error, PlimsollError) or error.fault == "error"
        full = _full_disk(directory, error) if is_unexpected else None
        if full is None:
            raise
        raise CannotWrite(
            f"Cannot write below {directory}: {full}. Free disk space, then resume the run."
        ) from error


def _full_disk(path: Path, error: Exception) -> str | None:
    """Return a text that says that the disk of a path is full, with the error; None if it is not.

    The disk is full if the error, or one that led to it, says so, or if hardly a byte is left: then
    libraries' errors have other names, such as `No usable temporary directory`.
    """
    earlier: BaseException | None = error
    while earlier is not None:
        if _number(earlier) in _FULL:
            return f"the disk is full ({first_line(error)})"
        earlier = earlier.__cause__ or earlier.__context__
    if _number(error) in _CANNOT_WRITE:
        return None
    usage = shutil.disk_usage(nearest_existing(path))
    if usage.total == 0 or usage.free >= _LEAST_FREE:  # /proc and its like have a total of 0
        return None
    return f"the disk is full ({type(error).__name__}: {first_line(error)})"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def nearest_existing(path: Path) -> Path:
    """Return a path, or its nearest parent that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def _number(error: BaseException) -> int | None:
    """Return the errno of an error, or None.

    Libraries in Rust and C++ have it only in the texts of their exceptions.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = _NUMBER_IN_TEXT.search(str(error))
    return int(match[1]) if match else None


def _sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}{_MARK}{uuid.uuid4().hex[:8]}")


def read_record(path: Path, kind: type[RecordT]) -> RecordT | None:
    """Return the record in a JSON file; None if there is no file, or another version wrote it."""
    try:
        return kind(**parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


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
