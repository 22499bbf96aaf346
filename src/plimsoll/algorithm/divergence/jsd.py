"""The generalised Jensen-Shannon divergence, between the two KLs.

Agarwal et al. 2023 (GKD), https://arxiv.org/abs/2306.13649, section 2, here on given tokens.
"""

from __future__ import annotations

from math import log

import torch

from plimsoll.algorithm.inputs import DivergenceInputs, DivergenceOutput
from plimsoll.config.base import OpenShare


def compare(inputs: DivergenceInputs, *, beta: OpenShare = 0.5) -> DivergenceOutput:
    """Return beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q.

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
