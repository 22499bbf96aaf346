"""Buckets of weights without engines: made of tensors, gathered from a worker, and read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plimsoll.sync.buckets import WeightBucket, ship_bucket, split_bytes
from plimsoll.sync.channel import HostInlet, HostOutlet
from plimsoll.trainer.weights import WeightPlan
from plimsoll.trainer.worker import Worker

CPU = torch.device("cpu")


def bucket_of(tensors: Mapping[str, Tensor]) -> WeightBucket:
    """A bucket that holds its bytes itself."""
    largest = sum(tensor.nbytes + 8 for tensor in tensors.values())
    return ship_bucket(tensors, HostOutlet(CPU, max(1, largest), near=False))


def tensors_in(bucket: WeightBucket) -> dict[str, Tensor]:
    """Views of a bucket's tensors, wherever on this node its bytes are."""
    data = HostInlet(CPU).open(bucket.handle, bucket.bytes)
    return split_bytes(bucket.tensors, data)


def open_way(worker: Worker, bucket_bytes: int, as_published: bool = False) -> WeightPlan:
    """The plan of the actor's weights, after opening a way that puts bytes into the handles."""
    plan = worker.weight_plan("actor", bucket_bytes, as_published, False)
    worker.open_channel("host", plan.largest, False, 1)
    return plan


def gathered(worker: Worker, names: Sequence[str]) -> WeightBucket | None:
    """A bucket of the actor's weights, whose bytes are its own, unlike the buffers' in turn."""
    bucket = worker.weight_bucket("actor", tuple(names), False)
    return None if bucket is None else bucket_of(tensors_in(bucket))
