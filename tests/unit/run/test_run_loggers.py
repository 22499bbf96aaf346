"""Loggers: the real ones, each in a process of its own, resumed under the same id; and what happens
when one fails. W&B, MLflow and Trackio are no part of the lock: `pip install` them to test them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from plimsoll.config.run import LoggerName, RunConfig
from plimsoll.errors import ConfigError
from plimsoll.run.directory import RunDirectory
from plimsoll.run.loggers import Logger, Loggers, open_loggers, table_of
from plimsoll.run.responses import SampledResponse

PARTS = {"right": 1.0}
RESPONSE = SampledResponse(2, 7, 1, "", "1 + 1 =", "2", "2", 1.0, PARTS, 0.5, 3, 0, cut_off=False)


def test_responses_are_a_table_with_a_column_for_each_part() -> None:
    other = SampledResponse(
        3, 8, 0, "", "b", "c", None, 0.0, {"form": 0.5}, None, 9, None, cut_off=True
    )
    columns, data = table_of(5, [RESPONSE, other])
    assert columns == [
        *("step", "group", "sample", "prompt", "response", "reference"),
        *("reward", "advantage", "tokens", "cut_off", "reward_right", "reward_form"),
    ]
    assert data == [
        [5, 2, 1, "1 + 1 =", "2", "2", 1.0, 0.5, 3, False, 1.0, None],
        [5, 3, 0, "b", "c", None, 0.0, None, 9, True, None, 0.5],
    ]


class Recorder:
    """Keeps what it is given; at the steps of `refuses` it fails."""

    identity = ""
    has_tables = False

    def __init__(self, name: str, refuses: Sequence[int] = ()) -> None:
        self.name = name
        self.steps: list[int] = []
        self.closed: list[bool] = []
        self._refuses = refuses

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step in self._refuses:
            raise ConnectionError("no route to host")
        self.steps.append(step)

    def responses(self, step: int, rows: Sequence[SampledResponse]) -> None:
        raise AssertionError("it has no tables")

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)


def test_a_logger_that_fails_is_reported_once_and_left_out(tmp_path: Path) -> None:
    good, bad = Recorder("good"), Recorder("bad", refuses=[2])
    recorders: list[Logger] = [bad, good]
    loggers, notes = Loggers(recorders), list[str]()
    for step in (1, 2, 3):
        loggers.scalars(step, {"loss": 1.0}, notes.append)
        loggers.responses(step, tmp_path / "none", notes.append)
    loggers.close(notes.append, failed=False)
    assert (good.steps, bad.steps) == ([1, 2, 3], [1])
    assert (good.closed, bad.closed) == ([False], [])
    assert len(notes) == 1 and notes[0].startswith("warning: bad keeps nothing any more")
    assert "ConnectionError: no route to host" in notes[0]


def run_config(path: Path, *loggers: LoggerName, tensorboard: bool = True) -> RunConfig:
    return RunConfig(directory=str(path), steps=4, loggers=loggers, tensorboard=tensorboard)


def test_by_default_there_is_tensorboard_alone(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for config in (run_config(tmp_path), run_config(tmp_path, "tensorboard")):
        with open_loggers(config, run, {}, 0) as loggers:
            loggers.scalars(1, {"loss": 1.0}, print)
    assert len(list(run.tensorboard_path.iterdir())) == 2 and not run.loggers_path.exists()
    with open_loggers(run_config(tmp_path / "b", tensorboard=False), run, {}, 0):
        assert not (tmp_path / "b").exists()


def test_ids_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.loggers_path.write_text("{")
    with (
        pytest.raises(ConfigError, match=r"loggers.json is not JSON .* Remove it"),
        open_loggers(run_config(tmp_path), run, {}, 0),
    ):
        pass


PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from plimsoll.config.run import RunConfig
from plimsoll.records import Prompt, RewardPart, single_turn
from plimsoll.run.directory import RunDirectory
from plimsoll.run.loggers import open_loggers
from plimsoll.run.trajectories import write_trajectories

name, path, first, last, rate = sys.argv[1], Path(sys.argv[2]), *map(float, sys.argv[3:])
run = RunDirectory(path)
config = RunConfig(directory=str(path), steps=4, loggers=(name,), tensorboard=False)
actor = {"rate": rate, "model": {"path": "models/one"}}
settings = {"actor": actor, "stop": [], "note": "x" * 7000}
tokens, zeros = np.array([1, 2]), np.zeros(2, np.float32)
prompt, rewards = Prompt(0, tokens, "1 + 1 ="), (RewardPart("right", 1.0),)
answer = single_turn(prompt, 0, tokens, zeros, "It is 2.", "stop", 0, rewards)
with open_loggers(config, run, settings, int(first)) as loggers:
    for step in range(int(first), int(last) + 1):
        values = {"loss": 1 / step, "reward/right one": step, "nothing": float("nan")}
        loggers.scalars(step, values, print)
        write_trajectories(run.trajectories_path(step), step, [answer])
        loggers.responses(step, run.trajectories_path(step), print)
"""


