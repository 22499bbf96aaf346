from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.run.state import (
    MANIFEST,
    SavedFile,
    find_damage,
    measure_file,
    other_contents,
    read_manifest,
    write_manifest,
)


def save(directory: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    write_manifest(directory, [measure_file(directory, name) for name in files])


def test_a_manifest_lists_sizes_and_checksums(tmp_path: Path) -> None:
    large = os.urandom(17 * 2**20)
    save(tmp_path, {"state.json": b"{}", "actor/rank.safetensors": large, "actor/empty": b""})
    assert [(f.name, f.bytes, f.xxh3) for f in read_manifest(tmp_path)] == [
        ("actor/empty", 0, xxhash.xxh3_64_hexdigest(b"")),
        ("actor/rank.safetensors", len(large), xxhash.xxh3_64_hexdigest(large)),
        ("state.json", 2, xxhash.xxh3_64_hexdigest(b"{}")),
    ]
    assert find_damage(tmp_path) == ""


@given(
    files=st.dictionaries(
        st.sampled_from(["state.json", "actor/a", "actor/b", "critic/a"]),
        st.binary(min_size=1, max_size=50),
        min_size=1,
    ),
    data=st.data(),
)
def test_any_changed_cut_or_lost_file_is_named_with_both_values(
    files: dict[str, bytes], data: st.DataObject
) -> None:
    with TemporaryDirectory() as home:
        directory = Path(home)
        save(directory, files)
        name = data.draw(st.sampled_from(sorted(files)))
        content, path = files[name], directory / name
        place = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["changed", "cut", "lost"])):
            case "changed":
                changed = bytes([content[place] ^ data.draw(st.integers(1, 255))])
                path.write_bytes(content[:place] + changed + content[place + 1 :])
                found = xxhash.xxh3_64_hexdigest(path.read_bytes())
                expected = xxhash.xxh3_64_hexdigest(content)
                damage = f"{name} has the xxh3 checksum {found} ({expected} expected)"
            case "cut":
                path.write_bytes(content[:place])
                damage = f"{name} has {place} bytes ({len(content)} expected)"
            case "lost":
                path.unlink()
                damage = f"{name} is missing ({len(content)} bytes expected)"
        assert find_damage(directory) == damage


@pytest.mark.parametrize("content", [b"", b'{"state.json": {"by', b"[]", b'{"a": 1}', b"\xff"])
def test_a_torn_manifest_is_damage(content: bytes, tmp_path: Path) -> None:
    save(tmp_path, {"state.json": b"{}"})
    (tmp_path / MANIFEST).write_bytes(content)
    assert find_damage(tmp_path).startswith("manifest.json cannot be read: ")


def test_a_checkpoint_of_an_earlier_version_counts_as_whole(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    assert find_damage(tmp_path) == ""


def test_roles_files_are_left_to_their_ranks(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    for name in ("state.json", "actor/rank-00000-00000.safetensors"):
        (tmp_path / name).write_text("1")
    write_manifest(
        tmp_path,
        [measure_file(tmp_path, n) for n in ("state.json", "actor/rank-00000-00000.safetensors")],
    )
    (tmp_path / "actor" / "rank-00000-00000.safetensors").write_text("2")
    assert find_damage(tmp_path, with_roles=False) == ""
    assert find_damage(tmp_path).startswith("actor/rank-00000-00000.safetensors has the xxh3")
    (tmp_path / "state.json").write_text("3")
    assert find_damage(tmp_path, with_roles=False).startswith("state.json has the xxh3 checksum")
    (tmp_path / "actor" / "rank-00000-00000.safetensors").write_text("22")
    assert "has 2 bytes (1 expected)" in find_damage(tmp_path, with_roles=False)


def test_a_file_that_ranks_cannot_read_is_no_damage(tmp_path: Path) -> None:
    """A node that has lost its disk says nothing of the checkpoint, which must keep its name."""
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError):
        other_contents(tmp_path, [SavedFile("file", 1, "0")])
