"""The receiving end's book of a weight sync, and the buckets that tensors travel in."""

from __future__ import annotations

import re

import pytest
import torch
from buckets import bucket_of, bytes_of, tensors_in
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.errors import WeightSyncError
from plimsoll.sync.buckets import Arrivals, WeightBucket, sum_pieces

DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float64]


def one_tensor() -> tuple[WeightBucket, list[int]]:
    """A bucket, and the checksum of what came."""
    bucket = bucket_of({"layer.weight": torch.arange(6.0).reshape(2, 3)})
    return bucket, sums_of(bucket)


def sums_of(bucket: WeightBucket) -> list[int]:
    return sum_pieces(bucket.tensors, bytes_of(bucket))


def test_tensors_that_were_announced_and_came_whole_are_complete() -> None:
    bucket, arrived = one_tensor()
    arrivals = Arrivals(("layer.weight",))
    arrivals.take(bucket.tensors, arrived)
    arrivals.complete()


def test_missing_tensors_are_counted_and_the_first_are_named() -> None:
    arrivals = Arrivals(tuple(f"layer.{i}" for i in range(7)))
    with pytest.raises(WeightSyncError) as caught:
        arrivals.complete()
    message = str(caught.value)
    assert message.startswith("7 tensors ")
    assert re.findall(r"layer\.\d", message) == [f"layer.{i}" for i in range(5)]


def test_a_tensor_that_comes_twice_or_was_not_announced() -> None:
    bucket, arrived = one_tensor()
    arrivals = Arrivals(("layer.weight",))
    arrivals.take(bucket.tensors, arrived)
    with pytest.raises(WeightSyncError, match=r"layer\.weight came twice"):
        arrivals.take(bucket.tensors, arrived)
    with pytest.raises(WeightSyncError, match=r"^layer\.weight .*never announced"):
        Arrivals(("other",)).take(bucket.tensors, arrived)


def test_one_damaged_bit_is_an_error_with_both_checksums() -> None:
    bucket, _ = one_tensor()
    tensors_in(bucket)["layer.weight"].view(torch.uint8)[0, 0] ^= 1
    [found], [sent] = sums_of(bucket), bucket.tensors
    assert found != sent.checksum
    arrivals = Arrivals(("layer.weight",))
    with pytest.raises(WeightSyncError) as caught:
        arrivals.take(bucket.tensors, [found])
    assert re.match(rf"layer\.weight .*\b{found:x}\b.*\b{sent.checksum:x}\b", str(caught.value))
    with pytest.raises(WeightSyncError, match=r"^1 tensor .*layer\.weight"):
        arrivals.complete()


def test_a_process_that_does_not_check_counts_what_came() -> None:
    """Another process of its engine reads the same memory, and checks it."""
    bucket, _ = one_tensor()
    arrivals = Arrivals(("layer.weight",))
    arrivals.take(bucket.tensors, None)
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
    bucket = bucket_of(tensors)
    found = tensors_in(bucket)
    assert list(found) == list(tensors)
    arrivals = Arrivals(tuple(tensors))
    for sent in bucket.tensors:
        assert found[sent.name].dtype == tensors[sent.name].dtype
        assert torch.equal(found[sent.name], tensors[sent.name])
    arrivals.take(bucket.tensors, sums_of(bucket))
    arrivals.complete()
