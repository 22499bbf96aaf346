"""Tell whether a run is healthy, by the figures of its steps.

A figure outside of its range gives a warning with its usual cause and a remedy to try: health.yaml
has them.

Is the reward being gamed? A policy that has found a way to please one part of the reward moves the
others no more, and one that has learned that long answers are rewarded writes longer ones. Neither
shows in the mean. Two figures of each step and their drift do.

Steps with numbers that are not finite are left out, and counted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import inf, isnan, nan
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from numpy.typing import ArrayLike, NDArray

from plimsoll.errors import PlimsollError
from plimsoll.records import Ints, Sample, Trajectory
from plimsoll.run.files import whole_file
from plimsoll.run.responses import ResponseGroup, SampledResponse, excerpt

StepMetrics = Mapping[str, float]
Bounds = tuple[float, float]


@dataclass(frozen=True)
class HealthAdvice:
    """The usual meaning of a value, and what to try."""

    means: str
    attempt: str


_NEVER = HealthAdvice("It cannot have this value.", "reporting it: the figure is computed wrongly.")


@dataclass(frozen=True)
class HealthyRange:
    """The healthy range of a figure."""

    what: str
    """A description of the figure, with its unit."""
    bounds: Callable[[StepMetrics], Bounds]
    """Takes a step's metrics; returns the lowest and the highest healthy value."""
    below: HealthAdvice
    """Advice for a value below the range."""
    above: HealthAdvice
    """Advice for a value above the range."""
    settles: int
    """How many steps at the beginning of a run are not checked."""


_KL_NOISE, _KL_OF_SHORT, _KL_A_TOKEN = -1.0, 20.0, 0.1


def _kl_bounds(metrics: StepMetrics) -> Bounds:
    """Return the lowest and highest healthy KL per response, in nats.

    The highest is 20, or 0.1 per token for long responses. The reward of a reward model is
    over-optimised from about ten nats on (Gao et al. 2022, arXiv:2210.10760, figure 1: responses
    of about fifty tokens). Long answers with verifiable rewards reach hundreds of nats without
    harm, so their limit is per token.
    """
    return _KL_NOISE, max(_KL_OF_SHORT, _KL_A_TOKEN * metrics.get("response_tokens", 0.0))


_LONG_PROMPT, _CACHED = 512, 0.8


def _cache_bounds(metrics: StepMetrics) -> Bounds:
    """Return the lowest and highest healthy share of prompt tokens found in the prefix cache.

    If prompts of n turns grow by the same length each turn, about 1 - 2 / n of their tokens were
    cached before. The lowest healthy share is 0.8 of this. It is 0 for short prompts, as caches
    hold blocks of tokens.
    """
    turns = metrics.get("episode/turns", 0.0)
    prompts = metrics.get("episode/prompt_tokens", 0.0)
    long = turns > 2 and prompts >= _LONG_PROMPT * turns
    return (_CACHED * (1 - 2 / turns) if long else 0.0), 1.0


_DROPPED = 0.1


def _dropped_bounds(metrics: StepMetrics) -> Bounds:
    """Return the lowest and highest healthy number of groups that were too old for a step."""
    return 0.0, _DROPPED * metrics.get("groups/drawn", 0.0)


_LEAST_GRADIENT, _MOST_GRADIENT = 1e-6, 10.0


def _gradient_bounds(metrics: StepMetrics) -> Bounds:
    """Return the lowest and highest healthy norm of a gradient.

    The lowest is 0 if no group has a signal, for the warning of `zero_signal` says so already.
    """
    least = 0.0 if metrics.get("zero_signal") == 1.0 else _LEAST_GRADIENT
    return least, _MOST_GRADIENT


_BOUNDS: Mapping[str, Callable[[StepMetrics], Bounds]] = {
    "kl": _kl_bounds,
    "rollout/prefix_cache_hits": _cache_bounds,
    "groups/dropped": _dropped_bounds,
    "actor/grad_norm": _gradient_bounds,
}
"""The bounds of figures that depend on other figures of the step."""


def _read_range(
    metric: str,
    what: str,
    low: float = -inf,
    high: float = inf,
    settles: int = 0,
    **advice: Mapping[str, str],
) -> HealthyRange:
    """Return the range of a metric from its entry in health.yaml."""
    below, above = (
        HealthAdvice(**advice[side]) if side in advice else _NEVER for side in ("below", "above")
    )
    bounds = _BOUNDS.get(metric, lambda metrics: (low, high))
    return HealthyRange(what, bounds, below, above, settles)


