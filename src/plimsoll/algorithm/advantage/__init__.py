"""Advantage estimators: every file defines one function
`estimate(inputs, *, options) -> Advantages` and says in `NEEDS_VALUES` whether it reads values.
"""
