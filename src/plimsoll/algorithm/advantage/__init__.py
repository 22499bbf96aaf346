"""Advantage estimators: every file defines `estimate(inputs, *, options) -> Advantages`."""
