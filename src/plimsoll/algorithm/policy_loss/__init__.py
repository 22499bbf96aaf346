"""Policy losses: every file defines one function `loss(inputs, *, options) -> TokenLoss`."""
