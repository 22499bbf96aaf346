"""Compute logits in chunks of rows, for heads that never hold all logits at once.

A chunk has the dtype of the weights. Softmaxes are computed from it in fp32, for a block of a few
rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

# fp32 elements that the softmax works on at once. On CPU they stay in the cache (measured: the
# element-wise passes over a chunk are 3 times faster than in one piece); accelerators want more.
BLOCK_ELEMENTS_CPU = 2**18
BLOCK_ELEMENTS_ACCELERATOR = 2**24


def block_elements(tensor: Tensor) -> int:
    """Return the number of elements of a block of fp32 values, for the tensor's device."""
    return BLOCK_ELEMENTS_CPU if tensor.is_cpu else BLOCK_ELEMENTS_ACCELERATOR


def fill_rows(x_N: Tensor, multiple: int) -> Tensor:
    """Return x, of shape [N] or [N, H], with rows of zeros added until N is a multiple."""
    more = -len(x_N) % multiple
    return pad(x_N, (0, 0) * (x_N.ndim - 1) + (0, more)) if more else x_N


@dataclass(frozen=True)
class LogitForm:
    """The form of logits: scale * cap * tanh(x / cap), where x is the head's product.

    Attributes:
        scale: 1 / temperature, times the model's own factor if it has one.
        softcap: the cap, or None. The cap comes before the scale, because Gemma 2
            (https://arxiv.org/abs/2408.00118, section 2) caps in the model, and samplers divide by
            the temperature afterwards.
        rows: the rows of hidden states are filled with zeros to a multiple of this number.
    """

    scale: float = 1.0
    softcap: float | None = None
    rows: int = 1

    def cap(self, logits_NV: Tensor) -> Tensor:
        """Return the logits after the cap, before the scale."""
        if self.softcap is None:
            return logits_NV
        return (logits_NV / self.softcap).tanh_().mul_(self.softcap)

    def log_softmax(self, capped_NV: Tensor) -> Tensor:
        """Return log-probabilities from capped logits."""
        return torch.log_softmax(capped_NV if self.scale == 1.0 else capped_NV * self.scale, dim=1)

    def backward(self, grad_NV: Tensor, capped_NV: Tensor) -> Tensor:
        """Return the gradient of the head's product, from that of the capped, scaled logits.

        `grad_NV` is changed in place.
        """
        if self.scale != 1.0:
            grad_NV.mul_(self.scale)
        if self.softcap is not None:
            grad_NV.mul_(1 - (capped_NV / self.softcap).square_())
        return grad_NV


