"""What a run writes to its directory: checkpoints and the final model."""

from __future__ import annotations

from plimsoll.config.engine import TrainedRole
from plimsoll.memory.items import Item
from plimsoll.memory.plan.contents import Job
from plimsoll.memory.price.roles import adapter_tensors
from plimsoll.memory.price.work import RoleName, trained_roles


def disk_items(job: Job) -> tuple[Item, ...]:
    """At most: the checkpoints that are kept, the one that is being written, the final model."""
    roles = trained_roles(job.config)
    count = job.config.run.keep_checkpoints + 1
    actor, saved = roles["actor"], _saved_parameters(job, "actor", roles["actor"])
    element = _element(actor)
    model = _item(
        "actor", "final model", element * saved, f"{element} bytes x {saved:,} parameters"
    )
    checkpoints = (
        _checkpoints(name, role, _saved_parameters(job, name, role), count)
        for name, role in roles.items()
    )
    return (*checkpoints, model)


def _saved_parameters(job: Job, name: RoleName, role: TrainedRole) -> int:
    """All, or the adapter's alone."""
    shape = job.shapes[name]
    value = shape.hidden if name == "critic" else 0
    if role.adapter is not None:
        return value + sum(count * size for count, size in adapter_tensors(shape, role.adapter))
    return shape.value_parameters if name == "critic" else shape.parameters


def _checkpoints(name: str, role: TrainedRole, parameters: int, count: int) -> Item:
    """Weights in the model's dtype, fp32 masters where they are another copy, and moments."""
    weights = _element(role)
    masters = 4 if role.zero.stage > 0 or role.model.dtype == "bfloat16" else 0
    moments = 2 if role.optimizer.kind == "adamw_8bit" else 8
    return _item(
        name,
        "checkpoints",
        count * (weights + masters + moments) * parameters,
        f"{count} checkpoints (one of them being written) x ({weights} weights + {masters} masters "
        f"+ {moments} moments) bytes x {parameters:,} trained parameters",
    )


def _element(role: TrainedRole) -> int:
    return 2 if role.model.dtype == "bfloat16" else 4


def _item(role: str, name: str, size: int, formula: str) -> Item:
    source = "DeepSpeed 0.19.8: engine.save_checkpoint; engine/export.py"
    return Item(role, name, "disk", "allocated", size, formula, source)
