"""Warn of figures outside of their healthy range, with their usual cause and a remedy to try.

docs/runs.md has the ranges and their sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike

from plimsoll.run.gaming import LENGTH, MOST_DRIFT, WINDOW, Drift

StepMetrics = Mapping[str, float]
Bounds = tuple[float, float]


@dataclass(frozen=True)
class HealthAdvice:
    """The usual meaning of a value, and what to try."""

    means: str
    attempt: str


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
    settles: int = 0
    """How many steps at the beginning of a run are not checked."""


def _constant(low: float, high: float) -> Callable[[StepMetrics], Bounds]:
    return lambda metrics: (low, high)


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


_NEVER = HealthAdvice("It cannot have this value.", "reporting it: the figure is computed wrongly.")

_DIFFERENT = HealthAdvice(
    "The engine gives sampled tokens other probabilities than the trainer does: another dtype or "
    "kernel, weights that are several versions old, or a sync that went wrong.",
    "rollout.dtype as actor.model.dtype, top_p 1, sync/logprob_gap beside it (large: the sync), a "
    "correction that masks instead of truncating, a smaller bound of staleness.",
)

RANGES: Mapping[str, HealthyRange] = MappingProxyType(
    {
        "reward": HealthyRange("the mean reward", _constant(-inf, inf), _NEVER, _NEVER),
        LENGTH: HealthyRange(
            "the correlation of reward and length within groups",
            _constant(-0.7, 0.7),
            HealthAdvice(
                "Short responses are rewarded, whatever they say; or long ones are cut off.",
                "reading the responses below, truncated, a larger rollout.sampling.max_new_tokens.",
            ),
            HealthAdvice(
                "Long responses are rewarded, whatever they say.",
                "reading the responses below; a reward that looks at the answer alone, or the "
                "reward overlong.",
            ),
        ),
        "kl": HealthyRange(
            "the KL of the actor from the reference, nats per response",
            _kl_bounds,
            HealthAdvice(
                "A KL is below 0 only by the chance of few samples: the log-probs that are "
                "compared are not of the distribution that was sampled from.",
                "rollout.sampling without top_p and the like, no minimum of tokens; mismatch/abs.",
            ),
            HealthAdvice(
                "The actor is far from where it began, most often because it has found a way to "
                "please the reward that was not intended.",
                "reading what is rewarded (plimsoll rollouts RUN --best), a larger "
                "algorithm.kl.coefficient or an algorithm.kl.adaptive, a lower learning rate.",
            ),
        ),
        "entropy": HealthyRange(
            "the mean entropy of the actor's next token, nats",
            _constant(0.01, 4.0),
            HealthAdvice(
                "Collapse: the responses to a prompt become the same, and there is nothing left to "
                "compare. A task that is solved ends here, too.",
                "a higher clip_high of the policy loss (DAPO: 0.28), algorithm.entropy_bonus, a KL "
                "from the reference, a temperature of 1.",
            ),
            HealthAdvice(
                "The actor unlearns its language and samples from ever more of the vocabulary.",
                "a lower learning rate, a smaller algorithm.entropy_bonus, a KL from the "
                "reference.",
            ),
        ),
        "actor/grad_norm": HealthyRange(
            "the norm of the actor's gradient before it is clipped",
            _gradient_bounds,
            HealthAdvice(
                "There is nothing to learn from: all advantages of the step are 0.",
                "zero_signal and the rewards (plimsoll rollouts RUN): are they all equal?",
            ),
            HealthAdvice(
                "At a max_grad_norm of 1 less than a tenth of it is applied: the step's direction "
                "is that of a few tokens.",
                "a lower learning rate with a warm-up, whitened or clipped advantages, a look at "
                "mismatch/abs and clip_fraction.",
            ),
        ),
        "clip_fraction": HealthyRange(
            "the share of tokens whose gradient the policy loss cuts off",
            _constant(0.0, 0.3),
            _NEVER,
            HealthAdvice(
                "The updates of a step take the actor far from the policy that sampled.",
                "a lower learning rate, fewer algorithm.epochs or mini_batches; a wide clip of "
                "sequences (gspo) where that is meant.",
            ),
        ),
        "mismatch/abs": HealthyRange(
            "the mean difference of a token's log-prob between trainer and sampler, nats",
            _constant(0.0, 0.05),
            _NEVER,
            _DIFFERENT,
        ),
        "mismatch/k3": HealthyRange(
            "the KL between sampler and trainer by k3, nats per token",
            _constant(0.0, 0.01),
            _NEVER,
            _DIFFERENT,
        ),
        "mismatch/outside": HealthyRange(
            "the share of tokens whose ratio of trainer to sampler is outside of 0.5 to 2",
            _constant(0.0, 0.1),
            _NEVER,
            _DIFFERENT,
        ),
        "response_tokens": HealthyRange(
            "the mean length of responses, tokens",
            _constant(1.5, inf),
            HealthAdvice(
                "Responses are empty: the actor ends before it has said anything.",
                "reading some (plimsoll rollouts RUN), the chat template, a reward for ending "
                "early that outweighs the answer's.",
            ),
            _NEVER,
        ),
        "truncated": HealthyRange(
            "the share of responses that were cut off at their longest",
            _constant(0.0, 0.3),
            _NEVER,
            HealthAdvice(
                "What is cut off has no answer and earns nothing, however good it was; or the "
                "actor has stopped to end its responses.",
                "a larger rollout.sampling.max_new_tokens, a penalty for overlong responses, the "
                "stop strings and the chat template.",
            ),
        ),
        "zero_signal": HealthyRange(
            "the share of groups whose rewards are all equal",
            _constant(0.0, 0.5),
            _NEVER,
            HealthAdvice(
                "These groups teach nothing and cost as much: the prompts are too easy, too hard, "
                "or the reward cannot tell responses apart.",
                "dynamic sampling, prompts chosen by their difficulty, more responses of each, a "
                "reward with more than two values.",
            ),
        ),
        "explained_variance": HealthyRange(
            "the share of the returns' variance that the critic predicts",
            _constant(0.0, 1.0),
            HealthAdvice(
                "The critic is worse than a constant would be, and adds noise to the advantages.",
                "algorithm.critic_warmup_steps, another critic.optimizer.learning_rate, a wider "
                "algorithm.value_clip, or an advantage without a critic.",
            ),
            _NEVER,
            settles=10,
        ),
        "rollout/prefix_cache_hits": HealthyRange(
            "the share of the prompts of turns that the engines' prefix caches had",
            _cache_bounds,
            HealthAdvice(
                "Engines compute earlier turns again: other episodes pushed them out of the KV "
                "cache, which has too little room for those in flight.",
                "fewer of them (environments.NAME.at_once), a larger rollout.vllm.memory_share (on "
                "CPU rollout.vllm.cpu_kv_cache_gib), rollout.vllm.arguments without "
                "enable_prefix_caching: false.",
            ),
            _NEVER,
        ),
        "groups/dropped": HealthyRange(
            "the number of groups that were too old to be learned from",
            _dropped_bounds,
            _NEVER,
            HealthAdvice(
                "Long responses last through more syncs than rollout.staleness allows. They are "
                "sampled in vain, and the policy sees fewer of them than it writes.",
                "a larger rollout.staleness, a smaller rollout.sampling.max_new_tokens, more "
                "engines.",
            ),
        ),
        "repetition": HealthyRange(
            "the share of responses that repeat themselves",
            _constant(0.0, 0.1),
            _NEVER,
            HealthAdvice(
                "The actor falls into loops, often after it was cut off and rewarded all the same.",
                "a penalty for overlong responses, a higher entropy or KL, reading the worst "
                "(plimsoll rollouts RUN --worst).",
            ),
        ),
    }
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
        return f"{self.metric} is {self.value:.3g}{self._range} ({self.what})"

    def __str__(self) -> str:
        return f"warning: {self.headline}. {self.advice.means} Try: {self.advice.attempt}"

    @property
    def _range(self) -> str:
        if isnan(self.value):
            return ""
        if self.high == inf:
            return f", healthy is {self.low:.3g} or more"
        return f", healthy is {self.low:.3g} to {self.high:.3g}"


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
