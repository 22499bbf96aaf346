"""What evaluations make of a mean negative log-likelihood."""

from math import exp


def perplexity(mean_nll: float) -> float:
    """Of a mean in nats; at most about 1e304, which a float still holds."""
    return exp(min(mean_nll, 700.0))
