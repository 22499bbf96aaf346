"""Compute log-probabilities of given tokens from hidden states, with logits in chunks.

The number of products with the head depends on what learns:

- A trained head: 4. Each chunk's logits are recomputed in the backward pass, because the weight of
  a token in the gradient depends on its log-probability.
- A frozen head: 2. The gradients of the hidden states are made in the forward pass, and scaled in
  the backward pass.
- The mean of the log-probabilities: 3. The weight of each token is known beforehand, so all
  gradients are made in the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plimsoll.model.logit_chunks import (
    HeadGradients,
    LogitForm,
    Wanted,
    blocks,
    fill_rows,
    grad_of_logprobs,
    logit_chunks,
    make_ahead,
)

Entropy = Literal["none", "metric", "loss"]
"""Whether the entropy is computed (`metric`, `loss`), and whether a gradient flows back (`loss`).
"""


class TokenLogprobs(NamedTuple):
    """The head's output for each learned token, in fp32.

    The class is a tuple, so that hooks on modules find the tensors.

    Attributes:
        logprobs_L: the log-probability of the target, in nats.
        entropy_L: the entropy of the next-token distribution, in nats; None if not requested.
    """

    logprobs_L: Tensor
    entropy_L: Tensor | None


def token_logprobs(
    hidden_L_H: Tensor,
    weight_VH: Tensor,
    targets_L: Tensor,
    *,
    bias_V: Tensor | None = None,
    chunk: int,
    form: LogitForm,
    entropy: Entropy = "none",
) -> TokenLogprobs:
    """Return the targets' log-probabilities and, if requested, entropies; fp32, [L].

    The logits are `form` applied to hidden @ weight.T + bias. The result is differentiable once,
    with respect to hidden, weight and bias: through the log-probabilities, and through the entropy
    if it is part of the loss. If L is 0, gradients are zeros, not None, because every rank must
    give ZeRO a gradient. Head and bias have the dtype of the hidden states; targets are int64, in
    [0, V). `chunk` is the number of rows of logits that exist at once.
    """
    assert chunk >= 1 and hidden_L_H.ndim == 2 and targets_L.shape == hidden_L_H.shape[:1]
    learns = weight_VH.requires_grad or (bias_V is not None and bias_V.requires_grad)
    of = (hidden_L_H, weight_VH, bias_V, targets_L)
    if not learns and entropy != "loss":
        each_L = torch.ones_like(targets_L, dtype=torch.float32)
        make = partial(differentiate, of, entropy, each_L, chunk, form)
        logprobs_L, entropy_L = make_ahead(hidden_L_H, weight_VH, bias_V, make)
        assert logprobs_L is not None
        return TokenLogprobs(logprobs_L, entropy_L)
    return TokenLogprobs(*_LearningHead.apply(*of, chunk, form, entropy))


def differentiate(
    of: tuple[Tensor, Tensor, Tensor | None, Tensor],
    entropy: Entropy,
    grad_logprobs_L: Tensor,
    chunk: int,
    form: LogitForm,
    wanted: Wanted,
) -> tuple[TokenLogprobs, HeadGradients]:
    """Return log-probabilities, and the gradients of a loss that is linear in them.

    Both come from the same logits. `of` is (hidden_L_H, weight_VH, bias_V, targets_L), as for
    `token_logprobs`; `wanted` says which gradients are needed. `grad_logprobs_L` is d loss /
    d log-probability of each token.
    """
    hidden_L_H, weight_VH, bias_V, targets_L = of
    loss_tokens, hidden_L_H = len(hidden_L_H), fill_rows(hidden_L_H, form.rows)
    output = _empty(targets_L, entropy)
    gradients = HeadGradients.empty(hidden_L_H, weight_VH, bias_V, wanted)
    for start, chunk_CV in logit_chunks(hidden_L_H, weight_VH, bias_V, chunk):
        for rows, block_NV in blocks(start, chunk_CV, loss_tokens):
            capped_NV = form.cap(block_NV.float())
            logp_NV = form.log_softmax(capped_NV)
            _read(logp_NV, rows, targets_L, output)
            if any(wanted):  # the gradient takes the place of the logits: still one chunk
                grad_NV = grad_of_logprobs(logp_NV, targets_L[rows], grad_logprobs_L[rows])
                block_NV.copy_(form.backward(grad_NV, capped_NV))
        gradients.add(start, chunk_CV, hidden_L_H, weight_VH)
    return output, gradients


def _empty(targets_L: Tensor, entropy: Entropy) -> TokenLogprobs:
    logprobs_L = torch.empty_like(targets_L, dtype=torch.float32)
    return TokenLogprobs(logprobs_L, None if entropy == "none" else torch.empty_like(logprobs_L))


class _LearningHead(torch.autograd.Function):
    """Recomputes logits in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_L_H: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_L: Tensor,
        chunk: int,
        form: LogitForm,
        entropy: Entropy,
    ) -> tuple[Tensor, Tensor | None]:
        output = _empty(targets_L, entropy)
        rows_L_H = fill_rows(hidden_L_H, form.rows)
        for start, logits_CV in logit_chunks(rows_L_H, weight_VH, bias_V, chunk):
            for rows, logits_NV in blocks(start, logits_CV, len(targets_L)):
                logp_NV = form.log_softmax(form.cap(logits_NV.float()))
                _read(logp_NV, rows, targets_L, output)
        if entropy == "metric":
            ctx.mark_non_differentiable(output.entropy_L)
        ctx.chunk, ctx.form = chunk, form
        ctx.set_materialize_grads(False)
        # The parameter itself, not a copy: ZeRO-3 fills it again before the backward pass.
        ctx.save_for_backward(hidden_L_H, weight_VH, bias_V, targets_L, output.entropy_L)
        return output

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_L: Tensor | None, grad_entropy_L: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_L_H, weight_VH, bias_V, targets_L, entropy_L = ctx.saved_tensors
        loss_tokens, hidden_L_H = len(hidden_L_H), fill_rows(hidden_L_H, ctx.form.rows)
        gradients = HeadGradients.empty(hidden_L_H, weight_VH, bias_V, ctx.needs_input_grad[:3])
        if grad_logprobs_L is None:
            grad_logprobs_L = torch.zeros_like(targets_L, dtype=torch.float32)
        for start, chunk_CV in logit_chunks(hidden_L_H, weight_VH, bias_V, ctx.chunk):
            for rows, block_NV in blocks(start, chunk_CV, loss_tokens):
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
            gradients.add(start, chunk_CV, hidden_L_H, weight_VH)
        bias = None if gradients.bias_V is None else gradients.bias_V.to(bias_V.dtype)
        hidden = None if gradients.hidden_L_H is None else gradients.hidden_L_H[:loss_tokens]
        return hidden, gradients.weight_VH, bias, None, None, None, None


