"""Advantages without a critic: numbers worked out by hand, and plain loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean, pstdev, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.algorithm.choice import advantage
from plimsoll.algorithm.groups import group_deviations, group_means, number_groups
from plimsoll.algorithm.inputs import AdvantageInputs
from plimsoll.config.base import Choice, OptionValue
from plimsoll.resolve.choices import AdvantageNeed

torch.set_num_threads(1)

# Two groups: of three responses, of 2, 0 and 1 tokens, and of two, of 1 and 2 tokens.
#   group   response  tokens  reward   less the mean   std (n - 1)
#   3       0         2       1         0   (mean 1)    1
#   3       1         0       2         1               1
#   3       2         1       0        -1               1
#   8       3         1       4         1.5 (mean 2.5)  sqrt(1.5^2 + 1.5^2) = 2.12132
#   8       4         2       1        -1.5             2.12132
GROUPS = [3, 3, 3, 8, 8]
LENGTHS = [2, 0, 1, 1, 2]
REWARDS = [1.0, 2.0, 0.0, 4.0, 1.0]
GREEDY = [0.5, 0.5, 0.5, 3.0, 3.0]


def inputs(
    parts: Sequence[Sequence[float]],
    lengths: Sequence[int],
    *,
    weights: Sequence[float] = (1.0,),
    shaping: Sequence[float] | None = None,
) -> AdvantageInputs:
    return AdvantageInputs(
        parts_SR=torch.tensor(parts, dtype=torch.float64),
        weights_R=torch.tensor(weights, dtype=torch.float64),
        shaping_L=torch.tensor(shaping or [0.0] * sum(lengths)),
        cu_loss_tokens=torch.tensor([0, *itertools.accumulate(lengths)]),
    )


def estimated(
    name: str,
    given: AdvantageInputs,
    groups: Sequence[int],
    greedy: Sequence[float] = (),
    **options: OptionValue,
) -> list[float]:
    asked: dict[AdvantageNeed, torch.Tensor] = {
        "group_S": torch.tensor(groups),
        "greedy_S": torch.tensor(greedy, dtype=torch.float64),
    }
    found = advantage(Choice(name=name, options=options))(given, asked)
    assert found.returns_L is None and found.advantages_L.dtype == torch.float32
    return found.advantages_L.tolist()


def by_hand(name: str, **options: OptionValue) -> list[float]:
    given_inputs = inputs([[r] for r in REWARDS], LENGTHS)
    return estimated(name, given_inputs, GROUPS, GREEDY, **options)


def whitened(values: Sequence[float]) -> list[float]:
    mean, variance = fmean(values), pstdev(values) ** 2
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in values]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", [0, 0, -1, 1.5, -1.5, -1.5]),
        # the mean of the others: (2 + 0) / 2, (1 + 2) / 2, 1, 4
        ("rloo", [0, 0, -1.5, 3, -3, -3]),
        # 1.6 is the mean of all five
        ("batch_mean", [-0.6, -0.6, -1.6, 2.4, -0.6, -0.6]),
        ("remax", [0.5, 0.5, -0.5, 1, -2, -2]),
        ("reinforce", [1, 1, 0, 4, 1, 1]),
        # 1.5 / 2.12132
        ("grpo", [0, 0, -1, 0.707106, -0.707106, -0.707106]),
        # the six of dr_grpo: mean -0.416667, variance (1 + 3 * 2.25) / 6 - 0.173611 = 1.118056
        ("reinforce_pp_baseline", [0.394055, 0.394055, -0.551677, 1.812653, -1.024543, -1.024543]),
        # the six returns: mean 8 / 6, variance (1 + 1 + 0 + 16 + 1 + 1) / 6 - 1.777778 = 1.555556
        ("reinforce_pp", [-0.267261, -0.267261, -1.069045, 2.138090, -0.267261, -0.267261]),
    ],
)
def test_by_hand(name: str, expected: list[float]) -> None:
    assert by_hand(name) == pytest.approx(expected, abs=2e-6)


def test_the_delta_of_grpo_is_added_to_the_deviation() -> None:
    # -1 / (1 + 1) and 1.5 / (2.12132 + 1)
    expected = [0, 0, -0.5, 0.480566, -0.480566, -0.480566]
    assert by_hand("grpo", delta=1.0) == pytest.approx(expected, abs=1e-6)


def test_discounted_returns_by_hand() -> None:
    # shaping -0.1 at every token, reward 1 at the end of three: 0.9, -0.1 + 0.5 * 0.9 = 0.35, ...
    given_inputs = inputs([[1.0]], [3], shaping=[-0.1, -0.1, -0.1])
    found = estimated("reinforce", given_inputs, [0], gamma=0.5)
    assert found == pytest.approx([0.075, 0.35, 0.9])
    found = estimated("reinforce_pp", given_inputs, [0], gamma=0.5)
    assert found == pytest.approx(whitened([0.075, 0.35, 0.9]), abs=1e-5)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "batch_mean", "remax"])
def test_what_shapes_tokens_counts_from_there_to_the_end(name: str) -> None:
    """The KL in the reward: no baseline is of it, and a token answers for what comes after it."""
    plain = inputs([[1.0], [0.0]], [2, 1])
    shaped = inputs([[1.0], [0.0]], [2, 1], shaping=[-0.1, -0.2, -0.4])
    want = estimated(name, plain, [0, 0], [0.5, 0.5])
    found = estimated(name, shaped, [0, 0], [0.5, 0.5])
    less = [w - f for w, f in zip(want, found, strict=True)]
    assert less == pytest.approx([0.3, 0.2, 0.4])


# A response is one action, and its shaping part of its reward: r = 1 - 0.3, 0 - 0.4 and 2, less
# the mean of the others, (-0.4 + 2) / 2 = 0.8, (0.7 + 2) / 2 = 1.35 and (0.7 - 0.4) / 2 = 0.15.
def test_rloo_of_whole_responses_by_hand() -> None:
    shaped = inputs([[1.0], [0.0], [2.0]], [2, 1, 1], shaping=[-0.1, -0.2, -0.4, 0.0])
    found = estimated("rloo", shaped, [0, 0, 0], whole=True)
    assert found == pytest.approx([-0.1, -0.1, -1.75, 1.85])


def test_without_shaping_whole_responses_change_nothing_about_rloo() -> None:
    assert by_hand("rloo", whole=True) == by_hand("rloo")


# Two rewards of weights 1 and 2, in one group of three:
#   a: 0, 1, 2    less the mean 1, over the deviation 1: -1, 0, 1
#   b: 0, 3, 0    less the mean 1, over sqrt(3) = 1.732: -0.577350, 1.154701, -0.577350
#   a + 2 b: 0, 7, 2   less the mean 3, over sqrt((9 + 16 + 1) / 2) = 3.605551
TWO = [[0.0, 0.0], [1.0, 3.0], [2.0, 0.0]]


def test_several_rewards_are_summed_then_normalised() -> None:
    found = estimated("grpo", inputs(TWO, [1, 1, 1], weights=[1.0, 2.0]), [0, 0, 0])
    assert found == pytest.approx([-0.832050, 1.109400, -0.277350], abs=2e-6)


def test_several_rewards_are_normalised_then_summed() -> None:
    found = estimated("gdpo", inputs(TWO, [1, 1, 1], weights=[1.0, 2.0]), [0, 0, 0])
    # -1 - 2 * 0.57735 = -2.154701, 2 * 1.154701 = 2.309401, 1 - 1.154701 = -0.154701: their mean
    # is 0 and their deviation with n - 1 sqrt((4.642734 + 5.333333 + 0.023932) / 2) = 2.236068
    assert found == pytest.approx([-0.963611, 1.032796, -0.069184], abs=2e-6)


def test_two_rewards_whose_sums_are_alike_differ_by_gdpo_alone() -> None:
    """Scaled by itself, a rare reward counts as much as a common one."""
    parts = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    given_inputs = inputs(parts, [1] * 4, weights=[1.0, 3.0])
    one, other, *_ = estimated("gdpo", given_inputs, [0] * 4)
    assert other > 0 > one
    equal = inputs(parts, [1] * 4, weights=[1.0, 1.0])
    assert estimated("grpo", equal, [0] * 4) == [0.0] * 4


GROUPED = ["grpo", "dr_grpo", "rloo", "gdpo", "reinforce_pp_baseline"]


@pytest.mark.parametrize("name", [*GROUPED, "batch_mean"])
@given(reward=st.floats(-1e3, 1e3), sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_equal_rewards_teach_exactly_nothing(name: str, reward: float, sizes: list[int]) -> None:
    groups = [i for i, size in enumerate(sizes) for _ in range(size)]
    given_inputs = inputs([[reward]] * len(groups), [2] * len(groups), weights=[0.3])
    assert not any(estimated(name, given_inputs, groups))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_beside_others_teaches_exactly_nothing(name: str) -> None:
    assert estimated(name, inputs([[0.1], [0.7], [5.3]], [1, 1, 1]), [0, 0, 1])[2] == 0


# (group, reward, tokens) of each response, in any order
BATCH = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-10, 10), st.integers(0, 3)), min_size=1, max_size=10
).filter(lambda batch: any(tokens for *_, tokens in batch))


def loop(name: str, batch: list[tuple[int, float, int]]) -> list[float]:
    """Response by response, then token by token."""
    found: list[float] = []
    for i, (group, reward, tokens) in enumerate(batch):
        own = [r for g, r, _ in batch if g == group]
        others = [r for j, (g, r, _) in enumerate(batch) if g == group and j != i]
        spread = stdev(own) if len(own) > 1 else 0.0
        value = {
            "grpo": (reward - fmean(own)) / (spread + 1e-6),
            "dr_grpo": reward - fmean(own),
            "rloo": reward - fmean(others) if others else 0.0,
            "batch_mean": reward - fmean(r for _, r, _ in batch),
            "reinforce": reward,
        }[name]
        found += [value] * tokens
    return found


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "batch_mean", "reinforce"])
@given(BATCH)
def test_equals_the_plain_loop(name: str, batch: list[tuple[int, float, int]]) -> None:
    groups, rewards, lengths = zip(*batch, strict=True)
    found = estimated(name, inputs([[r] for r in rewards], lengths), groups)
    # Rewards that differ by rounding alone are nothing beside delta, and may be anything below it.
    assert found == pytest.approx(loop(name, batch), rel=1e-4, abs=1e-4)


@given(BATCH)
def test_gdpo_equals_the_plain_loop(batch: list[tuple[int, float, int]]) -> None:
    groups, rewards, lengths = zip(*batch, strict=True)
    parts = [[r, float(i % 3)] for i, r in enumerate(rewards)]
    sums = [0.0] * len(batch)
    for part, weight in enumerate((0.5, 2.0)):
        for i, group in enumerate(groups):
            own = [p[part] for p, g in zip(parts, groups, strict=True) if g == group]
            spread = stdev(own) if len(own) > 1 else 0.0
            sums[i] += weight * (parts[i][part] - fmean(own)) / (spread + 1e-6)
    spread = stdev(sums) if len(sums) > 1 else 0.0
    expected = [(s - fmean(sums)) / (spread + 1e-6) for s in sums]
    found = estimated("gdpo", inputs(parts, lengths, weights=[0.5, 2.0]), groups)
    of_tokens = [a for a, n in zip(expected, lengths, strict=True) for _ in range(n)]
    assert found == pytest.approx(of_tokens, rel=1e-4, abs=1e-4)


@given(BATCH)
def test_whitened_ones_are_their_plain_forms_whitened_over_tokens(
    batch: list[tuple[int, float, int]],
) -> None:
    groups, rewards, lengths = zip(*batch, strict=True)
    given_inputs = inputs([[r] for r in rewards], lengths)
    for name, plain in (("reinforce_pp_baseline", "dr_grpo"), ("reinforce_pp", "reinforce")):
        expected = whitened(loop(plain, batch))
        found = estimated(name, given_inputs, groups)
        assert found == pytest.approx(expected, rel=1e-3, abs=2e-2)  # float32 / 1e-4 at worst


def test_groups_by_hand() -> None:
    group_S, x_S = torch.tensor([7, 2, 7, 5]), torch.tensor([1.0, 4.0, 3.0, 9.0])
    number_S, sizes = number_groups(group_S)
    assert number_S.tolist() == [2, 0, 2, 1] and sizes.tolist() == [1, 1, 2]
    assert group_means(x_S, group_S).tolist() == [2, 4, 2, 9]
    assert group_deviations(x_S, group_S).tolist() == pytest.approx([2**0.5, 0, 2**0.5, 0])
