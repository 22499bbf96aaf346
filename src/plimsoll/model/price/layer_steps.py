"""Describe a decoder layer as steps: what each saves for its backward, and what that allocates.

The file also finds the highest point of a forward without autograd. Counted from transformers 5's
modeling files (models/*/modeling_*.py, integrations/moe.py) and PyTorch's derivatives.yaml as they
run: norms that compute in fp32, rotary embeddings that make new tensors, and so on.
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
    LayerStep,
    Summit,
    summit,
)
from plimsoll.shapes.shape import Latent, Linear

_SCORES, _ROWS, _FILLED = 2**20, 1024, 32  # as SCORES, ROWS, OF_SEQUENCES: model/cpu.py
_FROM_HIDDEN = ("q_a_proj", "kv_a_proj_with_mqa")
_MLP_TENSORS = 4  # gate and up in one, the activated half, the product; or NewGELUActivation's


def layer_steps(layer: Layer) -> tuple[LayerStep, ...]:
    """Return the steps of one decoder layer, in the order of its forward."""
    return (*_attention(layer), *(_experts(layer) if layer.shape.experts else _dense(layer)))


def recomputed_steps(layer: Layer) -> tuple[LayerStep, ...]:
    """Return the steps of a checkpointed layer, without the input that the checkpoint keeps."""
    first, *others = layer_steps(layer)
    if layer.has_fused_norms:
        first = replace(first, saved=first.saved - layer.element * layer.hidden)
    return (first, *others)


def final_norm(layer: Layer) -> LayerStep:
    """Return the step of the norm before the head; no later step saves its full output."""
    return _norm(layer, layer.hidden, 1, kept=False)


def _attention(layer: Layer) -> Iterator[LayerStep]:
    if layer.shape.latent is None:
        yield from _projections(layer)
    else:
        yield from _latent_projections(layer, layer.shape.latent)
    if layer.work.shards > 1:
        yield _exchange(layer)
    yield _scores(layer.attending)
    if layer.work.shards > 1 and layer.work.exchange == "heads":
        yield _return(layer)
    yield linear_step(layer, OUTPUT, layer.attended + layer.post_norm_gradient)
    if layer.shape.traits.post_norms:
        yield _norm(layer, layer.hidden, 1, kept=False)


def _projections(layer: Layer) -> Iterator[LayerStep]:
    """Yield attention's norm, its linears, and the rotary embedding."""
    element, shape = layer.element, layer.shape
    projected = layer.queries + 2 * layer.keys
    fused = any(linear.name in ("qkv_proj", "c_attn") for linear in shape.linears)
    parallel = shape.traits.parallel
    kept = layer.saves_input(QUERIES) or (parallel and _keeps_mlp_input(layer))
    yield _norm(layer, layer.hidden, 1, kept)
    yield linear_step(layer, QUERIES, projected + layer.hidden)
    if shape.traits.query_norms:
        yield _norm(layer, layer.queries, shape.heads, False, 2 * layer.keys)
        yield _norm(layer, layer.keys, shape.kv_heads, False, layer.keys + layer.queries)
    if not shape.softcapped:
        # The rotary embedding makes new tensors; a slice of a fused projection keeps the whole
        # projection, unless the slice is repeated.
        values = projected if fused and not layer.longest_repeated else layer.attended_keys
        attending = layer.attending
        if attending is not layer:
            values = attending.attended_values
        rotated = layer.queries + attending.attended_keys + values
        scratch = element * (projected + layer.queries)
        yield LayerStep("queries, keys, values", element * rotated, scratch)


