"""Bytes of activations against sums done by hand, and what must hold for any shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.memory.items import Moment
from plimsoll.memory.price.activation_form import (
    ActivationForm,
    AdapterForm,
    Attention,
    ChunkedHead,
    UnfusedHead,
    ValueHead,
)
from plimsoll.memory.price.activations import activation_items
from plimsoll.memory.shapes.known_models import known_models, read_shape
from plimsoll.memory.shapes.shape import MicroBatch

LLAMA = read_shape("meta-llama/Llama-2-7b-hf")
WORK = MicroBatch(tokens=4096, sequences=4, longest=1024, learned=2000)
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


def test_checkpoints_every_second_layer_keep_half_the_inputs_and_recompute_two_layers() -> None:
    one, two = (_bytes(replace(FULL, checkpoint_every=every)) for every in (1, 2))
    assert two["device layer inputs"] == one["device layer inputs"] // 2
    grown = two["device recomputed activations"] - one["device recomputed activations"]
    assert grown == 4096 * LAYER


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


def test_written_scores_grow_with_the_longest_sequence() -> None:
    eager = _bytes(replace(FULL, attention="eager"))["device activations"]
    half = replace(WORK, longest=512)
    fewer = _bytes(replace(FULL, attention="eager"), half)["device activations"]
    assert eager - fewer == 32 * (4 + 2) * 32 * 4096 * 512


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


def test_a_value_head_has_no_logits() -> None:
    found = _bytes(replace(FULL, head=ValueHead()))
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


@given(
    name=st.sampled_from(sorted(known_models())),
    tokens=st.integers(1, 16384),
    more=st.integers(0, 4096),
    every=st.sampled_from([None, 1, 4]),
    attention=st.sampled_from(["varlen", "sdpa", "eager"]),
    trained=st.booleans(),
)
def test_more_tokens_never_need_less(
    name: str, tokens: int, more: int, every: int | None, attention: Attention, trained: bool
) -> None:
    form = replace(FULL, checkpoint_every=every, attention=attention, trained=trained)
    few, many = (
        sum(_bytes(form, MicroBatch(n, 1, n, n), name).values()) for n in (tokens, tokens + more)
    )
    assert few <= many


@given(name=st.sampled_from(sorted(known_models())), tokens=st.integers(64, 16384))
def test_checkpoints_and_adapters_save_memory(name: str, tokens: int) -> None:
    work = MicroBatch(tokens, 1, tokens, tokens)
    adapter = AdapterForm(rank=8, targets=("all-linear",), element=2)
    full = sum(_bytes(FULL, work, name).values())
    assert sum(_bytes(replace(FULL, checkpoint_every=1), work, name).values()) <= full
    assert sum(_bytes(replace(FULL, adapter=adapter), work, name).values()) <= full
