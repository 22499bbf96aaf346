"""What a mirror holds after each change of the run directory, and what is fetched from it: in
memory, on a disk, and on a server of S3 in this process.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from fsspec.core import url_to_fs

from plimsoll.config.run import RunConfig
from plimsoll.errors import CheckpointDamaged, ConfigError
from plimsoll.run.directory import RunDirectory, leave_out_damaged, open_run
from plimsoll.run.files import whole_directory
from plimsoll.run.json_lines import append_row, read_rows
from plimsoll.run.mirror import Mirror
from plimsoll.run.state import find_damage, measure_file, write_manifest

Resume = Literal["never", "auto", "must"]


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer  # takes seconds

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    name = uuid.uuid4().hex
    if request.param == "file":
        yield f"file://{tmp_path}/mirror/{name}"
    elif request.param == "memory":
        yield f"memory://{name}/run"
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_server"))
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield f"s3://{name}/runs/rl"


def config(path: Path, url: str, resume: Resume = "auto") -> RunConfig:
    return RunConfig(directory=str(path), steps=9, resume=resume, mirror=url)


def save(run: RunDirectory, step: int) -> None:
    append_row(run.metrics_path, {"step": step})
    with whole_directory(run.checkpoint_path(step)) as partial:
        (partial / "actor").mkdir()
        (partial / "actor" / "weights").write_text(f"weights of {step}")
        write_manifest(partial, [measure_file(partial, "actor/weights")])


def contents(url: str) -> dict[str, bytes]:
    fs, root = url_to_fs(url)
    fs.invalidate_cache()
    return {path.removeprefix(root).lstrip("/"): fs.cat_file(path) for path in fs.find(root)}


def mirrored(
    path: Path, url: str, steps: tuple[int, ...], change: Callable[[RunDirectory], object] = id
) -> list[str]:
    """Run from scratch to these checkpoints, of which two are kept; return the notes."""
    notes: list[str] = []
    mirror = Mirror(url, notes.append)
    run_config = config(path, url)
    with open_run(run_config, notes.append, mirror.fetch) as run, mirror.following(run):
        for step in steps:
            save(run, step)
            run.prune_checkpoints(2)
            mirror.wake()
        change(run)
    return notes


def write_model(run: RunDirectory) -> None:
    with whole_directory(run.model_path) as partial:
        (partial / "model.safetensors").write_text("the model")


def test_a_mirror_holds_what_the_directory_keeps(tmp_path: Path, url: str) -> None:
    assert mirrored(tmp_path / "run", url, (2, 4, 6), write_model) == []
    found = contents(url)
    assert sorted(found) == [
        "checkpoints/step-000004/actor/weights",
        "checkpoints/step-000004/manifest.json",
        "checkpoints/step-000006/actor/weights",
        "checkpoints/step-000006/manifest.json",
        "metrics.jsonl",
        "model/manifest.json",
        "model/model.safetensors",
    ]
    kept = {name for name in found if not name.startswith("model/manifest")}
    assert {name: (tmp_path / "run" / name).read_bytes() for name in kept} == {
        name: found[name] for name in kept
    }


def test_an_empty_directory_gets_the_newest_whole_checkpoint(tmp_path: Path, url: str) -> None:
    mirrored(tmp_path / "run", url, (2, 4, 6))
    fs, root = url_to_fs(url)
    fs.rm_file(f"{root}/checkpoints/step-000006/manifest.json")  # as while it is copied
    notes = mirrored(tmp_path / "again", url, ())
    run = RunDirectory(tmp_path / "again")
    assert notes == [f"{run.checkpoint_path(4)} was fetched from {url}"]
    assert [*run.checkpoints()] == [4] and find_damage(run.checkpoint_path(4)) == ""
    assert [row["step"] for row in read_rows(run.metrics_path)] == [2, 4]
    assert not any("step-000006" in name for name in contents(url))


def test_a_damaged_copy_is_left_out(tmp_path: Path, url: str) -> None:
    mirrored(tmp_path / "run", url, (2, 4))
    fs, root = url_to_fs(url)
    fs.pipe_file(f"{root}/checkpoints/step-000004/actor/weights", b"weights of 5")
    notes = mirrored(tmp_path / "again", url, ())
    assert "step-000004 is damaged" in notes[0]
    assert [*RunDirectory(tmp_path / "again").checkpoints()] == [2]
    assert {name.split("/")[1] for name in contents(url) if "/actor" in name} == {"step-000002"}


def test_a_checkpoint_that_ranks_find_damaged_is_fetched_again(tmp_path: Path, url: str) -> None:
    mirrored(tmp_path / "run", url, (2, 4))

    def damage(run: RunDirectory) -> None:
        (run.checkpoint_path(4) / "actor" / "weights").write_text("weights of 5")
        raise leave_out_damaged(run, 4, "actor/weights has another checksum")

    with pytest.raises(CheckpointDamaged):
        mirrored(tmp_path / "run", url, (), damage)
    notes = mirrored(tmp_path / "run", url, ())
    run = RunDirectory(tmp_path / "run")
    assert notes == [f"{run.checkpoint_path(4)} was fetched from {url}"]
    assert find_damage(run.checkpoint_path(4)) == ""


def test_a_directory_with_a_checkpoint_as_new_fetches_nothing(tmp_path: Path, url: str) -> None:
    mirrored(tmp_path / "run", url, (2, 4))
    assert mirrored(tmp_path / "run", url, (6,)) == []
    weights = [name for name in contents(url) if name.endswith("weights")]
    assert [name.split("/")[1] for name in weights] == ["step-000004", "step-000006"]


def test_a_mirror_of_another_run_is_not_overwritten(tmp_path: Path, url: str) -> None:
    mirrored(tmp_path / "run", url, (2,))
    before = contents(url)
    mirror = Mirror(url, print)
    with pytest.raises(ConfigError, match=r"already holds a run .*step 2\), and run.resume is"):
        open_run(config(tmp_path / "other", url, "never"), print, mirror.fetch)
    assert contents(url) == before


def test_must_needs_a_checkpoint_here_or_there(tmp_path: Path, url: str) -> None:
    mirror = Mirror(url, print)
    with pytest.raises(ConfigError, match="no checkpoint to resume from"):
        open_run(config(tmp_path / "run", url, "must"), print, mirror.fetch)
    mirrored(tmp_path / "first", url, (2,))
    with open_run(config(tmp_path / "run", url, "must"), print, mirror.fetch) as run:
        assert [*run.checkpoints()] == [2]


def test_a_place_that_fails_is_reported_and_what_it_has_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/mirror"
    put = Mirror._put

    def lose_connection(self: Mirror, local: Path, name: str) -> None:
        if name.endswith("step-000004/actor/weights"):
            raise TimeoutError("the store does not answer")
        put(self, local, name)

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_put", lose_connection)
        notes = mirrored(tmp_path / "run", url, (2, 4))
    assert "the store does not answer" in notes[-1]
    assert "checkpoints/step-000004/manifest.json" not in contents(url)
    assert mirrored(tmp_path / "run", url, ()) == []
    assert "checkpoints/step-000004/manifest.json" in contents(url)


def test_a_place_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mirror").write_text("a file")
    url = f"file://{tmp_path}/mirror/run"
    mirror: Any = Mirror(url, print)
    with pytest.raises(ConfigError, match=r"run\.mirror .* cannot be read: .*Not a directory"):
        open_run(config(tmp_path / "run", url), print, mirror.fetch)
