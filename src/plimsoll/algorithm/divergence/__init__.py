"""Divergences of a student's distributions from a teacher's.

Every file defines one function:

    compare(inputs: DivergenceInputs, *, options) -> DivergenceOutput

The output includes the gradient, because a head that works in chunks needs it while the logits of a
chunk exist.
"""
