"""Functions of one's own: plain or async, one trajectory or many, here or in a process; and what
hangs, raises, crashes or eats memory costs its trajectory alone."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import FunctionFailed, PlimsollError
from plimsoll.machine.processes import read_host
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.reward.references import process_items
from plimsoll.reward.score import Scored, open_rewards

MODULE = """
import asyncio, os, signal, time
from collections.abc import Sequence
from plimsoll.records import Trajectory

def does(trajectory):
    match trajectory.response_text.split():
        case ["hang"]: time.sleep(60)
        case ["raise"]: raise ValueError("no such thing")
        case ["crash"]: os.kill(os.getpid(), signal.SIGSEGV)
        case ["leave"]: os._exit(3)
        case ["eat"]: return float(len(bytearray(2**33)))
        case ["pid"]: return os.getpid()
        case ["print"]: print("printed")
        case ["spawn"]:
            if child := os.fork():
                open(__file__ + ".pid", "w").write(str(child))
            time.sleep(60)
        case ["nan"]: return float("nan")
    return len(trajectory.response_text)

async def waits(trajectory, *, seconds: float = 0.2):
    await asyncio.sleep(60 if trajectory.response_text == "hang" else seconds)
    return 1.0

def many(trajectories: Sequence[Trajectory]):
    return [len(t.response_text) / len(trajectories) for t in trajectories]

def one_too_few(trajectories: list[Trajectory]):
    return [0.0] * (len(trajectories) - 1)

def not_annotated(several):
    return [float(len(several))] * len(several)

def as_trl_has_it(completions, **columns):
    return [float(len(one)) for one in completions]

def fails_twice(trajectory, *, path: str):
    with open(path, "a") as file:
        file.write("x")
    if os.path.getsize(path) < 3:
        raise OSError("not yet")
    return 1.0