RANGES: Mapping[str, HealthyRange] = MappingProxyType(
    {
        metric: _read_range(metric, **entry)
        for metric, entry in yaml.safe_load(
            files("plimsoll.run").joinpath("health.yaml").read_text(encoding="utf-8")
        ).items()
    }
)


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


class Drift:
    """How far each figure of a run has moved since its first steps."""

    def __init__(self) -> None:
        self._first = defaultdict[str, list[float]](list)
        self._last = defaultdict[str, deque[float]](lambda: deque(maxlen=WINDOW))

    def add(self, metrics: Mapping[str, float | None]) -> dict[str, tuple[float, float]]:
        """Add a step, and return (mean at first, mean now) of each figure that moved too far."""
        moved = {}
        for name, value in metrics.items():
            if value is None or not name.startswith((LENGTH, SHARE)):
                continue
            first, last = self._first[name], self._last[name]
            if len(first) < WINDOW:
                first.append(value)
                continue
            last.append(value)
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
        f"{excerpt(r.response, _EXCERPT)!r}"
        for r in best
    )


QUIET = 20
"""How many steps a figure must be in its range before a new warning is shown. So a figure that
moves around an end of its range causes one warning, not many."""


@dataclass(frozen=True)
class HealthWarning:
    """A figure outside of its range."""

    metric: str
    value: float
    low: float
    """Lowest healthy value."""
    high: float
    """Highest healthy value."""
    what: str
    """A description of the figure."""
    advice: HealthAdvice
    """Advice for a value below or above the range, whichever the value is."""

    @property
    def headline(self) -> str:
        """The figure, its value and its healthy range as one sentence, without the full stop."""
        ends = f"{self.low:.3g} " + ("or more" if self.high == inf else f"to {self.high:.3g}")
        healthy = "" if isnan(self.value) else f", healthy is {ends}"
        return f"{self.metric} is {self.value:.3g}{healthy} ({self.what})"

    def __str__(self) -> str:
        return f"warning: {self.headline}. {self.advice.means} Try: {self.advice.attempt}"


def warnings_of(metrics: Mapping[str, float]) -> list[HealthWarning]:
    """Return a warning for each metric outside of its range, in the order of `RANGES`.

    NaN is outside of every range. Earlier warnings are not considered.
    """
    warnings = []
    for metric, healthy in RANGES.items():
        low, high = healthy.bounds(metrics)
        if metric in metrics and not low <= (value := metrics[metric]) <= high:
            advice = (
                _NOT_A_NUMBER if isnan(value) else healthy.below if value < low else healthy.above
            )
            warnings.append(HealthWarning(metric, value, low, high, healthy.what, advice))
    return warnings


def due_warnings(step: int, metrics: Mapping[str, float]) -> list[HealthWarning]:
    """Return a step's warnings, except for metrics that are not checked yet (`settles`)."""
    return [w for w in warnings_of(metrics) if step > RANGES[w.metric].settles]


_NOT_A_NUMBER = HealthAdvice(
    "Something was divided by 0, or grew past what its dtype holds; it spreads from here.",
    "the responses of this step (plimsoll rollouts RUN), a reward or loss of one's own, a lower "
    "learning rate.",
)


_DRIFTED = f"mean of {WINDOW} steps; the range is around that of the first {WINDOW}"
_GAMED = HealthAdvice(
    "What decides the reward has changed: the policy may please a part of it, or its length, in a "
    "way that was not meant.",
    "reading the responses below (plimsoll rollouts RUN --best), the curves of reward/<part> and "
    "response_tokens, another weight of the part.",
)


class HealthWatch:
    """The health of a run in progress: the last step at which each metric was out of its range."""

    def __init__(self, rows: Sequence[Mapping[str, float | None]] = ()) -> None:
        """Begin with no rows, or with the rows of a resumed run's metrics.jsonl (None for NaN)."""
        self._last_outside: dict[str, int] = {}
        self._drift = Drift()
        for row in rows[:-QUIET]:
            self._drift.add(row)
        for row in rows[-QUIET:]:
            metrics = {name: nan if value is None else value for name, value in row.items()}
            self.add(int(row["step"] or 0), metrics)

    def add(self, step: int, metrics: Mapping[str, float]) -> list[HealthWarning]:
        """Add a step's metrics, and return the warnings to show.

        A warning is shown if the figure was in its range in the last `QUIET` steps. Of figures with
        the same advice the first is shown alone, as they have one cause.
        """
        due = due_warnings(step, metrics) + [
            HealthWarning(name, now, before - MOST_DRIFT, before + MOST_DRIFT, _DRIFTED, _GAMED)
            for name, (before, now) in self._drift.add(metrics).items()
        ]
        new = [w for w in due if step - self._last_outside.get(w.metric, -inf) > QUIET]
        self._last_outside |= {warning.metric: step for warning in due}
        shown: dict[HealthAdvice, HealthWarning] = {}
        for warning in new:
            shown.setdefault(warning.advice, warning)
        return [*shown.values()]


