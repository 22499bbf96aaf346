"""One decoder layer as a row of steps: what each saves for backward, and what its backward needs;
and where its forward without autograd is highest.

Counted from transformers 5's modeling files (models/*/modeling_*.py, integrations/moe.py) and
PyTorch's derivatives.yaml as they run: norms that compute in fp32, rotary embeddings that make new
tensors, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from plimsoll.model.price.form import AdapterForm
from plimsoll.model.price.layer import (
    DOWN,
    FP32,
    GATES,
    OUTPUT,
    QUERIES,
    UPS,
    Layer,
    Step,
    Summit,
)
from plimsoll.shapes.shape import Linear

_SCORES, _ROWS, _FILLED = 2**20, 1024, 32  # of a block, of a batch: model/cpu/attention.py
_FOUR = 4  # gate and up in one, its first half activated, and the product; or NewGELUActivation's


def layer_steps(layer: Layer) -> tuple[Step, ...]:
    """The steps of one decoder layer, in the order of its forward."""
    return (*_attention(layer), *(_experts(layer) if layer.shape.experts else _dense(layer)))


def recomputed_steps(layer: Layer) -> tuple[Step, ...]:
    """Those of a checkpointed layer: a fused norm saves the input that the checkpoint keeps."""
    first, *others = layer_steps(layer)
    if layer.fused_norms:
        first = replace(first, saved=first.saved - layer.element * layer.hidden)
    return (first, *others)


def final_norm(layer: Layer) -> Step:
    """The norm before the head, whose output nothing saves as a whole."""
    return _norm(layer, layer.hidden, 1, kept=False)


def _attention(layer: Layer) -> Iterator[Step]:
    element, shape = layer.element, layer.shape
    projected = layer.queries + 2 * layer.keys
    fused = any(linear.name in ("qkv_proj", "c_attn") for linear in shape.linears)
    readers = (*QUERIES, *GATES) if shape.traits.parallel else QUERIES
    yield _norm(layer, layer.hidden, 1, layer.reads(readers))
    yield linear_step(layer, QUERIES, projected + layer.hidden)
    if shape.traits.query_norms:
        yield _norm(layer, layer.queries, shape.heads, False, 2 * layer.keys)
        yield _norm(layer, layer.keys, shape.kv_heads, False, layer.keys + layer.queries)
    if not shape.softcapped:
        # The rotary embedding makes new tensors; a slice of a fused projection keeps all of it,
        # unless it is repeated.
        values = projected if fused and not layer.longest_attended else layer.attended
        rotated = layer.queries + layer.attended + values
        scratch = element * (projected + layer.queries)
        yield Step("queries, keys, values", element * rotated, scratch)
    yield _scores(layer)
    yield linear_step(layer, OUTPUT, layer.queries + layer.post_norm)
    if shape.traits.post_norms:
        yield _norm(layer, layer.hidden, 1, kept=False)


def _scores(layer: Layer) -> Step:
    """The attention itself."""
    element, shape, tokens = layer.element, layer.shape, layer.tokens
    output = element * layer.queries
    by_sequence = layer.form.attention == "sdpa" or shape.softcapped
    joined = output if by_sequence and layer.reads(OUTPUT) else 0
    gathered = element * layer.gathered
    gradients = element * (layer.queries + 2 * layer.keys) + gathered
    scores = tokens * layer.work.longest * shape.heads
    largest = layer.work.longest**2 * shape.heads
    # CUDA's backward of a softmax writes the product of it and its gradient out (SoftMax.cu).
    product = 0 if layer.form.device == "cpu" else FP32
    if shape.softcapped:  # fp32: queries, keys of every head, tanh, softmax; values
        again = (FP32 + element) * layer.work.shared * shape.heads * shape.head_dim
        saved = (2 * FP32 + element) * (layer.queries + scores) + again
        inputs = (2 * FP32 + element) * layer.queries + gradients + again
        forward = inputs + (2 * FP32 + element) * (scores - largest) + 4 * FP32 * largest
        scratch = (6 + product) * largest
        return Step("attention scores", saved + joined, scratch, 0, forward)
    if layer.form.attention == "eager":  # the softmax in fp32, and narrowed for the values
        narrow = element if element < FP32 else 0
        saved = (FP32 + narrow) * scores + 3 * output
        return Step("attention scores", saved, (2 * FP32 - narrow + product) * scores)
    if layer.form.written:
        return _by_products(layer, joined, gradients, scores, product)
    if layer.sees_all_before:
        gradients = element * (layer.queries + 2 * layer.keys)
        saved = joined + FP32 * tokens * shape.heads
        return Step("attention", saved, output + gradients + _of_a_batch(layer) - joined)
    masks = layer.aligned_mask_bytes
    saved = output + FP32 * tokens * shape.heads + gathered + masks
    repeated = element * 2 * layer.longest_attended
    return Step("attention", saved + joined, output + 2 * gradients + repeated - joined)


def _by_products(layer: Layer, joined: int, gradients: int, scores: int, product: int) -> Step:
    """PyTorch's _scaled_dot_product_attention_math of a sequence at a time: kept are its softmax,
    and in fp32 what it reads, in place of what `_attention` counts."""
    longest = layer.work.longest**2
    largest = longest * layer.shape.heads
    read = layer.queries + 2 * layer.attended
    saved = FP32 * (scores + layer.gathered) + (FP32 - layer.element) * read + joined
    forward = saved + FP32 * (largest + longest)  # the scores, masked, beside their softmax
    repeated = layer.element * 2 * layer.longest_attended
    output = layer.element * layer.queries
    scratch = output + 2 * gradients + repeated - joined + (2 * FP32 + product) * largest
    return Step("attention scores", saved, scratch, 0, forward)


def _of_a_batch(layer: Layer) -> int:
    """What model/cpu/attention.py holds while it undoes the longest sequence, or several short
    ones. Bytes."""
    shape, work = layer.shape, layer.work
    short = _SCORES * work.sequences // (shape.heads * work.tokens)  # rows of some of mean length
    rows = max(work.longest, min(work.tokens, _ROWS, short))
    queries, keys = (heads * rows * shape.head_dim for heads in (shape.heads, shape.kv_heads))
    block = max(_SCORES, _FILLED * shape.heads * work.longest)
    scores = min(block, shape.heads * rows * work.longest)
    return FP32 * (4 * queries + 4 * keys + 2 * scores)


def _dense(layer: Layer) -> Iterator[Step]:
    """The norm and the MLP; Phi's reads what attention reads."""
    if not layer.shape.traits.parallel:
        yield _norm(layer, layer.hidden, 1, layer.reads((*GATES, *UPS)))
    yield from _mlp(layer, layer.shape.intermediate)
    if layer.shape.traits.post_norms:
        yield _norm(layer, layer.hidden, 1, kept=False)


