"""Divergences of a student's distributions from a teacher's: every file defines one function

    compare(inputs: DivergenceInputs, *, options) -> DivergenceOutput

which gives the gradient too, because a head in chunks needs it while the logits exist.
"""
