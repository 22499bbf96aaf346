"""Runs whose processes are killed: the command starts them again, and nothing is lost."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from commands import (
    GRPO,
    SFT,
    Command,
    Outcome,
    metrics,
    run,
    run_here,
    wait_for,
    write_config,
    write_task,
)
from test_run_killed import KILLED_AT, assert_each_step_once

ONCE = KILLED_AT.replace(
    "        os.kill(os.getpid(), signal.SIGKILL)",
    """        done = os.environ["KILLED_AT_DONE"]
        if os.path.exists(done):
            return
        open(done, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)""",
)
"""It kills only the first process that comes to the path."""
BROKEN = """
import plimsoll.jobs.sft_loop as loop
from plimsoll.train import from_data

update = from_data.update


def fail(role, cluster, step, rate):
    fail.calls += 1
    if fail.calls == 4 - 2 * resumed:
        raise ArithmeticError("the disk is on fire")
    return update(role, cluster, step, rate)


import sys
resumed = "auto" in sys.argv
fail.calls = 0
from_data.update = fail
"""
"""It fails at the fourth step, also in a run that goes on after the second."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("supervised")
    write_task(home)
    config = copy.deepcopy(SFT)
    config["run"] = {"directory": "whole", "steps": 6, "save_every": 2}
    write_config(home, "sft", config)
    (home / "sitecustomize.py").write_text(ONCE)
    assert run_here(home, "sft", "sft.yaml").code == 0
    return home


