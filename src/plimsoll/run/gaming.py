"""Is the reward being gamed? Two figures of each step, their drift, and responses to look at.

A policy that has found a way to please one part of the reward moves the others no more, and one
that has learned that long answers are rewarded writes longer ones. Neither shows in the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from plimsoll.records import Ints, Trajectory
from plimsoll.run.responses import ResponseGroup, SampledResponse, excerpt

LENGTH = "reward_length_correlation"
SHARE = "reward_share/"
WINDOW = 10
"""Steps over which a figure is averaged before it is compared."""
MOST_DRIFT = 0.4
"""How far a figure may move from its mean over the first steps; judgement."""
_ROUNDING = 1e-9
_FEWEST = 16
"""Fewest free differences of a step (responses less groups): a correlation of fewer is noise."""
_SHOWN = 3
_EXCERPT = 60


def gaming_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the figures of a step, from -1 to 1 or around it, by name.

    `reward_length_correlation` is Pearson's, of reward and number of response tokens, each less its
    mean over the group: what the advantages of a group learn. `reward_share/<part>` is the part's
    share of the reward's variance, cov(weight * part, reward) / var(reward); shares sum to 1, and
    one below 0 works against the others. Figures that are not defined, as all rewards or lengths
    are equal, are left out; so are the shares of a single part, and all figures of a step with few
    responses.
    """
    groups = {t.group for t in trajectories}
    lone = len(groups) == len(trajectories)
    if len(trajectories) - (1 if lone else len(groups)) < _FEWEST:
        return {}
    rewards_S = np.array([t.reward for t in trajectories])
    if not np.isfinite(rewards_S).all():
        return {}
    lengths_S = np.array([len(t.response_tokens) for t in trajectories], dtype=float)
    group_S = np.unique([t.group for t in trajectories], return_inverse=True)[1]
    size = float(np.abs(rewards_S).max(initial=1.0))
    inner_S = _without_rounding(_less_group_mean(rewards_S, group_S), size)
    long_S = _less_group_mean(lengths_S, group_S)
    figures = {}
    scale = np.sqrt((inner_S @ inner_S) * (long_S @ long_S))
    if scale > 0:
        figures[LENGTH] = float(inner_S @ long_S / scale)
    centred_S = _without_rounding(rewards_S - rewards_S.mean(), size)
    variance = centred_S @ centred_S
    names = [part.name for part in trajectories[0].rewards]
    if variance > 0 and len(names) > 1:
        for i, name in enumerate(names):
            part_S = np.array([t.rewards[i].value * t.rewards[i].weight for t in trajectories])
            figures[f"{SHARE}{name}"] = float(part_S @ centred_S / variance)
    return figures


def _without_rounding(x_S: NDArray[np.float64], size: float) -> NDArray[np.float64]:
    """Return differences of numbers of this size, with 0 for what is rounding alone."""
    return np.where(np.abs(x_S) <= _ROUNDING * size, 0.0, x_S)


def _less_group_mean(x_S: NDArray[np.float64], group_S: Ints) -> NDArray[np.float64]:
    """Return the numbers less their group's mean; if every group has one, less the mean of all."""
    counts = np.bincount(group_S)
    means = np.bincount(group_S, x_S) / counts
    less: NDArray[np.float64] = x_S - (means[group_S] if counts.max() > 1 else x_S.mean())
    return less


@dataclass
class Drift:
    """How far each figure of a run has moved since its first steps."""

    first: dict[str, list[float]] = field(default_factory=dict)
    last: dict[str, list[float]] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, float | None]) -> dict[str, tuple[float, float]]:
        """Add a step, and return (mean at first, mean now) of each figure that moved too far."""
        moved = {}
        for name, value in metrics.items():
            if value is None or not name.startswith((LENGTH, SHARE)):
                continue
            first, last = self.first.setdefault(name, []), self.last.setdefault(name, [])
            if len(first) < WINDOW:
                first.append(value)
                continue
            last.append(value)
            del last[:-WINDOW]
            before, now = fmean(first), fmean(last)
            if len(last) == WINDOW and abs(now - before) > MOST_DRIFT:
                moved[name] = (before, now)
        return moved


def suspects(name: str, value: float, groups: Sequence[ResponseGroup]) -> str:
    """Return three responses that a figure speaks of, from different groups, as one line.

    They are the best of their groups: of a length the longest, or the shortest if the correlation
    is negative; of a part those that have most of it. Empty for any other figure.
    """
    if not name.startswith((LENGTH, SHARE)):
        return ""
    sign = 1 if value >= 0 else -1

    def key(response: SampledResponse) -> tuple[float, float]:
        if name == LENGTH:
            return response.rank, sign * response.tokens
        return response.parts.get(name.removeprefix(SHARE), 0.0), response.rank

    best = sorted((max(g.responses, key=key) for g in groups), key=key, reverse=True)[:_SHOWN]
    return "; ".join(
        f"group {r.group}: reward {r.reward:.3g}, {r.tokens} tokens, "
        f"{excerpt(r.whole_text, _EXCERPT)!r}"
        for r in best
    )
