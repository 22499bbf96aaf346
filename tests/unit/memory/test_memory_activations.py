"""Bytes of activations against sums done by hand, and what must hold for any shape."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.model.price.activations import activation_items, backward_items
from plimsoll.model.price.form import (
    ActivationForm,
    AdapterForm,
    Attention,
    ChunkedHead,
    Fused,
    ScalarHead,
    UnfusedHead,
)
from plimsoll.model.price.layer import Layer
from plimsoll.model.price.layer_steps import layer_steps
from plimsoll.resolve.decisions import Capability, choose_kernels
from plimsoll.shapes.families import shape_from_config
from plimsoll.shapes.known_models import known_models, read_shape
from plimsoll.shapes.shape import MicroBatch
from plimsoll.timeline.items import Moment

LLAMA = read_shape("meta-llama/Llama-2-7b-hf")
WORK = MicroBatch(tokens=4096, sequences=4, longest=1024, loss_tokens=2000)
FULL = ActivationForm(
    element=2,
    checkpoint_every=None,
    attention="varlen",
    head=ChunkedHead(rows=1024),
    trained=True,
)
# Of a layer of Llama 2 7B, for each token, in bytes.
NORMS = 2 * (4 * 4096 + 4 + 2 * 4096 + 2 * 4096)  # fp32 input and statistic, normalised, output
ATTENTION = 2 * 3 * 4096 + 2 * 4096 + 4 * 32  # queries, keys, values; output and log-sum-exp
MLP = 4 * 2 * 11008  # gate, its silu, up, and their product
LAYER = NORMS + ATTENTION + MLP
STREAM = 2 * 4096 * 4096
TABLE = 2 * 32000 * 4096


def _bytes(form: ActivationForm, work: MicroBatch = WORK, name: str = LLAMA.name) -> dict[str, int]:
    held = activation_items("actor", read_shape(name), work, form, "train_actor")
    return {f"{one.item.where} {one.item.name}": one.item.bytes for one in held}


def test_every_activation_of_a_layer_is_kept_without_checkpoints() -> None:
    found = _bytes(FULL)
    last_norm = 4096 * (4 * 4096 + 4 + 2 * 4096)
    assert found["device activations"] == 32 * 4096 * LAYER + last_norm
    block = 2**24 // 32000
    assert found["device logits chunk"] == 32000 * (2 * 1024 + 2 * 4 * block)
    assert found["device head inputs"] == 2 * 2 * 2000 * 4096
    assert found["device embedding gradients in flight"] == TABLE


def test_a_checkpoint_for_each_layer_leaves_one_layer_whole() -> None:
    found = _bytes(replace(FULL, checkpoint_every=1))
    assert found["device layer inputs"] == 32 * STREAM
    gate, product = 2 * 4096 * 11008, 2 * 4096 * 11008
    assert found["device recomputed activations"] == 4096 * LAYER - product
    # The product's gradient, and those of gate and up; the gradient of the layer's output.
    assert found["device working set"] == 3 * gate + STREAM


@pytest.mark.parametrize("whose", ["own", "liger"])
def test_fused_norms_save_their_inputs_and_fused_mlps_no_activation(whose: Fused) -> None:
    fused = replace(FULL, fused=whose)
    found = _bytes(fused)
    norm = 2 * 4096 + 4 + 2 * 4096  # the input, a statistic, the output
    layer = 2 * norm + ATTENTION + MLP - 2 * 11008
    last_norm = 4096 * (2 * 4096 + 4)
    assert found["device activations"] == 32 * 4096 * layer + last_norm
    # Ours is highest where gate and up get gradients, Liger's before, with the product still there.
    product = {"own": 2 * 4096 * 11008}.get(whose, 0)
    again = _bytes(replace(fused, checkpoint_every=1))  # the first input is the checkpoint itself
    assert again["device recomputed activations"] == 4096 * layer - product - STREAM
    assert again["device layer inputs"] == 32 * STREAM


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_fused_norms_go_back_in_blocks_of_fp32(device: Literal["cuda", "cpu"]) -> None:
    """Beside the gradients of output and input; the output that was saved is gone."""
    form = replace(FULL, fused="own", device=device)
    first = layer_steps(Layer(LLAMA, WORK, form))[0]
    block = {"cuda": 4096 * 4096, "cpu": 64 * 4096}[device]
    assert first.scratch == 2 * STREAM + 3 * 4 * block - STREAM


def test_ligers_norms_need_no_block_and_its_mlps_write_over_what_they_saved() -> None:
    form = replace(FULL, fused="liger")
    steps = layer_steps(Layer(LLAMA, WORK, form))
    assert steps[0].scratch == STREAM  # the gradients of output and input, less the output
    (gated,) = (step for step in steps if step.saved == 2 * 2 * 4096 * 11008)
    assert gated.scratch == 2 * 4096 * 11008
    ours = layer_steps(Layer(LLAMA, WORK, replace(FULL, fused="own")))
    assert [step.saved for step in steps] == [step.saved for step in ours]


def test_of_gemma_2_liger_keeps_less_than_half() -> None:
    """A layer has four norms, with two outputs that products save, and the MLP."""
    gemma, stream, inner = "google/gemma-2-2b", 4096 * 2304, 4096 * 9216
    found = {whose: _saved(gemma, whose) for whose in FUSED}
    statistics = 4 * 4 * 4096
    assert found["liger"]["norms"] == (4 + 2) * 2 * stream + statistics
    assert found["own"]["norms"] == 4 * (4 + 4) * stream + 2 * 2 * stream + statistics
    assert found["liger"]["MLP"] == 3 * 2 * inner and found["own"]["MLP"] == 4 * 2 * inner
    assert found["own"] == found["none"]


FUSED: tuple[Fused, ...] = ("none", "own", "liger")


def _saved(name: str, whose: Fused) -> Counter[str]:
    """Bytes that a layer's steps save, by their part."""
    saved: Counter[str] = Counter()
    for step in layer_steps(Layer(read_shape(name), WORK, replace(FULL, fused=whose))):
        saved[step.part] += step.saved
    return saved


