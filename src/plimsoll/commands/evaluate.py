"""Measure a model on held-out rows as the job of a config measures it, without training.

`plimsoll eval CONFIG|RUN`

The job decides what is measured: the likelihood of given answers (sft, distill), preferences (dpo,
kto), the scores of responses or of steps (rm, prm), or answers that engines sample, with their
rewards (ppo). Sampled answers and the calibration of scores are kept beside the numbers.
"""

from __future__ import annotations

import time
from tempfile import TemporaryFile
from typing import Any

from plimsoll.commands.found_models import FoundModel, comparison_role
from plimsoll.run.files import explaining_errors, write_whole
from plimsoll.run.json_lines import document
from plimsoll.run.step_report import figures
from plimsoll.spec.run_spec import RunSpec, resolve_changed
from plimsoll.train.tokenizers import check_tokenizers


def run_eval(model: FoundModel) -> str:
    """Measure a model, write `eval.json`, and return the numbers as text.

    Raises ConfigError if the model has other tokens than the one it is compared with, or nothing is
    held out, and PlimsollError if the directory cannot be written to.
    """
    path, directory = model.path, model.directory
    measured = _with_model(model.spec, path)
    compared = comparison_role(measured)
    check_tokenizers(measured.actor.model, [] if compared is None else [compared])
    with explaining_errors(directory):  # checked before hours of work
        directory.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=directory).close()  # it may exist and not be writable
    start = time.monotonic()
    metrics = measured.job.load_loop().measure(measured, directory)
    results = {"model": path, **metrics, "seconds": time.monotonic() - start}
    write_whole(directory / "eval.json", document(results))
    values = [
        f"  {name:<24} {figure.value:>12,.6g}{figure.interval_text}"
        for name, figure in figures(metrics).items()
    ]
    return "\n".join([path, *values, f"written to {directory / 'eval.json'}"])


def _with_model(spec: RunSpec[Any], path: str) -> RunSpec[Any]:
    """Return the spec with this model as the actor, read without quantization.

    What an adapter learned over 4 bits is lost if it is merged and rounded to 4 bits again. The
    model that it is compared with stays.
    """
    reading = {"path": path, "quantization": "none", "gradient_checkpointing": False}
    actor = spec.written.actor
    model = actor.model.model_copy(update=reading)
    changed: dict[str, object] = {
        "actor": actor.model_copy(update={"model": model, "adapter": None})
    }
    if spec.may_precompute:
        changed["reference"] = spec.roles["reference"].settings
    return resolve_changed(spec, changed)