"""

Score = Callable[..., Scored]


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Score:
    """Scores responses by a function of the module."""
    (tmp_path / "own.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def scored(function: str, *responses: str, place: str = "own", **settings: Any) -> Scored:
        given: dict[str, Any] = {"retries": 0, **settings}
        rewards = {"mine": RewardConfig(name=f"{place}:{function}", **given)}
        trajectories = [trajectory(response, i) for i, response in enumerate(responses)]
        with open_rewards(rewards) as scorer:
            return scorer.submit(trajectories).result(timeout=60)

    return scored


def trajectory(response: str, index: int) -> Trajectory:
    tokens = np.zeros(2, dtype=np.int64)
    logprobs = np.zeros(2, dtype=np.float32)
    prompt = Prompt(index, tokens, "?", None, is_text=True)
    return single_turn(prompt, 0, tokens, logprobs, response, "stop", 0, group=index + 100)


def values(scored: Scored) -> list[float]:
    return [t.rewards[0].value for t in scored.trajectories]


def test_coroutines_wait_side_by_side(score: Score) -> None:
    start = time.monotonic()
    assert values(score("waits", *["a"] * 20)) == [1.0] * 20
    assert time.monotonic() - start < 2  # one after another: 4 s


def test_a_coroutine_that_hangs_costs_its_trajectory(score: Score) -> None:
    found = score("waits", "a", "hang", "b", time_limit=0.5)
    assert [t.response_text for t in found.trajectories] == ["a", "b"]
    (failure,) = found.failures
    assert (failure.group, failure.prompt_index, failure.reward) == (101, 1, "mine")
    assert re.search(r"'mine' \(own:waits\).*row 1 \(from 0\).*data\.train", failure.where)
    assert re.search(r"0\.5 s \(rewards\.mine\.time_limit", failure.said)
    assert "'?'" in failure.shown and "'hang'" in failure.shown
    assert all(part in str(failure) for part in (failure.where, failure.said, failure.shown))


def test_a_thread_that_hangs_costs_its_trajectory(score: Score) -> None:
    start = time.monotonic()
    found = score("does", "abc", "hang", "ab", time_limit=0.3)
    assert values(found) == [3.0, 2.0] and len(found.failures) == 1
    assert time.monotonic() - start < 5  # nor does closing wait for it


def test_a_function_that_raises_costs_its_trajectory_and_shows_its_line(score: Score) -> None:
    found = score("does", "raise", "ab")
    assert values(found) == [2.0]
    (failure,) = found.failures
    assert failure.said.endswith("ValueError: no such thing")
    error = failure.error()
    assert isinstance(error, FunctionFailed) and 'own.py", line 9, in does' in str(error)


def test_many_at_once_by_annotation_or_by_setting(score: Score) -> None:
    assert values(score("many", "a", "bb", "ccc", "")) == [0.25, 0.5, 0.75, 0.0]
    assert values(score("not_annotated", "a", "b", "c", batch=True)) == [3.0, 3.0, 3.0]
    assert values(score("many", "a", "bb", process=True, at_once=1)) == [0.5, 1.0]


@pytest.mark.parametrize("process", [False, True])
def test_by_a_files_path_and_of_trls_form(
    score: Score, process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text((tmp_path / "own.py").read_text())
    monkeypatch.chdir(tmp_path)
    settings = {"place": "beside.py", "process": process, "at_once": 1}
    assert values(score("many", "a", "bb", **settings)) == [0.5, 1.0]
    assert values(score("as_trl_has_it", "a", "bb", **settings)) == [1.0, 2.0]


@pytest.mark.parametrize("process", [False, True])
def test_one_number_too_few_stops_the_run_and_is_shown(score: Score, process: bool) -> None:
    with pytest.raises(PlimsollError, match=r"row 0 .*2 numbers for 3 .*\[0\.0, 0\.0\]"):
        score("one_too_few", "a", "b", "c", process=process)


@pytest.mark.parametrize("process", [False, True])
def test_nan_stops_the_run_whatever_the_retries(score: Score, process: bool) -> None:
    with pytest.raises(PlimsollError, match=r"row 1 .* gave nan \(float\)"):
        score("does", "a", "nan", process=process, retries=5, at_once=1)


def test_a_failure_is_tried_again(score: Score, tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "tries")}
    found = score("fails_twice", "a", options=options, retries=2)
    assert values(found) == [1.0] and (tmp_path / "tries").read_text() == "xxx"
    options = {"path": str(tmp_path / "fewer")}
    assert len(score("fails_twice", "a", options=options, retries=1).failures) == 1
    assert (tmp_path / "fewer").read_text() == "xx"


def test_a_function_that_breaks_its_process_costs_its_trajectory_alone(score: Score) -> None:
    settings = {"process": True, "at_once": 1, "time_limit": 1.0, "memory_gib": 1.0}
    found = score(
        "does", *["abc", "hang", "crash", "leave", "eat", "raise", "print", "ab"], **settings
    )
    assert values(found) == [3.0, 5.0, 2.0]
    reasons = (
        r"time_limit of 1 s \(rewards\.mine\.time_limit\).*process",
        "SIGSEGV",
        "exit code 3",
        "MemoryError",
        "ValueError: no such thing",
    )
    for failure, reason in zip(found.failures, reasons, strict=True):
        assert re.search(reason, failure.said)


def test_processes_count_as_part_of_the_one_that_started_them_and_hold_what_is_planned(
    score: Score, tmp_path: Path
) -> None:
    before = read_host().held
    rewards = {"mine": RewardConfig(name="own:does", process=True, at_once=2)}
    with open_rewards(rewards) as scorer:
        scorer.submit([trajectory("a", i) for i in range(20)]).result(timeout=60)
        during = read_host().held
    (planned,) = process_items(rewards, None)
    assert during - before == pytest.approx(planned.bytes, rel=0.35)
    assert read_host().held < before + planned.bytes / 4


def test_processes_are_ended_with_all_that_they_started(score: Score, tmp_path: Path) -> None:
    first, second = values(score("does", "pid", "pid", process=True, at_once=1))
    assert first == second != os.getpid()
    assert not Path(f"/proc/{int(first)}").exists()
    score("does", "spawn", process=True, at_once=1, time_limit=0.5)
    child = Path("/proc") / (tmp_path / "own.py.pid").read_text() / "stat"
    deadline = time.monotonic() + 5
    while child.exists() and ") Z " not in child.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or ") Z " in child.read_text()


def test_ctrl_c_or_an_error_ends_what_is_at_work(score: Score, tmp_path: Path) -> None:
    rewards = {"mine": RewardConfig(name="own:does", process=True, at_once=1)}
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), open_rewards(rewards) as scorer:
        future = scorer.submit([trajectory("hang", 0)])
        time.sleep(0.5)
        raise KeyboardInterrupt
    assert future.cancelled() and time.monotonic() - start < 5
