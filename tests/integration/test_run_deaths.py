"""Processes of a run that are killed, and engines that cannot start: the command ends, names who
and why in one block, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import copy
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import ray
from choice import slow
from commands import (
    PPO,
    SFT,
    VLLM,
    Command,
    main_lines,
    title,
    wait_for,
    write_config,
    write_task,
)
from decided import decided_model

from plimsoll.cluster.ray import RayCluster
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.engine import FrozenRole
from plimsoll.config.rollout import RolloutConfig, SamplingConfig
from plimsoll.errors import ConfigError, PlimsollError, WorkerDied
from plimsoll.records import Prompt
from plimsoll.reward.outcome import event_loop
from plimsoll.sampler.protocol import EngineSpec, Request, RolloutEngine
from plimsoll.sampler.transformers.config import TransformersConfig
from plimsoll.trainer.weights import PlannedBucket
from plimsoll.trainer.worker import Worker

pytestmark = pytest.mark.engine

Phase = Literal["rollout", "training"]

PROMPTS = 16
PROMISED = 60.0
"""Seconds within which a run ends when one of its processes has died, and nothing of it is left."""
LOG = r"  Logs: \S+/worker-\S+\.\{out,err\}\n"
HANG_TIMEOUT = ("--cluster.hang_timeout", "15")
STACKS = (
    r"  Logs, which end with where their threads are \(but for what is stopped\):\n"
    r"(?:    .* \(pid \d+ on node [\d.]+\): \S+\.err\n)+"
)
RUN_LOG = r"  Rows of step 1, counted from 0 in data\.train: [\d, ]+\n"
RUN_LOG += r"  Log, with the traceback: run/run\.log\n"
INNOCENT = ". The kernel has killed nothing here for want of memory since the run began\n"
KILLED = (
    f"  Why: its process ended without an error message: it was killed, or it crashed{INNOCENT}"
)
ENGINE_ENDED = f"  Why: its engine process ended{INNOCENT}"
MARKS = """
from pathlib import Path
from threading import Event

from plimsoll.algorithm.advantage import gae


def mark(name):
    with Path(__file__).with_name(name).open("a") as file:
        file.write("x")


def reward(trajectory):
    mark("rollout")
    return 0.0


def advantage(inputs, values_L):
    mark("training")
    return gae(inputs, values_L)


def stuck(inputs, values_L):
    Event().wait()
"""
"""A mark for each trajectory, and one before training: by them a test knows how far a run is."""


def endless(phase: Phase, engine: str, ranks: int) -> dict[str, Any]:
    """A run whose first step stays in one phase for minutes, with marks on the way there."""
    config = copy.deepcopy(PPO)
    config["run"] = {"directory": "run", "steps": 1, "restarts": 0}
    config["cluster"] |= {"where": "ray", "ranks": ranks}
    config["batch"] = {"prompts": PROMPTS, "responses": 1, "micro_batch_tokens": 4000}
    config["rewards"] = {"mark": {"name": "marks:reward"}}
    epochs = 1 if phase == "rollout" else 1_000_000
    config["algorithm"] = {"epochs": epochs, "advantage": {"name": "marks:advantage"}}
    del config["data"]["eval"]
    if engine == "vllm":
        config["rollout"] |= VLLM
    if phase == "rollout":
        # Few responses end by themselves; transformers gives them one after the other.
        if engine == "transformers":
            config["rollout"]["transformers"] = {"max_sequences": 1}
        config["rollout"]["sampling"] = {"max_new_tokens": 3900 if engine == "vllm" else 1000}
    return config


NEAR_TRAINING = "(score|train_critic|train_actor)"
"""The mark before training is the last thing that is done in `score`."""

RunUntil = Callable[..., Command]


@pytest.fixture
def run_until(tmp_path: Path) -> Iterator[RunUntil]:
    """Starts a run and waits until it is in a phase that does not end; what is left of it after the
    test is killed."""
    started = []

    def run_until(phase: Phase, engine: str, ranks: int, *words: str) -> Command:
        write_task(tmp_path, vocabulary=1024)
        (tmp_path / "marks.py").write_text(MARKS)
        write_config(tmp_path, "ppo", endless(phase, engine, ranks))
        command = Command(tmp_path, "ppo", "ppo.yaml", *words)
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


def stacks(told: str) -> dict[int, str]:
    """Return what a message's logs hold, by the ids of the processes."""
    found = re.findall(r"\(pid (\d+) on node [\d.]+\): (\S+\.err)", told)
    return {int(pid): Path(log).read_text() for pid, log in found}


def assert_nothing_left(command: Command) -> None:
    wait_for(lambda: not command.processes(), "the end of all processes of the run", PROMISED)