@pytest.mark.parametrize("whose", ["own", "liger"])
def test_layer_norms_are_not_fused(whose: Fused) -> None:
    name = "microsoft/phi-2"
    assert _bytes(replace(FULL, fused=whose), name=name) == _bytes(FULL, name=name)


@pytest.mark.parametrize(
    ("device", "capability", "has_liger", "whose"),
    [
        ("cuda", (8, 0), True, "liger"),
        ("cuda", None, True, "liger"),
        ("cuda", (7, 5), True, "own"),
        ("cuda", (9, 0), False, "own"),
        ("cpu", None, True, "own"),
    ],
)
def test_whose_norms_serve(
    device: str, capability: Capability | None, has_liger: bool, whose: Fused
) -> None:
    assert choose_kernels(device, capability, has_liger)[0] == whose


def test_a_checkpoint_for_every_second_layer_leaves_the_others_whole() -> None:
    found = _bytes(replace(FULL, checkpoint_every=2))
    assert found["device layer inputs"] == 16 * STREAM
    last_norm = 4096 * (4 * 4096 + 4 + 2 * 4096)
    assert found["device activations"] == 16 * 4096 * LAYER + last_norm


def test_where_the_last_layer_is_checkpointed_it_is_computed_beside_all_whole_ones() -> None:
    found = _bytes(replace(FULL, checkpoint_every=31))  # the first and the last
    assert found["device layer inputs"] == 2 * STREAM
    product = 2 * 4096 * 11008
    assert found["device recomputed activations"] == 31 * 4096 * LAYER - product


