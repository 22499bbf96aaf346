"""Faults at named points: what they do, when they happen, and what is refused."""

from __future__ import annotations

import ast
import asyncio
import errno
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import fault_injection
import numpy as np
import pytest
import torch
from fault_injection import FIRED
from fault_injection.points import CONDITIONS, KINDS, POINTS

import plimsoll
from plimsoll.algorithm.inputs import LossOutput
from plimsoll.errors import ConfigError
from plimsoll.machine.faults import (
    DIRECTORY,
    FAULTS,
    await_fault_point,
    fault_point,
    fault_settings,
    fault_value,
    name_process,
)
from plimsoll.run.phases import TimedPhase

Faults = pytest.MonkeyPatch
SUPPORT = str(Path(fault_injection.__file__).parents[1])


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Faults:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "faults"))
    monkeypatch.delenv("PLIMSOLL_FAULTS_PROCESS", raising=False)
    paths = [SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return monkeypatch


def fired(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "faults" / FIRED).read_text().splitlines()]


def test_without_the_variable_nothing_happens(faults: Faults) -> None:
    faults.delenv(FAULTS, raising=False)
    fault_point("rank.nowhere")
    assert fault_value("reward.call", 1.5) == 1.5
    assert fault_settings() == {}


def test_other_points_go_on(faults: Faults) -> None:
    faults.setenv(FAULTS, "rank.backward:error")
    fault_point("rank.step", 3)
    with pytest.raises(RuntimeError, match=r"by PLIMSOLL_FAULTS: rank\.backward:error"):
        fault_point("rank.backward")


def test_errors_are_those_of_the_real_fault(faults: Faults) -> None:
    faults.setenv(FAULTS, "rank.backward:oom,metrics.write:full,engine.request:network")
    with pytest.raises(torch.OutOfMemoryError):
        fault_point("rank.backward")
    with pytest.raises(OSError) as full:
        fault_point("metrics.write", 1)
    assert full.value.errno == errno.ENOSPC
    with pytest.raises(ConnectionError):
        asyncio.run(await_fault_point("engine.request", 1))


def test_a_step_and_a_call_are_counted(faults: Faults) -> None:
    faults.setenv(FAULTS, "rank.step:error:step=3,rank.backward:error:call=2")
    fault_point("rank.step", 2)
    with pytest.raises(RuntimeError):
        fault_point("rank.step", 3)
    fault_point("rank.backward")
    with pytest.raises(RuntimeError):
        fault_point("rank.backward")
    fault_point("rank.backward")


def test_a_rank_is_the_one_that_the_process_was_named(faults: Faults) -> None:
    faults.setenv(FAULTS, "rank.backward:error:rank=1")
    faults.setenv("PLIMSOLL_FAULTS_PROCESS", "rank=0")  # so that the test's end restores it
    name_process("rank", 2)
    fault_point("rank.backward")
    name_process("rank", 1)
    with pytest.raises(RuntimeError):
        fault_point("rank.backward")


def test_after_a_time_it_happens_once(faults: Faults, tmp_path: Path) -> None:
    faults.setenv(FAULTS, f"rank.step:error:after={2**40}+once,rank.step:error:after=9+once")
    with pytest.raises(RuntimeError, match="after=9"):
        fault_point("rank.step", 1)
    fault_point("rank.step", 2)
    assert len(fired(tmp_path)) == 1


def test_once_is_once_for_all_processes(faults: Faults, tmp_path: Path) -> None:
    text = "metrics.write:kill:step=4+once"
    faults.setenv(FAULTS, text)
    program = "from plimsoll.machine.faults import fault_point; fault_point('metrics.write', 4)"
    codes = [subprocess.run([sys.executable, "-c", program]).returncode for _ in range(2)]
    assert codes == [-signal.SIGKILL, 0]
    (row,) = fired(tmp_path)
    assert row["fault"] == text
    assert (row["process"], row["step"], row["call"]) == ("controller", 4, 1)


def draws(faults: Faults, text: str, calls: int) -> list[int]:
    faults.setenv(FAULTS, text)
    happened = []
    for call in range(calls):
        try:
            fault_point("rank.backward")
        except RuntimeError:
            happened.append(call)
    return happened


def test_random_faults_repeat_with_their_seed(faults: Faults, tmp_path: Path) -> None:
    runs = []
    for i, seed in enumerate((7, 7, 8)):
        faults.setenv(DIRECTORY, str(tmp_path / str(i)))
        runs.append(draws(faults, f"rank.backward:error:p=0.2+seed={seed}", 200))
    assert runs[0] == runs[1] != runs[2]
    assert 20 < len(runs[0]) < 60


def test_a_process_started_again_draws_anew(faults: Faults, tmp_path: Path) -> None:
    first = draws(faults, "rank.backward:error:p=0.2", 100)
    again = draws(faults, " rank.backward:error:p=0.2", 100)  # the space: read by a new process
    assert first != again


