"""When the first bucket of gradients is full: how much of the backward pass is then left."""

from __future__ import annotations

from math import ceil

from plimsoll.memory.price.division import ZeroSizes
from plimsoll.shapes.shape import ModelShape


def layers_left(shape: ModelShape, trained: int, sizes: ZeroSizes, adapted: bool) -> int:
    """Layers whose activations are still kept when DeepSpeed reduces for the first time.

    Gradients come from the head down, an embedding's last (a tied head's with it). A bucket that
    takes them all is reduced after the last of them, when nothing is left; at stage 0 all are.

    trained: elements of all gradients. adapted: only adapters have gradients.
    """
    if sizes.stage == 0 or sizes.bucket >= trained:
        return 0
    head = 0 if adapted else shape.head_parameters
    layers = trained - head - (0 if adapted else shape.embedding_parameters)
    undone = min(1.0, max(0, sizes.bucket - head) / max(1, layers))
    return ceil(shape.layers * (1 - undone))
