"""Preference losses against numbers computed by hand, their gradients, and general properties."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plimsoll.algorithm import preference_loss as preference_losses
from plimsoll.algorithm.choice import preference_loss
from plimsoll.algorithm.figures import wilson_interval
from plimsoll.algorithm.inputs import LossOutput, PairValues, PreferenceLossInputs
from plimsoll.algorithm.preference import in_pairs, preference_objective
from plimsoll.config.base import Choice, OptionValue
from plimsoll.config.choice import built_in_names
from plimsoll.resolve.choices import needs_reference

torch.set_num_threads(1)

PAGE = Path(__file__).parents[3] / "docs" / "dpo.md"
NAMES = built_in_names("plimsoll.algorithm.preference_loss")

# Two of the step's four pairs. Log-ratios to the reference: chosen 1 and 0, rejected -1 and 3, so
# h = 2 and -3. Log-probs per token: chosen -2 and -2, rejected -3 and -2; mean NLL 2 and 2.
POLICY = [-10.0, -12.0, -20.0, -18.0]
REFERENCE = [-11.0, -11.0, -20.0, -21.0]
LENGTHS = [5.0, 4.0, 10.0, 9.0]
PAIRS = 4


def doubles(values: list[float], *, learns: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=learns)


def compute(
    name: str,
    policy_S: Tensor,
    reference_S: Tensor,
    lengths_S: Tensor,
    pairs: int = PAIRS,
    **options: OptionValue,
) -> LossOutput:
    """The loss of sequences chosen, rejected, chosen, ..."""
    choice = Choice(name=name, options=options)
    inputs = PreferenceLossInputs(in_pairs(policy_S), in_pairs(lengths_S), pairs)
    reference = in_pairs(reference_S) if needs_reference(choice) else None
    return preference_objective(inputs, reference, preference_loss(choice), nll_weight=0.0)


@pytest.mark.parametrize(
    ("name", "options", "total"),
    [
        # m = 1 and -1.5: ln(1 + e^-1) + ln(1 + e^1.5)
        ("dpo", {"beta": 0.5}, 0.3132617 + 1.7014133),
        # each label flipped at 0.1 adds 0.1 * m
        ("dpo", {"beta": 0.5, "label_smoothing": 0.1}, 0.4132617 + 1.5514133),
        # h = 1/5 + 1/4 = 0.45 and 0 - 3/9; beta 2: m = 0.9 and -2/3
        ("dpo", {"beta": 2.0, "length_normalised": True}, 0.3411539 + 1.0810368),
        # (0.9 * 0.3132617 - 0.1 * 1.3132617) / 0.8 + (0.9 * 1.7014133 - 0.1 * 0.2014133) / 0.8
        ("robust", {"beta": 0.5, "flip_rate": 0.1}, 0.1882617 + 1.8889133),
        # 1 / (2 beta) = 1: (2 - 1)^2 + (-3 - 1)^2
        ("ipo", {"beta": 0.5}, 17.0),
        # (0.45 - 1)^2 + (-1/3 - 1)^2
        ("ipo", {"beta": 0.5, "length_normalised": True}, 0.3025 + 16 / 9),
        # m = 0.8 and -1.2: 0.2 + 2.2
        ("hinge", {"beta": 0.4}, 2.4),
        # m = 2 and -3: nothing from the first
        ("hinge", {"beta": 1.0}, 4.0),
        # 2 * (-2 + 3) - 0.5 = 1.5 and 2 * (-2 + 2) - 0.5 = -0.5
        ("simpo", {"beta": 2.0, "gamma": 0.5}, 0.2014133 + 0.9740770),
        # log odds: -1.8545865 less -2.9489308 = 1.0943443, and 0; NLL 2 + 2
        ("orpo", {"beta": 0.1}, 4 + 0.1 * (0.2887506 + 0.6931472)),
        # 0.1 * (-10 + 12) and 0.1 * (-20 + 18); NLL 2 + 2
        ("cpo", {"beta": 0.1}, 0.5981389 + 0.7981389 + 4),
        ("cpo", {"beta": 0.1, "alpha": 0.0}, 0.5981389 + 0.7981389),
    ],
)
def test_hand_computed(name: str, options: dict[str, OptionValue], total: float) -> None:
    policy, reference, lengths = doubles(POLICY), doubles(REFERENCE), doubles(LENGTHS)
    output = compute(name, policy, reference, lengths, PAIRS, **options)
    assert output.loss.item() == pytest.approx(total / PAIRS, abs=1e-7)


def test_every_loss_is_computed_by_hand_above() -> None:
    [marks] = [m for m in test_hand_computed.pytestmark if m.name == "parametrize"]  # type: ignore[attr-defined]
    assert {case[0] for case in marks.args[1]} == set(NAMES)


def test_metrics_are_means_over_the_steps_pairs() -> None:
    """beta 0.5: rewards 0.5 and 0 chosen, -0.5 and 1.5 rejected."""
    output = compute("dpo", doubles(POLICY), doubles(REFERENCE), doubles(LENGTHS), beta=0.5)
    assert {name: x.item() for name, x in output.metrics.items()} == pytest.approx(
        {
            "accuracy": 1 / 4,
            "rewards/margin": (1 - 1.5) / 4,
            "rewards/chosen": 0.5 / 4,
            "rewards/rejected": 1.0 / 4,
            "preference_loss": output.loss.item(),
            "nll": 4 / 4,
        }
    )


def test_the_gradient_of_dpo_by_hand() -> None:
    """-beta * sigmoid(-m) / 4 on the chosen, the opposite on the rejected; metrics have none."""
    policy_S = doubles(POLICY, learns=True)
    output = compute("dpo", policy_S, doubles(REFERENCE), doubles(LENGTHS), beta=0.5)
    assert not any(metric.requires_grad for metric in output.metrics.values())
    output.loss.backward()
    assert policy_S.grad is not None
    expected = [-0.2689414 / 8, 0.2689414 / 8, -0.8175745 / 8, 0.8175745 / 8]
    assert policy_S.grad.tolist() == pytest.approx(expected, abs=1e-7)


def test_a_tie_counts_half() -> None:
    same = doubles(REFERENCE)
    assert compute("dpo", same, same, doubles(LENGTHS), pairs=2).metrics["accuracy"] == 0.5


def test_the_nll_term_is_the_mean_per_token_of_the_chosen() -> None:
    loss = preference_loss(Choice(name="dpo"))
    inputs = PreferenceLossInputs(in_pairs(doubles(POLICY)), in_pairs(doubles(LENGTHS)), PAIRS)
    reference = in_pairs(doubles(REFERENCE))
    plain, held = (preference_objective(inputs, reference, loss, w) for w in (0.0, 0.5))
    assert held.loss.item() - plain.loss.item() == pytest.approx(0.5 * 4 / PAIRS)
    assert held.metrics["preference_loss"] == plain.loss


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    policy_S = -30 * torch.rand(8, generator=generator, dtype=torch.float64) - 1
    reference_S = policy_S + torch.randn(8, generator=generator, dtype=torch.float64)
    lengths_S = torch.tensor([3.0, 9, 4, 2, 7, 7, 1, 5], dtype=torch.float64)

    def loss(policy_S: Tensor) -> Tensor:
        return compute(name, policy_S, reference_S, lengths_S).loss

    assert torch.autograd.gradcheck(loss, policy_S.requires_grad_())


@given(name=st.sampled_from(NAMES), cut=st.integers(0, 5), seed=st.integers(0, 2**16))
def test_any_split_adds_up_to_the_whole(name: str, cut: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy_S, reference_S = -20 * torch.rand(2, 10, generator=generator, dtype=torch.float64) - 0.1
    lengths_S = torch.randint(1, 20, (10,), generator=generator).double()
    whole = compute(name, policy_S, reference_S, lengths_S, pairs=5)
    halves = [
        compute(name, policy_S[part], reference_S[part], lengths_S[part], pairs=5)
        for part in (slice(None, 2 * cut), slice(2 * cut, None))
    ]
    assert sum(h.loss.item() for h in halves) == pytest.approx(whole.loss.item(), abs=1e-12)
    for metric, value in whole.metrics.items():
        found = sum(h.metrics[metric].item() for h in halves)
        assert found == pytest.approx(value.item(), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_filler_gives_nothing_but_a_gradient_of_zeros(name: str) -> None:
    """A rank that has no pair still takes part in the backward pass."""
    filler_S = doubles([0.0], learns=True)
    output = compute(name, filler_S, doubles([0.0]), doubles([0.0]))
    output.loss.backward()
    assert output.loss == 0 and filler_S.grad is not None and filler_S.grad.tolist() == [0.0]


def test_orpo_is_finite_for_certain_responses() -> None:
    policy_S = doubles([0.0, 0.0, -1e-9, -40.0], learns=True)
    output = compute("orpo", policy_S, doubles([0.0] * 4), doubles([3.0] * 4))
    output.loss.backward()
    assert output.loss.isfinite() and policy_S.grad is not None and policy_S.grad.isfinite().all()


def test_cdpo_is_least_where_the_policy_is_as_sure_as_the_labels() -> None:
    """If a tenth of the labels is flipped, the minimum is at sigmoid(m) = 0.9."""
    margin = doubles([2.1972246, 0.0], learns=True)  # ln 9
    compute("dpo", margin, doubles([0.0, 0.0]), doubles([1.0, 1.0]), beta=1.0, label_smoothing=0.1)
    output = functools.partial(compute, "dpo", beta=1.0, label_smoothing=0.1)
    output(margin, doubles([0.0, 0.0]), doubles([1.0, 1.0])).loss.backward()
    assert margin.grad is not None and margin.grad.abs().max() < 1e-7


@given(rate=st.floats(0.01, 0.45), margin=st.floats(-5, 5))
def test_robust_dpo_on_flipped_labels_is_dpo_on_the_right_ones(rate: float, margin: float) -> None:
    def loss(name: str, m: float, **options: Any) -> float:
        zeros = doubles([0.0, 0.0])
        ones = doubles([1.0, 1.0])
        return compute(name, doubles([m, 0.0]), zeros, ones, beta=1.0, **options).loss.item()

    right, wrong = (loss("robust", m, flip_rate=rate) for m in (margin, -margin))
    expected = loss("dpo", margin)
    assert (1 - rate) * right + rate * wrong == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_pairs_are_every_second_sequence() -> None:
    pairs = in_pairs(doubles([1.0, 2.0, 3.0, 4.0]))
    assert pairs.chosen_P.tolist() == [1, 3] and pairs.rejected_P.tolist() == [2, 4]
    assert in_pairs(doubles([1.0])).chosen_P.tolist() == []


def test_the_page_tells_the_options_and_the_reference_of_each_loss() -> None:
    row = r"^\| `(\w+)` \| .* \| (.*) \| (yes|no) \|$"
    rows = re.findall(row, PAGE.read_text(), re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == NAMES
    for name, options, answer in rows:
        loss = vars(preference_losses)[name]
        assert needs_reference(Choice(name=name)) == (answer == "yes")
        taken = inspect.signature(loss).parameters.values()
        named = [one.name for one in taken if one.kind is inspect.Parameter.KEYWORD_ONLY]
        assert re.findall(r"`(\w+)`", options) == named


@given(hits=st.integers(0, 500), more=st.integers(1, 500))
def test_the_interval_ends_where_the_measured_share_would_just_be_unlikely(
    hits: int, more: int
) -> None:
    """Each end p solves |share - p| = 1.96 sqrt(p (1 - p) / n), its own standard error."""
    count = hits + more
    share = hits / count
    low, high = wilson_interval(share, count)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    for end in (low, high):
        assert (share - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / count, abs=1e-12)


def test_five_of_ten() -> None:
    assert wilson_interval(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_pair_values_need_one_number_for_each_response() -> None:
    with pytest.raises(AssertionError):
        PairValues(doubles([1.0]), doubles([1.0, 2.0]))