def test_selective_checkpoints_keep_products_and_attention() -> None:
    found = _bytes(replace(FULL, checkpoint_every=1, selective=True))
    assert found["device layer inputs"] == 32 * STREAM
    linears = 2 * (4 * 4096 + 2 * 11008 + 4096)  # queries, keys, values, output; gate, up; down
    attention = 2 * 4096 + 4 * 32
    # Of the layer that is computed again all is in use but the result of down, which nobody reads.
    kept = 31 * 4096 * (linears + attention) + 2 * 4096 * 4096
    assert found["device kept activations"] == kept
    full = _bytes(replace(FULL, checkpoint_every=1))
    assert found["device recomputed activations"] == full["device recomputed activations"]


@pytest.mark.parametrize(("dora", "dropout"), [(False, True), (True, False), (True, True)])
def test_selective_checkpoints_keep_little_of_an_adapter(dora: bool, dropout: bool) -> None:
    """Its first matrix' narrow results; the second's are wide, and cheap to compute again. For
    magnitudes the frozen layer is run a second time, on what dropout has thinned."""
    adapter = AdapterForm(8, ("q_proj", "down_proj"), element=2, dropout=dropout, dora=dora)
    form = replace(FULL, checkpoint_every=1, selective=True)
    plain, adapted = (_bytes(replace(form, adapter=a)) for a in (None, adapter))
    more = adapted["device kept activations"] - plain["device kept activations"]
    again = 2 * 4096 if dora and dropout else 0
    assert more == 31 * 4096 * 2 * (2 * 8 + again)


def test_inputs_on_the_host_leave_two_on_the_device() -> None:
    found = _bytes(replace(FULL, checkpoint_every=1, inputs_on_host=True))
    assert found["host layer inputs"] == 32 * STREAM
    assert found["device layer inputs"] == 2 * STREAM


def test_the_unfused_head_costs_sixteen_bytes_for_each_token_and_word() -> None:
    found = _bytes(replace(FULL, head=UnfusedHead()))
    assert found["device logits"] == 16 * 4096 * 32000


def test_attention_sequence_by_sequence_saves_its_output_twice() -> None:
    found = _bytes(replace(FULL, attention="sdpa"))
    assert found["device activations"] - _bytes(FULL)["device activations"] == 32 * STREAM


def test_a_card_without_the_flash_kernel_keeps_keys_and_values_for_every_head() -> None:
    """Of Llama 3 8B, 32 heads of queries and 8 of keys, 128 wide; Llama 2 7B has as many of both.
    A mask, which the flash kernel does not take, asks for the same."""
    form = replace(FULL, attention="sdpa")
    bare = replace(form, flash=False)
    grouped = "meta-llama/Meta-Llama-3-8B"
    more = 2 * 2 * 24 * 128 * 4096  # keys and values in bfloat16, of 24 heads more
    flash, other = (_bytes(x, name=grouped)["device activations"] for x in (form, bare))
    assert other - flash == 32 * more
    assert _bytes(form) == _bytes(bare)
    steps = layer_steps(Layer(read_shape(grouped), SHARED, form))
    (masked,) = (step for step in steps if step.part == "attention")
    output, sums, masks = 2 * 4096 * 4096, 4 * 4096 * 32, 2 * 4096 * 1024
    gathered = 2 * 4096 * (2 * 32 + 1.5 * 32) * 128  # of 32 heads, keys, values and queries
    assert masked.saved == 2 * output + sums + masks + gathered


SCORES = 32 * 4096 * 1024  # of every head, each query with 1,024 keys


@pytest.mark.parametrize(("element", "kept"), [(2, 4 + 2), (4, 4)])
@pytest.mark.parametrize(("device", "product"), [("cuda", 4), ("cpu", 0)])
def test_written_scores_by_hand(
    element: int, kept: int, device: Literal["cuda", "cpu"], product: int
) -> None:
    """Kept are the softmax in fp32, and narrowed if need be. At its backward the softmax is left,
    with its gradient, that of the scores, and on CUDA the product of the first two (SoftMax.cu)."""
    form = replace(FULL, attention="eager", element=element, device=device)
    (scores,) = (x for x in layer_steps(Layer(LLAMA, WORK, form)) if x.part == "attention scores")
    outputs = 3 * element * 4096 * 4096
    assert scores.saved == kept * SCORES + outputs
    assert scores.saved + scores.scratch == (4 + 4 + 4 + product) * SCORES + outputs


