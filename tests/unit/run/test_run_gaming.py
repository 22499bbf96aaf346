"""What decides a step's rewards: shares and correlation by hand, their drift, and what is shown."""

from __future__ import annotations

import io
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from plimsoll.records import Prompt, RewardPart, Trajectory, single_turn
from plimsoll.run.directory import RunDirectory
from plimsoll.run.displays import StepReport
from plimsoll.run.health import LENGTH, WINDOW, HealthWatch, gaming_figures
from plimsoll.run.progress import MetricsSink, Progress
from plimsoll.run.trajectories import write_trajectories


def sampled(group: int, number: int, length: int, **parts: float) -> Trajectory:
    tokens, logprobs = np.arange(length), np.zeros(length, np.float32)
    prompt = Prompt(group, np.array([1], np.int32), f"prompt {group}")
    rewards = tuple(RewardPart(name, value, 2.0) for name, value in parts.items())
    text = f"text {group}.{number}"
    return single_turn(prompt, number, tokens, logprobs, text, "stop", 0, rewards, group=group)


def many(step: list[Trajectory]) -> list[Trajectory]:
    """The groups of a step ten times over, each time as other groups."""
    return [replace(t, group=t.group + 10 * n) for n in range(10) for t in step]


def test_the_figures_of_a_step_by_hand() -> None:
    """Group 0 has rewards 2 and 6 at lengths 1 and 3, group 1 has 8 and 4 at lengths 7 and 9.

    Less the means of the groups they are -2, 2, 2, -2 and -1, 1, -1, 1: the products sum to 0. If
    the last group's lengths are 9 and 7, they sum to 8, which is all that is possible.
    """
    step = [
        sampled(0, 0, 1, right=1.0, style=0.0),
        sampled(0, 1, 3, right=2.0, style=1.0),
        sampled(1, 0, 7, right=3.0, style=1.0),
        sampled(1, 1, 9, right=2.0, style=0.0),
    ]
    figures = gaming_figures(many(step))
    # rewards 2, 6, 8, 4 less 5: -3, 1, 3, -1; squares 20. right 2 4 6 4 less 4: -2, 0, 2, 0: 12.
    assert figures == pytest.approx(
        {LENGTH: 0.0, "reward_share/right": 0.6, "reward_share/style": 0.4}
    )
    turned = [sampled(1, n, 9 - 2 * n, right=3.0 - 2 * n, style=0.0) for n in (0, 1)]
    turned += step[:2]
    assert gaming_figures(many(turned))[LENGTH] == pytest.approx(1.0)


def test_without_groups_the_step_is_one_and_what_is_undefined_is_left_out() -> None:
    alone = [sampled(n, 0, n + 1, right=float(n)) for n in range(17)]
    assert gaming_figures(alone) == pytest.approx({LENGTH: 1.0})
    assert gaming_figures(alone[:-1]) == {}  # too few to say
    assert gaming_figures([sampled(0, n, 2, right=1.0, style=1.0) for n in range(20)]) == {}
    solved = [sampled(n // 4, n % 4, n + 1, right=0.5, style=0.1) for n in range(96)]
    assert gaming_figures(solved) == {}  # the mean of 96 times 1.2 is rounded
    assert gaming_figures([*alone, sampled(0, 0, 1, right=inf)]) == {}


def report(step: int, **metrics: float) -> StepReport:
    return StepReport(step, metrics, 10, {}, {})


def test_a_part_that_takes_over_is_told_with_three_responses(tmp_path: Path) -> None:
    """After the first steps its share moves by half; the warning comes once."""
    run, printed = RunDirectory(tmp_path), io.StringIO()
    run.trajectories_path(1).parent.mkdir()
    with Progress("grpo", 99, tmp_path, printed) as progress:
        sink = MetricsSink(run, progress, health=HealthWatch())
        for step in range(1, 2 * WINDOW + 3):
            rows = [
                sampled(g, n, 2, right=0.0, style=float(g + n))
                for g in (0, 1, 2, 3)
                for n in (0, 1)
            ]
            write_trajectories(run.trajectories_path(step), step, rows)
            share = 0.2 if step <= WINDOW else 0.7
            sink.write(report(step, **{"reward_share/style": share, "reward_share/right": 0.5}))
    lines = printed.getvalue().splitlines()
    told = [n for n, line in enumerate(lines) if "reward_share/style is 0.7" in line]
    assert len(told) == 1
    seen = lines[told[0]]
    assert [seen.count(f"group {g}: ") for g in (0, 1, 2, 3)] == [0, 1, 1, 1]
    assert "text 3.1" in seen and "reward_share/right is" not in printed.getvalue()


def test_a_resumed_run_knows_its_first_steps() -> None:
    rows = [{"step": n, LENGTH: 0.0} for n in range(1, WINDOW + 1)]
    watch = HealthWatch(rows)
    warned = [watch.add(n, {LENGTH: 0.6}) for n in range(WINDOW + 1, 2 * WINDOW + 1)]
    assert [len(w) for w in warned] == [0] * (WINDOW - 1) + [1]
    assert (warned[-1][0].low, warned[-1][0].high) == (-0.4, 0.4)
