"""Preference losses: every file defines one function `loss`.

Its parameters say whether it compares with a reference:

    loss(inputs: PreferenceLossInputs, reference: PairValues, *, options) -> LossOutput
    loss(inputs: PreferenceLossInputs, *, options) -> LossOutput           (reference-free)

reference: the responses' log-probs under the frozen reference.
"""
