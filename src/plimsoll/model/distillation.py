"""Compute a student's loss from a teacher's logits, chunk by chunk.

At any time only a chunk of rows of both logits exists. The weight of each token is known
beforehand, so all gradients are made in the forward pass and only scaled in the backward pass. Each
chunk thus takes 4 products with a head instead of 6, and the teacher's head is needed only in the
forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from plimsoll.algorithm.inputs import DivergenceInputs, DivergenceOutput
from plimsoll.model.logit_chunks import (
    HeadGradients,
    LogitForm,
    Wanted,
    blocks,
    fill_rows,
    logit_chunks,
    make_ahead,
)


@dataclass(frozen=True)
class Lesson:
    """The teacher's side of one micro-batch, from which a student's head learns.

    Attributes:
        hidden_L_H: the teacher's hidden states; their size and dtype may differ from the student's.
        weight_VH: the teacher's head. Rows beyond the student's vocabulary are padding, and are
            left out.
        bias_V: the bias of the teacher's head.
        form: how the teacher's logits are computed.
        divergence: the divergence of the student's distributions from the teacher's; see
            algorithm/divergence.py.
        temperature: the divisor of both logits for the divergence.
        nll_share: the weight of the negative log-likelihood in the loss. The divergence has the
            rest, times temperature^2, which keeps its gradient as large at any temperature (Hinton
            et al. 2015, https://arxiv.org/abs/1503.02531, section 2).
        tokens: the learned tokens of the optimizer step, on all ranks together.
    """

    hidden_L_H: Tensor
    weight_VH: Tensor
    bias_V: Tensor | None
    form: LogitForm
    divergence: Callable[[DivergenceInputs], DivergenceOutput]
    temperature: float
    nll_share: float
    tokens: int


class Distilled(NamedTuple):
    """A micro-batch's shares of the means over the step's learned tokens, as fp32 scalars.

    Only `loss` has a gradient. The class is a tuple, so that hooks on modules find the tensors.

    Attributes:
        loss: the weighted sum of `divergence` and `nll`; see `Lesson.nll_share`.
        divergence: nats, at the temperature.
        nll: nats, at temperature 1.
    """

    loss: Tensor
    divergence: Tensor
    nll: Tensor


def distil(
    hidden_L_H: Tensor,
    weight_VH: Tensor,
    targets_L: Tensor,
    lesson: Lesson,
    *,
    bias_V: Tensor | None = None,
    chunk: int,
    form: LogitForm,
) -> Distilled:
    """Return the loss of the student on a lesson, with its two terms.

    The student's logits are `form` applied to hidden @ weight.T + bias. Shapes are those of
    `token_logprobs`; if L is 0, gradients are zeros, not None. `chunk` is the number of rows of
    student's and teacher's logits that exist at once. `loss` is differentiable once, with respect
    to hidden, weight and bias.
    """
    assert chunk >= 1 and len(hidden_L_H) == len(targets_L) == len(lesson.hidden_L_H)
    assert len(weight_VH) <= len(lesson.weight_VH), "the teacher's vocabulary is smaller"
    of = (hidden_L_H, weight_VH, bias_V)
    loss, divergence, nll = make_ahead(
        *of, partial(_distill_chunks, of, targets_L, lesson, chunk, form)
    )
    assert loss is not None and divergence is not None and nll is not None
    return Distilled(loss, divergence, nll)


def _distill_chunks(
    of: tuple[Tensor, Tensor, Tensor | None],
    targets_L: Tensor,
    lesson: Lesson,
    chunk: int,
    form: LogitForm,
    wanted: Wanted,
) -> tuple[tuple[Tensor, Tensor, Tensor], HeadGradients]:
    hidden_L_H, weight_VH, bias_V = of
    loss_tokens, hidden_L_H = len(hidden_L_H), fill_rows(hidden_L_H, form.rows)
    gradients = HeadGradients.empty(hidden_L_H, weight_VH, bias_V, wanted)
    divergence_L = torch.zeros_like(targets_L, dtype=torch.float32)
    nll_L = torch.zeros_like(divergence_L)
    student = logit_chunks(hidden_L_H, weight_VH, bias_V, chunk)
    teacher_VH, teacher_V = lesson.weight_VH[: len(weight_VH)], lesson.bias_V
    teacher_V = None if teacher_V is None else teacher_V[: len(weight_VH)]
    teacher = logit_chunks(fill_rows(lesson.hidden_L_H, form.rows), teacher_VH, teacher_V, chunk)
    for (start, chunk_CV), (_, teacher_CV) in zip(student, teacher, strict=True):
        pairs = zip(*(blocks(start, x, loss_tokens) for x in (chunk_CV, teacher_CV)), strict=True)
        for (rows, block_NV), (_, teacher_NV) in pairs:
            comparison = _compare(block_NV, teacher_NV, targets_L[rows], lesson, form)
            divergence_L[rows], nll_L[rows], grad_NV = comparison
            block_NV.copy_(grad_NV)  # it takes the place of the logits
        gradients.add(start, chunk_CV, hidden_L_H, weight_VH)
    divergence, nll = divergence_L.sum() / lesson.tokens, nll_L.sum() / lesson.tokens
    soft = (1 - lesson.nll_share) * lesson.temperature**2
    return (soft * divergence + lesson.nll_share * nll, divergence, nll), gradients


def _compare(
    logits_NV: Tensor, teacher_NV: Tensor, targets_N: Tensor, lesson: Lesson, form: LogitForm
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's divergences [N], negative log-likelihoods [N], and d loss / d logits."""
    temperature, share = lesson.temperature, lesson.nll_share
    capped_NV = form.cap(logits_NV.float())
    soft_NV = _at(form, temperature).log_softmax(capped_NV)
    teacher_form = _at(lesson.form, temperature)
    soft_teacher_NV = teacher_form.log_softmax(teacher_form.cap(teacher_NV.float()))
    compared = lesson.divergence(DivergenceInputs(soft_NV, soft_teacher_NV))
    del soft_teacher_NV
    logp_NV = soft_NV if temperature == 1 else form.log_softmax(capped_NV)
    nll_N = -logp_NV.gather(1, targets_N[:, None])[:, 0]
    # The gradient by the capped, scaled logits; the temperature divides them.
    grad_NV = compared.gradient_NV.mul_((1 - share) * temperature / lesson.tokens)
    if share > 0:
        each = share / lesson.tokens
        grad_NV.add_(logp_NV.exp(), alpha=each)
        grad_NV.scatter_add_(1, targets_N[:, None], torch.full_like(nll_N, -each)[:, None])
    return compared.values_N, nll_N, form.backward(grad_NV, capped_NV)


def _at(form: LogitForm, temperature: float) -> LogitForm:
    return replace(form, scale=form.scale / temperature)