def _mlp(layer: Layer, width: int) -> Iterator[Step]:
    """An MLP that every token passes."""
    element = layer.element
    inner, hidden = layer.tokens * width, layer.hidden + layer.post_norm
    product = inner if layer.reads(DOWN) else 0
    if not layer.shape.gated:  # NewGELUActivation is written in six operations
        yield linear_step(layer, GATES, inner + hidden)
        yield Step("MLP", element * 4 * inner, element * 3 * inner)
    elif any(layer.named(("gate_up_proj",))):
        yield linear_step(layer, GATES, 2 * inner + hidden)
        yield Step("MLP", element * 3 * inner, element * 3 * inner)
    elif layer.fused_gates:
        yield linear_step(layer, GATES, inner + 2 * hidden)
        yield linear_step(layer, UPS, 2 * inner + hidden, beside=inner)
        yield Step("MLP", element * 2 * inner, element * _gate_gradients(layer, inner))
    else:
        yield linear_step(layer, GATES, inner + 2 * hidden)
        yield Step("MLP", element * inner, element * (2 * inner + hidden))
        yield linear_step(layer, UPS, 2 * inner + hidden, beside=inner)
        yield Step("MLP", element * 2 * inner, element * 3 * inner)
    yield Step("MLP", element * product, 0)
    yield linear_step(layer, DOWN, inner + layer.post_norm)


def _gate_gradients(layer: Layer, inner: int) -> int:
    """Elements that the backward of a fused gate allocates, with the gradient that calls for it.
    Liger's writes over gate and up; ours makes two, beside a block of the activation and one of its
    gradient."""
    return inner if layer.form.fused == "liger" else 3 * inner + 2 * layer.fused_at_once(inner)


def _experts(layer: Layer) -> Iterator[Step]:
    """The norm and the routed MLPs: each token's row is copied for each of its experts. Where the
    routing's weights are fp32, so is all that is multiplied with them."""
    element, shape, tokens = layer.element, layer.shape, layer.tokens
    pairs = tokens * shape.experts_per_token
    rows, inner = pairs * shape.hidden, pairs * shape.expert_intermediate
    matrices = element * shape.experts * shape.hidden * shape.expert_intermediate
    trained = 1 if layer.full else 0
    yield _norm(layer, layer.hidden, 1, layer.full or bool(shape.shared_intermediate))
    if shape.shared_intermediate:
        yield from _mlp(layer, shape.shared_intermediate)
    yield Step("routing", FP32 * tokens * shape.experts + 48 * pairs, element * 2 * rows)
    into = element * (2 * inner + rows)
    yield Step("experts", element * trained * rows, into, 2 * trained * matrices)
    yield Step("experts", element * 3 * inner, element * 3 * inner)
    out = element * (trained * inner + rows)
    back = element * ((4 * layer.weighted - 3) * rows + inner)
    # The rows, their results, these weighted, and in the tokens' order.
    copies = element * (2 + 2 * layer.weighted - trained) * rows
    yield Step("experts", out, back, trained * matrices, copies)


