"""The settings of what each job optimises."""

from __future__ import annotations

from typing import Literal

from plimsoll.config.base import (
    Choice,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Settings,
)

PACKAGE = "plimsoll.algorithm"
FUNCTIONS = {
    "policy_loss": ("loss", "algorithm.policy_loss"),
    "preference_loss": ("loss", "algorithm.loss"),
    "reward_loss": ("loss", "algorithm.loss"),
    "unpaired_loss": ("loss", "algorithm.loss"),
    "advantage": ("estimate", "algorithm.advantage"),
    "divergence": ("compare", "algorithm.divergence"),
}
"""Of each package of algorithm/ the function in each of its files, and the key that chooses one."""

LearnedTokens = Literal["assistant", "all"]


class SftAlgorithm(Settings):
    """Supervised fine-tuning."""

    learned_tokens: LearnedTokens = "assistant"
    """assistant: what the assistant says, with the token that ends each turn; all: every token of
    a conversation, the template's own too. Documents of plain text are always learned whole."""
    neftune_alpha: PositiveFloat | None = None
    """Noise on the input embeddings while training, uniform within alpha / sqrt(length * width)
    (NEFTune, Jain et al. 2023, https://arxiv.org/abs/2310.05914: 5, 10 or 15); default: none."""


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


class PreferenceAlgorithm(Settings):
    """Learning from pairs; Rafailov et al. 2023, https://arxiv.org/abs/2305.18290."""

    loss: Choice = Choice(name="dpo", options={"beta": 0.1})
    """The preference loss: a file of algorithm/preference_loss/, or an import path."""
    nll_weight: NonNegativeFloat = 0.0
    """Weight of the chosen response's mean negative log-likelihood beside the preference loss."""


class DistillAlgorithm(Settings):
    """Learning a teacher's distributions; Hinton et al. 2015, https://arxiv.org/abs/1503.02531."""

    divergence: Choice = Choice(name="forward_kl")
    """How far the actor is from the teacher: a file of algorithm/divergence/ (`forward_kl`,
    `reverse_kl`, `jsd`), or an import path."""
    temperature: PositiveFloat = 1.0
    """Divides the logits of both for the divergence, whose gradient is multiplied back."""
    nll_share: Probability = 0.0
    """The share of the negative log-likelihood of the data in the loss; the divergence has the
    rest."""


class KtoAlgorithm(Settings):
    """Learning from labelled responses; Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306."""

    loss: Choice = Choice(name="kto", options={"beta": 0.1})
    """The loss: a file of algorithm/unpaired_loss/, or an import path."""


class RewardAlgorithm(Settings):
    """Learning scores from pairs; Ouyang et al. 2022, https://arxiv.org/abs/2203.02155."""

    loss: Choice = Choice(name="log_sigmoid")
    """The reward loss: a file of algorithm/reward_loss/, or an import path."""
    centring: NonNegativeFloat = 0.0
    """Weight of the mean squared sum of a pair's two scores, which draws scores to 0; such as 0.01,
    Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244."""


class PpoAlgorithm(Settings):
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
