"""Processes of a run that are killed, and engines that cannot start: the command ends, names who
and why in one block, and leaves nothing behind.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from commands import PPO, Command, wait_for, write_config, write_task

from plimsoll.cluster.ray import RayCluster
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.rollout import RolloutConfig
from plimsoll.engine.worker import Worker
from plimsoll.errors import PlimsollError, WorkerDied
from plimsoll.rollout.protocol import EngineSpec, RolloutEngine

pytestmark = [pytest.mark.slow, pytest.mark.alone]

Phase = Literal["rollout", "training"]

PROMPTS = 16
LOG = r"  Logs: \S+/worker-\S+\.\{out,err\}\n"
RESUME = r"  The same command with --run\.resume auto goes on from the last checkpoint\.\n"
INNOCENT = ". The kernel has killed nothing here for want of memory since the run began\n"
KILLED = f"  Why: its process ended without a word: it was killed, or it crashed{INNOCENT}"
ENGINE_ENDED = f"  Why: its vLLM engine process ended{INNOCENT}"
REWARD = """
def note(trajectory, *, path):
    with open(path, "a") as file:
        file.write("x")
    return 0.0
"""
"""A reward that leaves a mark for every trajectory, by which a test knows how far a run is."""


def endless(phase: Phase, engine: str, ranks: int = 1) -> dict[str, Any]:
    """A run whose first step stays in one phase for minutes, with marks on the way there."""
    config = copy.deepcopy(PPO)
    config["run"] = {"directory": "run", "steps": 1}
    config["cluster"] |= {"where": "ray", "ranks": ranks}
    config["batch"] = {"prompts": PROMPTS, "responses": 1, "micro_batch_tokens": 4000}
    config["rewards"] = {"note": {"name": "reward_mark:note", "options": {"path": "marks"}}}
    config["rollout"] |= {"engine": engine}
    config["algorithm"] = {"epochs": 1 if phase == "rollout" else 1_000_000}
    del config["data"]["eval"]
    if phase == "rollout":
        # Few responses end by themselves; transformers gives them one after the other.
        config["rollout"] |= {"max_sequences": 1 if engine == "transformers" else 256}
        config["rollout"]["sampling"] = {"max_new_tokens": 3900 if engine == "vllm" else 1000}
    return config


def start(home: Path, config: dict[str, Any]) -> Command:
    write_task(home, vocabulary=1024)
    (home / "reward_mark.py").write_text(REWARD)
    write_config(home, "ppo", config)
    return Command(home, "ppo", "ppo.yaml")


def wait_for_phase(command: Command, home: Path, phase: Phase) -> None:
    """Until the first response is there and others are not; or all are, and training began."""
    marks, wanted = home / "marks", 1 if phase == "rollout" else PROMPTS

    def reached() -> bool:
        assert command.process.poll() is None, command.errors
        return marks.exists() and marks.stat().st_size >= wanted

    wait_for(reached, f"the phase {phase}")
    if phase == "rollout":
        assert marks.stat().st_size < PROMPTS
    else:
        time.sleep(3)  # scoring takes a fraction of that, training has no end


def assert_nothing_left(command: Command) -> None:
    try:
        wait_for(lambda: not command.processes(), "the end of all processes of the run", 15)
    finally:
        command.kill_all()


@pytest.mark.parametrize(
    ("title", "phase", "engine", "name", "why"),
    [
        ("VLLM::EngineCore", "rollout", "vllm", "rollout engine 0", ENGINE_ENDED),
        ("VLLM::EngineCore", "training", "vllm", "rollout engine 0", ENGINE_ENDED),
        ("ray::EngineActor", "rollout", "vllm", "rollout engine 0", KILLED),
        ("ray::EngineActor", "training", "transformers", "rollout engine 0", KILLED),
        ("ray::RankActor", "rollout", "transformers", "training rank [01]", KILLED),
        ("ray::RankActor", "training", "transformers", "training rank [01]", KILLED),
    ],
)
def test_a_killed_process_ends_the_run_with_its_name(
    tmp_path: Path, title: str, phase: Phase, engine: str, name: str, why: str
) -> None:
    ranks = 2 if title == "ray::RankActor" else 1
    command = start(tmp_path, endless(phase, engine, ranks))
    wait_for_phase(command, tmp_path, phase)
    victim = command.find(title)[-1]
    # What a message calls the engine is the actor; vLLM's own process is its child.
    shown = victim.ppid() if title == "VLLM::EngineCore" else victim.pid
    victim.kill()
    killed = time.monotonic()
    outcome = command.finish()
    assert time.monotonic() - killed < 60
    assert outcome.code == 1
    reason = re.escape(why)
    expected = rf"error: {name} \(pid {shown} on node [\d.]+\) died\n{reason}{LOG}{RESUME}"
    assert re.fullmatch(expected, outcome.err), outcome.err
    assert outcome.out == "ppo: 1 steps, written to run\n"
    assert_nothing_left(command)


def test_a_second_signal_ends_a_run_on_ray_at_once(tmp_path: Path) -> None:
    command = start(tmp_path, endless("training", "transformers"))
    wait_for_phase(command, tmp_path, "training")
    command.process.send_signal(signal.SIGTERM)
    wait_for(lambda: command.errors, "the answer to the first signal")
    os.killpg(command.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    outcome = command.finish()
    asked = "\nstopping after this step; Ctrl-C again to stop at once\n"
    assert (outcome.code, outcome.err) == (130, f"{asked}error: interrupted\n")
    assert_nothing_left(command)


def test_a_killed_controller_leaves_no_ranks_and_engines_behind(tmp_path: Path) -> None:
    command = start(tmp_path, endless("training", "transformers"))
    wait_for_phase(command, tmp_path, "training")
    command.process.kill()
    command.process.wait()
    # Two small processes of Ray's own, its agents, notice only after a minute.
    wait_for(
        lambda: not any("Agent" not in " ".join(p.cmdline()) for p in command.processes()),
        "the end of ranks and engines",
        30,
    )
    command.kill_all()


def test_who_is_named_is_where_a_failure_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is to take a rank's bucket fails with the rank, and is not to blame."""
    monkeypatch.setattr("plimsoll.cluster.ray._CULPRIT_SECONDS", 0.5)
    write_task(tmp_path)
    rollout = RolloutConfig(engine="transformers")
    spec = EngineSpec(0, str(tmp_path / "model"), 16, 1, "cpu", rollout)
    cluster = RayCluster(ClusterConfig(), [spec], threads=1)
    try:
        with pytest.raises(PlimsollError) as failed:
            cluster.hand_over(Worker.weight_bucket, ("actor", ()), RolloutEngine.receive)
        name = r"training rank 0 \(pid (\d+) on node [\d.]+\)"
        found = re.fullmatch(
            rf"{name} failed\n  Why: KeyError: 'actor'\n{LOG}", f"{failed.value}\n"
        )
        assert found, str(failed.value)
        os.kill(int(found[1]), signal.SIGKILL)
        with pytest.raises(WorkerDied) as died:
            cluster.hand_over(Worker.weight_bucket, ("actor", ()), RolloutEngine.receive)
        assert re.match(rf"{name} died\n{re.escape(KILLED)}", str(died.value))
    finally:
        cluster.close()
