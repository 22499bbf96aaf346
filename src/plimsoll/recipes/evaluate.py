"""A model measured on held-out rows as the job of a config measures it, without training.

    plimsoll eval CONFIG|RUN

What is measured follows from the config's job: the likelihood of given answers (sft, distill), what
is preferred (dpo, kto), the scores of responses or of steps (rm, prm), or answers that engines
sample, with their rewards (ppo). What engines wrote, and how well scores are calibrated, is kept
beside the numbers.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryFile

from plimsoll.config.jobs import (
    ComparedJobConfig,
    DistillConfig,
    DpoConfig,
    JobConfig,
    KtoConfig,
    PpoConfig,
    PrmConfig,
    RmConfig,
    SftConfig,
)
from plimsoll.config.roles import role_models
from plimsoll.recipes.evaluate_answers import measure_answers
from plimsoll.recipes.evaluate_rows import (
    measure_likelihood,
    measure_pairs,
    measure_responses,
    measure_scores,
    measure_steps,
)
from plimsoll.recipes.found_models import FoundModel, judge_of
from plimsoll.recipes.roles import compared_role
from plimsoll.recipes.tokenizers import check_tokenizers
from plimsoll.run.files import explained, write_whole
from plimsoll.run.rows import document
from plimsoll.run.standing import figures

Metrics = dict[str, float]


def run_eval(found: FoundModel) -> str:
    """Measure, and write `eval.json`; gives what a person reads of it.

    Raises:
        ConfigError: the model has other tokens than what it is compared with, or nothing is held
            out.
        PlimsollError: the directory cannot be made, or written to.
    """
    path, config, directory = found.path, found.config, found.directory
    measured = _with_model(config, path)
    judge = judge_of(config)
    others = {role: model for role, model in role_models(measured).items() if role == judge}
    check_tokenizers(measured.actor.model, others)
    with explained(directory):  # before what may take hours
        directory.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=directory).close()  # it may be there already, and not be ours to write to
    start = time.monotonic()
    metrics = _measure(measured, directory)
    written = {"model": path, **metrics, "seconds": time.monotonic() - start}
    write_whole(directory / "eval.json", document(written))
    values = [
        f"  {name:<24} {figure.value:>12,.6g}{figure.interval_text}"
        for name, figure in figures(metrics).items()
    ]
    return "\n".join([path, *values, f"written to {directory / 'eval.json'}"])


def _with_model(config: JobConfig, path: str) -> JobConfig:
    """The same with this model as the actor, which is read whole: what an adapter learned over 4
    bits is lost where it is merged and rounded to 4 bits again. What it is compared with stays."""
    own = {"path": path, "quantization": "none", "gradient_checkpointing": False}
    model = config.actor.model.model_copy(update=own)
    changed: dict[str, object] = {
        "actor": config.actor.model_copy(update={"model": model, "adapter": None})
    }
    if isinstance(config, ComparedJobConfig):
        changed["reference"] = compared_role(config.reference, config.actor)
    return config.model_copy(update=changed)


def _measure(config: JobConfig, directory: Path) -> Metrics:
    match config:
        case SftConfig() | DistillConfig():
            return measure_likelihood(config)
        case DpoConfig():
            return measure_pairs(config)
        case KtoConfig():
            return measure_responses(config)
        case RmConfig():
            return measure_scores(config, directory / "eval-calibration.png")
        case PrmConfig():
            return measure_steps(config, directory / "eval-calibration.png")
        case PpoConfig():
            return measure_answers(config, directory / "eval-answers.parquet")
