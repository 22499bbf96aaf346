"""Processes of a run that are killed, and engines that cannot start: the command ends, names who
and why in one block, and leaves nothing behind.
"""

from __future__ import annotations

import copy
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from commands import PPO, SFT, Command, title, wait_for, write_config, write_task

from plimsoll.cluster.ray import RayCluster
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.engine import FrozenRole
from plimsoll.config.model import ModelConfig
from plimsoll.config.rollout import RolloutConfig
from plimsoll.engine.worker import Worker
from plimsoll.errors import ConfigError, PlimsollError, WorkerDied
from plimsoll.rollout.protocol import EngineSpec, RolloutEngine

pytestmark = pytest.mark.slow

Phase = Literal["rollout", "training"]

PROMPTS = 16
PROMISED = 60.0
"""Seconds within which a run ends when one of its processes has died, and nothing of it is left."""
LOG = r"  Logs: \S+/worker-\S+\.\{out,err\}\n"
RESUME = r"  The same command with --run\.resume auto goes on from the last checkpoint\.\n"
INNOCENT = ". The kernel has killed nothing here for want of memory since the run began\n"
KILLED = f"  Why: its process ended without a word: it was killed, or it crashed{INNOCENT}"
ENGINE_ENDED = f"  Why: its vLLM engine process ended{INNOCENT}"
MARKS = """
from pathlib import Path

from plimsoll.algorithm.advantage import gae


def mark(name):
    with Path(__file__).with_name(name).open("a") as file:
        file.write("x")


def reward(trajectory):
    mark("rollout")
    return 0.0


def advantage(inputs):
    mark("training")
    return gae.estimate(inputs)
"""
"""A mark for each trajectory, and one before training: by them a test knows how far a run is."""


def endless(phase: Phase, engine: str, ranks: int) -> dict[str, Any]:
    """A run whose first step stays in one phase for minutes, with marks on the way there."""
    config = copy.deepcopy(PPO)
    config["run"] = {"directory": "run", "steps": 1}
    config["cluster"] |= {"where": "ray", "ranks": ranks}
    config["batch"] = {"prompts": PROMPTS, "responses": 1, "micro_batch_tokens": 4000}
    config["rewards"] = {"mark": {"name": "marks:reward"}}
    config["rollout"] |= {"engine": engine}
    epochs = 1 if phase == "rollout" else 1_000_000
    config["algorithm"] = {"epochs": epochs, "advantage": {"name": "marks:advantage"}}
    del config["data"]["eval"]
    if phase == "rollout":
        # Few responses end by themselves; transformers gives them one after the other.
        config["rollout"] |= {"max_sequences": 1 if engine == "transformers" else 256}
        config["rollout"]["sampling"] = {"max_new_tokens": 3900 if engine == "vllm" else 1000}
    return config


NEAR_TRAINING = "(score|train_critic|train_actor)"
"""The mark before training is the last thing that is done in `score`."""

RunUntil = Callable[[Phase, str, int], Command]


@pytest.fixture
def run_until(tmp_path: Path) -> Iterator[RunUntil]:
    """Starts a run and waits until it is in a phase that does not end; what is left of it after the
    test is killed."""
    started = []

    def run_until(phase: Phase, engine: str, ranks: int) -> Command:
        write_task(tmp_path, vocabulary=1024)
        (tmp_path / "marks.py").write_text(MARKS)
        write_config(tmp_path, "ppo", endless(phase, engine, ranks))
        command = Command(tmp_path, "ppo", "ppo.yaml")
        started.append(command)
        wait_for_phase(command, tmp_path, phase)
        return command

    yield run_until
    for command in started:
        command.kill_all()


def wait_for_phase(command: Command, home: Path, phase: Phase) -> None:
    """Until the first response is there, but not all; or until training begins."""

    def reached() -> bool:
        assert command.process.poll() is None, command.errors
        return (home / phase).exists()

    wait_for(reached, f"the phase {phase}")
    if phase == "rollout":
        assert (home / phase).stat().st_size < PROMPTS


def assert_nothing_left(command: Command) -> None:
    wait_for(lambda: not command.processes(), "the end of all processes of the run", PROMISED)


def assert_own_heap(command: Command) -> None:
    """What computes on CPU has jemalloc (config/allocator.py)."""
    kinds = ("ray::RankActor", "ray::EngineActor", "VLLM::EngineCore")
    found = {kind: command.find(kind) for kind in kinds}
    assert found[kinds[0]] and found[kinds[1]]
    for process in (one for ones in found.values() for one in ones):
        assert "libjemalloc" in Path(f"/proc/{process.pid}/maps").read_text()


