"""Figures of evaluations: confidence intervals, separation of two groups, pass@k, calibration.

Rows of one prompt are not independent: a hard prompt is hard for all of its rows, so ten rows of
one prompt tell less than ten rows of ten prompts. The design effect measures this: it is the
figure's variance divided by the variance that it would have if no rows shared a prompt.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import comb, nan, sqrt

import numpy as np
from numpy.typing import NDArray

from plimsoll.records import Bools, Floats, Ints

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

    Both ends are NaN if a value is not finite.

    The interval is the mean +- t standard errors over K prompts, with K - 1 degrees of freedom. If
    all prompts have equally many rows, this is Student's interval of the prompts' means; else the
    mean is a ratio of two sums over prompts (Cochran 1977, Sampling Techniques, section 6.3).
    If all values are 0 or 1, the result is their `share_interval`, which has the same parameters.
    """
    values = np.asarray(values_N, dtype=np.float64)
    if np.isin(values, (0, 1)).all():
        return share_interval(values, prompts)
    if not np.isfinite(values).all():
        return nan, nan
    mean = float(values.mean())
    sums_K, _ = _by_prompt(values - mean, prompts)
    count = len(sums_K)
    if count == 1:
        return None
    error = sqrt(count / (count - 1) * float(sums_K @ sums_K)) / len(values)
    half = student_95(count - 1) * error
    return mean - half, mean + half


def design_effect(influence_N: Doubles, prompts: Iterable[Hashable]) -> float:
    """Return the number of rows divided by the number of independent rows that tell as much.

    It is 1 if no two rows share a prompt. Otherwise it is the variance between the prompts' sums
    divided by the variance between rows, each with Bessel's correction, times the squared ratio of
    Student's quantiles for the number of prompts and for the number of rows (the degrees of freedom
    of Korn and Graubard 1998, Survey Methodology 24(2), 193-201). With one prompt, or if prompts do
    not differ at all (all rows are right, say), the variance is unknown; each prompt then counts as
    one row (Kish 1965, Survey Sampling, with a correlation of 1 within prompts).

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
    """Return the 97.5 % quantile of Student's t for `freedom` degrees of freedom, within 0.2 %.

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


_HALVINGS = 60


def share_ahead(better: Floats, worse: Floats) -> float:
    """Return the share of pairs, one number from each group, where the better group's is larger.

    A tie counts half. The share is the area under the ROC curve; random order gives 0.5, whatever
    the sizes of the groups. Neither group may be empty.
    """
    return float(_ranks(better, worse).mean() / (2 * len(worse)))


def separation_effect(values_N: Floats, better_N: Bools, prompts: Iterable[Hashable]) -> float:
    """Return the design effect (see `design_effect`) of the `share_ahead` of two groups of numbers.

    A prompt may have several numbers, of one group or of both. The effect is computed from each
    number's rank among the other group's (Obuchowski 1997, https://doi.org/10.2307/2533958).
    """
    better, worse = values_N[better_N], values_N[~better_N]
    better_places, worse_places = _ranks(better, worse), 2.0 * len(better) - _ranks(worse, better)
    total = better_places.sum()
    # All times 2 len(better)^2 len(worse)^2, so that sums are exact.
    influence_N = np.empty(len(values_N))
    influence_N[better_N] = len(worse) * (len(better) * better_places - total)
    influence_N[~better_N] = len(better) * (len(worse) * worse_places - total)
    return design_effect(influence_N, prompts)


def separation_interval(share: float, better: float, worse: float) -> tuple[float, float]:
    """Return the 95 % confidence interval of a `share_ahead` of groups of independent numbers.

    `better` and `worse` are the sizes of the groups; if their numbers share prompts, divide both by
    the design effect. Source: Newcombe 2006, https://doi.org/10.1002/sim.2324, method 5: Hanley and
    McNeil's variance with the groups' mean size, computed at the bound itself, so that the interval
    stays within [0, 1].
    """
    assert 0 <= share <= 1 and better > 0 and worse > 0
    size = (better + worse) / 2 - 1

    def reach(share: float) -> float:
        spread = (1 - share) / (2 - share) + share / (1 + share)
        return NORMAL_95 * sqrt(share * (1 - share) * (1 + size * spread) / (better * worse))

    low = _root(lambda bound: share - bound - reach(bound), 0.0, share)
    high = _root(lambda bound: share - bound + reach(bound), share, 1.0)
    return low, high


