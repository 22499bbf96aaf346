"""KL(teacher || student), which spreads the student over all that the teacher may say.

Hinton et al. 2015, https://arxiv.org/abs/1503.02531.
"""

from __future__ import annotations

from plimsoll.algorithm.inputs import DivergenceInputs, DivergenceOutput


def compare(inputs: DivergenceInputs) -> DivergenceOutput:
    """Return sum p (log p - log q), with gradient q - p; p is the teacher's and q the student's."""
    teacher_NV = inputs.teacher_NV.exp()
    gaps_NV = (inputs.teacher_NV - inputs.student_NV).mul_(teacher_NV)
    values_N = gaps_NV.sum(1)
    return DivergenceOutput(values_N, gaps_NV.copy_(inputs.student_NV).exp_().sub_(teacher_NV))
