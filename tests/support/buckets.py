"""Buckets of weights without engines: made of tensors, gathered from a worker, and read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plimsoll.sync.buckets import WeightBucket, rebuild_bucket, ship_bucket, split_bytes
from plimsoll.sync.channel import Board, Channel, Handle, SharedFile
from plimsoll.trainer.weights import PlannedBucket, WeightPlan
from plimsoll.trainer.worker import Worker

CPU = torch.device("cpu")
_KEPT: list[Any] = []
"""What holds the memory of buckets and the stores of boards, for as long as the tests run."""


class Memory:
    """An outlet that keeps each bucket in memory of its own, and tells nobody."""

    channel = Channel("host", 0)

    def room(self, size: int) -> Tensor:
        self._file = SharedFile(max(1, size))
        _KEPT.append(self._file)
        return self._file.bytes[:size]

    def ship(self) -> Handle:
        return (self._file.path,)

    def post(self, values: Handle) -> None: ...

    def close(self) -> None: ...

    def break_off(self) -> None: ...

    def drop(self) -> None: ...


def bucket_of(tensors: Mapping[str, Tensor]) -> WeightBucket:
    """A bucket whose memory nothing else uses."""
    return ship_bucket(tensors, Memory())


def bytes_of(bucket: WeightBucket) -> Tensor:
    """The bytes of a bucket in host memory, which may go to other processes."""
    [path] = bucket.handle
    return torch.from_numpy(np.memmap(path, np.uint8, "r+", shape=(bucket.bytes,)))


def tensors_in(bucket: WeightBucket) -> dict[str, Tensor]:
    """Views of a bucket's tensors."""
    return split_bytes(bucket.tensors, bytes_of(bucket))


def posted(*buckets: WeightBucket) -> Channel:
    """A channel on which these buckets wait for one reader."""
    board = Board(1)
    _KEPT.append(board)
    for bucket in buckets:
        board.post(astuple(bucket))
    return Channel("host", 0, readers=1, board=board.path)


class Altered:
    """An outlet that posts other buckets than it shipped."""

    def __init__(self, outlet: Any, alter: Callable[[WeightBucket], WeightBucket]) -> None:
        self._outlet, self._alter = outlet, alter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outlet, name)

    def post(self, values: Handle) -> None:
        self._outlet.post(astuple(self._alter(rebuild_bucket(values))))


def open_way(worker: Worker, bucket_bytes: int, as_published: bool = False) -> WeightPlan:
    """The plan of the actor's weights, after opening a way that nobody reads."""
    plan = worker.weight_plan("actor", bucket_bytes, as_published, False)
    worker.open_channel("host", plan.largest, True, 0)
    return plan


def gathered(worker: Worker, planned: PlannedBucket) -> WeightBucket | None:
    """A bucket of the actor's weights, whose bytes are its own, unlike the buffers' in turn."""
    bucket = worker.weight_bucket("actor", planned, False)
    return None if bucket is None else bucket_of(tensors_in(bucket))
