"""Which curves a run has: what is drawn on which axes, and in which unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plimsoll.run.rows import Row
from plimsoll.run.standing import BEFORE_STEPS


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    unit: the label of the vertical axis, of all that is drawn there.
    series: the metrics to draw, each with its name in the legend.
    stacked: draw areas that add up, instead of lines. from_zero: of amounts, which a cut axis would
    make look as if they changed more than they do.
    """

    title: str
    unit: str
    series: Mapping[str, str]
    stacked: bool = False
    from_zero: bool = False


def _both(title: str, unit: str, name: str) -> Panel:
    """A metric in training, where it has one, and on what is held out."""
    return Panel(title, unit, {name: "training", f"eval/{name}": "held out"})


def _alone(title: str, unit: str, name: str) -> Panel:
    return Panel(title, unit, {name: name})


def _rewards(better: str, worse: str) -> Panel:
    names = {f"rewards/{name}": name for name in (better, worse)}
    return Panel("Implicit rewards in training", "per response", names)


JOB_PANELS: Mapping[str, Sequence[Panel]] = {
    "sft": (_both("Loss", "nats per token", "loss"),),
    "distill": (
        _both("Loss", "nats per token", "loss"),
        _both("Divergence from the teacher", "nats per token", "divergence"),
        _both("Negative log-likelihood", "nats per token", "nll"),
    ),
    "rm": (
        _both("Loss", "per pair", "loss"),
        _both("Accuracy", "share of pairs", "accuracy"),
        _both("Margin of scores", "per pair", "rewards/margin"),
    ),
    "prm": (
        _both("Loss", "nats per labelled step", "loss"),
        _both("Accuracy on steps", "share of labelled steps", "accuracy"),
        _both("Whole solutions", "share judged right", "solution_accuracy"),
    ),
    "dpo": (
        _both("Loss", "per pair", "loss"),
        _both("Accuracy", "share of pairs", "accuracy"),
        _both("Margin of implicit rewards", "per pair", "rewards/margin"),
        _rewards("chosen", "rejected"),
    ),
    "kto": (
        _both("Loss", "per response", "loss"),
        _both("Accuracy", "share of pairings", "accuracy"),
        _both("Margin of implicit rewards", "per response", "rewards/margin"),
        _rewards("desirable", "undesirable"),
        _both("KL from the reference", "nats per response", "kl"),
    ),
    "ppo": (
        _both("Reward", "per response", "reward"),
        _alone("KL from the reference", "nats per response", "kl"),
        _alone("Length of responses", "tokens per response", "response_tokens"),
        _alone("Policy loss", "per token", "policy_loss"),
        _alone("Value loss", "per token", "value_loss"),
    ),
}
"""By job; those that have data are drawn."""


def curve_panels(job: str | None, rows: Sequence[Row]) -> tuple[Panel, ...]:
    """What a job learns by; in PPO the parts of the reward as well, each in a unit of its own. None
    of a job that is not known."""
    own = JOB_PANELS.get(job or "", ())
    return (*own[:1], *_parts(rows), *own[1:])


def _parts(rows: Sequence[Row]) -> Sequence[Panel]:
    """A single part is the reward itself, but for its weight."""
    names = [name.removeprefix("reward/") for name in metric_names(rows, "reward/")]
    return [_part(name) for name in names] if len(names) > 1 else ()


def _part(name: str) -> Panel:
    series = {f"reward/{name}": "training", f"eval/{name}": "held out"}
    return Panel(f"Reward: {name}", "per response", series)


def time_panels(rows: Sequence[Row]) -> tuple[Panel, ...]:
    """Where the time of the steps went; reading data and loading are no part of any step."""
    phases = {name: name.removeprefix("seconds/") for name in metric_names(rows, "seconds/")}
    steps = {name: phase for name, phase in phases.items() if phase not in BEFORE_STEPS}
    return (
        Panel("Time of a step by phase", "seconds", steps, stacked=True),
        Panel("Speed", "tokens/s", {"tokens_per_second": "speed"}, from_zero=True),
    )


def memory_panel(peaks: Sequence[Row]) -> Panel:
    """Of the rows of `peaks_by_step`."""
    kinds = [name for name in metric_names(peaks, "") if name != "step"]
    return Panel("Memory at its fullest", "GB", {kind: kind for kind in kinds}, from_zero=True)


def metric_names(rows: Iterable[Row], prefix: str) -> list[str]:
    """Those that begin so, in the order in which they first came."""
    found = dict.fromkeys(name for row in rows for name in row)
    return [name for name in found if name.startswith(prefix)]
