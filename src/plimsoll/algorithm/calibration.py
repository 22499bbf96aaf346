"""Measure how well predicted probabilities agree with the shares that are observed.

Source: Guo et al. 2017, https://arxiv.org/abs/1706.04599.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plimsoll.records import Floats, Ints

BINS = 10


@dataclass(frozen=True)
class Calibration:
    """Predictions in K bins of equal width: mean prediction, mean outcome and count of each bin.

    Empty bins are left out.
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
