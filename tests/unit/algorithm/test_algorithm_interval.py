"""Intervals over prompts: by hand, against resampling whole prompts, and general properties."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.algorithm.figures import (
    NORMAL_95,
    Doubles,
    design_effect,
    mean_interval,
    separation_effect,
    separation_interval,
    share_ahead,
    share_interval,
    student_95,
    wilson_interval,
)
from plimsoll.records import Floats, Ints

ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 6)), min_size=1, max_size=40
)
"""Values and prompts."""


def halves(rows: Sequence[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [value for value, _ in rows], [prompt for _, prompt in rows]


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (9999, 1.96)],
)
def test_students_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_95(freedom) == pytest.approx(quantile, rel=2e-3)


def test_three_prompts_by_hand() -> None:
    """Right 2 of 2, 1 of 2 and 1 of 4, so 4 of 8. Of half each, prompts are ahead by 1, 0 and -1,
    rows by 0.5 or -0.5: 2 between prompts and 8 * 0.25 between rows, times 3/2 and 8/7."""
    values, prompts = [1, 1, 1, 0, 1, 0, 0, 0], ["a", "a", "b", "b", "c", "c", "c", "c"]
    effect = (2 / 2) * (3 / 2) / (8 / 7) * (4.3027 / student_95(7)) ** 2
    found = design_effect(np.array(values) - 0.5, prompts)
    assert found == pytest.approx(effect, rel=1e-4)
    assert share_interval(values, prompts) == pytest.approx(wilson_interval(0.5, 8 / found))


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=60))
def test_with_a_prompt_for_each_row_it_is_wilsons_interval(values: list[float]) -> None:
    expected = wilson_interval(float(np.mean(values)), len(values))
    assert share_interval(values, range(len(values))) == expected


@given(ROWS)
def test_a_share_lies_in_its_interval_and_that_between_0_and_1(
    rows: list[tuple[float, int]],
) -> None:
    low, high = share_interval(*halves(rows))
    assert 0 <= low <= np.mean(halves(rows)[0]) + 1e-12
    assert np.mean(halves(rows)[0]) - 1e-12 <= high <= 1


@given(ROWS, st.integers(2, 9))
def test_rows_that_come_several_times_in_their_prompt_tell_nothing_more(
    rows: list[tuple[float, int]], times: int
) -> None:
    low, high = share_interval(*halves(rows))
    low_again, high_again = share_interval(*halves(rows * times))
    assert low_again <= low + 1e-12 and high_again >= high - 1e-12


@given(ROWS)
def test_neither_the_order_of_rows_nor_the_names_of_prompts_matter(
    rows: list[tuple[float, int]],
) -> None:
    values, prompts = halves(rows[::-1])
    again = share_interval(values, [f"prompt {prompt}" for prompt in prompts])
    assert again == pytest.approx(share_interval(*halves(rows)), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("prompts", "rows"), [(1, 500), (20, 25), (500, 1)])
def test_where_all_rows_are_alike_each_prompt_counts_once(
    value: float, prompts: int, rows: int
) -> None:
    found = share_interval([value] * prompts * rows, list(range(prompts)) * rows)
    assert found == wilson_interval(value, prompts)


def test_a_single_prompt_tells_as_much_as_one_row() -> None:
    assert share_interval([1, 0, 1, 1] * 100, [7] * 400) == wilson_interval(0.75, 1)


Measure = Callable[[Ints], float]


def resampled(prompts: Ints, measure: Measure, times: int = 4000) -> tuple[float, float]:
    """The middle 95 % of a figure of some rows over resamples of whole prompts."""
    rng = np.random.default_rng(1)
    own = [np.flatnonzero(prompts == prompt) for prompt in np.unique(prompts)]
    drawn = rng.integers(0, len(own), (times, len(own)))
    found = [measure(np.concatenate([own[i] for i in draw])) for draw in drawn]
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def held_out(prompts: int, concentration: float, seed: int) -> tuple[Doubles, Ints]:
    """About 540 pairs of so many prompts, of unequal sizes, each with its own share right: the less
    concentrated these are, the more alike are rows of a prompt."""
    rng = np.random.default_rng(seed)
    sizes = rng.multinomial(540 - prompts, rng.dirichlet(np.full(prompts, 3.0))) + 1
    shares = rng.beta(0.59 * concentration, 0.41 * concentration, prompts)
    of_row = np.repeat(np.arange(prompts), sizes)
    return (rng.random(540) < shares[of_row]).astype(np.float64), of_row


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("prompts", [30, 60, 120, 270])
@pytest.mark.parametrize("concentration", [2.0, 20.0])
def test_of_540_pairs_of_few_prompts_it_is_what_resampling_prompts_gives(
    prompts: int, concentration: float, seed: int
) -> None:
    """Within 12 % of its width, where intervals of independent rows are up to three times too
    narrow."""
    right, of_row = held_out(prompts, concentration, seed)
    low, high = resampled(of_row, lambda rows: float(right[rows].mean()))
    found = share_interval(right, of_row)
    assert found == pytest.approx((low, high), abs=0.12 * (high - low))


def test_of_few_prompts_it_holds_the_truth_where_independent_rows_would_not() -> None:
    """540 pairs of 30 prompts with shares around 0.59, in 300 experiments."""
    held: dict[str, list[bool]] = {"prompts": [], "rows": []}
    for seed in range(300):
        right, of_row = held_out(30, 5.0, seed)
        low, high = share_interval(right, of_row)
        held["prompts"].append(low <= 0.59 <= high)
        low, high = wilson_interval(float(right.mean()), 540)
        held["rows"].append(low <= 0.59 <= high)
    assert np.mean(held["prompts"]) >= 0.92
    assert np.mean(held["rows"]) <= 0.8


def test_a_mean_of_any_rewards_has_students_interval_of_the_prompts_means() -> None:
    """Means 1, 2 and 6 of two responses each: 3 +- 4.3027 * sqrt(7 / 3)."""
    found = mean_interval([0, 2, 2, 2, 5, 7], [1, 1, 2, 2, 3, 3])
    assert found == pytest.approx((3 - 4.3027 * (7 / 3) ** 0.5, 3 + 4.3027 * (7 / 3) ** 0.5), 1e-4)


def test_a_mean_over_prompts_of_unequal_sizes_is_a_ratio() -> None:
    """3 of 3 and -1 of 1: the mean of the four is 2, from which the sums are 3 and -3 away."""
    half = 12.7062 * (2 / 1 * (3**2 + 3**2)) ** 0.5 / 4
    found = mean_interval([3, 3, 3, -1], [0, 0, 0, 1])
    assert found == pytest.approx((2 - half, 2 + half), 1e-5)


def test_a_mean_of_rewards_that_are_0_or_1_is_a_share() -> None:
    values, prompts = [1.0, 0.0, 1.0, 1.0, 0.0], [0, 0, 1, 2, 3]
    assert mean_interval(values, prompts) == share_interval(values, prompts)
    assert mean_interval([1.0], [0]) == wilson_interval(1, 1)


def test_a_mean_of_one_prompt_has_no_interval() -> None:
    assert mean_interval([0.25, 3.0], [5, 5]) is None


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 4)), min_size=2, max_size=20),
    st.integers(2, 5),
)
def test_responses_that_come_several_times_do_not_narrow_a_means_interval(
    rows: list[tuple[int, int]], times: int
) -> None:
    one, several = (mean_interval(*halves([*rows, (2, 9)] * k)) for k in (1, times))
    assert one is not None and several is not None
    assert several == pytest.approx(one) or several[1] - several[0] > one[1] - one[0]


@pytest.mark.parametrize("prompts", [100, 1000])
def test_a_mean_is_as_sure_as_resampling_prompts_says(prompts: int) -> None:
    rng = np.random.default_rng(2)
    of_row = np.repeat(np.arange(prompts), 4)
    rewards = rng.normal(0, 1, prompts)[of_row] + rng.exponential(0.5, len(of_row))
    low, high = resampled(of_row, lambda rows: float(rewards[rows].mean()))
    assert mean_interval(rewards, of_row) == pytest.approx((low, high), abs=0.06 * (high - low))


def labelled(prompts: int, alike: float, seed: int) -> tuple[Floats, np.ndarray, Ints]:
    """Rewards of responses, up to six a prompt; alike: how much of the spread is the prompt's."""
    rng = np.random.default_rng(seed)
    of_row = np.repeat(np.arange(prompts), rng.integers(1, 7, prompts))
    good = rng.random(len(of_row)) < rng.beta(1, 1, prompts)[of_row]
    spread = alike * rng.normal(0, 1, prompts)[of_row] + rng.normal(0, 1, len(of_row))
    return (spread + 0.7 * good).astype(np.float32), good, of_row


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("prompts", "alike"), [(60, 0.0), (60, 2.0), (200, 2.0)])
def test_a_separation_is_as_sure_as_resampling_prompts_says(
    prompts: int, alike: float, seed: int
) -> None:
    rewards, good, of_row = labelled(prompts, alike, seed)

    def share(rows: Ints) -> float:
        return share_ahead(rewards[rows][good[rows]], rewards[rows][~good[rows]])

    low, high = resampled(of_row, share, times=2000)
    effect = separation_effect(rewards, good, of_row)
    found = separation_interval(
        share(np.arange(len(of_row))), good.sum() / effect, (~good).sum() / effect
    )
    assert found == pytest.approx((low, high), abs=0.12 * (high - low))


