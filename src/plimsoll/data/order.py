"""In which order rows are seen: a pure function of the position, so that resuming is exact."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from plimsoll.records import Ints


@dataclass(frozen=True)
class DataOrder:
    """The endless order of `rows` rows: epoch after epoch, each epoch a permutation of its own
    from (seed, epoch), or the rows as they are without `shuffle`.

    A run that has used `n` rows goes on with `indices(n, ...)`, whatever its batch size was.
    """

    rows: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        assert self.rows > 0 and self.seed >= 0

    def indices(self, start: int, count: int) -> Ints:
        """The row numbers at positions start, ..., start + count - 1; shape [count]."""
        assert start >= 0 and count >= 0
        positions = np.arange(start, start + count, dtype=np.int64)
        if not self.shuffle:
            return positions % self.rows
        epochs, places = np.divmod(positions, self.rows)
        indices = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = _permutation(self.rows, self.seed, int(epoch))[places[here]]
        return indices


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> Ints:
    """Sorts random keys instead of calling `Generator.permutation`: numpy promises the same bits
    of a bit generator in every version, but not the same permutation."""
    keys = np.random.PCG64([seed, epoch]).random_raw(rows)
    order = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order
