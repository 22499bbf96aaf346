"""A figure that leaves its healthy range gives one warning, with its meaning."""

from __future__ import annotations

import io
import re
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.run.directory import RunDirectory
from plimsoll.run.displays import StepReport
from plimsoll.run.health import (
    QUIET,
    RANGES,
    HealthWatch,
    repeating,
    repetition,
    warnings_of,
)
from plimsoll.run.json_lines import read_rows
from plimsoll.run.progress import MetricsSink, Progress

HEALTHY = {
    "reward": 0.4,
    "reward_length_correlation": -0.3,
    "kl": 3.0,
    "entropy": 0.6,
    "actor/grad_norm": 0.3,
    "clip_fraction": 0.05,
    "mismatch/abs": 0.01,
    "mismatch/k3": 3e-4,
    "mismatch/outside": 0.001,
    "response_tokens": 250.0,
    "truncated": 0.05,
    "zero_signal": 0.25,
    "explained_variance": 0.5,
    "rollout/prefix_cache_hits": 0.9,
    "groups/drawn": 32.0,
    "groups/dropped": 1.0,
    "repetition": 0.0,
}


def test_every_figure_has_a_range_and_a_healthy_run_no_warning() -> None:
    assert set(RANGES) == HEALTHY.keys() - {"groups/drawn"}
    assert warnings_of(HEALTHY) == []
    assert warnings_of({"loss": nan, "eval/reward": nan}) == []


@pytest.mark.parametrize(
    ("metric", "value", "meaning"),
    [
        ("kl", 26.0, "please the reward"),
        ("groups/dropped", 4.0, "more syncs than rollout.staleness allows"),
        ("kl", -1.5, "not of the distribution that was sampled from"),
        ("entropy", 0.001, "Collapse"),
        ("entropy", 6.0, "unlearns its language"),
        ("actor/grad_norm", 0.0, "all advantages of the step are 0"),
        ("actor/grad_norm", 11.0, "less than a tenth of it is applied"),
        ("clip_fraction", 0.31, "far from the policy that sampled"),
        ("mismatch/abs", 0.06, "other probabilities than the trainer"),
        ("mismatch/k3", 0.02, "other probabilities than the trainer"),
        ("mismatch/outside", 0.2, "other probabilities than the trainer"),
        ("response_tokens", 1.0, "Responses are empty"),
        ("truncated", 0.5, "What is cut off has no answer"),
        ("zero_signal", 0.75, "teach nothing and cost as much"),
        ("explained_variance", -0.1, "worse than a constant"),
        ("repetition", 0.2, "falls into loops"),
        ("rollout/prefix_cache_hits", 1.1, "It cannot have this value"),
        ("reward", nan, "divided by 0"),
        ("kl", nan, "divided by 0"),
    ],
)
def test_a_figure_out_of_its_range_gives_a_warning_with_its_meaning(
    metric: str, value: float, meaning: str
) -> None:
    (found,) = warnings_of(HEALTHY | {metric: value})
    assert found.metric == metric and meaning in found.advice.means
    text = str(found)
    assert "\n" not in text and text.startswith(f"warning: {metric} is {value:.3g}")


def test_a_warning_is_a_line_with_range_meaning_and_advice() -> None:
    (found,) = warnings_of({"truncated": 0.5})
    assert (found.low, found.high) == (0.0, 0.3)
    assert re.search(rf"truncated is 0\.5, .*0 to 0\.3 \({found.what}\)", str(found))
    assert re.search(r"Try: .*rollout\.sampling\.max_new_tokens", str(found))
    (found,) = warnings_of({"response_tokens": 1.0})
    assert found.high == inf and re.search(r"is 1, .*1\.5 or more \(", str(found))


def test_the_kl_of_long_responses_is_counted_by_the_token() -> None:
    assert [one.high for one in warnings_of({"kl": 30.0, "response_tokens": 50.0})] == [20.0]
    assert warnings_of({"kl": 300.0, "response_tokens": 4000.0}) == []
    assert [one.high for one in warnings_of({"kl": 401.0, "response_tokens": 4000.0})] == [400.0]


def test_long_episodes_find_their_earlier_turns_in_the_cache() -> None:
    """3/4 of 8 turns of equal length was there before; a fifth less is let pass."""
    long = {"episode/turns": 8.0, "episode/prompt_tokens": 8 * 512.0}
    metric = "rollout/prefix_cache_hits"
    assert warnings_of(long | {metric: 0.61}) == []
    (found,) = warnings_of(long | {metric: 0.59})
    assert found.low == pytest.approx(0.6) and "compute earlier turns again" in found.advice.means
    for other in ({"episode/prompt_tokens": 8 * 500.0}, {"episode/turns": 2.0}):
        assert warnings_of(long | other | {metric: 0.0}) == []