def test_a_torn_file_is_cut_and_its_writer_ends(faults: Faults, tmp_path: Path) -> None:
    faults.setenv(FAULTS, "checkpoint.file:torn")
    written = tmp_path / "checkpoint"
    written.mkdir()
    (written / "large").write_bytes(b"x" * 1000)
    (written / "small").write_bytes(b"x" * 10)
    program = (
        "import sys; from pathlib import Path; from plimsoll.machine.faults import fault_point; "
        "fault_point('checkpoint.file', path=Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(written)])
    assert done.returncode == -signal.SIGKILL
    assert (written / "large").stat().st_size == 900
    assert (written / "small").stat().st_size == 10


def test_a_call_that_asks_waits_and_others_go_on(faults: Faults) -> None:
    faults.setenv(FAULTS, "reward.call:hang")

    async def play() -> str:
        waiting = asyncio.ensure_future(await_fault_point("reward.call"))
        await asyncio.sleep(0)
        state = "waits" if not waiting.done() else "went on"
        waiting.cancel()
        return state

    assert asyncio.run(play()) == "waits"


def test_wrong_values_are_copies(faults: Faults) -> None:
    faults.setenv(FAULTS, "reward.call:wrong")
    array = np.ones(3, np.float32)
    assert math.isnan(fault_value("reward.call", 0.5))
    assert math.isnan(fault_value("reward.call", {"a": 1})["a"])
    assert np.isnan(fault_value("reward.call", [array])[0]).all()
    assert fault_value("reward.call", torch.tensor([255, 0], dtype=torch.uint8)).tolist() == [0, 1]
    output = LossOutput(torch.ones((), requires_grad=True) * 2, {"loss": torch.ones(())})
    wrong = fault_value("reward.call", output)
    assert wrong.loss.isnan() and wrong.loss.requires_grad and wrong.metrics == output.metrics
    assert array.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("text", "needle", "listed"),
    [
        ("rank.nowhere:kill", "no point 'rank.nowhere'", "rank.backward"),
        ("rank.step:explode", "no kind 'explode'", "kill"),
        ("rank.step:torn", "no kind at rank.step 'torn'", "oom"),
        ("rank.step:kill:epoch=3", "no condition 'epoch'", "once"),
        ("rank.step:kill:step=x", "step is 'x'", "whole number"),
        ("rank.step:kill:p=1.5", "p is 1.5", "from 0 to 1"),
        ("rank.step:delay=long", "delay is 'long'", "a number"),
        ("rank.step:kill=3", "kill takes no number", "delay"),
        ("rank.backward:kill:step=3", "does not know the step", "call=N"),
        ("rank.step:kill:once=1", "once takes no value", "once"),
        ("rank.step:kill:after=1e9", "'1e9'; write a whole number", "after"),
        ("rank.step:kill:after=9", "it would happen at every call", "once"),
    ],
)
def test_what_cannot_be_is_refused(faults: Faults, text: str, needle: str, listed: str) -> None:
    faults.setenv(FAULTS, f"rank.step:delay=0,{text}")
    with pytest.raises(ConfigError) as refused:
        fault_settings()
    assert text in str(refused.value) and needle in str(refused.value)
    assert listed in str(refused.value)


def test_once_needs_a_directory(faults: Faults) -> None:
    faults.setenv(FAULTS, "rank.step:kill:once")
    faults.delenv(DIRECTORY)
    with pytest.raises(ConfigError, match=DIRECTORY):
        fault_settings()


def test_processes_elsewhere_get_the_variables(faults: Faults, tmp_path: Path) -> None:
    faults.setenv(FAULTS, "rank.step:kill:once")
    assert fault_settings() == {
        FAULTS: "rank.step:kill:once",
        DIRECTORY: str(tmp_path / "faults"),
        "PYTHONPATH": os.environ["PYTHONPATH"],
    }
    faults.setenv("PYTHONPATH", "/elsewhere")
    assert fault_settings()["PYTHONPATH"] == os.pathsep.join([SUPPORT, "/elsewhere"])


def test_lists_are_sentences() -> None:
    texts = [*KINDS.values(), *CONDITIONS.values(), *(p.meaning + "." for p in POINTS.values())]
    assert all(text[0].isupper() and text.endswith(".") for text in texts)
    assert all(kind in KINDS for point in POINTS.values() for kind in point.kinds)


def placed_points() -> list[str]:
    """Return the names of the points in the source, in calls of the functions of faults.py."""
    names = []
    for file in Path(plimsoll.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        calls = ast.walk(ast.parse(text)) if "plimsoll.machine.faults import" in text else ()
        for call in calls:
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(
                ("fault_point", "fault_value")
            ):
                names.append(ast.unparse(call.args[0]).strip("f'").replace("{name}", "*"))
    return names


def test_each_point_is_in_the_source_and_in_the_list() -> None:
    listed = {name if name not in PHASES else "controller.*" for name in POINTS}
    assert set(placed_points()) == listed


PHASES = {f"controller.{phase}" for phase in get_args(TimedPhase)}
