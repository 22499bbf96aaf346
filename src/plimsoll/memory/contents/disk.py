"""The files that a run writes to its directory: checkpoints and the final model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll.config.engine import TrainedRole
from plimsoll.memory.contents.contents import PlannedJob
from plimsoll.model.price.form import trained_parameters
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.timeline.items import Item
from plimsoll.trainer.price import trainer_price

_STORED_LOGPROB = 20


def disk_items(job: PlannedJob) -> tuple[Item, ...]:
    """Return the most that a run keeps on disk.

    These are the kept checkpoints, the best checkpoint, the checkpoint that is being written, and
    the final model.
    """
    roles, run = job.spec.trained, job.spec.run
    if not roles:
        return ()
    count = run.keep_checkpoints and run.keep_checkpoints + 1 + (run.best is not None)
    saved = _parameters(job)
    element, parameters = roles["actor"].model.element, saved["actor"]
    words = f"{element} bytes x {parameters:,} parameters"
    model = _item("actor", "final model", element * parameters, words)
    checkpoints = [_checkpoints(name, role, saved[name], count) for name, role in roles.items()]
    written = [*checkpoints * (count > 0), *[model] * run.save_model]
    return (*written, *_reference_logprobs(job.spec))


def checkpoint_bytes(job: PlannedJob) -> int:
    """Return the bytes of one checkpoint of all trained roles."""
    parameters, roles = _parameters(job), job.spec.trained
    return sum(_checkpoints(name, role, parameters[name], 1).bytes for name, role in roles.items())


def _parameters(job: PlannedJob) -> dict[str, int]:
    """Return the number of trained parameters of each role that learns."""
    return {
        name: trained_parameters(role, job.shapes[name], job.spec.roles[name].head)
        for name, role in job.spec.trained.items()
    }


def _reference_logprobs(spec: RunSpec[Any]) -> Iterator[Item]:
    """Yield an item with the most bytes that the stored log-probs of the reference take.

    Rows that come several times are counted each time. KTO scores each prompt with two responses.
    Nothing is yielded for a run in epochs: its steps are unknown before its rows are read.
    """
    steps = spec.known_steps
    if spec.precomputes and steps is not None:
        work = spec.workload
        rows = work.scored_with * steps * work.sequences
        yield Item(
            "reference",
            "frozen models",
            "log-probs",
            "disk",
            "allocated",
            _STORED_LOGPROB * rows,
            f"{_STORED_LOGPROB} bytes x {rows:,} sequences of {steps:,} steps",
            "run/stored_logprobs.py: a hash of 16 bytes and a float32",
        )


def _checkpoints(name: str, role: TrainedRole, parameters: int, count: int) -> Item:
    """Return the item of a role's checkpoints: masters, moments, and a moving average.

    The weights are not saved, because they are the rounded masters.
    """
    saved = trainer_price(role).saved(role)
    return _item(
        name,
        "checkpoints",
        count * (saved.masters + saved.moments + saved.average) * parameters,
        f"{count} checkpoints (one of them being written) x ({saved.masters} masters + "
        f"{saved.moments} moments + {saved.average} moving average) bytes x {parameters:,} "
        "trained parameters",
    )


def _item(role: str, name: str, size: int, formula: str) -> Item:
    source = "trainer/checkpoint.py; trainer/weights.py"
    return Item(role, "weights", name, "disk", "allocated", size, formula, source)