def warned_steps(values: list[float], metric: str = "truncated") -> list[int]:
    """The steps, from 1, at which a figure's values are warned of."""
    watch = HealthWatch()
    return [n for n, value in enumerate(values, start=1) if watch.add(n, {metric: value})]


def test_a_figure_gives_a_warning_when_it_leaves_its_range_and_not_at_every_step() -> None:
    assert warned_steps([0.1, 0.5, 0.6, 0.5]) == [2]
    assert warned_steps([0.5] + [0.1] * QUIET + [0.5]) == [1, QUIET + 2]
    assert warned_steps([0.5] + [0.1] * (QUIET - 1) + [0.5]) == [1]
    assert warned_steps([0.5, 0.1] * 40) == [1]  # one that comes and goes


def test_figures_of_one_cause_give_one_warning() -> None:
    wrong = {"mismatch/abs": 0.3, "mismatch/k3": 0.2, "mismatch/outside": 0.4}
    equal = {"zero_signal": 1.0, "actor/grad_norm": 0.0}
    told = HealthWatch().add(3, HEALTHY | wrong | equal)
    assert [warning.metric for warning in told] == ["mismatch/abs", "zero_signal"]
    [norm] = HealthWatch().add(3, HEALTHY | {"actor/grad_norm": 0.0})
    assert norm.metric == "actor/grad_norm"


def test_a_new_critic_is_given_time() -> None:
    assert warned_steps([-3.0] * 10, "explained_variance") == []
    assert warned_steps([-3.0] * 12, "explained_variance") == [11]


@given(
    st.lists(st.sampled_from([0.1, 0.5, nan]), max_size=90),
    st.integers(0, 90),
)
def test_a_resumed_run_tells_what_one_that_was_not_stopped_tells(
    values: list[float], stop: int
) -> None:
    rows = [{"step": n, "truncated": value} for n, value in enumerate(values, start=1)]
    whole, parted = HealthWatch(), HealthWatch()
    expected, found = [], []
    for number, row in enumerate(rows):
        if number == stop:
            written = [{k: None if v != v else v for k, v in one.items()} for one in rows[:number]]
            parted = HealthWatch(written)
        metrics = {"truncated": row["truncated"]}
        expected.append([str(one) for one in whole.add(int(row["step"]), metrics)])
        found.append([str(one) for one in parted.add(int(row["step"]), metrics)])
    assert found == expected


def test_the_warning_stands_under_the_line_of_its_step(tmp_path: Path) -> None:
    run, stream = RunDirectory(tmp_path), io.StringIO()
    with Progress("rl", 3, tmp_path, stream) as progress:
        sink = MetricsSink(run, progress, health=HealthWatch())
        for step, kl in ((1, 1.0), (2, nan), (3, nan)):
            sink.write(StepReport(step, {"kl": kl}, 1, {}, {}))
    lines = stream.getvalue().splitlines()[1:]
    assert [line.split(" | ")[0] for line in lines if "step" in line[:10]] == [
        f"rl step {n}/3" for n in (1, 2, 3)
    ]
    assert lines[2].startswith("warning: kl is nan (the KL of") and len(lines) == 4
    resumed = HealthWatch(read_rows(run.metrics_path))
    assert resumed.add(3 + QUIET, {"kl": nan}) == [] != resumed.add(4 + 2 * QUIET, {"kl": nan})


def test_repetition_is_the_share_of_4_grams_that_came_before() -> None:
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(0.2)
    assert repetition([7] * 13) == pytest.approx(0.9)  # ten, of one kind
    assert repetition(range(50)) == 0.0
    assert repetition([1, 2, 3]) == 0.0 and repetition([]) == 0.0


def test_responses_repeat_themselves_or_do_not() -> None:
    loop, plain = [1, 2, 3] * 20, list(range(60))
    assert repeating([loop, plain, plain, loop]) == 0.5
    assert repeating([]) == 0.0


@given(st.lists(st.integers(0, 3), max_size=40))
def test_repetition_is_a_share(tokens: list[int]) -> None:
    assert 0.0 <= repetition(tokens) < 1.0
    assert repetition(tokens + tokens) >= repetition(tokens)
