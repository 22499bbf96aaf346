"""Confidence intervals of measured figures whose rows may share a prompt.

Rows of one prompt are not independent: a hard prompt is hard for all of its rows, so ten rows of
one prompt tell less than ten rows of ten prompts. The design effect is the cost: the variance of
the figure over prompts, divided by the variance if each row had a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from plimsoll.records import Ints

Doubles = NDArray[np.float64]

NORMAL_95 = 1.959964
"""The standard normal's 97.5 % quantile."""
_FEWEST = {1: 12.706205, 2: 4.302653}
"""Student's 97.5 % quantiles for degrees of freedom at which the expansion below is not close."""


def share_interval(
    values_N: Sequence[float] | Doubles, prompts: Iterable[Hashable]
) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of values that are 0, 1, or 0.5 for a tie.

    It is Wilson's interval with the effective sample size N / design effect, as Franco et al. 2019
    recommend (https://pmc.ncbi.nlm.nih.gov/articles/PMC6690503); Wilson's own if no rows share a
    prompt. `prompts` has any key for the prompt of each row.
    """
    values = np.asarray(values_N, dtype=np.float64)
    rows = len(values)
    # Times N, so that sums are exact: no difference between prompts is then 0 and not almost 0.
    effect = design_effect(rows * values - values.sum(), prompts)
    return wilson_interval(float(values.mean()), rows / effect)


def mean_interval(
    values_N: Sequence[float] | Doubles, prompts: Iterable[Hashable]
) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean of any values; None for a single prompt.

    The interval is the mean +- t standard errors over K prompts, with K - 1 degrees of freedom. If
    all prompts have equally many rows, this is Student's interval of the prompts' means; else the
    mean is a ratio of two sums over prompts (Cochran 1977, Sampling Techniques, section 6.3).
    Values that are all 0 or 1 get their `share_interval`. Parameters as there.
    """
    values = np.asarray(values_N, dtype=np.float64)
    if np.isin(values, (0, 1)).all():
        return share_interval(values, prompts)
    mean = float(values.mean())
    sums_K, _ = _by_prompt(values - mean, prompts)
    count = len(sums_K)
    if count == 1:
        return None
    error = sqrt(count / (count - 1) * float(sums_K @ sums_K)) / len(values)
    half = student_95(count - 1) * error
    return mean - half, mean + half


def design_effect(influence_N: Doubles, prompts: Iterable[Hashable]) -> float:
    """Return the number of rows over the number of independent rows that would tell as much.

    It is 1 if no two rows share a prompt. Otherwise it is the variance between prompts' sums over
    that between rows, each with Bessel's correction, times the squared ratio of Student's quantiles
    for as many prompts and for as many rows: the degrees of freedom of Korn and Graubard 1998,
    Survey Methodology 24(2), 193-201. With one prompt, or if prompts do not differ at all (all rows
    are right, say), the variance is unknown; each prompt then counts as one row (Kish 1965, Survey
    Sampling, with a correlation of 1 within prompts).

    `influence_N` says how far each row moves the figure, in any unit; the influences add up to 0.
    """
    sums_K, sizes_K = _by_prompt(influence_N, prompts)
    rows, count = len(influence_N), len(sums_K)
    if count == rows:
        return 1.0
    between = float(sums_K @ sums_K)
    if count == 1 or between == 0:
        return float(sizes_K @ sizes_K) / rows
    within = float(influence_N @ influence_N)
    few = student_95(count - 1) / student_95(rows - 1)
    return between / within * (count / (count - 1)) / (rows / (rows - 1)) * few**2


def wilson_interval(share: float, count: float) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share measured on `count` independent cases.

    Unlike share +- 1.96 standard errors it stays within [0, 1] and is right near the ends and for
    few cases. Source: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953.
    """
    assert 0 <= share <= 1 and count > 0
    z2 = NORMAL_95**2 / count
    middle = (share + z2 / 2) / (1 + z2)
    half = sqrt(share * (1 - share) * z2 + z2**2 / 4) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def student_95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t for degrees of freedom, to 0.2 %.

    It is the expansion in 1 / freedom of Abramowitz and Stegun 1964, Handbook of Mathematical
    Functions, 26.7.5.
    """
    z, n = NORMAL_95, freedom
    return _FEWEST.get(freedom) or (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


def _by_prompt(values_N: Doubles, prompts: Iterable[Hashable]) -> tuple[Doubles, Ints]:
    numbers: dict[Hashable, int] = {}  # from 0, in the order in which prompts first come
    places = np.array([numbers.setdefault(key, len(numbers)) for key in prompts], dtype=np.int64)
    sums_K = np.bincount(places, weights=values_N).astype(np.float64)
    return sums_K, np.bincount(places).astype(np.int64)
