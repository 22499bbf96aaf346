"""Divergences of a student's distributions from a teacher's.

Every file defines one function:

    compare(inputs: DivergenceInputs, *, options) -> DivergenceOutput

The output has the gradient too, because a head in chunks needs it while the logits exist.
"""
