"""Divergences of a student's distributions from a teacher's.

`algorithm.divergence.name` chooses a function of this file by its name:

    divergence(inputs: DivergenceInputs, *, options) -> DivergenceOutput

The output includes the gradient, because a head that works in chunks needs it while the logits of a
chunk exist.
"""

from __future__ import annotations

from math import log

import torch

from plimsoll.algorithm.inputs import DivergenceInputs, DivergenceOutput
from plimsoll.config.base import OpenShare


def forward_kl(inputs: DivergenceInputs) -> DivergenceOutput:
    """Return sum p (log p - log q), with gradient q - p; p is the teacher's and q the student's.

    KL(teacher || student), which spreads the student over all that the teacher may say.

    Hinton et al. 2015, https://arxiv.org/abs/1503.02531.
    """
    teacher_NV = inputs.teacher_NV.exp()
    gaps_NV = (inputs.teacher_NV - inputs.student_NV).mul_(teacher_NV)
    values_N = gaps_NV.sum(1)
    return DivergenceOutput(values_N, gaps_NV.copy_(inputs.student_NV).exp_().sub_(teacher_NV))


def reverse_kl(inputs: DivergenceInputs) -> DivergenceOutput:
    """Return D = sum q (log q - log p), with gradient q_j (log q_j - log p_j - D) for logit j.

    KL(student || teacher), which keeps the student from what the teacher would not say.

    MiniLLM, Gu et al. 2023, https://arxiv.org/abs/2306.08543, here on given tokens.

    p is the teacher's and q the student's distribution.
    """
    gaps_NV = inputs.student_NV - inputs.teacher_NV
    student_NV = inputs.student_NV.exp()
    values_N = (gaps_NV * student_NV).sum(1)
    return DivergenceOutput(values_N, gaps_NV.sub_(values_N[:, None]).mul_(student_NV))


def jsd(inputs: DivergenceInputs, *, beta: OpenShare = 0.5) -> DivergenceOutput:
    """Return beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.

    The generalised Jensen-Shannon divergence, between the two KLs.

    Agarwal et al. 2023 (GKD), https://arxiv.org/abs/2306.13649, section 2, here on given
    tokens.

    p is the teacher's and q the student's distribution. The gradient for logit j is (1 - beta) q_j
    (log q_j - log m_j - KL(q || m)); the terms of m cancel. With beta near 0 the value is about
    beta * KL(p || q), near 1 about (1 - beta) * KL(q || p).
    """
    student_NV, teacher_NV = inputs.student_NV, inputs.teacher_NV
    mixed_NV = torch.logaddexp(teacher_NV + log(beta), student_NV + log(1 - beta))
    from_teacher_N = (teacher_NV - mixed_NV).mul_(teacher_NV.exp()).sum(1)
    gaps_NV = mixed_NV.neg_().add_(student_NV)
    student_NV = student_NV.exp()
    from_student_N = (gaps_NV * student_NV).sum(1)
    gradient_NV = gaps_NV.sub_(from_student_N[:, None]).mul_(student_NV).mul_(1 - beta)
    return DivergenceOutput(beta * from_teacher_N + (1 - beta) * from_student_N, gradient_NV)