def test_a_card_without_any_kernel_writes_the_scores_out() -> None:
    """Of Llama 3 8B. Kept are each sequence's softmax and, in fp32, queries, keys and values of
    all heads, of which "queries, keys, values" has 2 bytes."""
    grouped = read_shape("meta-llama/Meta-Llama-3-8B")
    form = replace(FULL, attention="sdpa", flash=False, kernels=False)
    (scores,) = (x for x in layer_steps(Layer(grouped, WORK, form)) if x.part == "attention scores")
    joined, read = 2 * 4096 * 4096, 3 * 4096 * 4096
    assert scores.saved == 4 * SCORES + 2 * read + joined
    one = 32 * 1024**2  # of one sequence: gradients of both, and on CUDA a product
    gradients = 2 * 2 * 4096 * (32 + 2 * 8) * 128
    assert scores.scratch == (4 + 4 + 4) * one + gradients + 2 * 2 * 1024 * 4096
    assert scores.forward - scores.saved == 4 * one + 4 * 1024**2


def test_softcapped_scores_take_a_product_more_on_cuda() -> None:
    gemma = read_shape("google/gemma-2-2b")
    found = {}
    for device in ("cuda", "cpu"):
        steps = layer_steps(Layer(gemma, WORK, replace(FULL, attention="sdpa", device=device)))
        found[device] = next(x.scratch for x in steps if x.part == "attention scores")
    assert found["cuda"] - found["cpu"] == 4 * 8 * 1024**2  # one sequence's, of 8 heads


def test_an_adapter_keeps_its_own_inputs_and_no_gradient_of_the_embedding() -> None:
    adapter = AdapterForm(rank=8, targets=("down_proj",), element=2)
    found = _bytes(replace(FULL, adapter=adapter))
    norms = 2 * (4 * 4096 + 4)  # neither normalised for the weight, nor output for a linear
    assert found["device activations"] == pytest.approx(
        32 * 4096 * (norms + ATTENTION + MLP + 2 * 8), rel=0.01
    )
    assert not [name for name in found if "gradients" in name]


def test_a_wide_adapter_casts_every_input_that_it_reads() -> None:
    narrow = AdapterForm(rank=8, targets=("q_proj", "k_proj"), element=2)
    wide = replace(narrow, element=4)
    few, many = (_bytes(replace(FULL, adapter=a))["device activations"] for a in (narrow, wide))
    # Two fp32 copies in place of the norm's shared output; twice the width of the inner products.
    assert many - few == 32 * 4096 * (2 * 4 * 4096 - 2 * 4096 + 2 * 8 * 2)


def test_magnitudes_keep_two_results_of_each_adapted_layer() -> None:
    lora = AdapterForm(rank=8, targets=("q_proj", "up_proj"), element=2)
    plain, dora = (
        _bytes(replace(FULL, adapter=replace(lora, dora=on)))["device activations"]
        for on in (False, True)
    )
    both = 32 * 4096 * 2 * 2 * (4096 + 11008)
    assert dora - plain == pytest.approx(both, rel=0.03)  # not all of the last layer is at the top


def test_magnitudes_with_dropout_keep_weights_of_4_bits_as_16() -> None:
    dora = AdapterForm(rank=8, targets=("q_proj",), element=2, dropout=True, dora=True)
    form = replace(FULL, adapter=dora)
    plain, coded = (
        _bytes(replace(form, quantized=on))["device activations"] for on in (False, True)
    )
    assert coded - plain == 32 * 2 * 4096 * 4096


