"""What reinforcement learning optimises, and the functions that a config chooses by name."""

from __future__ import annotations

from typing import Literal

from plimsoll.config.base import (
    Choice,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
)

PACKAGE = "plimsoll.algorithm"
FUNCTIONS = {
    "policy_loss": ("loss", "algorithm.policy_loss"),
    "preference_loss": ("loss", "algorithm.loss"),
    "reward_loss": ("loss", "algorithm.loss"),
    "feedback_loss": ("loss", "algorithm.loss"),
    "advantage": ("estimate", "algorithm.advantage"),
    "divergence": ("compare", "algorithm.divergence"),
}
"""Of each package of algorithm/ the function in each of its files, and the key that chooses one."""


class KlConfig(Settings):
    """The KL divergence from the reference: estimator, place, coefficient."""

    place: Literal["none", "reward", "loss"] = "reward"
    """reward: subtracted token by token from the reward; loss: added to the policy loss;
    none: no reference is loaded at all."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Schulman's estimators of KL(policy || reference); http://joschu.net/blog/kl-approx.html."""
    coefficient: NonNegativeFloat = 0.01
    """The weight of the KL (the first one, when adaptive)."""
    target: PositiveFloat | None = None
    """Adapt the coefficient towards this KL per response (nats, Ziegler et al. 2019);
    default: fixed."""
    horizon: PositiveInt = 10_000
    """Responses over which an adaptive coefficient moves."""


class RlAlgorithm(Settings):
    """Proximal policy optimisation; Schulman et al. 2017, https://arxiv.org/abs/1707.06347."""

    advantage: Choice = Choice(name="gae", options={"gamma": 1.0, "gae_lambda": 0.95})
    """The advantage estimator: a file of algorithm/advantage/, or an import path."""
    policy_loss: Choice = Choice(name="clip")
    """The policy loss: a file of algorithm/policy_loss/, or an import path."""
    value_clip: PositiveFloat | None = 0.2
    """Clip the change of the value by this much; null turns value clipping off."""
    kl: KlConfig = KlConfig()
    """The KL from the reference."""
    whiten_advantages: bool = True
    """Shift and scale the batch's advantages to mean 0 and standard deviation 1."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of the mean token entropy that is added to the objective."""
    epochs: PositiveInt = 1
    """Passes over each batch of trajectories."""
    mini_batches: PositiveInt = 1
    """Optimizer steps per pass; must divide the number of trajectories of a step."""
    critic_warmup_steps: NonNegativeInt = 0
    """Steps at the beginning that train the critic alone; the actor's schedule, and an adaptive KL
    coefficient, begin after them."""
