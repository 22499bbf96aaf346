"""The mean negative log-likelihood of given tokens, never holding the whole logits.

What each token weighs in a mean is known beforehand, so the gradients of hidden states and head
are made in the forward pass, where a chunk's logits are; the backward pass only scales them. That
takes 3 products with the head, where `token_logprobs` computes the logits again and takes 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plimsoll.model.logit_chunks import (
    HeadGradients,
    LogitForm,
    blocks,
    grad_of_logprobs,
    logit_chunks,
)
from plimsoll.model.rows import filled


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
    learning = torch.is_grad_enabled()
    inputs = (hidden_L_H, weight_VH, bias_V, targets_L, tokens, chunk, form, learning)
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
        learning: bool,
    ) -> Tensor:
        learned, hidden_L_H = len(hidden_L_H), filled(hidden_L_H)
        wanted = ctx.needs_input_grad[:3] if learning else (False, False, False)
        gradients = HeadGradients.empty(hidden_L_H, weight_VH, bias_V, wanted)
        logprobs_L = torch.empty_like(targets_L, dtype=torch.float32)
        grad_logprobs_L = torch.full_like(logprobs_L, -1 / tokens)
        for start, chunk_CV in logit_chunks(hidden_L_H, weight_VH, bias_V, chunk):
            for rows, block_NV in blocks(start, chunk_CV, learned):
                capped_NV = form.cap(block_NV.float())
                logp_NV = form.log_softmax(capped_NV)
                logprobs_L[rows] = logp_NV.gather(1, targets_L[rows, None])[:, 0]
                if learning:  # the gradient takes the place of the logits: still one chunk
                    grad_NV = grad_of_logprobs(logp_NV, targets_L[rows], grad_logprobs_L[rows])
                    block_NV.copy_(form.backward(grad_NV, capped_NV))
            gradients.add(start, chunk_CV, hidden_L_H, weight_VH)
        ctx.gradients, ctx.learned = gradients, learned
        return -logprobs_L.sum() / tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        found: HeadGradients = ctx.gradients
        del ctx.gradients
        return (*found.times(grad_loss, ctx.learned), None, None, None, None, None)