GRAM = 4
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, near 2^64 / the golden ratio
REPEATS = 0.5
"""Share of repeated 4-grams above which a response repeats itself. Human text has 0.01 to 0.02,
degenerate text of greedy decoding over 0.4 (Welleck et al. 2019, arXiv:1908.04319, seq-rep-4);
steps of arithmetic lie between."""


def repetition(tokens: ArrayLike) -> float:
    """Return the share (0 to 1) of a response's 4-grams that repeat an earlier 4-gram of it.

    [1 2 3 4 1 2 3 4] has five 4-grams, and the last equals the first: 0.2. Return 0 if the
    response is shorter than 4 tokens. 4-grams are compared by a hash of 64 bits.
    """
    ids = np.asarray(tokens, np.uint64)
    count = len(ids) - GRAM + 1
    if count < 1:
        return 0.0
    hashes = np.zeros(count, np.uint64)
    for i in range(GRAM):
        hashes = hashes * _HASH_FACTOR + ids[i : i + count]
    hashes.sort()  # faster than np.unique, which has a hash table
    return int(np.count_nonzero(hashes[1:] == hashes[:-1])) / count


def repeating(responses: Sequence[ArrayLike]) -> float:
    """Return the share of responses whose `repetition` is above `REPEATS`; 0 without responses.

    Each response is given as its tokens.
    """
    if not responses:
        return 0.0
    return sum(repetition(tokens) > REPEATS for tokens in responses) / len(responses)


BAD_STEPS = "bad_steps"
"""The metric that is 1 in a step that was left out, wholly or in one of its updates."""


class BadNumbers(PlimsollError):
    """Numbers that are not finite, from which a step must not learn.

    Attributes:
        figures: What is not finite and where, such as `the reward of group 3`.
    """

    def __init__(self, figures: Sequence[str]) -> None:
        super().__init__(list(figures))  # the argument, so that the exception pickles
        self.figures = figures

    def __str__(self) -> str:
        return f"not finite: {'; '.join(self.figures)}"


def write_sequences(path: Path, step: int, samples: Sequence[Sample]) -> None:
    """Write the sequences that a step of a job on rows would have learned from, in their order."""
    table = pa.table(
        {
            "step": pa.array([step] * len(samples), pa.int64()),
            "sequence": pa.array(range(len(samples)), pa.int64()),
            "tokens": pa.array([s.tokens.astype(np.int64) for s in samples], pa.list_(pa.int64())),
            "loss_mask": pa.array([s.loss_mask for s in samples], pa.list_(pa.bool_())),
        }
    )
    path.parent.mkdir(exist_ok=True)
    with whole_file(path) as partial:
        pq.write_table(table, partial, compression="zstd")


class BadSteps:
    """The bad steps of this part of a run.

    Attributes:
        most: How many may follow one another; see `run.max_bad_steps`.
        in_a_row: How many of the last steps were bad.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.in_a_row = 0

    def add(self, step: int, figures: Sequence[str], dump: Path) -> str:
        """Count a bad step, and return the note on it.

        Raises PlimsollError if there were too many in a row.

        Args:
            step: the step.
            figures: what is not finite, and where.
            dump: the file with what the step would have learned from.
        """
        self.in_a_row += 1
        what = f"step {step} has numbers that are not finite: {'; '.join(figures)}"
        if self.in_a_row <= self.most:
            return f"{what}. The weights stay as they were. What it would have learned: {dump}"
        row = "" if self.in_a_row == 1 else f", the {self.in_a_row}th bad step in a row"
        raise PlimsollError(
            f"{what}{row}. run.max_bad_steps allows {self.most} in a row. The weights were left as "
            f"they were, and earlier checkpoints are whole. What the step would have learned is in "
            f"{dump} (`plimsoll rollouts RUN --bad`). If a reward or a log-prob of the sampler is "
            "not finite, mend where it comes from. If a loss or a gradient is, look at what the "
            "loss is computed from (a loss or an advantage of your own); where it grew in the "
            "steps before (metrics.jsonl), lower the learning rate"
        )
