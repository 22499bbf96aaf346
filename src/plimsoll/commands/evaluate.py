"""Evaluate a model on held-out rows, without training. The job of a config says how.

`plimsoll eval CONFIG|RUN`

Jobs measure the likelihood of given answers (sft, distill), preferences (dpo, kto), scores of
responses or of solution steps (rm, prm), or the rewards of answers that engines sample (ppo).
Sampled answers and the calibration of scores are written next to the numbers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from plimsoll.commands.found_models import FoundModel, comparison_role
from plimsoll.resolve.run_spec import RunSpec, resolve_changed
from plimsoll.run.displays import figures
from plimsoll.run.files import explaining_errors, write_whole
from plimsoll.run.json_lines import document
from plimsoll.train.tokenizers import check_tokenizers


def run_eval(model: FoundModel) -> str:
    """Evaluate a model, write `eval.json`, and return the metrics as text.

    Raises ConfigError if the tokens of the model and its comparison model differ, or if there are
    no held-out rows; PlimsollError if the directory cannot be written to.
    """
    directory = model.directory
    with explaining_errors(directory):  # checked before hours of work
        directory.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=directory).close()  # it may exist and not be writable
    start = time.monotonic()
    with _whole_model(model) as whole:
        measured = _with_model(model.spec, whole)
        compared = comparison_role(measured)
        check_tokenizers(measured.actor.model, [] if compared is None else [compared])
        metrics = measured.job.load_loop().measure(measured, directory)
    results = {"model": model.path, **metrics, "seconds": time.monotonic() - start}
    write_whole(directory / "eval.json", document(results))
    values = [
        f"  {name:<24} {figure.value:>12,.6g}{figure.interval_text}"
        for name, figure in figures(metrics).items()
    ]
    return "\n".join([model.path, *values, f"written to {directory / 'eval.json'}"])


@contextmanager
def _whole_model(model: FoundModel) -> Iterator[str]:
    """Yield the path of a model; an adapter is merged into its base for as long as the block lasts.

    The merged model is beside the results, where the run's other processes find it, too.
    """
    if not model.adapter:
        yield model.path
        return
    from plimsoll.commands.export import merge_adapter

    of = model.spec.actor.model
    read = {name: getattr(of, name) for name in ("quantization", "double_quantization")}
    read |= {"dtype": of.dtype, "trust_remote_code": of.trust_remote_code}
    with TemporaryDirectory(dir=model.directory, prefix=".merged-") as folder:
        merged = Path(folder, "model")
        merge_adapter(Path(model.path), merged, None, **read)
        yield str(merged)


def _with_model(spec: RunSpec[Any], path: str) -> RunSpec[Any]:
    """Return a spec with this model as the actor, loaded without quantization or adapter.

    An adapter trained on a 4-bit base is lost if the merged weights are rounded to 4 bits again.
    The comparison model does not change.
    """
    reading = {"path": path, "quantization": "none", "gradient_checkpointing": False}
    actor = spec.written.actor
    whole = {"model": actor.model.model_copy(update=reading), "adapter": None}
    changed: dict[str, object] = {"actor": actor.model_copy(update=whole)}
    if spec.may_precompute:
        changed["reference"] = spec.roles["reference"].settings
    return resolve_changed(spec, changed)
