"""A run whose machine is lost goes on on another one, from its mirror: the same run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from commands import SFT, metrics, run_here, write_config, write_task

from plimsoll.run.state import find_damage


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("mirror")
    write_task(home)
    run = {"directory": "whole", "steps": 6, "save_every": 2, "keep_checkpoints": 2}
    write_config(home, "sft", SFT | {"run": run | {"tensorboard": False}})
    return home


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_run_goes_on_from_its_mirror_alone(home: Path, background: str) -> None:
    if not (home / "whole").exists():
        assert run_here(home, "sft", "sft.yaml").code == 0
    name = f"lost-{background}"
    mirror = home / f"mirror-{background}"
    place = ("--run.directory", name, "--run.mirror", f"file://{mirror}")
    flags = (*place, "--run.save_in_background", background)
    first = run_here(home, "sft", "sft.yaml", *flags)
    assert first.code == 0, first.err
    for path in ("checkpoints/step-000006", "model"):
        assert find_damage(mirror / path) == "" and (mirror / path / "manifest.json").is_file()
    assert metrics(mirror) == metrics(home / "whole")

    shutil.rmtree(home / name)  # and the last checkpoint had not been copied
    shutil.rmtree(mirror / "checkpoints" / "step-000006")
    refused = run_here(home, "sft", "sft.yaml", *flags)
    assert refused.code == 2 and "already holds a run" in refused.err
    again = run_here(home, "sft", "sft.yaml", *flags, "--run.resume", "must")
    assert again.code == 0 and "resumed after step 4 " in again.out, again.err
    fetched = f"{name}/checkpoints/step-000004 was fetched from file://{mirror}"
    assert fetched in (home / name / "run.log").read_text()
    assert metrics(home / name) == metrics(home / "whole") == metrics(mirror)
    models = [run / "model" / "model.safetensors" for run in (home / name, home / "whole", mirror)]
    assert len({path.read_bytes() for path in models}) == 1


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("no-such-place://x", "not known"),
        ("adl://x/y", "nstall"),
        ("s3://id:Xy7@bucket/x", "s3://***@bucket/x"),
    ],
)
def test_a_place_that_fsspec_cannot_open_is_refused(home: Path, url: str, why: str) -> None:
    refused = run_here(home, "sft", "sft.yaml", "--run.directory", "r", "--run.mirror", url)
    assert refused.code == 2 and "run.mirror" in refused.err and why in refused.err
    assert "Xy7" not in refused.err
    assert not (home / "r").exists()
