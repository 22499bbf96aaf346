"""Which evaluation of a run was the best, and when to stop because none gets better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isnan

from plimsoll.config.run import BestConfig
from plimsoll.errors import ConfigError
from plimsoll.run.state import RunState


def after_evaluation(config: BestConfig, state: RunState, metrics: Mapping[str, float]) -> RunState:
    """The state with the evaluation of its step taken into account. NaN is never better.

    Raises:
        ConfigError: the evaluation has no metric of the name.
    """
    if config.metric not in metrics:
        names = ", ".join(sorted(name for name in metrics if name.startswith("eval/")))
        raise ConfigError(
            f"run.best.metric {config.metric!r} is none of what the evaluation gave: {names}. "
            "Write one of these."
        )
    value = metrics[config.metric]
    if _is_better(config, value, state.best):
        return replace(state, best=value, best_step=state.step, evaluations_since_best=0)
    return replace(state, evaluations_since_best=state.evaluations_since_best + 1)


def _is_better(config: BestConfig, value: float, best: float | None) -> bool:
    if best is None:
        return not isnan(value)
    gain = best - value if config.goal == "lowest" else value - best
    return gain > config.min_delta


def is_patience_out(config: BestConfig | None, state: RunState) -> bool:
    """Whether the run has to end early."""
    if config is None or config.patience is None:
        return False
    return state.evaluations_since_best >= config.patience