def _latent_projections(layer: Layer, latent: Latent) -> Iterator[LayerStep]:
    """Yield attention's norm, the linears to and from its narrow vectors, and all heads' tensors.

    Queries and keys are joined from their rotated and other dimensions. A value is a slice, which
    keeps what its linear gave of the keys, too.
    """
    tokens, element = layer.tokens, layer.element
    narrow, queries = tokens * latent.width, tokens * latent.queries
    yield _norm(layer, layer.hidden, 1, layer.saves_input((*_FROM_HIDDEN, *QUERIES)))
    if queries:
        yield linear_step(layer, ("q_a_proj",), queries + layer.hidden)
        yield _norm(layer, queries, 1, layer.saves_input(("q_b_proj",)))
    yield linear_step(layer, ("q_proj", "q_b_proj"), layer.queries + (queries or layer.hidden))
    down = narrow + tokens * latent.rotary
    yield linear_step(layer, ("kv_a_proj_with_mqa",), down + layer.hidden)
    yield _norm(layer, narrow, 1, layer.saves_input(("kv_b_proj",)))
    yield linear_step(layer, ("kv_b_proj",), layer.expanded + narrow)
    held = layer.queries + layer.keys + layer.expanded
    yield LayerStep("queries, keys, values", element * held, element * (held + layer.queries))


def _exchange(layer: Layer) -> LayerStep:
    """Return the step of the exchange before attention; "queries, keys, values" saves its result.

    Its forward holds the rank's own tensors, and what is sent of them; with keys also those of all
    rows, before each sequence's are chosen. Its backward holds as much of gradients.
    """
    own = layer.queries + layer.keys + layer.values
    if layer.work.exchange == "heads":
        sent = layer.attending.queries + layer.attending.keys + layer.attending.values
        return LayerStep("exchange", 0, layer.element * sent, 0, layer.element * (own + sent))
    sent, gathered = layer.keys + layer.values, layer.gathered
    back = layer.element * 2 * gathered
    return LayerStep("exchange", 0, back, 0, layer.element * (own + sent + gathered))


def _return(layer: Layer) -> LayerStep:
    """Return the step of the exchange after attention; the output's linear saves its result."""
    output = layer.element * layer.attended
    by_sequence = layer.form.attention == "sdpa" or layer.shape.softcapped
    saved = output if not by_sequence and layer.saves_input(OUTPUT) else 0
    return LayerStep("exchange", saved, 2 * output - saved, 0, 3 * output)


def _scores(layer: Layer) -> LayerStep:
    element, shape, tokens = layer.element, layer.shape, layer.tokens
    output = element * layer.attended
    by_sequence = layer.form.attention == "sdpa" or shape.softcapped
    keeps = layer.saves_input(OUTPUT) or (shape.traits.sinks and layer.has_cpu_kernel)
    joined = output if by_sequence and keeps else 0
    gathered = element * layer.gathered_keys
    gradients = element * (layer.queries + layer.keys + layer.values) + gathered
    scores = tokens * layer.work.longest * shape.heads
    largest = layer.work.longest**2 * shape.heads
    # CUDA's backward of a softmax holds the product of it and its gradient (SoftMax.cu).
    product = 0 if layer.form.device == "cpu" else FP32
    if shape.softcapped:  # fp32: queries, keys of every head, tanh, softmax; values
        again = (FP32 + element) * layer.work.shared * shape.heads * shape.head_dim
        saved = (2 * FP32 + element) * (layer.queries + scores) + again
        inputs = (2 * FP32 + element) * layer.queries + gradients + again
        forward = inputs + (2 * FP32 + element) * (scores - largest) + 4 * FP32 * largest
        scratch = (6 + product) * largest
        return LayerStep("attention scores", saved + joined, scratch, 0, forward)
    if layer.form.attention == "eager":  # the softmax in fp32, and narrowed for the values
        narrow = element if element < FP32 else 0
        saved = (FP32 + narrow) * scores + 3 * output
        return LayerStep("attention scores", saved, (2 * FP32 - narrow + product) * scores)
    if layer.writes_scores:
        return _attention_by_products(layer, joined, gradients, scores, product)
    if layer.has_cpu_kernel:
        gradients = element * (layer.queries + 2 * layer.keys)
        saved = joined + FP32 * tokens * shape.heads
        return LayerStep("attention", saved, output + gradients + _cpu_batch_bytes(layer) - joined)
    masks = layer.aligned_mask_bytes
    saved = output + FP32 * tokens * shape.heads + gathered + masks
    repeated = element * 2 * layer.longest_repeated
    return LayerStep("attention", saved + joined, output + 2 * gradients + repeated - joined)