def logit_chunks(
    hidden_L_H: Tensor, weight_VH: Tensor, bias_V: Tensor | None, chunk: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first row, logits) of each chunk; the next chunk overwrites the logits."""
    buffer_CV = hidden_L_H.new_empty(min(chunk, len(hidden_L_H)), len(weight_VH))
    for start in range(0, len(hidden_L_H), chunk):
        rows_CH = hidden_L_H[start : start + chunk]
        logits_CV = buffer_CV[: len(rows_CH)]
        torch.mm(rows_CH, weight_VH.T, out=logits_CV)
        if bias_V is not None:
            logits_CV += bias_V
        yield start, logits_CV


def blocks(start: int, logits_CV: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice among all rows, logits) for blocks of a few rows of a chunk.

    Rows from number `rows` on only fill the chunk up (see `LogitForm`); they are zeroed and left
    out.
    """
    real = max(0, rows - start)
    logits_CV[real:] = 0
    size = max(1, block_elements(logits_CV) // logits_CV.shape[1])
    for block_NV in logits_CV[:real].split(size):
        yield slice(start, start + len(block_NV)), block_NV
        start += len(block_NV)


def grad_of_logprobs(logp_NV: Tensor, targets_N: Tensor, grad_logprobs_N: Tensor) -> Tensor:
    """Return d loss / dz of a block, for a loss of the targets' log-probabilities alone.

    With p = softmax(z), d log p_target / dz_j = [j = target] - p_j. `logp_NV` is overwritten.
    """
    grad_NV = logp_NV.exp_().mul_(-grad_logprobs_N[:, None])
    return grad_NV.scatter_add_(1, targets_N[:, None], grad_logprobs_N[:, None])


Wanted = tuple[bool, bool, bool]
"""Whether the gradients of hidden states, weight and bias are needed."""


@dataclass(frozen=True)
class HeadGradients:
    """Gradients of hidden states and head, added up chunk by chunk; None if not wanted.

    Attributes:
        hidden_L_H: the gradient of the hidden states, in their dtype.
        weight_VH: the gradient of the weight, in its dtype.
        bias_V: the gradient of the bias, in fp32.
    """

    hidden_L_H: Tensor | None
    weight_VH: Tensor | None
    bias_V: Tensor | None

    @classmethod
    def empty(
        cls,
        hidden_L_H: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        wanted: Wanted,
    ) -> HeadGradients:
        """Return the gradients before the first chunk."""
        return cls(
            torch.empty_like(hidden_L_H) if wanted[0] else None,
            torch.zeros_like(weight_VH) if wanted[1] else None,
            torch.zeros_like(bias_V, dtype=torch.float32)
            if wanted[2] and bias_V is not None
            else None,
        )

    def add(self, start: int, grad_CV: Tensor, hidden_L_H: Tensor, weight_VH: Tensor) -> None:
        """Add the gradients of a chunk that begins at row `start`, given that of its logits."""
        chunk = slice(start, start + len(grad_CV))
        if self.hidden_L_H is not None:
            torch.mm(grad_CV, weight_VH, out=self.hidden_L_H[chunk])
        if self.weight_VH is not None:
            self.weight_VH.addmm_(grad_CV.T, hidden_L_H[chunk])
        if self.bias_V is not None:
            self.bias_V.add_(grad_CV.sum(0, dtype=torch.float32))

    def times(self, factor: Tensor, loss_tokens: int) -> tuple[Tensor | None, ...]:
        """Return the gradients of the first `loss_tokens` hidden states, weight and bias, scaled.

        They are scaled in place, so call this once. `factor` is a scalar that the dtype of the
        weights can hold, such as 1; or, with a frozen head, a number for each row.
        """
        hidden = None if self.hidden_L_H is None else self.hidden_L_H[:loss_tokens]
        if factor.ndim:
            assert hidden is not None and self.weight_VH is None and self.bias_V is None
            return hidden.mul_(factor[:, None]), None, None
        gradients = (hidden, self.weight_VH, self.bias_V)
        return tuple(None if g is None else g.mul_(factor.to(g.dtype)) for g in gradients)


Outputs = tuple[Tensor | None, ...]


def make_ahead(
    hidden_L_H: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    make: Callable[[Wanted], tuple[Outputs, HeadGradients]],
) -> Outputs:
    """Return the outputs of `make`, which also returns their gradients.

    So gradients are made in the forward pass, where the logits exist, and the backward pass only
    scales them. Only the first output is differentiable, and only once. It is a scalar, or a number
    for each row; for these, `make` returns the gradients of their sum.
    """
    if not torch.is_grad_enabled():
        return make((False, False, False))[0]
    made: Outputs = _MakeAhead.apply(hidden_L_H, weight_VH, bias_V, make)
    return made


class _MakeAhead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_L_H: Tensor, weight_VH: Tensor, bias_V: Tensor | None, make: Any
    ) -> Outputs:
        outputs: Outputs
        outputs, ctx.gradients = make(ctx.needs_input_grad[:3])
        ctx.loss_tokens = len(hidden_L_H)
        ctx.mark_non_differentiable(*(x for x in outputs[1:] if x is not None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, *_: Tensor | None) -> Outputs:
        gradients: HeadGradients = ctx.gradients
        del ctx.gradients
        return (*gradients.times(factor, ctx.loss_tokens), None)
