"""KL(student || teacher), which keeps the student from what the teacher would not say.

MiniLLM, Gu et al. 2023, https://arxiv.org/abs/2306.08543, here on given tokens.
"""

from __future__ import annotations

from plimsoll.algorithm.inputs import DivergenceInputs, DivergenceOutput


def compare(inputs: DivergenceInputs) -> DivergenceOutput:
    """Return D = sum q (log q - log p), with gradient q_j (log q_j - log p_j - D) for logit j.

    p is the teacher's and q the student's distribution.
    """
    gaps_NV = inputs.student_NV - inputs.teacher_NV
    student_NV = inputs.student_NV.exp()
    values_N = (gaps_NV * student_NV).sum(1)
    return DivergenceOutput(values_N, gaps_NV.sub_(values_N[:, None]).mul_(student_NV))
