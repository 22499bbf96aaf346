"""Parts that losses on binary feedback share: their KL baseline and their metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from plimsoll.algorithm.inputs import FeedbackLossInputs, LossOutput


def kl_baseline(logratios_S: Tensor) -> float:
    """Return KTO's estimate of KL(policy || reference): the mean log-ratio, at least 0, in nats.

    The log-ratios log(pi(y'|x) / ref(y'|x)) are those of all prompts x of the step with responses
    y' to other prompts. The estimate is cheap but biased, because y' is not sampled from the
    policy; it has no gradient. Source: Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306,
    section 4.2.
    """
    return max(0.0, float(logratios_S.mean()))


def feedback_output(losses_S: Tensor, rewards_S: Tensor, inputs: FeedbackLossInputs) -> LossOutput:
    """Return a feedback loss's output: its mean over the step's responses, with metrics.

    Metrics: `kl`; `rewards/desirable` and `rewards/undesirable`, means over the step's responses
    with that label, left out if the step has none; `rewards/margin`, their difference, if both
    exist. rewards_S are the rewards that the loss assigns to the micro-batch's responses.
    """
    responses = inputs.counts.responses
    kl = torch.tensor(inputs.kl * len(losses_S) / responses)
    with torch.no_grad():
        metrics = {"kl": kl} | _reward_metrics(rewards_S, inputs)
    return LossOutput(losses_S.sum() / responses, metrics)


def _reward_metrics(rewards_S: Tensor, inputs: FeedbackLossInputs) -> dict[str, Tensor]:
    counts, desirable_S = inputs.counts, inputs.desirable_S
    metrics = {}
    # No boolean index: the host would wait for the device to count the rows.
    if counts.desirable:
        metrics["rewards/desirable"] = rewards_S.where(desirable_S, 0).sum() / counts.desirable
    if counts.undesirable:
        metrics["rewards/undesirable"] = rewards_S.where(~desirable_S, 0).sum() / counts.undesirable
    if len(metrics) == 2:
        good, bad = metrics.values()
        metrics["rewards/margin"] = good - bad
    return metrics
