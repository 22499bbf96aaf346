"""PPO's clipped loss against numbers computed by hand, and its properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.algorithm.inputs import PolicyLossInputs
from plimsoll.algorithm.policy_loss import clip as loss

torch.set_num_threads(1)

# Four tokens, with the terms of min(ratio * A, clip(ratio, 0.8, 1.2) * A):
#   ratio  A   unclipped  clipped   min
#   1.5    1    1.5        1.2      1.2   clipped: no gradient
#   0.5   -1   -0.5       -0.8     -0.8   clipped: no gradient
#   1.1    2    2.2        2.2      2.2
#   5.0   -1   -5.0       -1.2     -5.0   bounded by dual clip: -3 with c = 3
RATIOS = [1.5, 0.5, 1.1, 5.0]
ADVANTAGES = [1.0, -1.0, 2.0, -1.0]


def inputs(ratios: list[float], advantages: list[float]) -> PolicyLossInputs:
    old_L = torch.linspace(-3, -1, len(ratios), dtype=torch.float64)
    return PolicyLossInputs(
        logprobs_L=(old_L + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        old_logprobs_L=old_L,
        advantages_L=torch.tensor(advantages, dtype=torch.float64),
        cu_loss_tokens=torch.tensor([0, len(ratios)]),
    )


def test_hand_computed() -> None:
    given_inputs = inputs(RATIOS, ADVANTAGES)
    output = loss(given_inputs)
    output.loss_L.sum().backward()
    assert output.loss_L.tolist() == pytest.approx([-1.2, 0.8, -2.2, 5.0])
    # the gradient of ratio * A with respect to the log-prob is ratio * A itself
    gradient = given_inputs.logprobs_L.grad
    assert gradient is not None
    assert gradient.tolist() == pytest.approx([0, 0, -2.2, 5.0])
    assert output.metrics["clip_fraction"].tolist() == [1, 1, 0, 0]
    assert output.metrics["ratio"].tolist() == pytest.approx(RATIOS)
    # ratio - 1 - ln(ratio)
    expected = [0.094535, 0.193147, 0.004690, 2.390562]
    assert output.metrics["approx_kl"].tolist() == pytest.approx(expected, abs=1e-6)


def test_dual_clip_bounds_only_bad_tokens_that_became_likelier() -> None:
    given_inputs = inputs(RATIOS, ADVANTAGES)
    output = loss(given_inputs, dual_clip=3.0)
    output.loss_L.sum().backward()
    assert output.loss_L.tolist() == pytest.approx([-1.2, 0.8, -2.2, 3.0])
    gradient = given_inputs.logprobs_L.grad
    assert gradient is not None
    assert gradient.tolist() == pytest.approx([0, 0, -2.2, 0])
    assert output.metrics["clip_fraction"].tolist() == [1, 1, 0, 1]


def test_the_two_sides_clip_by_their_own_bounds() -> None:
    # min(1.5, 1.3) = 1.3 and min(-0.5, -0.9) = -0.9
    output = loss(inputs([1.5, 0.5], [1.0, -1.0]), clip_low=0.1, clip_high=0.3)
    assert output.loss_L.tolist() == pytest.approx([-1.3, 0.9])


@given(
    advantages=st.lists(st.floats(-5, 5), min_size=1, max_size=6),
    low=st.floats(0, 1),
    high=st.floats(0, 3),
    dual=st.none() | st.floats(1.01, 10),
)
def test_ratio_of_one_is_the_plain_policy_gradient(
    advantages: list[float], low: float, high: float, dual: float | None
) -> None:
    given_inputs = inputs([1.0] * len(advantages), advantages)
    output = loss(given_inputs, clip_low=low, clip_high=high, dual_clip=dual)
    output.loss_L.sum().backward()
    gradient = given_inputs.logprobs_L.grad
    assert gradient is not None
    assert gradient.tolist() == pytest.approx([-a for a in advantages])
    assert not output.metrics["clip_fraction"].any()
    assert not output.metrics["approx_kl"].any()


@given(
    ratios=st.lists(st.floats(0.01, 20), min_size=1, max_size=6),
    advantage=st.floats(-5, 5),
)
def test_clipping_never_improves_the_objective(ratios: list[float], advantage: float) -> None:
    found_L = loss(inputs(ratios, [advantage] * len(ratios))).loss_L.tolist()
    assert all(
        found >= -ratio * advantage - 1e-9 for found, ratio in zip(found_L, ratios, strict=True)
    )


def test_gradcheck_away_from_the_kinks() -> None:
    base = inputs([1.5, 0.5, 1.1, 5.0, 0.9], [1.0, -1.0, 2.0, -1.0, -2.0])

    def loss_of(logprobs_L: torch.Tensor) -> torch.Tensor:
        return loss(
            PolicyLossInputs(
                logprobs_L, base.old_logprobs_L, base.advantages_L, base.cu_loss_tokens
            ),
            dual_clip=3.0,
        ).loss_L

    assert torch.autograd.gradcheck(loss_of, (base.logprobs_L,))


def test_a_micro_batch_without_learned_tokens_adds_nothing_but_has_a_gradient() -> None:
    output = loss(inputs([], []))
    output.loss_L.sum().backward()
    assert output.loss_L.tolist() == []
    assert {name: metric.tolist() for name, metric in output.metrics.items()} == {
        "clip_fraction": [],
        "approx_kl": [],
        "ratio": [],
        "ratio_clamped": [],
    }
