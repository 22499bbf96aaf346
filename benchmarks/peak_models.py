"""What a published row's framework holds at its peak, priced with Plimsoll's own formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from peak_activations import Activations
from peak_projects import PROJECTS, Project
from peak_rows import Row
from peak_states import bucket_sizes, states, trained_parameters, zero_stage
from plimsoll.engine.zero.price import layers_left
from plimsoll.engine.zero.sizes import ZeroSizes
from plimsoll.memory.contents.overheads import Constants
from plimsoll.timeline.lifetimes import Life
from plimsoll.timeline.tensors import kept_bytes


@dataclass(frozen=True)
class Peak:
    """Bytes, in the row's own metric, and as the device shows them."""

    metric: float
    device: float


def in_metric(row: Row, allocated: float, constants: Constants) -> Peak:
    """From allocated bytes to what the row reports; an unstated metric is taken as the device's."""
    reserved = allocated * (1 + constants.allocator_gap)
    communicator = constants.nccl_communicator if row.ranks > 1 else 0
    device = reserved + constants.cuda_context + communicator
    by_metric = {"allocated": allocated, "reserved": reserved}
    return Peak(by_metric.get(row.metric, device), device)


def allocated_bytes(row: Row) -> int:
    """The maximum over forward and backward, the first reduction of gradients, their norm and the
    optimizer's step, as of a trained role (timeline/lifetimes.py); but the DeepSpeed of these
    rows made its buckets before the backward (zero/stage_1_and_2.py, backward), and took the norm
    of a gradient that goes to the host where it reduced it (copy_grads_in_partition).
    """
    project = PROJECTS.get(row.framework, Project())
    if project.untied:
        row = replace(row, shape=replace(row.shape, tied=False))
    if row.prepared is None:
        row = replace(row, prepared=project.prepares)
    kept = tuple(states(row, project))
    activations = Activations(row, project)

    def living(*lives: Life) -> int:
        return kept_bytes(kept, "always", "built", "stepped", *lives)

    before: tuple[Life, ...] = ("training",) if row.accumulates else ()
    late: tuple[Life, ...] = ("training",) if project.late_zero else before
    early = row.optimizer_offload and zero_stage(row, project) in (1, 2)
    norming: tuple[Life, ...] = ("computing", "backward", *before) if early else ("training",)
    return max(
        living("computing", "backward", *late) + activations.highest,
        living("computing", "backward", *before) + activations.left(row.shape.layers),
        living("computing", "backward", "reducing", *before)
        + activations.left(_unreduced(row, project)),
        living("computing", "backward", "training") + activations.at_end,
        living("norming", *norming) + activations.at_step,
        living("training", "stepping") + activations.at_step,
    )


def _unreduced(row: Row, project: Project) -> int:
    """Layers that are left when gradients are first reduced: FSDP and DDP begin with the last, if
    it is a unit of its own."""
    if row.one_unit:
        return 1
    stage = zero_stage(row, project)
    if not stage:
        return row.shape.layers
    sizes = ZeroSizes(stage, row.ranks, 2, bucket_sizes(row, project)[0])
    return layers_left(row.shape, trained_parameters(row), sizes, row.adapter is not None)