def test_magnitudes_write_an_update_and_an_identity_matrix_out() -> None:
    """If there are few tokens, that is the most: of `down`, 11,008 inputs and 4,096 outputs."""
    few = MicroBatch(tokens=64, sequences=1, longest=64, loss_tokens=8)
    dora = AdapterForm(rank=8, targets=("down_proj",), element=2, dora=True)
    found = _bytes(replace(FULL, adapter=dora, checkpoint_every=1), few)
    written = 2 * 11008 * (11008 + 3 * 4096)
    assert written < found["device working set"] < 1.02 * written


def test_phis_layer_by_hand() -> None:
    """One layer norm that attention and MLP share, and an activation in six operations."""
    found = _bytes(FULL, name="microsoft/phi-2")
    hidden, inner, heads = 2560, 10240, 32
    norm = 2 * hidden + 2 * 4 + 2 * hidden  # the input, mean and deviation, the output
    attention = 2 * 3 * hidden + 2 * hidden + 4 * heads
    activation = 2 * 4 * inner  # the input, half of it, tanh, one more than that
    layer = norm + attention + activation + 2 * inner
    last = 4096 * (2 * hidden + 2 * 4)
    assert found["device activations"] == 32 * 4096 * layer + last


def test_a_value_head_has_no_logits() -> None:
    found = _bytes(replace(FULL, head=ScalarHead()))
    assert not [name for name in found if "logits" in name]


def test_quantised_weights_are_written_out_one_at_a_time() -> None:
    adapter = AdapterForm(rank=8, targets=("all-linear",), element=2)
    base = replace(FULL, adapter=adapter, trained=False)
    plain, quantised = (_bytes(replace(base, quantized=q)) for q in (False, True))
    assert quantised["device working set"] - plain["device working set"] == 2 * 4096 * 11008


def test_scoring_holds_no_layer_for_later() -> None:
    moment = Moment("score", "forward")
    form = replace(FULL, trained=False)
    held = activation_items("reference", LLAMA, WORK, form, "score")
    assert all(one.moments == {moment} for one in held)
    assert sum(one.item.bytes for one in held) < 4096 * LAYER


def test_items_say_how_they_were_reckoned() -> None:
    held = activation_items("actor", LLAMA, WORK, FULL, "train_actor")
    for one in held:
        assert one.item.formula and one.item.source
        assert one.moments == {Moment("train_actor", "forward_backward")}
    words = next(one.item.formula for one in held if one.item.name == "activations")
    assert "32 layers x 4,096 tokens" in words and "MLP 88,064" in words


SHARED = replace(WORK, shared=4096)


def test_shared_prompts_are_keys_and_values_once_more() -> None:
    """While they are undone, their gradients are held, too."""
    twice, once = (_bytes(FULL, work)["device activations"] for work in (WORK, SHARED))
    assert once - twice == 32 * 4096 * 2 * 2 * 4096
    scoring = replace(FULL, trained=False)
    working = [_bytes(scoring, work)["device working set"] for work in (WORK, SHARED)]
    assert working[1] - working[0] <= 4096 * 2 * 2 * 4096


def test_layers_share_their_masks() -> None:
    """Each of 1,024 keys of at most 4,096 queries; kernels on a card copy them in every layer. On a
    CPU one sequence has one at a time."""
    card, host = (replace(FULL, attention="sdpa", device=device) for device in ("cuda", "cpu"))
    masks = 2 * 4096 * 1024
    assert _bytes(card, SHARED)["device attention masks"] == masks
    for form, work in ((card, WORK), (host, SHARED), (FULL, SHARED)):
        assert "device attention masks" not in _bytes(form, work)
    outputs, queries = 2 * 4096 * 4096, 2 * int(1.5 * 4096 * 4096)
    by_sequence, whole = (_bytes(form, SHARED)["device activations"] for form in (card, FULL))
    assert by_sequence - whole == 32 * (masks + outputs + queries)


