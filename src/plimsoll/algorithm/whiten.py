"""Shift and scale a batch's values (such as advantages) to mean 0 and standard deviation 1."""

from __future__ import annotations

import torch
from torch import Tensor

_EPS = 1e-8


def whiten(values_L: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8), with the population's variance (divided by L).

    Values that are all alike, a single one included, have nothing to scale by: they become 0. No
    values give no values.
    """
    if len(values_L) == 0:
        return values_L.clone()
    variance, mean = torch.var_mean(values_L, correction=0)
    return (values_L - mean) * torch.rsqrt(variance + _EPS)
