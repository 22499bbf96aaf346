"""What a run writes to its directory: checkpoints and the final model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll.config.engine import TrainedRole
from plimsoll.config.model import ELEMENT_BYTES
from plimsoll.engine.zero.sizes import adapter_tensors, moment_bytes
from plimsoll.memory.contents.contents import Job
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import RunSpec
from plimsoll.timeline.items import Item

_STORED_LOGPROB = 20


def disk_items(job: Job) -> tuple[Item, ...]:
    """At most: the checkpoints that are kept, the best one among them, the one that is being
    written, the final model."""
    roles = job.spec.trained
    run = job.spec.run
    count = run.keep_checkpoints + 1 + (run.best is not None)
    actor, saved = roles["actor"], _saved_parameters(job, "actor", roles["actor"])
    element = actor.model.element
    model = _item(
        "actor", "final model", element * saved, f"{element} bytes x {saved:,} parameters"
    )
    checkpoints = (
        _checkpoints(name, role, _saved_parameters(job, name, role), count)
        for name, role in roles.items()
    )
    return (*checkpoints, model, *_reference_logprobs(job.spec))


def _reference_logprobs(spec: RunSpec[Any]) -> Iterator[Item]:
    """At most, as rows may come several times; KTO has each prompt scored with two responses."""
    if spec.precomputes:
        work, steps = spec.workload, spec.run.steps
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


def _saved_parameters(job: Job, name: RoleName, role: TrainedRole) -> int:
    """All, or the adapter's alone."""
    shape = job.shapes[name]
    scores = job.spec.roles[name].head == "value"
    value = shape.hidden if scores else 0
    if role.adapter is not None:
        return value + sum(count * size for count, size in adapter_tensors(shape, role.adapter))
    return shape.value_parameters if scores else shape.parameters


def _checkpoints(name: str, role: TrainedRole, parameters: int, count: int) -> Item:
    """Masters, moments, and a moving average; the weights are the masters', rounded."""
    masters = ELEMENT_BYTES[role.zero.state_dtype]
    moments = round(moment_bytes(role))
    average = 4 if role.ema is not None else 0
    return _item(
        name,
        "checkpoints",
        count * (masters + moments + average) * parameters,
        f"{count} checkpoints (one of them being written) x ({masters} masters + {moments} moments "
        f"+ {average} moving average) bytes x {parameters:,} trained parameters",
    )


def _item(role: str, name: str, size: int, formula: str) -> Item:
    source = "engine/checkpoint.py; engine/export.py"
    return Item(role, "weights", name, "disk", "allocated", size, formula, source)
