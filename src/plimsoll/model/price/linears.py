"""Linears with one input, their adapters, and what these save and need."""

from __future__ import annotations

from plimsoll.model.price.form import AdapterForm
from plimsoll.model.price.layer import Layer, Step
from plimsoll.shapes.shape import Linear


def linear_step(layer: Layer, names: tuple[str, ...], scratch: int, beside: int = 0) -> Step:
    """Whatever made their input counts it; here is only what adapters save.

    scratch: elements that their backward allocates. beside: elements that the forward holds
    besides, and saves later.
    """
    element, adapter, written = layer.element, layer.form.adapter, layer.written(names)
    if adapter is None:
        gradient = element * layer.largest(names)
        return Step("linears", 0, element * scratch + written, gradient)
    saved = sum(
        _adapter_saves(layer, adapter, linear) * linear.count // layer.shape.layers
        for linear in layer.adapted(names)
    )
    widest = layer.tokens * max((each.outputs for each in layer.adapted(names)), default=0)
    # The frozen layer's result, the adapter's, and the adapter's scaled.
    results = (element + 2 * adapter.element) * widest
    inputs = element * (beside + layer.hidden + _thinned(layer, adapter, names))
    if adapter.element > element:  # the norm's output, and the gradient that calls for it all
        inputs += (adapter.element + 2 * element) * layer.hidden
    back = element * scratch + written + adapter.element * widest * (1 + 2 * adapter.dora)
    norms = max((_dora_norms(layer, adapter, each) for each in layer.adapted(names)), default=0)
    made = max(results, norms) if adapter.dora else results
    return Step("adapters", saved, back, 0, saved + inputs + made)


def scoring_adapter(layer: Layer, names: tuple[str, ...]) -> int:
    """What the largest of their adapters makes beside its linear's result, without autograd: its
    own result and that scaled; with magnitudes also what `_dora_norms` says. Bytes."""
    adapter = layer.form.adapter
    if adapter is None:
        return 0

    def made(linear: Linear) -> int:
        results = adapter.element * layer.tokens * linear.outputs
        if not adapter.dora:
            return 2 * results
        identity, matrix = linear.inputs**2, linear.inputs * linear.outputs
        written = matrix * layer.form.quantized
        last = matrix + written + 4 * layer.tokens * linear.outputs
        return layer.element * max(identity + matrix, 3 * matrix + written, last)

    return max(map(made, layer.adapted(names)), default=0)


def _dora_norms(layer: Layer, adapter: AdapterForm, linear: Linear) -> int:
    """For the norms of a weight's rows, PEFT writes the weight's update out: an identity matrix
    sent through the adapter, which autograd keeps, the product, it scaled, and its sum with the
    weight; bytes (peft/tuners/lora/dora.py, DoraLinearLayer.forward)."""
    copies = 3 + (layer.form.quantized and not adapter.dropout)  # else it is kept, and counted so
    return layer.element * linear.inputs * (linear.inputs + copies * linear.outputs)


def _thinned(layer: Layer, adapter: AdapterForm, names: tuple[str, ...]) -> int:
    """An input that dropout copies, and that nothing saves as it is; elements."""
    widest = max((each.inputs for each in layer.adapted(names)), default=0)
    return layer.tokens * widest if adapter.dropout else 0


def _adapter_saves(layer: Layer, adapter: AdapterForm, linear: Linear) -> int:
    tokens, element = layer.tokens, adapter.element
    saved = element * tokens * adapter.rank
    if adapter.dropout or element > layer.element:
        saved += element * tokens * linear.inputs
    if adapter.dropout:  # the mask
        mask = 1 if layer.form.device == "cuda" else element
        saved += mask * tokens * linear.inputs
    return saved + (_dora_saves(layer, adapter, linear) if adapter.dora else 0)


def _dora_saves(layer: Layer, adapter: AdapterForm, linear: Linear) -> int:
    """The frozen layer's result and the adapter's, for the magnitudes' gradient. With dropout the
    frozen layer is run again on the thinned input: a 4-bit weight written out for that is kept."""
    results = 2 * layer.tokens * linear.outputs
    kept = linear.inputs * linear.outputs if layer.form.quantized and adapter.dropout else 0
    return layer.element * (results + kept)
