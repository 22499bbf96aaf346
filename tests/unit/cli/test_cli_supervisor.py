"""When a run is started again, and when it is not."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from plimsoll.cli.supervisor import Attempt, Silence, reason_to_stop, resuming
from plimsoll.errors import Recovery
from plimsoll.run.ending import RunEnd
from plimsoll.run.phases import OpenRun

OPEN = OpenRun("run", 3)
KILLED = Attempt(-9, OPEN)


def failed(why: str, fault: Recovery, step: int = 4) -> Attempt:
    return Attempt(1, OPEN, RunEnd("failed", why, fault, step=step))


DIED = failed("training rank 1 (pid 17 on node 10.0.0.1) died in the phase sync", "process")
BROKE = failed("training rank 1 (pid 17 on node 10.0.0.1) failed", "error")


@pytest.mark.parametrize(
    "attempt",
    [
        Attempt(2),
        Attempt(-9),
        Attempt(2, replace(OPEN, is_open=False)),
        Attempt(0, OPEN, RunEnd("done")),
        Attempt(130, OPEN, RunEnd("stopped", "interrupted")),
        Attempt(1, OPEN, RunEnd("failed", "The reward 'mine' raised", "none")),
        replace(KILLED, asked=True),
        replace(KILLED, open=OpenRun("run", 0)),
    ],
    ids=[
        "no settings",
        "killed before them",
        "before it began",
        "done",
        "stopped",
        "a setting",
        "asked to stop",
        "switched off",
    ],
)
def test_nothing_is_started_again_that_would_fail_again(attempt: Attempt) -> None:
    assert reason_to_stop([attempt]) == ""


KILLED_EARLY = Attempt(-9, replace(OPEN, is_open=False))


@pytest.mark.parametrize("attempt", [KILLED, DIED, BROKE, Attempt(1, OPEN), KILLED_EARLY])
def test_a_fault_of_the_machine_starts_the_run_again(attempt: Attempt) -> None:
    assert reason_to_stop([attempt]) is None


def test_so_many_faults_in_an_hour_are_the_last() -> None:
    attempts = [replace(DIED, at=60.0 * minute) for minute in (0, 10, 20, 30)]
    assert reason_to_stop(attempts[:3]) is None
    reason = reason_to_stop(attempts) or ""
    assert "4 faults of the machine" in reason and "run.restarts is 3" in reason
    assert "in step 4: training rank 1 (pid 17" in reason and "its rows may be at fault" in reason
    attempts[-1] = replace(DIED, at=3700.0)
    assert reason_to_stop(attempts) is None


def test_errors_and_faults_of_the_machine_are_counted_apart() -> None:
    errors = [failed("training rank 1 failed", "error", step) for step in range(1, 5)]
    both = [each for error in errors for each in (DIED, error)]
    assert all(reason_to_stop(both[:length]) is None for length in range(1, 7))
    assert "4 faults of the machine" in (reason_to_stop(both[:7]) or "")
    assert "4 errors within an hour" in (reason_to_stop([*both[:6], errors[3]]) or "")
    assert "in step 1: training" in (reason_to_stop([*both[:6], errors[3]]) or "")


def test_an_error_before_the_first_step_is_the_last() -> None:
    """A fault of the machine there is not: a process may be killed while it loads."""
    first = failed("rollout engine 0 does not compute what the trainer computes", "error", 0)
    assert "it failed before its first step" in (reason_to_stop([first]) or "")
    assert reason_to_stop([replace(DIED, end=failed("died", "process", 0).end)]) is None


def test_an_error_that_comes_again_at_the_same_step_is_of_the_data() -> None:
    """A process that is killed again at the same step is not: it may be by chance."""
    again = failed("training rank 0 (pid 99 on node 10.0.0.2) failed", "error")
    assert "step 4 ended by the same error twice" in (reason_to_stop([BROKE, again]) or "")
    assert "the same error twice" in (reason_to_stop([BROKE, DIED, again]) or "")
    for before, last in (
        (BROKE, failed("training rank 1 (pid 17 on node 10.0.0.1) failed", "error", 5)),
        (BROKE, failed("rollout engine 1 failed", "error")),
        (KILLED, KILLED),
        (DIED, DIED),
    ):
        assert reason_to_stop([before, last]) is None


@pytest.mark.parametrize(
    ("words", "again"),
    [
        (["sft", "a.yaml"], ["sft", "a.yaml"]),
        (["sft", "a.yaml", "--run.resume", "must", "--x", "1"], ["sft", "a.yaml", "--x", "1"]),
        (["sft", "--run.resume=never", "a.yaml"], ["sft", "a.yaml"]),
    ],
)
def test_the_command_resumes_when_it_is_started_again(words: list[str], again: list[str]) -> None:
    assert resuming(words) == [*again, "--run.resume", "auto"]


def test_the_text_says_from_where(tmp_path: Path) -> None:
    from plimsoll.cli.supervisor import _start_text

    run = OpenRun(str(tmp_path), 3)
    killed = replace(KILLED, open=run)
    text = _start_text([killed])
    assert "from its beginning (1 of 3" in text and text.endswith("run.restarts)")
    (tmp_path / "checkpoints" / "step-000006").mkdir(parents=True)
    died = replace(DIED, open=run)
    assert _start_text([died]).startswith("The run is started again after step 6")


def test_a_run_goes_on_with_the_nodes_that_are_there() -> None:
    flags = ("--cluster.nodes", "1", "--cluster.ranks", "2")
    end = RunEnd("failed", "the Ray cluster has 1 of 2 nodes", "process", flags)
    words = ["sft", "a.yaml", "--cluster.ranks=4", "--run.steps", "9"]
    again = ["sft", "a.yaml", "--run.steps", "9", "--run.resume", "auto", *flags]
    assert resuming(words, end) == again
    assert resuming(again, end) == again


def hangs(silence: Silence, now: float) -> bool:
    silence.look(now)
    return silence.is_too_long


def test_a_silence_is_as_long_as_the_supervisor_was_there(tmp_path: Path) -> None:
    told = tmp_path / "run.json"
    silence = Silence(told)
    assert not hangs(silence, 0.0)  # the run has not begun
    told.write_text(json.dumps(asdict(OpenRun("run", 3, hang_seconds=10))))
    assert not any(hangs(silence, float(now)) for now in range(1, 12))
    assert silence.seconds == 10 and hangs(silence, 12.0)
    os.utime(told, ns=(0, 10**9))
    silence.look(13.0)
    assert silence.seconds == 0
    silence.look(10_000.0)  # the supervisor was stopped meanwhile
    assert silence.seconds == 4
    told.write_text(json.dumps(asdict(OpenRun("run", 3, hang_seconds=0))))
    assert not any(hangs(silence, float(now)) for now in range(10_000, 11_000, 3))