def _attention_by_products(
    layer: Layer, joined: int, gradients: int, scores: int, product: int
) -> LayerStep:
    """Return the step of PyTorch's _scaled_dot_product_attention_math, one sequence at a time.

    It keeps its softmax and fp32 copies of its inputs, which replace the inputs that `_attention`
    counts.
    """
    longest = layer.work.longest**2
    largest = longest * layer.shape.heads
    read = layer.queries + layer.attended_keys + layer.attended_values
    saved = FP32 * (scores + layer.gathered_keys) + (FP32 - layer.element) * read + joined
    forward = saved + FP32 * (largest + longest)  # the scores, masked, beside their softmax
    repeated = layer.element * 2 * layer.longest_repeated
    output = layer.element * layer.attended
    scratch = output + 2 * gradients + repeated - joined + (2 * FP32 + product) * largest
    return LayerStep("attention scores", saved, scratch, 0, forward)


def _cpu_batch_bytes(layer: Layer) -> int:
    """Return the bytes that the backward of the largest batch in model/cpu.py allocates."""
    shape, work = layer.shape, layer.work
    short = _SCORES * work.sequences // (shape.heads * work.tokens)  # rows of some of mean length
    rows = max(work.longest, min(work.tokens, _ROWS, short))
    queries, keys = (heads * rows * shape.head_dim for heads in (shape.heads, shape.kv_heads))
    block = max(_SCORES, _FILLED * shape.heads * work.longest)
    scores = min(block, shape.heads * rows * work.longest)
    return FP32 * (4 * queries + 4 * keys + 2 * scores)


def _dense(layer: Layer) -> Iterator[LayerStep]:
    """Yield the norm and the MLP; Phi's MLP reads attention's norm."""
    if not layer.shape.traits.parallel:
        yield _norm(layer, layer.hidden, 1, _keeps_mlp_input(layer))
    yield from _mlp(layer, layer.shape.intermediate)
    if layer.shape.traits.post_norms:
        yield _norm(layer, layer.hidden, 1, kept=False)


def _keeps_mlp_input(layer: Layer) -> bool:
    return layer.form.mlp_tile is not None or layer.saves_input((*GATES, *UPS))


def _tiled_mlp(layer: Layer, width: int) -> LayerStep:
    """Return the step of an MLP in tiles (model/tiling.py).

    Its backward allocates the input's gradient, sums of the weights' gradients in fp32, and what a
    tile needs for its forward and backward.
    """
    tile, element = layer.mlp_tile, layer.element
    top = summit(tuple(_mlp(tile, width)))
    of_all = element * (layer.hidden + layer.post_norm_gradient)
    output = element * tile.hidden
    sums = FP32 * layer.trained_elements((*GATES, *UPS, *DOWN))
    forward = element * layer.hidden + _scoring_dense(tile, width)
    return LayerStep(
        "MLP", 0, of_all + output + top.saved + top.scratch, sums + top.gradient, forward
    )


def _mlp(layer: Layer, width: int) -> Iterator[LayerStep]:
    if layer.form.mlp_tile is not None:
        yield _tiled_mlp(layer, width)
        return
    element = layer.element
    inner, hidden = layer.tokens * width, layer.hidden + layer.post_norm_gradient
    product = inner if layer.saves_input(DOWN) else 0
    if not layer.shape.gated:  # NewGELUActivation is a chain of six operations
        yield linear_step(layer, GATES, inner + hidden)
        yield LayerStep("MLP", element * 4 * inner, element * 3 * inner)
    elif any(layer.select_linears(("gate_up_proj",))):
        yield linear_step(layer, GATES, 2 * inner + hidden)
        yield LayerStep("MLP", element * 3 * inner, element * 3 * inner)
    elif layer.has_fused_gates:
        yield linear_step(layer, GATES, inner + 2 * hidden)
        yield linear_step(layer, UPS, 2 * inner + hidden, beside=inner)
        yield LayerStep("MLP", element * 2 * inner, element * _gate_gradients(layer, inner))
    else:
        yield linear_step(layer, GATES, inner + 2 * hidden)
        yield LayerStep("MLP", element * inner, element * (2 * inner + hidden))
        yield linear_step(layer, UPS, 2 * inner + hidden, beside=inner)
        yield LayerStep("MLP", element * 2 * inner, element * 3 * inner)
    yield LayerStep("MLP", element * product, 0)
    yield linear_step(layer, DOWN, inner + layer.post_norm_gradient)


