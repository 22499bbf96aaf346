"""The masks of packed attention, where a kernel's own causal mask does not do (model/attention.py).

They are of sequences that are longer than the window, that begin as another does, or whose scores
are bounded: a number for each query and each key.
"""

from __future__ import annotations

from plimsoll.memory.price.activation_form import ActivationForm
from plimsoll.shapes.shape import MicroBatch, ModelShape


def mask_bytes(shape: ModelShape, work: MicroBatch, form: ActivationForm) -> int:
    """Of one forward: all of its layers share them."""
    if (form.attention != "sdpa" and not shape.softcapped) or sees_all_before(shape, work, form):
        return 0
    kinds = (work.shared > 0 or shape.softcapped) + _is_windowed(shape, work)
    return kinds * form.element * work.tokens * work.longest


def aligned_mask_bytes(shape: ModelShape, work: MicroBatch, form: ActivationForm) -> int:
    """What a card's kernels make of them in a layer, to align their rows; the mean over all layers,
    of which only some may have a window."""
    if not _by_kernel(shape, form) or form.written:
        return 0
    return form.element * work.tokens * work.longest * _masked(shape, work) // shape.layers


def repeated_share(shape: ModelShape, work: MicroBatch, form: ActivationForm) -> float:
    """Of the layers, those in which a card's kernel gets keys and values repeated for every head of
    queries (model/attention.py)."""
    if not _by_kernel(shape, form) or shape.heads == shape.kv_heads:
        return 0.0
    return _masked(shape, work) / shape.layers if form.flash else 1.0


def _by_kernel(shape: ModelShape, form: ActivationForm) -> bool:
    return form.attention == "sdpa" and not shape.softcapped and form.device != "cpu"


def _masked(shape: ModelShape, work: MicroBatch) -> int:
    """Layers."""
    if work.shared:
        return shape.layers
    return shape.sliding_layers if _is_windowed(shape, work) else 0


def sees_all_before(shape: ModelShape, work: MicroBatch, form: ActivationForm) -> bool:
    """Whether a CPU's kernel for whole packs serves (model/cpu/attention.py)."""
    plain = not shape.softcapped and not _is_windowed(shape, work)
    return form.device == "cpu" and form.attention == "sdpa" and plain


def _is_windowed(shape: ModelShape, work: MicroBatch) -> bool:
    return shape.sliding_window is not None and work.longest > shape.sliding_window