def environment(path: Path) -> dict[str, str]:
    """Return environment variables that keep loggers to this machine, and to the path."""
    own = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file:{path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": f"{path}/trackio",
        "HF_HUB_OFFLINE": "1",
    }
    return os.environ | own


def python(path: Path, program: str, *words: object) -> str:
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(path), cwd=path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "keeps nothing" not in done.stdout + done.stderr
    return done.stdout


def run_and_resume(path: Path, name: str) -> str:
    """Four steps, stopped after the third and resumed from the second, with another setting; the
    id, which both had."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    ids = []
    for first, last, rate in ((1, 3, 0.5), (3, 4, 0.25)):
        python(path, PROGRAM, name, path / "run", first, last, rate)
        ids.append(json.loads((path / "run" / "loggers.json").read_text())[name])
    assert ids[0] == ids[1]
    return str(ids[0])


MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient()
found = client.get_run(sys.argv[1])
history = client.get_metric_history(sys.argv[1], "loss")
print(json.dumps({
    "steps": sorted(one.step for one in history),
    "names": sorted(found.data.metrics),
    "rate": found.data.params["actor.rate"],
    "note": len(found.data.params["note"]),
    "path": found.data.params["actor.model.path"],
    "status": found.info.status,
    "name": found.info.run_name,
    "experiment": client.get_experiment(found.info.experiment_id).name,
    "files": sorted(one.path for one in client.list_artifacts(sys.argv[1], "responses")),
    "response": client.load_table(found.info.experiment_id, "responses/step-000004.json",
                                  [sys.argv[1]])["response"].tolist(),
}))
"""


@pytest.mark.timeout(240)
def test_mlflow_has_config_metrics_and_responses_in_one_run(tmp_path: Path) -> None:
    identity = run_and_resume(tmp_path, "mlflow")
    assert json.loads(python(tmp_path, MLFLOW, identity).splitlines()[-1]) == {
        "steps": [1, 2, 3, 3, 4],
        "names": ["loss", "nothing", "reward/right one"],
        "rate": "0.5",
        "note": 6000,
        "path": "models/one",
        "status": "FINISHED",
        "name": "run",
        "experiment": "plimsoll",
        "files": [f"responses/step-00000{n}.json" for n in (1, 2, 3, 4)],
        "response": ["It is 2."],
    }


@pytest.mark.timeout(240)
def test_a_run_that_mlflow_does_not_know_is_refused_with_the_way_out(tmp_path: Path) -> None:
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed: pip install mlflow")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "loggers.json").write_text('{"mlflow": "0123456789abcdef"}')
    command = [sys.executable, "-c", PROGRAM, "mlflow", str(tmp_path / "run"), "1", "1", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path))
    assert re.search(r"ConfigError: run\.loggers: mlflow .*MlflowException", done.stderr)
    assert "0123456789abcdef out of" in done.stderr


TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
logs = SQLiteStorage.get_logs("plimsoll", sys.argv[1])
print(json.dumps({
    "runs": SQLiteStorage.get_runs("plimsoll"),
    "steps": sorted(one["step"] for one in logs if "loss" in one),
    "losses": sorted(one["loss"] for one in logs if "loss" in one and one["step"] < 3),
    "tables": [str(one["responses"]) for one in logs if "responses" in one],
    "config": SQLiteStorage.get_run_config("plimsoll", sys.argv[1])["actor"],
}))
"""


@pytest.mark.timeout(240)
def test_trackio_has_config_metrics_and_responses_in_one_run(tmp_path: Path) -> None:
    identity = run_and_resume(tmp_path, "trackio")
    found = json.loads(python(tmp_path, TRACKIO, identity).splitlines()[-1])
    assert found["runs"] == [identity] and identity.startswith("run-")
    assert found["steps"] == [1, 2, 3, 3, 4] and found["losses"] == [0.5, 1.0]
    assert len(found["tables"]) == 5 and all("It is 2." in one for one in found["tables"])
    assert found["config"]["model"] == {"path": "models/one"}


@pytest.mark.timeout(240)
def test_wandb_has_metrics_and_responses_under_one_id(tmp_path: Path) -> None:
    """Without a network there is a folder for each part of a run, which `wandb sync` joins by the
    id."""
    identity = run_and_resume(tmp_path, "wandb")
    parts = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{identity}"))
    assert len(parts) == 2
    for part, rate in zip(parts, ("0.5", "0.25"), strict=True):
        (log,) = part.glob("*.wandb")
        written = log.read_bytes()
        for name in (b"loss", b"reward/right one", b"models/one", rate.encode(), b"plimsoll"):
            assert name in written
        tables = [json.loads(file.read_text()) for file in part.rglob("*.table.json")]
        assert tables and all("It is 2." in table["data"][0] for table in tables)
