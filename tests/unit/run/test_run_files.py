from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from plimsoll.errors import CannotWrite
from plimsoll.run.files import (
    explaining_errors,
    is_temporary,
    whole_directory,
    whole_file,
    write_whole,
)


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_text_and_bytes_are_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_whole(tmp_path / "sub" / "a.txt", "grüße\n")
    write_whole(tmp_path / "sub" / "b.bin", b"\x00\xff")
    assert (tmp_path / "sub" / "a.txt").read_bytes() == "grüße\n".encode()
    assert (tmp_path / "sub" / "b.bin").read_bytes() == b"\x00\xff"
    assert names(tmp_path / "sub") == ["a.txt", "b.bin"]


def test_an_error_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    with pytest.raises(KeyError), whole_file(path) as partial:
        partial.write_text("half")
        raise KeyError
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_file_that_the_system_refuses_to_grow_is_not_left_half_written(tmp_path: Path) -> None:
    """The kernel's own refusal, as a full disk gives it, in a process with a file-size limit."""
    program = f"""
import resource, signal
from pathlib import Path
from plimsoll.errors import CannotWrite
from plimsoll.run.files import write_whole
from plimsoll.run.json_lines import append_row, read_rows
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
folder = Path({str(tmp_path)!r})
for write in (
    lambda: write_whole(folder / "big.bin", b"x" * 10_000),
    lambda: append_row(folder / "rows.jsonl", {{"step": 2, "text": "y" * 10_000}}),
):
    append_row(folder / "rows.jsonl", {{"step": 1}}) if not list(folder.iterdir()) else None
    try:
        write()
    except CannotWrite as error:
        print(error)
assert read_rows(folder / "rows.jsonl") == [{{"step": 1}}]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    big, rows = done.stdout.splitlines()
    assert f"Cannot write {tmp_path / 'big.bin'}: [Errno {errno.EFBIG}]" in big
    assert "Free disk space" in big
    assert f"Cannot add to {tmp_path / 'rows.jsonl'}: [Errno {errno.EFBIG}]" in rows
    assert names(tmp_path) == ["rows.jsonl"]
    assert (tmp_path / "rows.jsonl").read_text() == '{"step": 1}\n'


def test_a_full_disk_is_named_when_a_library_raises_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with pytest.raises(RuntimeError, match="write failed"), explaining_errors(tmp_path / "a"):
        raise RuntimeError("file write failed")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=0))
    full = r"/a: the disk is full \(RuntimeError: file write"
    with pytest.raises(CannotWrite, match=full):  # noqa: SIM117
        with explaining_errors(tmp_path / "a"):
            raise RuntimeError("file write failed")
    with pytest.raises(CannotWrite, match=r"/a: .*Permission denied"):  # noqa: SIM117
        with explaining_errors(tmp_path / "a"):
            raise PermissionError(errno.EACCES, "Permission denied")


def test_tensors_that_the_disk_has_no_room_for_are_explained(tmp_path: Path) -> None:
    """safetensors raises no OSError for it."""
    program = f"""
import resource, signal
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from plimsoll.errors import CannotWrite
from plimsoll.run.files import explaining_errors, whole_directory
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
folder = Path({str(tmp_path)!r})
try:
    with whole_directory(folder / "model") as partial:
        with explaining_errors(partial / "weights.safetensors"):
            save_file({{"w": np.zeros(10_000)}}, partial / "weights.safetensors")
except CannotWrite as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Cannot write") == 1 and "weights.safetensors: " in done.stdout
    assert "File too large" in done.stdout and "Free disk space" in done.stdout
    assert names(tmp_path) == []


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_who_may_read_a_directory_may_read_its_files(
    tmp_path: Path, umask: int, expected: int
) -> None:
    before = os.umask(umask)
    try:
        with whole_directory(tmp_path / "model") as partial:
            save_file({"w": np.zeros(3)}, partial / "weights.safetensors")
            (partial / "config.json").write_text("{}")
    finally:
        os.umask(before)
    assert [item.stat().st_mode & 0o777 for item in (tmp_path / "model").iterdir()] == [
        expected
    ] * 2


def test_a_parent_that_is_a_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(CannotWrite, match=r"Cannot write .*a/b"):
        write_whole(tmp_path / "a" / "b", "x")


def test_a_directory_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "checkpoints" / "step-000001"
    with whole_directory(target) as partial:
        (partial / "deep").mkdir()
        (partial / "deep" / "x").write_text("1")
        assert not target.exists()
        assert is_temporary(partial)
    assert (target / "deep" / "x").read_text() == "1"
    assert names(target.parent) == ["step-000001"]


def test_a_directory_is_replaced_only_at_success(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with whole_directory(target) as partial:
        (partial / "old").write_text("")
    with pytest.raises(RuntimeError), whole_directory(target) as partial:
        (partial / "new").write_text("")
        raise RuntimeError
    assert names(tmp_path) == ["model"] and names(target) == ["old"]
    with whole_directory(target) as partial:
        (partial / "new").write_text("")
    assert names(tmp_path) == ["model"] and names(target) == ["new"]


def test_an_error_that_is_not_of_the_disk_is_passed_on_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="a rank"), whole_directory(tmp_path / "a"):
        raise TimeoutError("a rank did not answer")
    assert names(tmp_path) == []


def test_a_read_only_file_system_is_an_error_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses even to remove what is not there."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(CannotWrite, match=r"Cannot write .*Read-only file system"):
        write_whole(tmp_path / "a.txt", "text")