def _gate_gradients(layer: Layer, inner: int) -> int:
    """Return the elements of a fused gate's backward, including the incoming gradient.

    Liger's kernel overwrites gate and up. Ours makes two gradients, beside a block of the
    activation and a block of its gradient.
    """
    return inner if layer.form.fused == "liger" else 3 * inner + 2 * layer.fused_block(inner)


def _experts(layer: Layer) -> Iterator[LayerStep]:
    """Yield the norm and the routed MLPs; each token's row is copied for each of its experts."""
    element, shape, tokens = layer.element, layer.shape, layer.tokens
    pairs = tokens * shape.experts_per_token
    rows, inner = pairs * shape.hidden, pairs * shape.expert_intermediate
    matrices = element * shape.experts * shape.hidden * shape.expert_intermediate
    trained = 1 if layer.trains_all else 0
    routers = layer.trains_all and layer.form.trains_routers
    yield _norm(layer, layer.hidden, 1, routers or bool(shape.shared_intermediate))
    if shape.shared_intermediate:
        yield from _mlp(layer, shape.shared_intermediate)
    yield LayerStep("routing", FP32 * tokens * shape.experts + 48 * pairs, element * 2 * rows)
    into = element * (2 * inner + rows)
    yield LayerStep("experts", element * trained * rows, into, 2 * trained * matrices)
    if shape.traits.clamped_experts:
        # Kept: gate and up in one, the clamped gate, its sigmoid, their product, and the up plus 1.
        # The forward also holds biases (as wide as gate and up), the clamped up and the product,
        # and what it read: the residual stream, its norm and the rows.
        forward = element * (10 * inner + (1 - trained) * (rows + 2 * layer.hidden))
        yield LayerStep("experts", element * 6 * inner, element * 3 * inner, 0, forward)
    else:
        yield LayerStep("experts", element * 3 * inner, element * 3 * inner)
    out = element * (trained * inner + rows)
    back = element * ((4 * layer.result_factor - 3) * rows + inner)
    # The rows, their results, the weighted results, and those in the tokens' order.
    copies = element * (2 + 2 * layer.result_factor - trained) * rows
    yield LayerStep("experts", out, back, trained * matrices, copies)


def _norm(layer: Layer, elements: int, rows: int, kept: bool, beside: int = 0) -> LayerStep:
    """Return the step of a norm over `elements` elements, in `rows` rows for each token.

    `beside` is the number of elements of gradients that exist at the same time. The output is
    `kept` if a step that reads it saves it. Llama's norm saves its input in fp32 and, for the
    weight's gradient, the normalised input in the input's dtype. Gemma's multiplies by (1 + weight)
    in fp32. Both save their input unchanged if fused, as Phi's does (PyTorch's layer norm).
    """
    element = layer.element
    output = element * elements if kept else 0
    wait = element * beside
    norms = layer.shape.traits.norms
    if norms == "layer":
        saved = element * elements + 2 * FP32 * rows * layer.tokens + output
        return LayerStep("norms", saved, element * elements + wait)
    if layer.has_fused_norms:  # gradients of output and input; ours hold a block of three in fp32
        saved = element * elements + FP32 * rows * layer.tokens + output
        wide = 3 * FP32 * layer.norm_block(elements)
        scratch = 2 * element * elements + wide - output
        return LayerStep("norms", saved, scratch + wait)
    width = FP32 if norms == "rms_fp32" else element
    normalised = width * elements if layer.trains_all else 0
    saved = FP32 * (elements + rows * layer.tokens) + normalised + output
    return LayerStep("norms", saved, 5 * FP32 * elements - normalised - output + wait)