def test_a_pack_keeps_nothing_of_attention_but_its_output_and_sums_of_rows() -> None:
    """On a CPU too, whose backward makes keys, values and scores again."""
    host = replace(FULL, attention="sdpa", device="cpu")
    kept, shared = (_bytes(host, work)["device activations"] for work in (WORK, SHARED))
    assert shared == kept == _bytes(FULL)["device activations"]


def test_windows_and_bounded_scores_need_masks_of_their_own() -> None:
    """Gemma 2's scores are bounded, with a window of 4,096; Mistral 7B's window is as large."""
    form = replace(FULL, attention="sdpa", device="cpu")
    short, long = WORK, MicroBatch(tokens=8192, sequences=1, longest=8192, loss_tokens=8192)
    masks = {
        (name, work.longest): _bytes(form, work, name).get("device attention masks", 0)
        for name in ("google/gemma-2-2b", "mistralai/Mistral-7B-v0.1")
        for work in (short, long)
    }
    assert masks == {
        ("google/gemma-2-2b", 1024): 2 * 4096 * 1024,
        ("google/gemma-2-2b", 8192): 2 * 2 * 8192**2,
        ("mistralai/Mistral-7B-v0.1", 1024): 0,
        ("mistralai/Mistral-7B-v0.1", 8192): 2 * 8192**2,
    }


@pytest.mark.parametrize("adapter", [None, AdapterForm(8, ("all-linear",), 4, dropout=True)])
@pytest.mark.parametrize("name", [LLAMA.name, "Qwen/Qwen3-30B-A3B"])
def test_what_is_left_is_a_model_of_so_many_layers(name: str, adapter: AdapterForm | None) -> None:
    form, at = replace(FULL, adapter=adapter), Moment("train_actor", "reduce")
    whole = read_shape(name)
    for layers in (1, 2, whole.layers):
        alone = shape_from_config({**known_models()[name], "num_hidden_layers": layers}, name)
        assert backward_items("actor", whole, WORK, form, at, layers) == backward_items(
            "actor", alone, WORK, form, at, layers
        )


@given(
    name=st.sampled_from(sorted(known_models())),
    tokens=st.integers(1, 16384),
    more=st.integers(0, 4096),
    every=st.sampled_from([None, 1, 4]),
    selective=st.booleans(),
    attention=st.sampled_from(["varlen", "sdpa", "eager"]),
    trained=st.booleans(),
)
def test_more_tokens_never_need_less(
    name: str,
    tokens: int,
    more: int,
    every: int | None,
    selective: bool,
    attention: Attention,
    trained: bool,
) -> None:
    form = replace(
        FULL, checkpoint_every=every, selective=selective, attention=attention, trained=trained
    )
    few, many = (
        sum(_bytes(form, MicroBatch(n, 1, n, n), name).values()) for n in (tokens, tokens + more)
    )
    assert few <= many


@given(name=st.sampled_from(sorted(known_models())), tokens=st.integers(64, 16384))
def test_checkpoints_and_adapters_save_memory(name: str, tokens: int) -> None:
    work = MicroBatch(tokens, 1, tokens, tokens)
    adapter = AdapterForm(rank=8, targets=("all-linear",), element=2)
    full = sum(_bytes(FULL, work, name).values())
    every_layer = replace(FULL, checkpoint_every=1)
    kinds = (every_layer, replace(every_layer, selective=True), replace(FULL, checkpoint_every=2))
    least, *others = (sum(_bytes(kind, work, name).values()) for kind in kinds)
    assert all(least <= other <= full for other in others)
    adapted = sum(_bytes(replace(FULL, adapter=adapter), work, name).values())
    inner = 2 * 8 * tokens * sum(linear.count for linear in read_shape(name).linears)
    assert adapted <= full + inner  # what it keeps of its own; of phi-2 it saves little beside
