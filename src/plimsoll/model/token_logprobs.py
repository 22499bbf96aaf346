"""Log-probabilities of given tokens from hidden states, never holding the whole logits.

The logits of `chunk` rows exist at once, in the dtype of the weights; the softmax is computed
from them in fp32, a few rows at a time. The backward pass computes each chunk's logits again: the
gradient of the weights cannot be prepared in the forward pass, because in policy optimisation
a token's loss weight depends on its log-probability. So the head costs chunk * vocabulary * 2
bytes in bfloat16, instead of about 16 bytes for every token * vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# fp32 elements that the softmax works on at once. On CPU they stay in the cache (measured: the
# element-wise passes over a chunk are 3 times faster than in one piece); accelerators want more.
_BLOCK_ELEMENTS_CPU = 2**18
_BLOCK_ELEMENTS_ACCELERATOR = 2**24


class TokenLogprobs(NamedTuple):
    """What the head gives for each learned token, in fp32. A tuple, so that hooks on modules
    find the tensors.

    logprobs_L: log p(target). entropy_L: the entropy, in nats, of the whole distribution; None
    where it was not asked for.
    """

    logprobs_L: Tensor
    entropy_L: Tensor | None


@dataclass(frozen=True)
class _Form:
    """How hidden states become logits: rows at once, then cap * tanh(x / cap), then scale * x."""

    chunk: int
    scale: float
    softcap: float | None


def token_logprobs(
    hidden_L_H: Tensor,
    weight_VH: Tensor,
    targets_L: Tensor,
    *,
    bias_V: Tensor | None = None,
    chunk: int,
    scale: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool,
) -> TokenLogprobs:
    """log softmax(scale * cap(hidden @ weight.T + bias))[target], and the entropy, in fp32.

    hidden_L_H: the hidden states that predict, shape [L, H]; L may be 0, and then the gradients
        are zeros, not None, because every rank must give ZeRO a gradient.
    weight_VH, bias_V: the head, in the dtype of hidden_L_H.
    targets_L: token ids, int64, in [0, V).
    chunk: rows of logits that exist at once.
    scale: 1 / temperature, times the model's own factor if it has one.
    softcap: cap * tanh(logits / cap), before the scale: Gemma 2
        (https://arxiv.org/abs/2408.00118, section 2) caps in the model, and samplers divide by
        the temperature afterwards.
    with_entropy: also give the entropy.

    Differentiable once, for hidden, weight and bias, through log-probabilities and entropy.
    """
    assert chunk >= 1 and hidden_L_H.ndim == 2 and targets_L.shape == hidden_L_H.shape[:1]
    form = _Form(chunk, scale, softcap)
    return TokenLogprobs(
        *_TokenLogprobs.apply(hidden_L_H, weight_VH, bias_V, targets_L, form, with_entropy)
    )


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_L_H: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_L: Tensor,
        form: _Form,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        logprobs_L = torch.empty_like(targets_L, dtype=torch.float32)
        entropy_L = torch.empty_like(logprobs_L) if with_entropy else None
        for start, logits_CV in _logit_chunks(hidden_L_H, weight_VH, bias_V, form.chunk):
            for rows, logits_NV in _blocks(start, logits_CV):
                logp_NV = _log_softmax(_cap(logits_NV.float(), form), form)
                logprobs_L[rows] = logp_NV.gather(1, targets_L[rows, None])[:, 0]
                if entropy_L is not None:
                    entropy_L[rows] = -(logp_NV.exp().mul_(logp_NV)).sum(1)
        ctx.form = form
        ctx.set_materialize_grads(False)
        # The parameter itself, not a copy: ZeRO-3 fills it again before the backward pass.
        ctx.save_for_backward(hidden_L_H, weight_VH, bias_V, targets_L, entropy_L)
        return logprobs_L, entropy_L

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_L: Tensor | None, grad_entropy_L: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_L_H, weight_VH, bias_V, targets_L, entropy_L = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_L_H) if for_hidden else None
        grad_weight = torch.zeros_like(weight_VH) if for_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if for_bias else None
        if grad_logprobs_L is None:
            grad_logprobs_L = torch.zeros_like(targets_L, dtype=torch.float32)
        for start, chunk_CV in _logit_chunks(hidden_L_H, weight_VH, bias_V, ctx.form.chunk):
            for rows, block_NV in _blocks(start, chunk_CV):
                # The gradient takes the place of the logits: still one chunk.
                block_NV.copy_(
                    _grad_logits(
                        block_NV.float(),
                        targets_L[rows],
                        grad_logprobs_L[rows],
                        None if grad_entropy_L is None else (entropy_L[rows], grad_entropy_L[rows]),
                        ctx.form,
                    )
                )
            chunk = slice(start, start + len(chunk_CV))
            if grad_hidden is not None:
                torch.mm(chunk_CV, weight_VH, out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight.addmm_(chunk_CV.T, hidden_L_H[chunk])
            if grad_bias is not None:
                grad_bias += chunk_CV.sum(0, dtype=torch.float32)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias_V.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _logit_chunks(
    hidden_L_H: Tensor, weight_VH: Tensor, bias_V: Tensor | None, chunk: int
) -> Iterator[tuple[int, Tensor]]:
    """The first row and the logits of each chunk; one buffer serves them all."""
    buffer_CV = hidden_L_H.new_empty(min(chunk, len(hidden_L_H)), len(weight_VH))
    for start in range(0, len(hidden_L_H), chunk):
        rows_CH = hidden_L_H[start : start + chunk]
        logits_CV = buffer_CV[: len(rows_CH)]
        torch.mm(rows_CH, weight_VH.T, out=logits_CV)
        if bias_V is not None:
            logits_CV += bias_V
        yield start, logits_CV


def _blocks(start: int, logits_CV: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Cut a chunk into a few rows at a time, with the rows' place among all rows."""
    elements = _BLOCK_ELEMENTS_CPU if logits_CV.is_cpu else _BLOCK_ELEMENTS_ACCELERATOR
    for block_NV in logits_CV.split(max(1, elements // logits_CV.shape[1])):
        yield slice(start, start + len(block_NV)), block_NV
        start += len(block_NV)


def _cap(logits_NV: Tensor, form: _Form) -> Tensor:
    if form.softcap is None:
        return logits_NV
    return (logits_NV / form.softcap).tanh_().mul_(form.softcap)


def _log_softmax(capped_NV: Tensor, form: _Form) -> Tensor:
    return torch.log_softmax(capped_NV if form.scale == 1.0 else capped_NV * form.scale, dim=1)


def _grad_logits(
    logits_NV: Tensor,
    targets_N: Tensor,
    grad_logprobs_N: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    form: _Form,
) -> Tensor:
    """d loss / d logits of a block.

    With p = softmax(z) and entropy H, d log p_target / dz_j = [j = target] - p_j and
    dH / dz_j = -p_j (log p_j + H). entropy: (H, d loss / d H), both shape [N].
    """
    capped_NV = _cap(logits_NV, form)
    logp_NV = _log_softmax(capped_NV, form)
    if entropy is None:
        grad_NV = logp_NV.exp_().mul_(-grad_logprobs_N[:, None])
    else:
        entropy_N, grad_entropy_N = entropy
        grad_NV = logp_NV.exp()
        logp_NV.add_(entropy_N[:, None]).mul_(grad_entropy_N[:, None])
        grad_NV.mul_(logp_NV.add_(grad_logprobs_N[:, None]).neg_())
    grad_NV.scatter_add_(1, targets_N[:, None], grad_logprobs_N[:, None])
    if form.scale != 1.0:
        grad_NV.mul_(form.scale)
    if form.softcap is not None:
        grad_NV.mul_(1 - (capped_NV / form.softcap).square_())
    return grad_NV