def scoring_summit(layer: Layer) -> Summit:
    """Return the highest point of a layer's forward without autograd.

    The tensors counted are the local variables of transformers' functions.
    """
    return max(_scoring_attention(layer), _scoring_mlp(layer), key=lambda point: point.bytes)


def _scoring_attention(layer: Layer) -> Summit:
    """Return the point in attention, with embedding, layer input, norm, queries, keys, values."""
    element, shape, work = layer.element, layer.shape, layer.work
    projected = layer.queries + layer.keys + layer.values
    if shape.latent is not None:  # and what queries and keys are joined from
        projected = 2 * layer.queries + layer.keys + layer.expanded
    held = element * (3 * layer.hidden + projected + layer.gathered_keys)
    attending = layer.attending
    rows = work.longest
    if work.shards > 1:
        held += element * _exchanged(layer)
        rows = rows if work.exchange == "heads" else min(rows, -(-work.tokens // 2))
    made = element * (layer.attended + layer.hidden)  # attention's output, and the layer's after it
    adapted = held + max(scoring_adapter(layer, QUERIES), made + scoring_adapter(layer, OUTPUT))
    scores = 3 * FP32 * attending.shape.heads * work.longest
    if shape.softcapped:  # sequence by sequence, with queries and keys in fp32
        longest = 3 * FP32 * attending.queries // attending.tokens + scores
        held += longest * rows
    elif layer.form.attention == "eager":
        held += scores * work.tokens
    elif layer.writes_scores:  # sequence by sequence, with all that is read in fp32
        read = 2 * layer.queries + layer.attended_keys + layer.attended_values
        held += element * 2 * layer.attended
        if layer.form.device == "cpu":  # there the mask is added in place
            scores = scores * 2 // 3
        held += (scores + FP32 * read // work.tokens) * work.longest
    else:
        held += element * 2 * layer.attended
    # Rotary embeddings: the product with the cosine, the turned halves, and their product.
    turned = 3 * layer.hidden + projected + max(3 * layer.queries, layer.queries + 3 * layer.keys)
    rotary = 0 if shape.latent or layer.form.fused == "liger" else element * turned
    norms = (2 + layer.has_fused_norms) * element * layer.hidden
    norms += 3 * FP32 * layer.norm_block(layer.hidden)
    highest = max(held, norms, rotary, adapted) + layer.dequantised_bytes(QUERIES)
    return Summit("the forward of attention", 0, highest, 0)


def _exchanged(layer: Layer) -> int:
    """Return the size of what an exchange gives, which exists beside the rank's own tensors.

    A fused projection exists, too, as the rank's values are a part of it.
    """
    fused = any(linear.name in ("qkv_proj", "c_attn") for linear in layer.shape.linears)
    rotated = layer.queries + layer.keys if fused else 0
    if layer.work.exchange == "heads":
        attending = layer.attending
        return rotated + attending.queries + attending.keys + attending.values
    return rotated + 2 * layer.gathered  # and as much of the keys that each sequence has


def _scoring_mlp(layer: Layer) -> Summit:
    """Return the point in the MLP, with embedding, layer input, residual, norm and its tensors."""
    element, shape, tokens = layer.element, layer.shape, layer.tokens
    stream = element * 4 * layer.hidden + layer.dequantised_bytes((*GATES, *DOWN))
    if not shape.experts:
        return Summit(
            "the forward of MLP", 0, stream + _scoring_dense(layer, shape.intermediate), 0
        )
    pairs = element * tokens * shape.experts_per_token
    # Clamped: two for biases, two for gate and up in one, and five of their parts.
    tensors = 9 if shape.traits.clamped_experts else _MLP_TENSORS
    rows, inner = pairs * shape.hidden, pairs * tensors * shape.expert_intermediate
    copies = 2 * (1 + layer.result_factor) * rows
    return Summit("the forward of experts", 0, stream + max(rows + inner, copies), 0)


def _scoring_dense(layer: Layer, width: int) -> int:
    if layer.form.mlp_tile is not None:
        return layer.element * layer.hidden + _scoring_dense(layer.mlp_tile, width)
    inner = layer.element * layer.tokens * width
    fused = any(layer.select_linears(("gate_up_proj",)))
    widths = 3 if layer.shape.gated and not fused else _MLP_TENSORS
    width_at_once = layer.fused_block(layer.tokens * width) if layer.has_fused_gates else 0
    return max(
        widths * inner + layer.element * width_at_once,
        (1 + fused) * inner + scoring_adapter(layer, GATES),
        2 * inner + scoring_adapter(layer, UPS),
        inner + layer.element * layer.hidden + scoring_adapter(layer, DOWN),
    )


def linear_step(layer: Layer, names: tuple[str, ...], scratch: int, beside: int = 0) -> LayerStep:
    """Return the step of the linears of these names; it saves only what their adapters save.

    The inputs of linears are counted by the steps that make them. `scratch` is the number of
    elements that the backward allocates; `beside`, of those that the forward holds besides and
    saves later.
    """
    element, adapter = layer.element, layer.form.adapter
    dequantised = layer.dequantised_bytes(names)
    if adapter is None:
        gradient = element * layer.largest_weight(names)
        return LayerStep("linears", 0, element * scratch + dequantised, gradient)
    linears = tuple(layer.adapted_linears(names))
    saved = sum(
        _adapter_saves(layer, adapter, linear) * linear.count // layer.shape.layers
        for linear in linears
    )
    widest = layer.tokens * max((linear.outputs for linear in linears), default=0)
    # The frozen layer's result, the adapter's, and the adapter's scaled.
    results = (element + 2 * adapter.element) * widest
    # Dropout copies an input, which nothing saves unchanged.
    copied = max((linear.inputs for linear in linears), default=0) if adapter.dropout else 0
    inputs = element * (beside + layer.hidden + layer.tokens * copied)
    if adapter.element > element:  # the norm's output, and the incoming gradient
        inputs += (adapter.element + 2 * element) * layer.hidden
    back = element * scratch + dequantised + adapter.element * widest * (1 + 2 * adapter.dora)
    norms = max((_dora_norms(layer, adapter, linear) for linear in linears), default=0)
    made = max(results, norms) if adapter.dora else results
    return LayerStep("adapters", saved, back, 0, saved + inputs + made)


def scoring_adapter(layer: Layer, names: tuple[str, ...]) -> int:
    """Return the most bytes that an adapter adds to its linear's result, without autograd.

    They are the adapter's result and its scaled copy; with DoRA also the tensors of `_dora_norms`.
    """
    adapter = layer.form.adapter
    if adapter is None:
        return 0

    def made(linear: Linear) -> int:
        results = adapter.element * layer.tokens * linear.outputs
        if not adapter.dora:
            return 2 * results
        identity, matrix = linear.inputs**2, linear.inputs * linear.outputs
        dequantised = matrix * layer.form.quantized
        last = matrix + dequantised + 4 * layer.tokens * linear.outputs
        return layer.element * max(identity + matrix, 3 * matrix + dequantised, last)

    return max(map(made, layer.adapted_linears(names)), default=0)


def _dora_norms(layer: Layer, adapter: AdapterForm, linear: Linear) -> int:
    """Return the bytes that DoRA needs to compute the norms of a weight's rows.

    PEFT computes the weight's update for this: it sends an identity matrix, which autograd keeps,
    through the adapter, scales the product and adds the weight (peft/tuners/lora/dora.py,
    DoraLinearLayer.forward).
    """
    copies = 3 + (layer.form.quantized and not adapter.dropout)  # else _dora_saves counts the copy
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
    """Return the bytes that DoRA saves for the magnitudes' gradient.

    They are the results of the frozen layer and of the adapter. With dropout the frozen layer runs
    again on the dropped-out input; if it is in 4 bits, the dequantised weight of that run is kept.
    """
    results = 2 * layer.tokens * linear.outputs
    kept = linear.inputs * linear.outputs if layer.form.quantized and adapter.dropout else 0
    return layer.element * (results + kept)
