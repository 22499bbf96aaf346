"""The masks of packed attention, where a kernel's own causal mask does not do (model/attention.py).

They are of sequences that are longer than the window, that begin as another does, or whose scores
are bounded: a number for each query and each key.
"""

from __future__ import annotations

from plimsoll.memory.price.activation_form import ActivationForm
from plimsoll.memory.shapes.shape import MicroBatch, ModelShape


def mask_bytes(shape: ModelShape, work: MicroBatch, form: ActivationForm) -> int:
    """Of one forward: all of its layers share them."""
    if (form.attention != "sdpa" and not shape.softcapped) or sees_all_before(shape, work, form):
        return 0
    kinds = (work.shared > 0 or shape.softcapped) + _is_windowed(shape, work)
    return kinds * form.element * work.tokens * work.longest


def aligned_mask_bytes(shape: ModelShape, work: MicroBatch, form: ActivationForm) -> int:
    """What a card's kernels make of them in a layer, to align their rows; the mean over all layers,
    of which only some may have a window."""
    if form.attention != "sdpa" or shape.softcapped or form.device == "cpu":
        return 0
    layers = shape.sliding_layers if _is_windowed(shape, work) else 0
    if work.shared:
        layers = shape.layers
    return form.element * work.tokens * work.longest * layers // shape.layers


def sees_all_before(shape: ModelShape, work: MicroBatch, form: ActivationForm) -> bool:
    """Whether a CPU's kernel for whole packs serves (model/cpu_attention.py)."""
    plain = not shape.softcapped and not _is_windowed(shape, work)
    return form.device == "cpu" and form.attention == "sdpa" and plain


def _is_windowed(shape: ModelShape, work: MicroBatch) -> bool:
    return shape.sliding_window is not None and work.longest > shape.sliding_window
