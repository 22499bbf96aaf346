"""The value model: a Hugging Face decoder over a pack, and a head that gives a number per token."""

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
    """Return the pack unchanged; values are read at the token before each learned token, [L].

    Critics judge this state.
    """
    return pack


def at_ends(pack: PackTensors) -> PackTensors:
    """Return the pack changed so that values are read at each sequence's last token, [S].

    Reward models score responses there.
    """
    return replace(pack, predictor_L=pack.layout.cu_queries[1:].long() - 1)


def at_marks(pack: PackTensors) -> PackTensors:
    """Return the pack changed so that values are read at the learned tokens themselves, [L].

    For a process reward model these tokens end the steps of solutions. No two sequences may share
    tokens.
    """
    return replace(pack, predictor_L=pack.predictor_L + 1)


class ValueHead(nn.Module):
    """Replaces the one-label `score` Linear and keeps its weight; computes in fp32.

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

    Stiennon et al. 2020 (https://arxiv.org/abs/2009.01325) initialise the reward head in this way.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = score.in_features
    drawn = torch.randn(1, hidden, generator=generator) / (hidden + 1)
    with torch.no_grad():
        score.weight.copy_(drawn)
