"""How sure a measured share is."""

from __future__ import annotations

from math import sqrt

NORMAL_95 = 1.959964
"""The standard normal's 97.5 % quantile."""


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share that was measured on `count` independent cases.

    Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953: unlike share +- 1.96 standard
    errors it stays within [0, 1] and is right near the ends and for few cases.
    """
    assert 0 <= share <= 1 and count > 0
    z2 = NORMAL_95**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = sqrt(share * (1 - share) * z2 + z2**2 / 4) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)
