"""The mean negative log-likelihood of given tokens, never holding the whole logits.

What each token weighs in a mean is known beforehand, so all gradients are made in the forward pass,
where a chunk's logits are, and scaled in the backward pass: 3 products with the head, not 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plimsoll.model.logit_chunks import HeadGradients, LogitForm
from plimsoll.model.token_logprobs import TokenLogprobs, differentiate, token_logprobs


@dataclass(frozen=True)
class Imitation:
    """To make the targets likely. tokens: learned ones of the whole step, over all ranks."""

    tokens: int


def token_nll(
    hidden_L_H: Tensor,
    weight_VH: Tensor,
    targets_L: Tensor,
    tokens: int,
    *,
    bias_V: Tensor | None = None,
    chunk: int,
    form: LogitForm,
) -> Tensor:
    """- sum of log softmax(form of hidden @ weight.T + bias)[target] / tokens: an fp32 scalar.

    Shapes as for `token_logprobs`; L may be 0, and then the gradients are zeros, not None.
    chunk: rows of logits that exist at once.

    Differentiable once, for hidden, weight and bias.
    """
    assert chunk >= 1 and tokens > 0 and len(hidden_L_H) == len(targets_L)
    if not torch.is_grad_enabled():
        found = token_logprobs(
            hidden_L_H, weight_VH, targets_L, bias_V=bias_V, chunk=chunk, form=form
        )
        return -found.logprobs_L.sum() / tokens
    inputs = (hidden_L_H, weight_VH, bias_V, targets_L, tokens, chunk, form)
    loss: Tensor = _TokenNll.apply(*inputs)
    return loss


class _TokenNll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_L_H: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_L: Tensor,
        tokens: int,
        chunk: int,
        form: LogitForm,
    ) -> Tensor:
        logprobs_L = torch.empty_like(targets_L, dtype=torch.float32)
        ctx.gradients = differentiate(
            (hidden_L_H, weight_VH, bias_V, targets_L),
            TokenLogprobs(logprobs_L, None),
            torch.full_like(logprobs_L, -1 / tokens),
            chunk,
            form,
            ctx.needs_input_grad[:3],
        )
        ctx.loss_tokens = len(hidden_L_H)
        return -logprobs_L.sum() / tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        found: HeadGradients = ctx.gradients
        del ctx.gradients
        return (*found.times(grad_loss, ctx.loss_tokens), None, None, None, None)
