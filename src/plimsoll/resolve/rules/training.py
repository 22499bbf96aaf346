"""Rules about the training of roles: its length, schedule, averages and evaluations, and adapters.

A reference and quantised models have their rules here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from plimsoll.config.base import Choice
from plimsoll.config.engine import (
    EXPERTS,
    AdapterConfig,
    FrozenRole,
    ReferenceLogprobsConfig,
    TrainedRole,
)
from plimsoll.config.problems import Problem, Section, conflict
from plimsoll.config.run import BestConfig
from plimsoll.resolve.job import Evaluation
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.numbers import plural

_ALIGNED = 8
"""16 bytes of bfloat16 (PyTorch's grouped_mm, aten/src/ATen/native/GroupedMMUtils.h)."""


def check_adapter(name: str, role: TrainedRole) -> Iterator[Problem]:
    """Yield problems of a trained role's adapter and quantisation."""
    at = Section(name, role)
    if role.model.quantization == "nf4" and role.adapter is None:
        why = "Weights of 4 bits cannot be trained, and there is no adapter to train instead."
        fix = f"an adapter, such as {name}.adapter.rank: 16, or {name}.model.quantization: none"
        yield at.conflict("model.quantization", why, fix, "four-bit-training")
    if role.adapter is None:
        return
    if not role.adapter.targets:
        why = "No layer would get an adapter, so nothing would be trained."
        fix = "[all-linear], or the names of some layers"
        yield at.invalid("adapter.targets", why, fix, "adapter-targets")
    if EXPERTS in role.adapter.targets:
        yield from _check_experts(at, name, role.adapter)


def _check_experts(at: Section, name: str, adapter: AdapterConfig) -> Iterator[Problem]:
    """Yield what an adapter of stacked experts cannot be."""
    others, code = f"{name}.adapter.targets without {EXPERTS}", "adapter-experts"
    if adapter.dropout > 0:
        why = "PEFT's adapters of stacked experts have no dropout: it would read another model."
        yield at.conflict("adapter.dropout", why, f"{name}.adapter.dropout: 0, or {others}", code)
    if adapter.dora:
        why = "DoRA needs the norms of all experts' updated weights in each forward pass, and PEFT "
        why += "has none for stacked experts."
        yield at.conflict("adapter.dora", why, f"{name}.adapter.dora: false, or {others}", code)
    if adapter.rank % _ALIGNED:
        why = "Grouped matrix products need rows of whole 16 bytes, so the rank of experts must be "
        why += f"a multiple of {_ALIGNED}."
        rank = -(-adapter.rank // _ALIGNED) * _ALIGNED
        yield at.conflict("adapter.rank", why, f"{name}.adapter.rank: {rank}, or {others}", code)


def check_steadiness(name: str, role: TrainedRole) -> Iterator[Problem]:
    """Yield a problem if a role's adapter has dropout although its log-probs must be repeatable.

    A job calls this if its loss compares log-probs from two forward passes.
    """
    if role.adapter is not None and role.adapter.dropout > 0:
        why = "Each forward pass would drop other inputs, so the ratio of new to old probabilities "
        why += "would be noise."
        fix = f"{name}.adapter.dropout: 0; dropout is for sft and dpo"
        yield Section(name, role).conflict("adapter.dropout", why, fix, "adapter-dropout")


SUFFIX = ".parquet"


def stored_logprobs(settings: ReferenceLogprobsConfig) -> Iterator[Problem]:
    """Yield problems of the settings for a file of the reference's log-probs."""
    at = Section("reference_logprobs", settings)
    if settings.path is None:
        return
    if not settings.precompute:
        why = "It would be neither read nor written: the reference scores batch by batch."
        fix = "reference_logprobs.precompute: true, or leave reference_logprobs.path out"
        yield at.conflict("path", why, fix, "reference-logprobs")
    if Path(settings.path).suffix != SUFFIX:
        why = "The numbers are kept as Parquet, and files of data are told by their names."
        fix = f"a name that ends in {SUFFIX}"
        yield at.invalid("path", why, fix, "reference-logprobs")


def unused_reference(
    given: FrozenRole | None, logprobs: ReferenceLogprobsConfig, loss: Choice
) -> Iterator[Problem]:
    """Yield a problem for each setting of the reference, for a loss that uses no reference."""
    unused = {"reference": "given"} if given is not None else {}
    if logprobs.precompute:
        unused["reference_logprobs.precompute"] = "true"
    for key, value in unused.items():
        why = f"The loss {loss.name} is reference-free: it would not be looked at."
        fix = f"leave {key} out, or algorithm.loss.name: dpo"
        yield conflict(key, value, why, fix, code="reference-free-loss")


def check_length(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield problems of the run's length (`run.steps` or `run.epochs`)."""
    at, run = Section("run", spec.run), spec.run
    if (run.steps is None) == (run.epochs is None):
        both = run.steps is not None
        why = "How long the run is, is given two ways: run.epochs is set too." if both else ""
        why = why or "Missing: how long the run is."
        fix = "run.steps or run.epochs, not both" if both else "write run.steps or run.epochs"
        yield at.invalid("steps", why, fix)
    if run.epochs is None or spec.known_steps is None:
        return
    for role in spec.roles.values():
        if not role.trained or role.begins < spec.steps:
            continue
        why = f"The run has {plural(spec.steps, 'step')}, and the {role.name} is trained from "
        why += f"step {role.begins + 1} on, so it would never be."
        yield at.invalid("epochs", why, "more run.epochs, or train it earlier")


def check_evaluations(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Yield problems of `run.best`, and of moving averages of roles that become no final model."""
    at, best = Section("", spec.config), spec.run.best
    if best is not None and spec.run.eval_every is None:
        why = "Nothing is evaluated: run.eval_every is not given."
        fix = "give run.eval_every and data.eval, or leave run.best out"
        yield at.conflict("run.best", why, fix, "best-without-eval")
    if best is not None and not spec.run.keep_checkpoints:
        why = "It keeps the checkpoint of the best evaluation, and run.keep_checkpoints is 0."
        fix = "run.keep_checkpoints: 1, or leave run.best out"
        yield at.conflict("run.best", why, fix, "best-without-checkpoints")
    if best is not None and not spec.evaluation.more:
        yield from _best(Section("run.best", best), best, spec.evaluation)
    for name, role in spec.trained.items():
        if role.ema is not None and not spec.roles[name].sends:
            why = f"The average is for the final model, and the {name} is not written as one."
            fix = f"{spec.sender.name}.ema, or leave {name}.ema out"
            yield at.conflict(f"{name}.ema", why, fix, "critic-ema")


def _best(at: Section, best: BestConfig, evaluation: Evaluation) -> Iterator[Problem]:
    """Yield problems of the metric by which evaluations are compared, and of its direction."""
    reported, name = evaluation.written_names, evaluation.reports(best.metric)
    if name is None:
        close = get_close_matches(best.metric, reported, n=3)
        why = "Evaluations are compared by it (run.best), and this job's do not report it."
        fix = f"did you mean {' or '.join(close)}?" if close else f"one of {', '.join(reported)}"
        yield at.invalid("metric", why, fix, "best-metric")
    elif reported[name] not in (None, best.goal):
        why = f"It would keep the worst evaluation: the best {best.metric} is the "
        why += f"{reported[name]} (run.best.metric)."
        fix = f"run.best.goal: {reported[name]}"
        yield at.conflict("goal", why, fix, "best-metric")


def check_schedule(name: str, role: TrainedRole, updates: int | None) -> Iterator[Problem]:
    """Yield problems of a role's learning rate schedule and of its moving average.

    `updates` is the number of the role's optimizer steps, or None if it is not known yet.
    """
    at, optimizer = Section(name, role), role.optimizer
    if optimizer.final_ratio > 1:
        why, fix = "It is a share of the peak learning rate.", "a number from 0 to 1"
        yield at.invalid("optimizer.final_ratio", why, fix, "optimizer-value")
    if optimizer.warmup_steps and optimizer.warmup_ratio:
        why = f"{name}.optimizer.warmup_steps says how long the warm-up is, too."
        fix = f"leave {name}.optimizer.warmup_ratio out, or {name}.optimizer.warmup_steps"
        yield at.invalid("optimizer.warmup_ratio", why, fix, "optimizer-value")
    if updates is not None and optimizer.warmup_steps > updates:
        why = f"The {name} takes {plural(updates, 'optimizer step')}, so the peak would never be "
        why += "reached."
        fix = f"at most {updates}, or a longer run"
        yield at.invalid("optimizer.warmup_steps", why, fix, "warmup-too-long")
    yield from _decay(at, role, updates)
    if role.ema is not None and role.ema.decay >= 1:
        why = "At 1 the average stays what it was, and above it grows without bound."
        fix = "a number below 1, such as 0.999"
        yield at.invalid("ema.decay", why, fix, "optimizer-value")


def _decay(at: Section, role: TrainedRole, updates: int | None) -> Iterator[Problem]:
    name, optimizer = at.key, role.optimizer
    if optimizer.decay_steps is None:
        return
    if optimizer.schedule != "wsd":
        why = f"Only wsd has such steps ({name}.optimizer.schedule: {optimizer.schedule})."
        fix = f"{name}.optimizer.schedule: wsd, or leave {name}.optimizer.decay_steps out"
        yield at.conflict("optimizer.decay_steps", why, fix, "decay-steps")
    elif updates is not None and optimizer.warmup(updates) + optimizer.decay_steps > updates:
        why = f"With the warm-up of {plural(optimizer.warmup(updates), 'step')} they are more than "
        why += f"its {plural(updates, 'optimizer step')}."
        fix = f"fewer of both, {updates} at most, or a longer run"
        yield at.invalid("optimizer.decay_steps", why, fix, "decay-steps")
