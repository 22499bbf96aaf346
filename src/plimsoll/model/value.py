"""The value function: a Hugging Face decoder over a pack, then one number per learned token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plimsoll.model.policy import PackTensors, predictor_states

ReadAt = Callable[[PackTensors], PackTensors]
"""Chooses where the values of a pack are read: returns the same pack with other predictors."""


def before_learned(pack: PackTensors) -> PackTensors:
    """Return the pack unchanged: critics judge the state before each learned token, [L]."""
    return pack


def at_ends(pack: PackTensors) -> PackTensors:
    """Return the pack read at the last token of each sequence, [S], as reward models score it."""
    return replace(pack, predictor_L=pack.layout.cu_queries[1:].long() - 1)


def at_marks(pack: PackTensors) -> PackTensors:
    """Return the pack read at the learned tokens themselves, [L], which end process rewards' steps.

    No two sequences may share tokens.
    """
    return replace(pack, predictor_L=pack.predictor_L + 1)


class ValueHead(nn.Module):
    """Takes the place and the weight of the one-label `score` Linear; computes in fp32.

    In bfloat16 a value would have 8 bits, too few for differences between neighbouring tokens.
    """

    def __init__(self, score: nn.Linear) -> None:
        super().__init__()
        self.weight = score.weight

    def forward(self, hidden_L_H: Tensor) -> Tensor:
        """Return a value for each hidden state, shape [L]."""
        return hidden_L_H.float() @ self.weight[0].float()


class ValueModel(nn.Module):
    """A sequence-classification model with one label, read at every token before a learned one.

    values_L[i] is the value of the state before the i-th learned token.

    Attributes:
        lm: the Hugging Face model, with packed attention; saved under its own names (without
            `lm.`), AutoModelForSequenceClassification loads it with num_labels = 1.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        lm.score = ValueHead(lm.score)

    def forward(self, pack: PackTensors) -> Tensor:
        """Return values_L in fp32."""
        values_L: Tensor = self.lm.score(predictor_states(self.lm, pack))
        return values_L


def initialise_score(score: nn.Linear, seed: int) -> None:
    """Draw small weights with standard deviation 1 / (hidden + 1), so that values start near 0.

    Stiennon et al. 2020 (https://arxiv.org/abs/2009.01325) start the reward head so.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = score.in_features
    drawn = torch.randn(1, hidden, generator=generator) / (hidden + 1)
    with torch.no_grad():
        score.weight.copy_(drawn)
