"""Environments that do what none should, at random: the run ends well, and its counts are right."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import GRPO, column, metrics, run_here, write_config, write_task

from plimsoll.run.directory import RunDirectory
from plimsoll.run.trajectories import read_trajectories

STEPS, PROMPTS, RESPONSES = 4, 6, 3
SLEEPER = f"86399.{os.getpid()}"
"""Seconds that a process of an environment would stay; no other run's does."""
FAULTS = ("raise", "hang", "number", "nothing", "nan", "flood", "late raise", "late text")
DEATHS = ("exit", "kill", "memory")
KEPT = {"flood"}
"""What costs nothing: it is cut."""
ENVIRONMENT = f"""
import json, os, random, signal, subprocess, sys, time


class Chaos:
    def __init__(self, log, faults):
        self.log, self.faults = log, faults.split(",")

    def reset(self, row):
        self.seed, self.turn, self.fault = row["seed"], 0, None
        if "exit" in self.faults:
            subprocess.Popen(["sleep", "{SLEEPER}"])

    def step(self, reply):
        self.turn += 1
        draw = random.Random(f"{{self.seed}} {{self.turn}} {{reply.text}}")
        if draw.random() < 0.08:
            self.fault = draw.choice(self.faults)
            with open(self.log, "a") as log:
                print(json.dumps([self.seed, self.fault]), file=log)
        match self.fault:
            case "raise":
                raise LookupError("no such door")
            case "hang":
                time.sleep(3600)
            case "number":
                return 7
            case "nothing":
                return None, False
            case "flood":
                return "1" * 10_000_000, self.turn == 2
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "memory":
                self.held = bytearray(1 << 33)
        return "1+1=", self.turn == 2

    def get_reward(self):
        if self.fault == "late raise":
            sys.exit(1)
        return {{"nan": float("nan"), "late text": "good"}}.get(self.fault, 0.25 * self.turn)

    def close(self):
        raise RuntimeError("closed twice")
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("chaos")
    write_task(home)
    (home / "chaos.py").write_text(ENVIRONMENT)
    return home


def left_running() -> list[psutil.Process]:
    """Processes of environments, and of what they started, that do not end by themselves."""
    own = {process.pid for process in psutil.Process().children(recursive=True)}
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()  # of one that is gone, None
        worker = "plimsoll.environment.local" in words and process.pid in own
        if SLEEPER in words or worker:
            found.append(process)
    _, alive = psutil.wait_procs(found, timeout=30)
    return [*alive]


@pytest.mark.parametrize("process", [False, True])
def test_one_in_ten_episodes_fails_and_only_whole_groups_are_learned_from(
    home: Path, process: bool
) -> None:
    name = f"process-{process}"
    faults = ",".join(FAULTS + DEATHS if process else FAULTS)
    chaos = {
        "name": "chaos.py:Chaos",
        "options": {"log": f"{name}.log", "faults": faults},
        "tool_format": "none",
        "max_turns": 3,
        "max_tokens": 40,
        "call_seconds": 2.0,
        "retries": 0,
        "process": process,
        **({"memory_gib": 1.0, "at_once": 4} if process else {}),
    }
    config: dict[str, Any] = GRPO | {
        "run": {"directory": name, "steps": STEPS, "tensorboard": False},
        "batch": {
            "prompts": PROMPTS,
            "responses": RESPONSES,
            "micro_batch_tokens": 128,
            "max_failed_groups": 1.0,
        },
        "environments": {"chaos": chaos},
        "rollout": GRPO["rollout"]
        | {
            "transformers": {"max_sequences": 8},
            "sampling": {"max_new_tokens": 6, "stop": ["1", "3", "5", "7", "9"]},
        },
    }
    write_config(home, name, config)
    outcome = run_here(home, "grpo", f"{name}.yaml")
    assert outcome.code == 0, outcome.err

    told = [json.loads(line) for line in (home / f"{name}.log").read_text().splitlines()]
    seen = {fault for _, fault in told}
    failed = {seed for seed, fault in told if fault not in KEPT}
    assert len(seen) > 2 and len(failed) > 2, told
    rows = metrics(home / name)
    assert sum(column(rows, "groups/failed")) == len(failed)
    assert column(rows, "groups/drawn") == [
        PROMPTS + failed_ for failed_ in column(rows, "groups/failed")
    ]
    for path in RunDirectory(home / name).trajectories().values():
        found = read_trajectories(path)
        assert [*Counter(t.group for t in found).values()] == [RESPONSES] * PROMPTS
        for t in found:
            assert t.reward in (0, 0.25, 0.5) and len(t.response_tokens) <= 40
    assert left_running() == []
