"""The private folder of Ray's sessions and sockets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plimsoll.cluster.ray_access import longest_temporary, make_ray_folder, ray_folder
from plimsoll.errors import PlimsollError


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "gone"))
    return tmp_path / "gone"


def test_the_folder_is_its_users_alone(temporary: Path) -> None:
    folder = Path(make_ray_folder())
    assert folder.parent.parent == temporary and folder.parent.stat().st_mode & 0o777 == 0o700
    folder.mkdir()
    folder.chmod(0o777)  # as Ray does
    assert make_ray_folder() == str(folder)


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_folder_that_others_may_enter_is_refused(temporary: Path, mode: int) -> None:
    private = Path(make_ray_folder()).parent
    private.chmod(mode)
    with pytest.raises(PlimsollError, match=rf"mode {mode:o}\. .* RAY_TMPDIR"):
        make_ray_folder()


def test_a_link_that_somebody_else_may_have_put_there_is_refused(temporary: Path) -> None:
    private = Path(make_ray_folder()).parent
    private.rename(temporary / "elsewhere")
    private.symlink_to(temporary / "elsewhere")
    with pytest.raises(PlimsollError, match="Remove it"):
        make_ray_folder()


def test_the_longest_path_leaves_room_for_rays_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/" + "t" * (longest_temporary() - 1))
    session = "session_2026-11-28_18-06-30_123456_4194304"
    socket = ray_folder() / session / "sockets" / "plasma_store"
    assert len(os.fsencode(socket)) == 107
