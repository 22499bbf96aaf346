"""A model measured on held-out rows as the job of a config measures it, without training.

    plimsoll eval CONFIG|RUN

What is measured follows from the config's job: the likelihood of given answers (sft, distill), what
is preferred (dpo, kto), the scores of responses or of steps (rm, prm), or answers that engines
sample, with their rewards (ppo). What engines wrote, and how well scores are calibrated, is kept
beside the numbers.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from plimsoll.config.jobs import (
    DistillConfig,
    DpoConfig,
    JobConfig,
    KtoConfig,
    PpoConfig,
    PrmConfig,
    RmConfig,
    SftConfig,
)
from plimsoll.config.which import load_any_config
from plimsoll.errors import ConfigError
from plimsoll.memory.price.work import role_models
from plimsoll.model.adapter_files import CONFIG
from plimsoll.recipes.evaluate_answers import measure_answers
from plimsoll.recipes.evaluate_rows import (
    measure_likelihood,
    measure_pairs,
    measure_responses,
    measure_scores,
    measure_steps,
)
from plimsoll.recipes.roles import compared_role
from plimsoll.recipes.tokenizers import check_tokenizers
from plimsoll.run.directory import RunDirectory
from plimsoll.run.files import explained, write_whole

Metrics = dict[str, float]


def run_eval(source: str, flags: list[str], model: str | None, out: str | None) -> str:
    """Measure; gives what a person reads of it.

    source: a config, or a run.directory, whose config and final model are taken. model: a directory
    or name instead of that, or of the config's actor.model.path. out: where `eval.json` is written;
    default: the run.directory.

    Raises:
        ConfigError: there is no such config, run or model, the model is an adapter alone or has
            other tokens than what it is compared with, or nothing is held out.
        PlimsollError: the directory cannot be made.
    """
    if not Path(source).exists() and Path(source).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"There is no config and no run.directory {source!r}. Check the path.")
    run = Path(source) if Path(source).is_dir() else None
    config = load_any_config(source if run is None else str(RunDirectory(run).config_path), flags)
    path = model or (config.actor.model.path if run is None else _final_model(run))
    _refuse_adapter(path, source)
    measured = _with_model(config, path)
    judge = "reward" if isinstance(config, PpoConfig) else "reference"
    others = {role: model for role, model in role_models(measured).items() if role == judge}
    check_tokenizers(measured.actor.model, others)
    directory = Path(out) if out else run or Path(config.run.directory)
    with explained(directory):  # before what may take hours
        directory.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    metrics = _measure(measured, directory)
    found = {"model": path, **metrics, "seconds": time.monotonic() - start}
    write_whole(directory / "eval.json", json.dumps(found, indent=2) + "\n")
    values = [f"  {name:<24} {value:>12,.6g}" for name, value in metrics.items()]
    return "\n".join([path, *values, f"written to {directory / 'eval.json'}"])


def _with_model(config: JobConfig, path: str) -> JobConfig:
    """The same with this model as the actor, which is read whole: what an adapter learned over 4
    bits is lost where it is merged and rounded to 4 bits again. What it is compared with stays."""
    own = {"path": path, "quantization": "none", "gradient_checkpointing": False}
    model = config.actor.model.model_copy(update=own)
    changed: dict[str, object] = {
        "actor": config.actor.model_copy(update={"model": model, "adapter": None})
    }
    if isinstance(config, DpoConfig | KtoConfig):
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


def _final_model(run: Path) -> str:
    path = RunDirectory(run).model_path
    if not path.is_dir():
        raise ConfigError(
            f"{run} has no final model yet. Write one from a checkpoint with `plimsoll export "
            f"{run} --to DIRECTORY`, and give it with --model."
        )
    return str(path)


def _refuse_adapter(model: str, source: str) -> None:
    if (Path(model) / CONFIG).is_file():
        raise ConfigError(
            f"{model} is an adapter alone. Merge it first, with `plimsoll merge {model} --out "
            f"DIRECTORY` or `plimsoll export {source} --merge --to DIRECTORY`, and give the result "
            f"with --model."
        )
