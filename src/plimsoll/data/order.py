"""In which order rows are seen: a pure function of the position, so that resuming is exact.

A mixture takes turns between its sources by the divisor method of Webster and Sainte-Lague, which
divides seats among parties (Balinski and Young 1982, Fair Representation): draw j of a source of
weight w, j from 0, is at time (j + 1/2) / w, and all draws happen in the order of their times. So
sources come as evenly as their weights allow, and how often each has come before a position can be
told without drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from plimsoll.records import Ints


@dataclass(frozen=True, eq=False)
class Ascending:
    """A number for each row of a source, by which each epoch goes from the lowest to the highest.
    numbers: shape [rows]."""

    numbers: NDArray[np.float64]


@dataclass(frozen=True)
class DataOrder:
    """The endless order of `rows` rows: epoch after epoch, each epoch a permutation of its own
    from (seed, epoch, source), or the rows as they are without `shuffle`; by: sorted then, so that
    this is the order of rows with the same number.

    A run that has used `n` rows goes on with `indices(n, ...)`, whatever its batch size was.
    """

    rows: int
    seed: int
    shuffle: bool
    source: int = 0
    by: Ascending | None = None

    def __post_init__(self) -> None:
        assert self.rows > 0 and self.seed >= 0

    def indices(self, start: int, count: int) -> Ints:
        """The row numbers at positions start, ..., start + count - 1; shape [count]."""
        assert start >= 0 and count >= 0
        positions = np.arange(start, start + count, dtype=np.int64)
        if not self.shuffle and self.by is None:
            return positions % self.rows
        epochs, places = np.divmod(positions, self.rows)
        indices = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = self._epoch(int(epoch))[places[here]]
        return indices

    def _epoch(self, epoch: int) -> Ints:
        drawn = (self.rows, self.seed, epoch, self.source) if self.shuffle else None
        if self.by is not None:
            return _sorted(self.by, drawn)
        assert drawn is not None
        return _permutation(*drawn)


@dataclass(frozen=True)
class Portion:
    """A source within a mixture. name: its key in the config; of a single source, empty. by: what
    its rows are drawn by, if not at random."""

    name: str
    rows: int
    weight: float
    by: Ascending | None = None

    @property
    def key(self) -> str:
        """How the config calls it."""
        return f"data.train.{self.name}" if self.name else "data.train"


@dataclass(frozen=True)
class MixedOrder:
    """The endless order of the rows of several sources, numbered through, one source after another.

    After any number of draws, each of n sources has come as often as its share of the weights
    says, but for less than (n + 1) / 2. Each keeps its own `DataOrder`, and so its own epochs.
    """

    portions: tuple[Portion, ...]
    seed: int
    shuffle: bool

    def share(self, portion: Portion) -> float:
        """The part of all draws that a source has."""
        return portion.weight / sum(p.weight for p in self.portions)

    def indices(self, start: int, count: int) -> Ints:
        """The row numbers at positions start, ..., start + count - 1; shape [count]."""
        first, sources = self._sources(start, start + count)
        drawn = self._drawn(start, first, sources)
        sources = sources[start - sum(first) :][:count]
        indices = np.empty(count, dtype=np.int64)
        offset = 0
        for source, portion in enumerate(self.portions):
            here = np.flatnonzero(sources == source)
            order = DataOrder(portion.rows, self.seed, self.shuffle, source, portion.by)
            indices[here] = offset + order.indices(drawn[source], len(here))
            offset += portion.rows
        return indices

    def epochs(self, position: int) -> dict[str, float]:
        """How often the rows of each source have been seen before a position, by its name."""
        first, sources = self._sources(position, position)
        drawn = self._drawn(position, first, sources)
        return {p.name: n / p.rows for p, n in zip(self.portions, drawn, strict=True)}

    def _sources(self, start: int, stop: int) -> tuple[list[int], Ints]:
        """The source of every position from sum(first) on, to beyond `stop`, where sum(first) is
        not beyond `start`; first: how many draws of each source come before."""
        shares = np.array([self.share(portion) for portion in self.portions])
        slack = len(shares)
        # a position's time is within n / 2 of the position, so these hold all that is asked for
        first = [max(0, int(share * (start - slack)) - 2) for share in shares]
        last = [int(share * (stop + slack)) + 2 for share in shares]
        sources = np.repeat(np.arange(len(shares)), np.subtract(last, first))
        draws = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
        return first, sources[np.lexsort((sources, (draws + 0.5) / shares[sources]))]

    def _drawn(self, position: int, first: Sequence[int], sources: Ints) -> list[int]:
        """How many draws of each source come before a position; first, sources: of `_sources`."""
        counts = np.bincount(sources[: position - sum(first)], minlength=len(self.portions))
        return [n + int(more) for n, more in zip(first, counts, strict=True)]


@lru_cache(maxsize=32)
def _permutation(rows: int, seed: int, epoch: int, source: int) -> Ints:
    """Sorts random keys instead of calling `Generator.permutation`: numpy promises the same bits
    of a bit generator in every version, but not the same permutation."""
    keys = np.random.PCG64([seed, epoch, source]).random_raw(rows)
    order = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


@lru_cache(maxsize=32)
def _sorted(by: Ascending, drawn: tuple[int, int, int, int] | None) -> Ints:
    """The rows from the lowest number to the highest, equal ones as they were drawn; None: as they
    are."""
    before = np.arange(len(by.numbers)) if drawn is None else _permutation(*drawn)
    order: Ints = before[np.argsort(by.numbers[before], kind="stable")]
    order.flags.writeable = False
    return order