def test_a_killed_run_is_started_again_and_is_the_run_that_was_never_killed(home: Path) -> None:
    told = {"KILLED_AT": "*/checkpoints/.step-000004.partial-*", "KILLED_AT_DONE": "done"}
    words = ("sft", "sft.yaml", "--run.directory", "killed")
    outcome = run(home, *words, environment=told, supervised=True)
    assert outcome.code == 0, outcome.err
    assert "signal 9 in the phase save of step 5" in outcome.err
    assert "again after step 2 (1 of 3 times" in outcome.err
    assert metrics(home / "killed") == metrics(home / "whole")
    weights = [
        (home / name / "model" / "model.safetensors").read_bytes() for name in ("killed", "whole")
    ]
    assert weights[0] == weights[1]
    assert_each_step_once(home / "killed")


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[str]]]:
    """A webhook's URL, and the texts that it got."""
    texts: list[str] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            texts.append(json.loads(body)["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", texts
    server.shutdown()
    server.server_close()


def test_a_run_that_is_killed_each_time_ends_as_it_did(
    home: Path, webhook: tuple[str, list[str]]
) -> None:
    """The command calls the webhook, as the process cannot."""
    url, texts = webhook
    told = {"KILLED_AT": "*/checkpoints/.step-000004.partial-*", "KILLED_AT_DONE": "/proc/none"}
    words = ("sft", "sft.yaml", "--run.directory", "hopeless", "--run.restarts", "1")
    (home / "hopeless-site").mkdir()
    (home / "hopeless-site" / "sitecustomize.py").write_text(KILLED_AT)
    told["PYTHONPATH"] = str(home / "hopeless-site")
    outcome = run(home, *words, "--run.notify", url, environment=told, supervised=True)
    assert outcome.code == -signal.SIGKILL
    assert "an hour, and run.restarts is 1" in outcome.err
    killed, last = [text for text in texts if "ended by signal 9" in text]
    assert "The run is started again after step 2" in killed
    assert "The run is not started again: 2 faults" in last


def run_with(fault: str, home: Path, job: str, directory: str, *flags: str) -> Outcome:
    """Run a job under its supervisor, with a fault that happens once."""
    faults = {"PLIMSOLL_FAULTS": f"{fault}+once"}
    faults["PLIMSOLL_FAULTS_DIRECTORY"] = str(home / f"{directory}-faults")
    words = (job, f"{job}.yaml", "--run.directory", directory, *flags)
    return run(home, *words, environment=faults, supervised=True)


@pytest.mark.slow
def test_a_run_whose_process_is_stopped_is_ended_and_goes_on(home: Path) -> None:
    fault, patience = "controller.train_actor:hang:step=5", ("--cluster.hang_timeout", "6")
    outcome = run_with(fault, home, "sft", "hung", *patience)
    assert outcome.code == 0, outcome.err
    assert "no sign of life for" in outcome.err and "started again after step 4" in outcome.err
    assert metrics(home / "hung") == metrics(home / "whole")


@pytest.mark.slow
def test_a_run_that_is_killed_before_its_directory_is_open_begins_once_more(home: Path) -> None:
    outcome = run_with("rows.read:kill:call=1", home, "sft", "early")
    assert outcome.code == 0, outcome.err
    assert "again from its beginning (1 of 3" in outcome.err
    assert metrics(home / "early") == metrics(home / "whole")


@pytest.mark.slow
@pytest.mark.engine
def test_a_run_goes_on_after_the_death_of_a_rank_under_ray(home: Path) -> None:
    outcome = run_with("rank.step:kill:call=5", home, "sft", "rank", "--cluster.where", "ray")
    assert outcome.code == 0, outcome.err
    assert re.search(r"training rank 0 \(pid \d+ on node .*\) died in the phase train", outcome.err)
    assert "Rows of step 5, counted from 0" in outcome.err
    assert "started again after step 4 (1 of 3" in outcome.err
    assert metrics(home / "rank") == metrics(home / "whole")


@pytest.mark.slow
def test_weights_that_arrive_damaged_cost_an_attempt_and_no_step(home: Path) -> None:
    config = copy.deepcopy(GRPO) | {"run": {"directory": "grpo", "steps": 3, "save_every": 1}}
    config["batch"] = {"prompts": 4, "responses": 2, "micro_batch_tokens": 400}
    config["rewards"] = {"length": {"name": "length"}}
    config["rollout"] |= {"sampling": {"max_new_tokens": 6}}
    write_config(home, "grpo", config)
    assert run_here(home, "grpo", "grpo.yaml").code == 0
    outcome = run_with("engine.receive:wrong:call=2", home, "grpo", "damaged")
    assert outcome.code == 0, outcome.err
    assert "arrived damaged" in outcome.err and "times in an hour for errors" in outcome.err
    assert metrics(home / "damaged") == metrics(home / "grpo")


def test_a_signal_to_the_command_stops_the_run(home: Path) -> None:
    words = ("sft", "sft.yaml", "--run.directory", "stopped", "--run.steps", "100000")
    command = Command(home, *words, supervised=True)
    try:
        wait_for((home / "stopped" / "metrics.jsonl").exists, "the first step")
        command.process.terminate()
        outcome = command.finish()
        assert outcome.code == 130, outcome.err
        assert "everything is saved" in outcome.err and "started again" not in outcome.err
    finally:
        command.kill_all()


@pytest.mark.slow
def test_a_run_whose_command_is_killed_stops_and_saves(home: Path) -> None:
    words = ("sft", "sft.yaml", "--run.directory", "orphan", "--run.steps", "100000")
    command = Command(home, *words, supervised=True)
    try:
        wait_for((home / "orphan" / "metrics.jsonl").exists, "the first step")
        os.kill(command.process.pid, signal.SIGKILL)
        wait_for((home / "orphan" / "end.json").exists, "the end of the run")
        wait_for(lambda: not command.processes(), "the end of its processes")
        assert list((home / "orphan" / "checkpoints").iterdir())
    finally:
        command.kill_all()


def test_a_wrong_setting_is_told_once(home: Path) -> None:
    outcome = run(home, "sft", "sft.yaml", "--run.stepss", "3", supervised=True)
    assert outcome.code == 2 and outcome.err.count("run.stepss:") == 1
    assert "started again" not in outcome.err


def test_an_error_that_comes_again_at_the_same_step_names_its_rows(home: Path) -> None:
    (home / "broken-site").mkdir()
    (home / "broken-site" / "sitecustomize.py").write_text(BROKEN)
    words = ("sft", "sft.yaml", "--run.directory", "broken")
    told = {"PYTHONPATH": str(home / "broken-site")}
    outcome = run(home, *words, environment=told, supervised=True)
    assert outcome.code == 1
    assert outcome.err.count("unexpected ArithmeticError") == 2
    assert "step 4 ended by the same error twice" in outcome.err
    told_rows = re.findall(r"Rows of step 4, counted from 0 in data.train: (.+)", outcome.err)
    [rows] = set(told_rows)
    assert len(rows.split(", ")) == 7
