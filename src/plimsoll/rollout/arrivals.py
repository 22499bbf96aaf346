"""Which tensors of a weight sync were announced, and which of them came whole."""

from __future__ import annotations

from torch import Tensor

from plimsoll.engine.weights import SentTensor, hash_bytes
from plimsoll.errors import WeightSyncError
from plimsoll.run.counting import counted


class Arrivals:
    """The tensors of one weight sync."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._missing = set(names)

    def take(self, sent: SentTensor, tensor: Tensor) -> None:
        """Note a tensor that came (contiguous, in host memory).

        Raises:
            WeightSyncError: it was not announced, came twice, or its bytes are not those sent.
        """
        if sent.name not in self._missing:
            raise WeightSyncError(f"{sent.name} came twice, or was never announced")
        arrived_hash = hash_bytes(tensor)
        if arrived_hash != sent.hash:
            raise WeightSyncError(
                f"{sent.name} arrived damaged: hash {arrived_hash}, but {sent.hash} was sent"
            )
        self._missing.remove(sent.name)

    def complete(self) -> None:
        """Raise WeightSyncError if announced tensors have not come."""
        if self._missing:
            first = ", ".join(sorted(self._missing)[:5])
            raise WeightSyncError(
                f"{counted(len(self._missing), 'tensor')} of the new weights never arrived: "
                f"{first}. The engine would go on with the old ones and sample from no version at "
                "all"
            )