def test_a_separations_effect_is_1_where_no_responses_share_a_prompt() -> None:
    rewards, good, of_row = labelled(50, 1.0, 0)
    assert separation_effect(rewards, good, range(len(of_row))) == 1.0


def test_a_separations_effect_by_hand() -> None:
    """Better 3, 1 and worse 2, 0: ahead in three of four. Of the better ones 3 is ahead of all and
    1 of half, of the worse ones 2 is behind half and 0 behind all: 1/4 more or less than 3/4 each.
    Prompt a has 3 and 0, which add up, and b has 1 and 2."""
    values = np.array([3, 1, 2, 0], dtype=np.float32)
    better = np.array([True, True, False, False])
    found = separation_effect(values, better, ["a", "b", "b", "a"])
    expected = (2 * 2**2) / 4 * (2 / 1) / (4 / 3) * (12.7062 / student_95(3)) ** 2
    assert found == pytest.approx(expected, rel=1e-5)
    opposed = separation_effect(values, better, ["a", "a", "b", "b"])
    assert (
        opposed == 2.0
    )  # in each prompt the two cancel out: nothing is known, so each counts once


def test_the_best_separation_counts_each_prompt_once() -> None:
    values, better = np.arange(6, dtype=np.float32), np.arange(6) >= 3
    assert separation_effect(values, better, [0, 1, 2, 0, 1, 2]) == 2.0


def test_the_normal_quantile_is_the_limit() -> None:
    assert student_95(10**9) == pytest.approx(NORMAL_95)