def assert_own_heap(command: Command) -> None:
    """What computes on CPU has jemalloc (machine/heap.py)."""
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
        slow("VLLM::EngineCore", "rollout", "vllm", "rollout engine 0", ENGINE_ENDED),
        slow("VLLM::EngineCore", "training", "vllm", "rollout engine 0", ENGINE_ENDED),
        slow("ray::EngineActor", "rollout", "vllm", "rollout engine 0", KILLED),
        slow("ray::EngineActor", "training", "transformers", "rollout engine 0", KILLED),
        slow("ray::RankActor", "rollout", "transformers", "training rank [01]", KILLED),
        slow("ray::RankActor", "training", "transformers", "training rank [01]", KILLED),
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
    expected = f"{died}{reason}{LOG}{RUN_LOG}"
    assert re.fullmatch(expected, outcome.err), outcome.err
    assert main_lines(outcome.out) == ["ppo: 1 step, written to run"]
    assert_nothing_left(command)


ASYNCHRONOUS = ("--rollout.staleness", "1", "--algorithm.correction", "{name: truncate}")


@pytest.mark.parametrize("phase", [slow("training"), slow("rollout")])
def test_an_engine_that_is_killed_while_others_work_is_named(
    run_until: RunUntil, phase: Phase
) -> None:
    """Requests are open beside the call that the loop waits for."""
    long = ("--rollout.sampling.max_new_tokens", "3900")
    command = run_until(phase, "vllm", 1, *ASYNCHRONOUS, *long)
    [victim] = command.find("VLLM::EngineCore")
    shown = victim.ppid()
    victim.kill()
    outcome = command.finish()
    named = "rollout" if phase == "rollout" else NEAR_TRAINING
    died = rf"error: rollout engine 0 \(pid {shown} on node [\d.]+\) died in the phase {named}\n"
    expected = f"{died}{re.escape(ENGINE_ENDED)}{LOG}{RUN_LOG}"
    assert re.fullmatch(expected, outcome.err), outcome.err
    assert outcome.code == 1
    assert_nothing_left(command)


@pytest.mark.parametrize(
    ("kind", "phase", "engine", "name"),
    [
        slow("VLLM::EngineCore", "rollout", "vllm", "rollout engine 0"),
        slow("ray::EngineActor", "training", "transformers", "rollout engine 0"),
        slow("ray::RankActor", "training", "transformers", "training rank [01]"),
    ],
)
def test_a_stopped_process_ends_the_run_with_its_name(
    run_until: RunUntil, kind: str, phase: Phase, engine: str, name: str
) -> None:
    ranks = 2 if kind == "ray::RankActor" else 1
    command = run_until(phase, engine, ranks, *HANG_TIMEOUT)
    victim = command.find(kind)[-1]
    shown = victim.ppid() if kind == "VLLM::EngineCore" else victim.pid
    victim.suspend()
    outcome = command.finish()
    assert outcome.code == 1
    named = "rollout" if phase == "rollout" else NEAR_TRAINING
    hangs = (
        rf"error: {name} \(pid {shown} on node [\d.]+\) hangs in the phase {named}\n"
        rf"  Why: it has not answered for \d+ s \(15 s are allowed: cluster\.hang_timeout\)"
        rf"; process {victim.pid} \({kind}[^)]*\) is stopped, as by `kill -STOP`\n"
    )
    assert re.fullmatch(hangs + STACKS + RUN_LOG, outcome.err), outcome.err
    for pid, written in stacks(outcome.err).items():
        assert ("most recent call first" in written) is (pid != victim.pid)
    assert_nothing_left(command)


@pytest.mark.slow
def test_a_run_in_which_nobody_works_ends_with_where_all_are(run_until: RunUntil) -> None:
    own = ("--algorithm.policy_loss.name", "marks:stuck", "--algorithm.epochs", "1")
    command = run_until("training", "transformers", 1, *HANG_TIMEOUT, *own)
    outcome = command.finish()
    assert outcome.code == 1
    hangs = (
        r"error: the run hangs in the phase train_actor\n"
        r"  Why: all ranks and engines answer, but for \d+ s none has computed, read or written; "
        r"whom they wait for is not known \(15 s are allowed: cluster\.hang_timeout\)\n"
    )
    assert re.fullmatch(hangs + STACKS + RUN_LOG, outcome.err), outcome.err
    first, *_ = stacks(outcome.err).values()
    assert "in stuck" in first
    assert_nothing_left(command)


@pytest.mark.slow
def test_a_run_goes_on_when_it_was_stopped_itself(run_until: RunUntil) -> None:
    """Ctrl-Z stops a run in this way. Time that nobody watched does not count."""
    command = run_until("training", "transformers", 1, "--cluster.hang_timeout", "4")
    command.process.send_signal(signal.SIGSTOP)
    time.sleep(12)
    command.process.send_signal(signal.SIGCONT)
    command.process.send_signal(signal.SIGTERM)
    wait_for(lambda: command.errors, "the answer to the signal")
    time.sleep(8)
    assert command.process.poll() is None
    [line] = command.errors.split("\n")[1:-1]
    assert line.startswith("stopping after this step")


