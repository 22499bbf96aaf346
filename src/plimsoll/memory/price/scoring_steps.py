"""A decoder layer's forward without autograd: what its local names hold where it is highest."""

from __future__ import annotations

from plimsoll.memory.price.activation_form import BLOCK_ELEMENTS, ActivationForm
from plimsoll.memory.price.layer import DOWN, GATES, OUTPUT, QUERIES, UPS, Layer
from plimsoll.memory.price.linear_steps import scoring_adapter
from plimsoll.memory.price.steps import Summit
from plimsoll.shapes.shape import MicroBatch, ModelShape

_FP32 = 4
_FOUR = 4  # gate and up in one, its first half activated, and the product; or NewGELUActivation's


def scoring_summit(shape: ModelShape, work: MicroBatch, form: ActivationForm) -> Summit:
    """The highest point of a layer's forward."""
    layer = Layer(shape, work, form)
    return max(_attention(layer), _mlp(layer), key=lambda point: point.bytes)


def _attention(layer: Layer) -> Summit:
    """The embedding's output, the layer's input and its norm; queries, keys, values."""
    element, shape, work = layer.form.element, layer.shape, layer.work
    held = element * (3 * layer.hidden + layer.queries + 2 * layer.keys + layer.gathered)
    made = element * (layer.queries + layer.hidden)  # attention's output, and the layer's after it
    adapted = held + max(scoring_adapter(layer, QUERIES), made + scoring_adapter(layer, OUTPUT))
    scores = 3 * _FP32 * shape.heads * work.longest
    if shape.softcapped:  # sequence by sequence, with queries and keys in fp32
        longest = 3 * _FP32 * layer.queries // work.tokens + scores
        held += longest * work.longest
    elif layer.form.attention == "eager":
        held += scores * work.tokens
    elif layer.form.written:  # sequence by sequence, with all that is read in fp32
        read = 2 * layer.queries + 2 * layer.attended
        held += element * 2 * layer.queries
        held += (scores + _FP32 * read // work.tokens) * work.longest
    else:
        held += element * 2 * layer.queries
    norms = (2 + layer.fused_norms) * element * layer.hidden
    norms += 3 * _FP32 * layer.normed_at_once(layer.hidden)
    highest = max(held, norms, adapted) + layer.written(QUERIES)
    return Summit("the forward of attention", 0, highest, 0)


def _mlp(layer: Layer) -> Summit:
    """The embedding's output, the layer's input, the residual and its norm; the MLP."""
    element, shape, tokens = layer.form.element, layer.shape, layer.work.tokens
    stream = element * 4 * layer.hidden + layer.written((*GATES, *DOWN))
    if not shape.experts:
        return Summit("the forward of MLP", 0, stream + _dense(layer, shape.intermediate), 0)
    pairs = element * tokens * shape.experts_per_token
    rows, inner = pairs * shape.hidden, pairs * _FOUR * shape.expert_intermediate
    copies = 2 * (1 + layer.weighted) * rows
    return Summit("the forward of experts", 0, stream + max(rows + inner, copies), 0)


def _dense(layer: Layer, width: int) -> int:
    """Of an MLP that every token passes; bytes."""
    inner = layer.form.element * layer.work.tokens * width
    fused = any(layer.named(("gate_up_proj",)))
    widths = 3 if layer.shape.gated and not fused else _FOUR
    block = layer.form.element * BLOCK_ELEMENTS[layer.form.device] if layer.fused_gates else 0
    return max(
        widths * inner + min(inner, block),
        (1 + fused) * inner + scoring_adapter(layer, GATES),
        2 * inner + scoring_adapter(layer, UPS),
        inner + layer.form.element * layer.hidden + scoring_adapter(layer, DOWN),
    )
