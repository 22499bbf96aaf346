"""Losses on single responses that are good or bad by themselves.

Every file defines one function:

    loss(inputs: FeedbackLossInputs, *, options) -> LossOutput
"""
