"""A cgroup for a program: where it is made, what it limits, and that nothing of it is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plimsoll.machine.cgroup import make_cgroup, remove_cgroup

FILES = ("memory.max", "memory.swap.max", "pids.max", "cgroup.procs")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folders of a hierarchy of version 2 with the run's cgroup, /user/run."""
    (tmp_path / "root" / "user" / "run").mkdir(parents=True)
    (tmp_path / "root" / "cgroup.controllers").write_text("memory pids")
    (tmp_path / "membership").write_text("4:memory:/v1\n0::/user/run\n")
    return tmp_path / "root"


def test_limits_stand_beside_the_cgroup_of_the_run(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(folder: Path) -> None:
        """Make a folder as the kernel makes that of a cgroup, with its files."""
        os.mkdir(folder)
        for name in FILES:
            (folder / name).write_text("")

    monkeypatch.setattr(Path, "mkdir", make)
    folder = make_cgroup(2**30, 64, [17], root.parent / "membership", root)
    assert folder is not None and folder.parent == root / "user"
    written = [(folder / name).read_text() for name in FILES]
    assert written == ["1073741824", "0", "64", "17"]


def test_where_no_limits_can_be_set_nothing_is_left(root: Path) -> None:
    """The parent does not give its controllers on, so the new folder has no `memory.max`."""
    assert make_cgroup(2**30, 64, [17], root.parent / "membership", root) is None
    assert [path.name for path in (root / "user").iterdir()] == ["run"]
    (root / "cgroup.controllers").unlink()  # a system with version 1
    assert make_cgroup(2**30, 64, [17], root.parent / "membership", root) is None


def test_a_cgroup_that_is_gone_already_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    remove_cgroup(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    remove_cgroup(tmp_path / "new")
