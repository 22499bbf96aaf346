"""A model measured on held-out rows as the job of a config measures it, without training.

    plimsoll eval CONFIG|RUN

What is measured follows from the config's job: the likelihood of given answers (sft, distill), what
is preferred (dpo, kto), the scores of responses or of steps (rm, prm), or answers that engines
sample, with their rewards (ppo). What engines wrote, and how well scores are calibrated, is kept
beside the numbers.
"""

from __future__ import annotations

import time
from tempfile import TemporaryFile
from typing import Any

from plimsoll.commands.found_models import FoundModel, measure_with
from plimsoll.run.files import explained, write_whole
from plimsoll.run.json_lines import document
from plimsoll.run.step_report import figures
from plimsoll.spec.run_spec import RunSpec, resolve
from plimsoll.train.tokenizers import check_tokenizers


def run_eval(found: FoundModel) -> str:
    """Measure, and write `eval.json`; gives what a person reads of it.

    Raises:
        ConfigError: the model has other tokens than what it is compared with, or nothing is held
            out.
        PlimsollError: the directory cannot be made, or written to.
    """
    path, directory = found.path, found.directory
    measured = _with_model(found.spec, path)
    beside = measure_with(measured)
    check_tokenizers(measured.actor.model, [] if beside is None else [beside])
    with explained(directory):  # before what may take hours
        directory.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=directory).close()  # it may be there already, and not be ours to write to
    start = time.monotonic()
    metrics = measured.job.load_loop().measure(measured, directory)
    written = {"model": path, **metrics, "seconds": time.monotonic() - start}
    write_whole(directory / "eval.json", document(written))
    values = [
        f"  {name:<24} {figure.value:>12,.6g}{figure.interval_text}"
        for name, figure in figures(metrics).items()
    ]
    return "\n".join([path, *values, f"written to {directory / 'eval.json'}"])


def _with_model(spec: RunSpec[Any], path: str) -> RunSpec[Any]:
    """The same with this model as the actor, which is read whole: what an adapter learned over 4
    bits is lost where it is merged and rounded to 4 bits again. What it is compared with stays."""
    own = {"path": path, "quantization": "none", "gradient_checkpointing": False}
    model = spec.actor.model.model_copy(update=own)
    changed: dict[str, object] = {
        "actor": spec.actor.model_copy(update={"model": model, "adapter": None})
    }
    if spec.may_precompute:
        changed["reference"] = spec.roles["reference"].settings
    return resolve(spec.job, spec.config.model_copy(update=changed))
