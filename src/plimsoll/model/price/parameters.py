"""The number of a role's parameters that learn."""

from __future__ import annotations

from plimsoll.config.engine import AdapterConfig, TrainedRole
from plimsoll.shapes.shape import ModelShape
from plimsoll.spec.roles import HeadKind

EMBEDDINGS = "embed_tokens"
"""The input embedding, as an adapter's target; it is no linear layer."""


def trained_parameters(role: TrainedRole, shape: ModelShape, head: HeadKind) -> int:
    """Return the number of trained parameters: all, or the adapter's and those of a value head."""
    if role.adapter is None:
        return shape.value_parameters if head == "value" else shape.parameters
    return adapter_parameters(shape, role.adapter) + (shape.hidden if head == "value" else 0)


def adapter_parameters(shape: ModelShape, adapter: AdapterConfig) -> int:
    """Return the number of an adapter's parameters: all matrices, and DoRA's magnitudes."""
    return sum(count * elements for count, elements in adapter_tensors(shape, adapter))


def adapter_tensors(shape: ModelShape, adapter: AdapterConfig) -> list[tuple[int, int]]:
    """Return an adapter's matrices and DoRA's magnitudes as pairs of count and elements of each."""
    tensors = []
    for linear in shape.linears:
        if linear.stacked == 1 and ({linear.name, "all-linear"} & {*adapter.targets}):
            sides = [linear.inputs, linear.outputs]
            tensors += [(linear.count, adapter.rank * side) for side in sides]
            tensors += [(linear.count, linear.outputs)] if adapter.dora else []
    if EMBEDDINGS in adapter.targets:
        tensors += [(1, adapter.rank * side) for side in (shape.vocabulary, shape.hidden)]
        tensors += [(1, shape.hidden)] if adapter.dora else []
    return tensors
