"""What must agree about how a run goes: schedules, moving averages, and the best evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from plimsoll.config.engine import TrainedRole
from plimsoll.config.problems import Problem, conflict, invalid, show
from plimsoll.config.run import BestConfig
from plimsoll.run.counting import counted
from plimsoll.spec.job import Names
from plimsoll.spec.run_spec import RunSpec


def evaluated(spec: RunSpec[Any]) -> Iterator[Problem]:
    """What is kept of evaluations, and what is averaged."""
    best = spec.run.best
    if best is not None and spec.run.eval_every is None:
        yield conflict(
            "run.best",
            "given",
            "Nothing is evaluated: run.eval_every is not given.",
            "give run.eval_every and data.eval, or leave run.best out",
            code="best-without-eval",
        )
    if best is not None and not spec.evaluation.more:
        yield from _best(best, spec.evaluation.written)
    critic = spec.trained.get("critic")
    if critic is not None and critic.ema is not None:
        yield conflict(
            "critic.ema",
            "given",
            "The average is for the final model, and the critic is not written as one.",
            "actor.ema, or leave critic.ema out",
            code="critic-ema",
        )


def _best(best: BestConfig, reported: Names) -> Iterator[Problem]:
    """What evaluations are compared by, and which way."""
    if best.metric not in reported:
        close = get_close_matches(best.metric, reported, n=3)
        yield invalid(
            "run.best.metric",
            show(best.metric),
            "Evaluations are compared by it (run.best), and this job's do not report it.",
            f"did you mean {' or '.join(close)}?" if close else f"one of {', '.join(reported)}",
            code="best-metric",
        )
    elif reported[best.metric] not in (None, best.goal):
        yield conflict(
            "run.best.goal",
            best.goal,
            f"It would keep the worst evaluation: the best {best.metric} is the "
            f"{reported[best.metric]} (run.best.metric).",
            f"run.best.goal: {reported[best.metric]}",
            code="best-metric",
        )


def scheduled(name: str, role: TrainedRole, updates: int) -> Iterator[Problem]:
    """A role's learning rates and averages over its optimizer steps."""
    optimizer = role.optimizer
    if optimizer.final_ratio > 1:
        yield invalid(
            f"{name}.optimizer.final_ratio",
            str(optimizer.final_ratio),
            "It is a share of the peak learning rate.",
            "a number from 0 to 1",
            code="optimizer-value",
        )
    if optimizer.warmup_steps > updates:
        yield invalid(
            f"{name}.optimizer.warmup_steps",
            str(optimizer.warmup_steps),
            f"The {name} takes {counted(updates, 'optimizer step')}, so the peak would never be "
            "reached.",
            f"at most {updates}, or more run.steps",
            code="warmup-too-long",
        )
    yield from _decay(name, role, updates)
    if role.ema is not None and role.ema.decay >= 1:
        yield invalid(
            f"{name}.ema.decay",
            str(role.ema.decay),
            "At 1 the average stays what it was, and above it grows without bound.",
            "a number below 1, such as 0.999",
            code="optimizer-value",
        )
    if role.ema is not None and role.zero.state_dtype == "bfloat16":
        yield conflict(
            f"{name}.ema",
            "given",
            "The average changes places with the masters for evaluations, and would be rounded to "
            f"bfloat16 ({name}.zero.state_dtype).",
            f"{name}.zero.state_dtype: float32, or leave {name}.ema out",
            code="state-dtype",
        )


def _decay(name: str, role: TrainedRole, updates: int) -> Iterator[Problem]:
    optimizer = role.optimizer
    if optimizer.decay_steps is None:
        return
    if optimizer.schedule != "wsd":
        yield conflict(
            f"{name}.optimizer.decay_steps",
            str(optimizer.decay_steps),
            f"Only wsd has such steps ({name}.optimizer.schedule: {optimizer.schedule}).",
            f"{name}.optimizer.schedule: wsd, or leave {name}.optimizer.decay_steps out",
            code="decay-steps",
        )
    elif optimizer.warmup_steps + optimizer.decay_steps > updates:
        yield invalid(
            f"{name}.optimizer.decay_steps",
            str(optimizer.decay_steps),
            f"With the warm-up ({name}.optimizer.warmup_steps: {optimizer.warmup_steps}) they are "
            f"more than its {counted(updates, 'optimizer step')}.",
            f"fewer of both, {updates} at most, or more run.steps",
            code="decay-steps",
        )
