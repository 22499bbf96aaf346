"""Measure whether predicted probabilities come true; Guo et al. 2017, arXiv 1706.04599.

https://arxiv.org/abs/1706.04599
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plimsoll.records import Floats, Ints

BINS = 10


@dataclass(frozen=True)
class Calibration:
    """The mean prediction, the mean outcome and the count of predictions of K bins of equal width.

    Empty bins are left out.
    """

    predicted_K: Floats
    observed_K: Floats
    counts_K: Ints

    @property
    def error(self) -> float:
        """The expected calibration error, equation 3.

        It is the distance between the two means of a bin, averaged over all predictions.
        """
        gaps_K = np.abs(self.predicted_K - self.observed_K)
        return float(np.average(gaps_K, weights=self.counts_K))


def calibrate(predicted: Floats, outcomes: Floats) -> Calibration:
    """Return the mean prediction and the mean outcome in bins of predictions.

    There must be a prediction. Both arrays have a number from 0 to 1 for each, shape [N].
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
    """Return the calibration of preferences.

    Each pair counts in both orders: as a prediction that came true and as one that did not.
    `chosen_ahead` is how far the chosen response's score is ahead, [P].
    """
    preferred = sigmoid(chosen_ahead)
    outcomes = np.repeat(np.array([1, 0], dtype=np.float32), len(preferred))
    return calibrate(np.concatenate([preferred, 1 - preferred]), outcomes)


def sigmoid(scores: Floats) -> Floats:
    """Return the probabilities of scores (logits), without overflow."""
    probabilities: Floats = (0.5 * (1 + np.tanh(0.5 * scores))).astype(np.float32)
    return probabilities
