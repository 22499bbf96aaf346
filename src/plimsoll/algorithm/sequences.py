"""Where the sequences lie in a flat `_L` tensor, from their offsets `cu_loss_tokens` [S + 1]."""

from __future__ import annotations

import torch
from torch import Tensor


def lengths(cu_loss_tokens: Tensor) -> Tensor:
    """How many learned tokens each sequence has; int, shape [S]."""
    return cu_loss_tokens.diff()


def nonempty(cu_loss_tokens: Tensor) -> Tensor:
    """Which sequences have a learned token at all; bool, shape [S]."""
    return lengths(cu_loss_tokens) > 0


def last_tokens(cu_loss_tokens: Tensor) -> Tensor:
    """The position in `_L` of each non-empty sequence's last token; int, one per such sequence."""
    return cu_loss_tokens[1:][nonempty(cu_loss_tokens)].long() - 1


def sequence_of_token(cu_loss_tokens: Tensor) -> Tensor:
    """Which sequence each token belongs to; int, shape [L]."""
    lengths_S = lengths(cu_loss_tokens)
    return torch.arange(len(lengths_S), device=cu_loss_tokens.device).repeat_interleave(lengths_S)


def sums(x_L: Tensor, cu_loss_tokens: Tensor) -> Tensor:
    """The sum over each sequence's learned tokens, shape [S]; 0 for one without."""
    sizes = lengths(cu_loss_tokens).long()
    # To check them, the host would wait for the card.
    return torch.segment_reduce(x_L, "sum", lengths=sizes, initial=0, unsafe=True)
