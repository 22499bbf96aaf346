"""Where the weights of each sync come into a process of an engine, whichever engine it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from plimsoll.errors import WeightSyncError
from plimsoll.machine.faults import fault_value
from plimsoll.run.numbers import plural
from plimsoll.sync.buckets import SentTensor, WeightBucket, sum_pieces
from plimsoll.sync.channel import Channel, Inlet, open_inlet


class Arrivals:
    """The tensors that one weight sync announced, and which of them have come."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._missing = set(names)

    def take(self, tensors: Sequence[SentTensor], arrived: Sequence[int] | None) -> None:
        """Check the tensors of a bucket that came, and note them.

        Args:
            tensors: the tensors as they were sent.
            arrived: the checksums of what came; None if another process of the engine, which reads
                the same memory, checks it.

        Raises:
            WeightSyncError: one was not announced, came twice, or its bytes are not those sent.
        """
        for number, sent in enumerate(tensors):
            if sent.name not in self._missing:
                raise WeightSyncError(f"{sent.name} came twice, or was never announced")
            if arrived is not None and arrived[number] != sent.checksum:
                raise WeightSyncError(
                    f"{sent.name} arrived damaged: checksum {arrived[number]:x}, but "
                    f"{sent.checksum:x} was sent"
                )
            self._missing.remove(sent.name)

    def complete(self) -> None:
        """Raise WeightSyncError if announced tensors have not come."""
        if self._missing:
            first = ", ".join(sorted(self._missing)[:5])
            raise WeightSyncError(
                f"{plural(len(self._missing), 'tensor')} of the new weights never arrived: "
                f"{first}. The engine would go on with the old ones and sample from no version at "
                "all"
            )


class WeightLanding:
    """The receiving end of a run's syncs, with what the present one announced.

    Args:
        number: the number of the process among those of all engines, from 1.
        device: the engine's device.
    """

    def __init__(self, number: int, device: torch.device) -> None:
        self._number, self._device = number, device
        self._arrivals = Arrivals(())
        self._opened: tuple[Channel, Inlet] | None = None

    def begin(self, names: tuple[str, ...], channel: Channel) -> None:
        """Expect these tensors by a channel, which stays open for further syncs."""
        self._arrivals = Arrivals(names)
        if self._opened is None or self._opened[0] != channel:
            self._opened = channel, open_inlet(channel, self._number, self._device)

    @contextmanager
    def bucket(
        self, buckets: Iterable[WeightBucket], *, is_first: bool = True
    ) -> Iterator[tuple[WeightBucket, Tensor]]:
        """Yield the bucket that reaches this process, and its bytes; use these in the block only.

        Args:
            buckets: the bucket of each rank that sends, with the same tensors.
            is_first: whether this is the first process of its engine. If all of them read the same
                memory, only the first checks it.

        Raises:
            WeightSyncError: see `Arrivals.take`; or none of the buckets reaches this process.
        """
        inlet = self._inlet
        bucket = next((b for b in buckets if inlet.reaches(b.handle)), None)
        if bucket is None:
            raise WeightSyncError("no training rank sends weights from this process's card")
        data = fault_value("engine.receive", inlet.open(bucket.handle, bucket.bytes))
        checks = is_first or not inlet.one_copy
        self._arrivals.take(bucket.tensors, sum_pieces(bucket.tensors, data) if checks else None)
        yield bucket, data
        if data.is_cuda:  # the sender fills the buffer anew as soon as the block has ended
            torch.cuda.current_stream(data.device).synchronize()

    def complete(self) -> None:
        """Raise WeightSyncError if announced tensors have not come."""
        self._arrivals.complete()

    def close(self) -> None:
        """Let go of the sender's memory until the next sync."""
        self._inlet.close()

    @property
    def _inlet(self) -> Inlet:
        assert self._opened is not None, "a sync that has not begun"
        return self._opened[1]