def _read(logp_NV: Tensor, rows: slice, targets_L: Tensor, into: TokenLogprobs) -> None:
    """Write the log-probabilities of a block, and its entropies if requested, into `into`."""
    into.logprobs_L[rows] = logp_NV.gather(1, targets_L[rows, None])[:, 0]
    if into.entropy_L is not None:
        into.entropy_L[rows] = -(logp_NV.exp().mul_(logp_NV)).sum(1)


def _grad_logits(
    logits_NV: Tensor,
    targets_N: Tensor,
    grad_logprobs_N: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    form: LogitForm,
) -> Tensor:
    """Return d loss / d logits of a block.

    With p = softmax(z) and entropy H, d log p_target / dz_j = [j = target] - p_j and dH / dz_j =
    -p_j (log p_j + H). `entropy` is (H, d loss / d H), both of shape [N].
    """
    capped_NV = form.cap(logits_NV)
    logp_NV = form.log_softmax(capped_NV)
    if entropy is None:
        grad_NV = grad_of_logprobs(logp_NV, targets_N, grad_logprobs_N)
    else:
        entropy_N, grad_entropy_N = entropy
        grad_NV = logp_NV.exp()
        logp_NV.add_(entropy_N[:, None]).mul_(grad_entropy_N[:, None])
        grad_NV.mul_(logp_NV.add_(grad_logprobs_N[:, None]).neg_())
        grad_NV.scatter_add_(1, targets_N[:, None], grad_logprobs_N[:, None])
    return form.backward(grad_NV, capped_NV)


@dataclass(frozen=True)
class Imitation:
    """A lesson that makes the targets more likely: its loss is the negative log-likelihood.

    Attributes:
        tokens: the learned tokens of the optimizer step, on all ranks together.
    """

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
    """Return the sum of the targets' negative log-probabilities, divided by `tokens`; fp32 scalar.

    Parameters and shapes are those of `token_logprobs`. If L is 0, gradients are zeros, not None.
    The result is differentiable once, with respect to hidden, weight and bias.
    """
    assert chunk >= 1 and tokens > 0 and len(hidden_L_H) == len(targets_L)
    of = (hidden_L_H, weight_VH, bias_V, targets_L)

    def make(wanted: Wanted) -> tuple[tuple[Tensor], HeadGradients]:
        each_L = torch.full_like(targets_L, -1 / tokens, dtype=torch.float32)
        output, gradients = differentiate(of, "none", each_L, chunk, form, wanted)
        return (-output.logprobs_L.sum() / tokens,), gradients

    (loss,) = make_ahead(hidden_L_H, weight_VH, bias_V, make)
    assert loss is not None
    return loss
