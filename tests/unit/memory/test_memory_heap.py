"""What is left of tensors on CPU when they are freed, and when a bucket of gradients is reduced."""

from __future__ import annotations

import ctypes
from multiprocessing import get_context

import pytest
import torch

from plimsoll.config.engine import TrainedRole
from plimsoll.memory.items import Held, Item, Moment
from plimsoll.memory.price.heap import LARGEST_KEPT, kept_by_heap, small_bytes
from plimsoll.memory.price.lifetimes import job_moments
from plimsoll.memory.price.reduction import layers_left
from plimsoll.memory.price.roles import trained_role
from plimsoll.memory.price.states import Kept
from plimsoll.memory.price.zero_states import ZeroSizes
from plimsoll.memory.shapes.known_models import read_shape
from plimsoll.memory.shapes.shape import MicroBatch

READ, BUILD = Moment("load", "read actor"), Moment("load", "build actor")
TRAIN, STEP = Moment("train_actor", "backward"), Moment("train_actor", "step")
SAVE = Moment("save", "gather")
SHAPE = read_shape("Qwen/Qwen2.5-7B")
ENDS = 152_064 * 3584  # of its embedding, and of its head
MOMENTS = job_moments(("actor",), ("train_actor", "save"))


def held(small: int, *moments: Moment, large: int = 0) -> Held:
    item = Item("actor", "x", "host", "allocated", small + large, "by hand", "a test", small)
    return Held(item, frozenset(moments))


def freed(*everything: Held) -> dict[Moment, int]:
    return {m: one.item.bytes for one in kept_by_heap(everything) for m in one.moments}


def test_the_heap_stays_as_large_as_its_small_blocks_ever_were() -> None:
    lasting = held(10, BUILD, TRAIN, STEP, SAVE)
    found = freed(lasting, held(100, TRAIN, large=5000), held(30, STEP), held(0, TRAIN, large=7))
    assert found == {TRAIN: 0, STEP: 70, SAVE: 100}


def test_what_is_saved_at_the_end_leaves_nothing_behind() -> None:
    assert freed(held(100, TRAIN), held(250, SAVE)) == {TRAIN: 0, SAVE: 0}


def test_what_threads_read_serves_nobody_later() -> None:
    assert freed(held(40, READ), held(100, TRAIN), held(0, SAVE)) == {TRAIN: 40, SAVE: 140}


def test_blocks_are_small_below_32_mib() -> None:
    assert small_bytes(10**9, LARGEST_KEPT - 1) == 10**9
    assert small_bytes(10**9, LARGEST_KEPT) == 0
    many = Kept("x", "weights", 10**9, 2, "", block=2**24 - 1)
    assert many.small == many.bytes
    assert Kept("x", "flat", 10**9, 2, "").small == 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="glibc alone")
def test_the_system_gets_large_blocks_back_and_no_small_ones() -> None:
    """The two sides of LARGEST_KEPT in glibc itself, beside small tensors that last; in a process
    of its own, as what a heap keeps depends on all that was in it."""
    with get_context("spawn").Pool(1) as pool:
        full, without_large, without_small, lasting = pool.apply(_resident_as_blocks_are_freed)
    assert full - without_large > 240 * 2**20  # of 256 MiB
    assert without_large - without_small < 64 * 2**20  # of 256 MiB
    assert lasting == 64


def _resident_as_blocks_are_freed() -> tuple[int, int, int, int]:
    first = torch.ones(2**22)
    del first  # from now on blocks of 16 MiB come from the heap
    large = torch.ones(2**26)
    pairs = [(torch.ones(2**14), torch.ones(2**20)) for _ in range(64)]
    full = _resident()
    del large
    without_large = _resident()
    lasting = [kept for kept, _ in pairs]
    pairs.clear()
    return full, without_large, _resident(), len(lasting)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def left(bucket: int, stage: int = 2, adapted: bool = False, trained: int = 0) -> int:
    sizes = ZeroSizes(stage, ranks=1, accumulate=4, bucket=bucket)
    return layers_left(SHAPE, trained or SHAPE.parameters, sizes, adapted)


def test_a_bucket_is_full_before_a_layer_is_undone_where_the_head_fills_it() -> None:
    assert left(ENDS) == left(10**6) == SHAPE.layers == 28


def test_a_bucket_that_takes_half_of_the_layers_leaves_the_other_half() -> None:
    layers = SHAPE.parameters - 2 * ENDS
    assert left(ENDS + layers // 2) == 14
    assert left(1000, adapted=True, trained=4000) == 21


def test_a_bucket_that_takes_all_is_reduced_when_nothing_is_left() -> None:
    assert left(SHAPE.parameters) == 0
    assert left(10**6, stage=0) == 0


def test_the_bucket_and_the_highest_logits_are_never_there_together() -> None:
    names = role_moments()
    assert Moment("train_actor", "forward_backward") not in names["reduce bucket"]
    assert names["logits chunk"] == {Moment("train_actor", "forward_backward")}
    assert names["copy to reduce"] == {Moment("train_actor", "reduce")}


def test_eight_bit_adam_writes_five_copies_out_on_cpu() -> None:
    step = {one.item.name: one.item.bytes for one in role(optimizer={"kind": "adamw_8bit"})}
    assert step["copies for 8-bit AdamW"] == 5 * 4 * SHAPE.parameters
    assert "copies for 8-bit AdamW" not in role_moments()


def test_gloo_reduces_a_clone_of_a_full_bucket_at_stage_3() -> None:
    bucket = 50_000_000
    third = {one.item.name: one for one in role(zero={"stage": 3, "bucket_elements": bucket})}
    clone, copy = third["gloo's copy to reduce"], third["copy to reduce"]
    assert clone.item.bytes == copy.item.bytes == 2 * ENDS  # the head alone is larger than a bucket
    assert clone.moments == copy.moments == {Moment("train_actor", "reduce")}
    assert "gloo's copy to reduce" not in role_moments()


def test_a_quantised_model_is_read_in_16_bits_on_cpu() -> None:
    four_bits = role(model={"quantization": "nf4"}, adapter={"rank": 8})
    [read] = [one for one in four_bits if one.item.name == "weights to quantise"]
    linears = SHAPE.parameters - 2 * ENDS - SHAPE.other_parameters
    assert read.moments == {READ}
    assert read.item.small == read.item.bytes == pytest.approx(2 * linears, rel=1e-3)


def role(**settings: object) -> tuple[Held, ...]:
    model = {"path": "Qwen/Qwen2.5-7B"} | settings.pop("model", {})  # type: ignore[operator]
    trained = TrainedRole.model_validate({"model": model, **settings})
    work = MicroBatch(tokens=512, sequences=2, longest=256, learned=512)
    return trained_role("actor", trained, SHAPE, "policy", work, 1, "cpu", "train_actor", MOMENTS)


def role_moments() -> dict[str, frozenset[Moment]]:
    return {one.item.name: one.moments for one in role()}