def assert_only_one_in_its_group(command: Command) -> None:
    """What is sent to the group of the command reaches nothing else of the run."""
    names = [title(p) for p in command.processes() if os.getpgid(p.pid) == command.process.pid]
    assert len(names) == 1, names
    assert command.find("gcs_server") and command.find("raylet/raylet")


@pytest.mark.parametrize(
    ("kind", "phase", "engine", "name", "why"),
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
    run_until: RunUntil, kind: str, phase: Phase, engine: str, name: str, why: str
) -> None:
    command = run_until(phase, engine, 2 if kind == "ray::RankActor" else 1)
    assert_own_heap(command)
    victim = command.find(kind)[-1]
    # What a message calls the engine is the actor; vLLM's own process is its child.
    shown = victim.ppid() if kind == "VLLM::EngineCore" else victim.pid
    victim.kill()
    killed = time.monotonic()
    outcome = command.finish()
    assert time.monotonic() - killed < PROMISED
    assert outcome.code == 1
    reason, named = re.escape(why), "rollout" if phase == "rollout" else NEAR_TRAINING
    died = rf"error: {name} \(pid {shown} on node [\d.]+\) died in the phase {named}\n"
    expected = f"{died}{reason}{LOG}{RESUME}"
    assert re.fullmatch(expected, outcome.err), outcome.err
    assert outcome.out == "ppo: 1 step, written to run\n"
    assert_nothing_left(command)


def test_a_second_signal_ends_a_run_on_ray_at_once(run_until: RunUntil) -> None:
    command = run_until("training", "transformers", 1)
    assert_own_heap(command)
    os.killpg(command.process.pid, signal.SIGTERM)  # as `timeout` and Slurm send it
    wait_for(lambda: command.errors, "the answer to the first signal")
    assert_only_one_in_its_group(command)
    os.killpg(command.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    outcome = command.finish()
    asked = "\nstopping after this step; Ctrl-C again to stop at once\n"
    assert (outcome.code, outcome.err) == (130, f"{asked}error: interrupted\n")
    assert_nothing_left(command)


def test_a_signal_while_ray_starts_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    """Ray would take SIGTERM for itself, and end at once without a word."""
    write_task(tmp_path)
    write_config(tmp_path, "sft", SFT)
    command = Command(tmp_path, "sft", "sft.yaml", "--cluster.where", "ray")
    try:
        wait_for(lambda: command.find("gcs_server"), "the start of Ray")
        command.process.terminate()
        outcome = command.finish()
        assert outcome.code == 130
        assert "error: stopped before the first step of 30, as asked; everything" in outcome.err
        assert outcome.out == "sft: 30 steps, written to sft\n"
        assert_nothing_left(command)
    finally:
        command.kill_all()


def test_a_killed_controller_leaves_no_ranks_and_engines_behind(run_until: RunUntil) -> None:
    command = run_until("training", "transformers", 1)
    command.process.kill()
    command.process.wait()

    def only_agents() -> bool:
        """Two small processes of Ray's own, which notice only after a minute."""
        return all("Agent" in title(process) for process in command.processes())

    wait_for(only_agents, "the end of ranks and engines", PROMISED)


def test_who_is_named_is_where_a_failure_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is to take a rank's bucket fails with the rank, and is not to blame."""
    monkeypatch.setattr("plimsoll.cluster.ray._CULPRIT_SECONDS", 0.5)
    write_task(tmp_path)
    rollout = RolloutConfig(engine="transformers")
    spec = EngineSpec(0, str(tmp_path / "model"), 16, 1, "cpu", rollout)
    cluster = RayCluster(ClusterConfig(), [spec], threads=1)
    assert cluster.critics is cluster
    try:
        with pytest.raises(PlimsollError) as failed:
            cluster.hand_over(Worker.weight_bucket, ("actor", (), True), RolloutEngine.receive)
        name = r"training rank 0 \(pid (\d+) on node [\d.]+\)"
        found = re.fullmatch(
            rf"{name} failed\n  Why: KeyError: 'actor'\n{LOG}", f"{failed.value}\n"
        )
        assert found, str(failed.value)
        absent = FrozenRole(model=ModelConfig(path="./absent"))
        with pytest.raises(ConfigError, match=rf"(?s)absent.*\n  Told by: {name}$"):
            cluster.all(Worker.load_policy, "actor", absent, 1.0)
        os.kill(int(found[1]), signal.SIGKILL)
        with pytest.raises(WorkerDied) as died:
            cluster.hand_over(Worker.weight_bucket, ("actor", (), True), RolloutEngine.receive)
        assert re.match(rf"{name} died\n{re.escape(KILLED)}", str(died.value))
    finally:
        cluster.close()