def _norm(layer: Layer, elements: int, rows: int, kept: bool, beside: int = 0) -> Step:
    """A norm. kept: what reads its output saves that. beside: gradients that wait.

    Llama's saves its input in fp32 and, for the weight's gradient, the normalised input in
    its own dtype. Gemma's multiplies by (1 + weight) in fp32. Fused, both save their input as it
    is. Phi's is PyTorch's layer norm, which does so, too.
    """
    element = layer.element
    output = element * elements if kept else 0
    wait = element * beside
    norms = layer.shape.traits.norms
    if norms == "layer":
        saved = element * elements + 2 * FP32 * rows * layer.tokens + output
        return Step("norms", saved, element * elements + wait)
    if layer.fused_norms:  # the gradients of output and input; of ours a block of three in fp32
        saved = element * elements + FP32 * rows * layer.tokens + output
        wide = 3 * FP32 * layer.normed_at_once(elements)
        scratch = 2 * element * elements + wide - output
        return Step("norms", saved, scratch + wait)
    width = FP32 if norms == "rms_fp32" else element
    normalised = width * elements if layer.full else 0
    saved = FP32 * (elements + rows * layer.tokens) + normalised + output
    return Step("norms", saved, 5 * FP32 * elements - normalised - output + wait)


def scoring_summit(layer: Layer) -> Summit:
    """The highest point of a layer's forward without autograd: of what its local names hold."""
    return max(_scoring_attention(layer), _scoring_mlp(layer), key=lambda point: point.bytes)


def _scoring_attention(layer: Layer) -> Summit:
    """The embedding's output, the layer's input and its norm; queries, keys, values."""
    element, shape, work = layer.element, layer.shape, layer.work
    held = element * (3 * layer.hidden + layer.queries + 2 * layer.keys + layer.gathered)
    made = element * (layer.queries + layer.hidden)  # attention's output, and the layer's after it
    adapted = held + max(scoring_adapter(layer, QUERIES), made + scoring_adapter(layer, OUTPUT))
    scores = 3 * FP32 * shape.heads * work.longest
    if shape.softcapped:  # sequence by sequence, with queries and keys in fp32
        longest = 3 * FP32 * layer.queries // work.tokens + scores
        held += longest * work.longest
    elif layer.form.attention == "eager":
        held += scores * work.tokens
    elif layer.form.written:  # sequence by sequence, with all that is read in fp32
        read = 2 * layer.queries + 2 * layer.attended
        held += element * 2 * layer.queries
        held += (scores + FP32 * read // work.tokens) * work.longest
    else:
        held += element * 2 * layer.queries
    norms = (2 + layer.fused_norms) * element * layer.hidden
    norms += 3 * FP32 * layer.normed_at_once(layer.hidden)
    highest = max(held, norms, adapted) + layer.written(QUERIES)
    return Summit("the forward of attention", 0, highest, 0)


def _scoring_mlp(layer: Layer) -> Summit:
    """The embedding's output, the layer's input, the residual and its norm; the MLP."""
    element, shape, tokens = layer.element, layer.shape, layer.tokens
    stream = element * 4 * layer.hidden + layer.written((*GATES, *DOWN))
    if not shape.experts:
        return Summit(
            "the forward of MLP", 0, stream + _scoring_dense(layer, shape.intermediate), 0
        )
    pairs = element * tokens * shape.experts_per_token
    rows, inner = pairs * shape.hidden, pairs * _FOUR * shape.expert_intermediate
    copies = 2 * (1 + layer.weighted) * rows
    return Summit("the forward of experts", 0, stream + max(rows + inner, copies), 0)


def _scoring_dense(layer: Layer, width: int) -> int:
    """Of an MLP that every token passes; bytes."""
    inner = layer.element * layer.tokens * width
    fused = any(layer.named(("gate_up_proj",)))
    widths = 3 if layer.shape.gated and not fused else _FOUR
    width_at_once = layer.fused_at_once(layer.tokens * width) if layer.fused_gates else 0
    return max(
        widths * inner + layer.element * width_at_once,
        (1 + fused) * inner + scoring_adapter(layer, GATES),
        2 * inner + scoring_adapter(layer, UPS),
        inner + layer.element * layer.hidden + scoring_adapter(layer, DOWN),
    )


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
    # Dropout copies an input, which nothing saves as it is.
    copied = (
        max((each.inputs for each in layer.adapted(names)), default=0) if adapter.dropout else 0
    )
    inputs = element * (beside + layer.hidden + layer.tokens * copied)
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
