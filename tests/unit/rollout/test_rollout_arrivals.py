"""The receiving end's book of a weight sync, and the buckets that tensors travel in."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from plimsoll.engine.weights import SentTensor, hash_bytes, make_bucket, read_bucket
from plimsoll.errors import WeightSyncError
from plimsoll.rollout.sync import Arrivals

DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float64]


def one_tensor() -> tuple[SentTensor, Tensor]:
    bucket = make_bucket({"layer.weight": torch.arange(6.0).reshape(2, 3)})
    return bucket.tensors[0], read_bucket(bucket)["layer.weight"]


def test_tensors_that_were_announced_and_came_whole_are_complete() -> None:
    sent, tensor = one_tensor()
    arrivals = Arrivals(("layer.weight",))
    arrivals.take(sent, tensor)
    arrivals.complete()


def test_missing_tensors_are_counted_and_the_first_are_named() -> None:
    arrivals = Arrivals(tuple(f"layer.{i}" for i in range(7)))
    with pytest.raises(WeightSyncError) as caught:
        arrivals.complete()
    message = str(caught.value)
    assert message.startswith("7 tensors ")
    assert re.findall(r"layer\.\d", message) == [f"layer.{i}" for i in range(5)]


def test_a_tensor_that_comes_twice_or_was_not_announced() -> None:
    sent, tensor = one_tensor()
    arrivals = Arrivals(("layer.weight",))
    arrivals.take(sent, tensor)
    with pytest.raises(WeightSyncError, match=r"layer\.weight came twice"):
        arrivals.take(sent, tensor)
    with pytest.raises(WeightSyncError, match=r"^other .*never announced"):
        Arrivals(("layer.weight",)).take(replace(sent, name="other"), tensor)


def test_one_damaged_bit_is_an_error_with_both_hashes() -> None:
    sent, tensor = one_tensor()
    tensor.view(torch.uint8)[0, 0] ^= 1
    arrivals = Arrivals(("layer.weight",))
    with pytest.raises(WeightSyncError) as caught:
        arrivals.take(sent, tensor)
    found = hash_bytes(tensor)
    assert found != sent.hash
    assert re.match(rf"layer\.weight .*\b{found}\b.*\b{sent.hash}\b", str(caught.value))
    with pytest.raises(WeightSyncError, match=r"^1 tensor .*layer\.weight"):
        arrivals.complete()


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 3), max_size=3)),
        min_size=1,
        max_size=6,
    )
)
def test_a_bucket_gives_back_every_tensor_bit_for_bit(
    shapes: list[tuple[torch.dtype, list[int]]],
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{i}": (torch.randn(shape, generator=generator) * 50).to(dtype)
        for i, (dtype, shape) in enumerate(shapes)
    }
    bucket = make_bucket(tensors)
    found = read_bucket(bucket)
    assert list(found) == list(tensors)
    arrivals = Arrivals(tuple(tensors))
    for sent in bucket.tensors:
        assert found[sent.name].dtype == tensors[sent.name].dtype
        assert torch.equal(found[sent.name], tensors[sent.name])
        arrivals.take(sent, found[sent.name])
    arrivals.complete()