@pytest.mark.slow
def test_a_second_signal_ends_a_run_on_ray_at_once(run_until: RunUntil) -> None:
    command = run_until("training", "transformers", 1)
    assert_own_heap(command)
    os.killpg(command.process.pid, signal.SIGTERM)  # as `timeout` and Slurm send it
    wait_for(lambda: command.errors, "the answer to the first signal")
    assert_only_one_in_its_group(command)
    os.killpg(command.process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    outcome = command.finish()
    asked = "\nstopping after this step; Ctrl-C again to stop at once\n"
    assert (outcome.code, outcome.err) == (130, f"{asked}interrupted\n")
    assert_nothing_left(command)


def test_a_signal_while_processes_start_ends_the_run_at_once(tmp_path: Path) -> None:
    """Ray would take SIGTERM for itself, and end at once without saying why."""
    write_task(tmp_path, vocabulary=1024)
    write_config(tmp_path, "sft", SFT)
    command = Command(tmp_path, "sft", "sft.yaml", "--cluster.where", "ray")
    try:
        wait_for(lambda: command.find("gcs_server"), "the start of gcs_server")
        command.process.terminate()
        outcome = command.finish()
        told = (
            r"\nstopping\nstopped before the first step of \d+, as asked; there is nothing to save"
        )
        assert outcome.code == 130
        assert re.match(told, outcome.err), outcome.err
        assert_nothing_left(command)
    finally:
        command.kill_all()


@pytest.mark.slow
def test_a_killed_controller_leaves_no_ranks_and_engines_behind(run_until: RunUntil) -> None:
    command = run_until("training", "transformers", 1)
    command.process.kill()
    command.process.wait()

    def only_agents() -> bool:
        """Two small processes of Ray's own, which notice only after a minute."""
        return all("Agent" in title(process) for process in command.processes())

    wait_for(only_agents, "the end of ranks and engines", PROMISED)


@pytest.mark.slow
def test_who_is_named_is_where_a_failure_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an engine cannot take a bucket, the rank that sends it is named."""
    monkeypatch.setattr("plimsoll.cluster.ray._CULPRIT_SECONDS", 0.5)
    write_task(tmp_path)
    rollout = RolloutConfig(dtype="bfloat16").with_engine(TransformersConfig())
    spec = EngineSpec(0, str(tmp_path / "model"), 16, 1, "cpu", rollout)
    cluster = RayCluster(ClusterConfig(), [spec], threads=1, device="cpu")
    bucket: Any = Worker.weight_bucket, ("actor", PlannedBucket(()), True), RolloutEngine.receive
    assert cluster.own_groups == {}
    try:
        with pytest.raises(PlimsollError) as failed:
            cluster.hand_over(*bucket)
        name = r"training rank 0 \(pid (\d+) on node [\d.]+\)"
        found = re.fullmatch(
            rf"{name} failed\n  Why: KeyError: 'actor'\n{LOG}", f"{failed.value}\n"
        )
        assert found, str(failed.value)
        absent = FrozenRole(model=decided_model(path="./absent", dtype="bfloat16"))
        with pytest.raises(ConfigError, match=rf"(?s)absent.*\n  Reported by: {name}$"):
            cluster.all(Worker.load_model, "actor", absent, 1.0)
        os.kill(int(found[1]), signal.SIGKILL)
        with pytest.raises(WorkerDied) as died:
            cluster.hand_over(*bucket)
        assert re.match(rf"{name} died\n{re.escape(KILLED)}", str(died.value))
        # A run's own Ray keeps no record of calls: its head grew by 3.6 KB with each.
        time.sleep(2)  # Ray sends its records once a second
        assert ray.timeline() == []
    finally:
        cluster.close()


def test_a_request_that_fails_beside_other_calls_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plimsoll.cluster.ray._CULPRIT_SECONDS", 0.5)
    write_task(tmp_path)
    rollout = RolloutConfig(dtype="float32").with_engine(TransformersConfig())
    spec = EngineSpec(0, str(tmp_path / "model"), 16, 1, "cpu", rollout)
    cluster = RayCluster(ClusterConfig(), [spec], threads=1, device="cpu")
    unknown = Prompt(0, np.array([10**6]), "a token that the model does not have")
    failed = r"rollout engine 0 \(pid \d+ on node [\d.]+\) failed\n  Why: IndexError"
    try:
        with event_loop() as loop:
            request = Request((unknown,), 1, SamplingConfig(), 0)

            async def talk() -> None:
                await cluster.ask(request, 0)

            asking = asyncio.run_coroutine_threadsafe(talk(), loop)
            with pytest.raises(PlimsollError, match=failed):
                cluster.wait_for(asking)
            with pytest.raises(PlimsollError, match=failed):
                cluster.all(Worker.read_memory)
            asking.cancel()
    finally:
        cluster.close()
