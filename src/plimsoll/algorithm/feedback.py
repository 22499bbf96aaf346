"""What losses on binary feedback share: the KL that they are held against, and their metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from plimsoll.algorithm.inputs import FeedbackLossInputs, LossOutput


def kl_baseline(logratios_S: Tensor) -> float:
    """KTO's estimate of KL(policy || reference): the mean log-ratio, or 0 where that is less; nats
    per response.

    logratios_S: of responses y' to other prompts, log(pi(y'|x) / ref(y'|x)), of the whole step.
    Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306, section 4.2. Biased, as y' is not
    sampled from the policy, but cheap; it has no gradient.
    """
    return max(0.0, float(logratios_S.mean()))


def feedback_output(losses_S: Tensor, rewards_S: Tensor, inputs: FeedbackLossInputs) -> LossOutput:
    """The output of an feedback loss.

    losses_S: of each response of the micro-batch. rewards_S: what the loss takes it to be worth.
    Metrics: `kl`; means over the step's responses of a label, `rewards/desirable` and
    `rewards/undesirable`, each where the step has any; `rewards/margin`, the one less the other,
    where it has both.
    """
    responses = inputs.counts.responses
    kl = torch.tensor(inputs.kl * len(losses_S) / responses)
    with torch.no_grad():
        metrics = {"kl": kl} | _reward_metrics(rewards_S, inputs)
    return LossOutput(losses_S.sum() / responses, metrics)


def _reward_metrics(rewards_S: Tensor, inputs: FeedbackLossInputs) -> dict[str, Tensor]:
    counts, desirable_S = inputs.counts, inputs.desirable_S
    found = {}
    # Not by an index: the host waits for a card to tell how many there are.
    if counts.desirable:
        found["rewards/desirable"] = rewards_S.where(desirable_S, 0).sum() / counts.desirable
    if counts.undesirable:
        found["rewards/undesirable"] = rewards_S.where(~desirable_S, 0).sum() / counts.undesirable
    if len(found) == 2:
        good, bad = found.values()
        found["rewards/margin"] = good - bad
    return found