def _ranks(numbers: Floats, others: Floats) -> Doubles:
    """Return for each number twice the count of smaller `others`; a tie adds 1."""
    ordered = np.sort(others)
    below, up_to = (np.searchsorted(ordered, numbers, side) for side in ("left", "right"))
    return (below + up_to).astype(np.float64)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a falling function that is >= 0 at `low` and <= 0 at `high`."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def pass_at_k(responses: int, passed: int, k: int) -> float:
    """Return the probability that at least one of k responses passes: 1 - C(n - c, k) / C(n, k).

    n responses were measured, and c passed. Unlike 1 - (1 - c/n)^k it has no bias. Source: Chen et
    al. 2021, https://arxiv.org/abs/2107.03374, section 2.1.
    """
    assert 0 <= passed <= responses and 1 <= k <= responses
    return 1 - comb(responses - passed, k) / comb(responses, k)


def majority(
    answers: Sequence[str | None], same: Callable[[str, str], bool] = operator.eq
) -> int | None:
    """Return the index of the first response with the most frequent answer (self-consistency).

    Among equally frequent answers the first wins. A response whose answer is None has no vote; if
    all are None, the result is None. `same` says whether two answers that are written differently
    are equal; votes for an answer go to the first earlier answer that is equal. Source: Wang et al.
    2023, https://arxiv.org/abs/2203.11171.
    """
    votes: dict[str, int] = {}
    for answer, count in Counter(text for text in answers if text is not None).items():
        joined = next((earlier for earlier in votes if same(earlier, answer)), answer)
        votes[joined] = votes.get(joined, 0) + count
    return answers.index(max(votes, key=votes.__getitem__)) if votes else None


BINS = 10


@dataclass(frozen=True)
class Calibration:
    """Predictions in K bins of equal width: mean prediction, mean outcome and count of each bin.

    Empty bins are left out. Source: Guo et al. 2017, https://arxiv.org/abs/1706.04599.
    """

    predicted_K: Floats
    observed_K: Floats
    counts_K: Ints

    @property
    def error(self) -> float:
        """The expected calibration error, equation 3.

        It is the mean over bins of |mean prediction - mean outcome|, weighted by the counts.
        """
        gaps_K = np.abs(self.predicted_K - self.observed_K)
        return float(np.average(gaps_K, weights=self.counts_K))


def calibrate(predicted: Floats, outcomes: Floats) -> Calibration:
    """Return the calibration of N > 0 predictions, given their outcomes.

    Both arrays have shape [N] and values from 0 to 1.
    """
    assert predicted.shape == outcomes.shape and len(predicted)
    bins = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
    counts = np.bincount(bins, minlength=BINS)
    filled = np.flatnonzero(counts)

    def means(values: Floats) -> Floats:
        sums = np.bincount(bins, weights=values, minlength=BINS)
        return (sums[filled] / counts[filled]).astype(np.float32)

    return Calibration(means(predicted), means(outcomes), counts[filled])


def calibrate_pairs(chosen_ahead: Floats) -> Calibration:
    """Return the calibration of predicted preferences.

    `chosen_ahead` is the chosen response's score minus the rejected one's, shape [P]. Each pair
    counts twice: the chosen response is preferred (outcome 1), and the rejected one is (outcome 0).
    """
    preferred = sigmoid(chosen_ahead)
    outcomes = np.repeat(np.array([1, 0], dtype=np.float32), len(preferred))
    return calibrate(np.concatenate([preferred, 1 - preferred]), outcomes)


def sigmoid(scores: Floats) -> Floats:
    """Return the probabilities of scores (logits), without overflow."""
    probabilities: Floats = (0.5 * (1 + np.tanh(0.5 * scores))).astype(np.float32)
    return probabilities
