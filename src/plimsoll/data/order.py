"""The order in which rows are seen: a pure function of the position, so that resuming is exact.

A mixture takes turns between its sources by the divisor method of Webster and Sainte-Lague, which
divides seats among parties (Balinski and Young 1982, Fair Representation). Draw j of a source of
weight w, j from 0, has the time (j + 1/2) / w, and all draws happen in the order of their times. So
sources come as evenly as their weights allow, and the number of draws of each source before a
position can be computed without drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from plimsoll.records import Ints

ENDLESS = 2**40
"""The number of rows of a stream: more than any run draws."""


@dataclass(frozen=True, eq=False)
class Ascending:
    """Numbers by which the rows of a source are sorted in each epoch, the lowest first."""

    numbers: NDArray[np.float64]
    """One number per row; shape [rows]."""


@dataclass(frozen=True)
class DataOrder:
    """The endless order of the rows of one source, epoch after epoch.

    A run that has used `n` rows goes on with `indices(n, ...)`, whatever its batch size was.
    """

    rows: int
    seed: int
    shuffle: bool
    """Whether each epoch is a permutation of its own, drawn from (seed, epoch, source)."""
    source: int = 0
    """The position of the source in the mixture."""
    by: Ascending | None = None
    """The numbers that sort each epoch. Rows with equal numbers keep the order of `shuffle`."""

    def __post_init__(self) -> None:
        assert self.rows > 0 and self.seed >= 0

    def indices(self, start: int, count: int) -> Ints:
        """Return the row numbers at positions start, ..., start + count - 1; shape [count]."""
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
        permutation = (self.rows, self.seed, epoch, self.source) if self.shuffle else None
        if self.by is not None:
            return _sort_rows(self.by, permutation)
        assert permutation is not None
        return _permutation(*permutation)


@dataclass(frozen=True)
class Portion:
    """A source within a mixture."""

    name: str
    """The key of the source in the config; empty for a single source."""
    rows: int
    """The number of rows of the source."""
    weight: float
    by: Ascending | None = None
    """The numbers that sort the rows; None if they are not sorted."""

    @property
    def key(self) -> str:
        """The setting that holds the source."""
        return f"data.train.{self.name}" if self.name else "data.train"


@dataclass(frozen=True)
class MixedOrder:
    """The endless order of the rows of several sources.

    Rows are numbered through, one source after another. After any number of draws, the count of
    each of n sources differs from its share by less than (n + 1) / 2. Each source keeps its own
    `DataOrder`, and so its own epochs.
    """

    portions: tuple[Portion, ...]
    seed: int
    shuffle: bool

    def share(self, portion: Portion) -> float:
        """Return the share of all draws that come from a source, from 0 to 1."""
        return portion.weight / sum(p.weight for p in self.portions)

    def indices(self, start: int, count: int) -> Ints:
        """Return the row numbers at positions start, ..., start + count - 1; shape [count]."""
        first, sources = self._sources(start, start + count)
        draws_before = self._draws_before(start, first, sources)
        sources = sources[start - sum(first) :][:count]
        indices = np.empty(count, dtype=np.int64)
        offset = 0
        for source, portion in enumerate(self.portions):
            here = np.flatnonzero(sources == source)
            shuffle = self.shuffle and portion.rows < ENDLESS  # a stream shuffles by itself
            order = DataOrder(portion.rows, self.seed, shuffle, source, portion.by)
            indices[here] = offset + order.indices(draws_before[source], len(here))
            offset += portion.rows
        return indices

    def epochs(self, position: int) -> dict[str, float]:
        """Return the number of epochs (a float) of each source before a position, by its name.

        Streams have none, as the number of their rows is not known.
        """
        first, sources = self._sources(position, position)
        draws_before = self._draws_before(position, first, sources)
        counted = zip(self.portions, draws_before, strict=True)
        return {p.name: n / p.rows for p, n in counted if p.rows < ENDLESS}

    def _sources(self, start: int, stop: int) -> tuple[list[int], Ints]:
        """Compute the source of every position around start, ..., stop.

        Returns:
            The number of draws of each source before the first of these positions, and the source
                of each position from there on. The first position is the sum of these numbers, at
                most `start`; the last position is at least `stop`.
        """
        shares = np.array([self.share(portion) for portion in self.portions])
        slack = len(shares)
        # A position's time is within n / 2 of the position, so these draws cover start to stop.
        first = [max(0, int(share * (start - slack)) - 2) for share in shares]
        last = [int(share * (stop + slack)) + 2 for share in shares]
        sources = np.repeat(np.arange(len(shares)), np.subtract(last, first))
        draws = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
        return first, sources[np.lexsort((sources, (draws + 0.5) / shares[sources]))]

    def _draws_before(self, position: int, first: Sequence[int], sources: Ints) -> list[int]:
        """Return how many draws of each source come before a position.

        `first` and `sources` are what `_sources` returns.
        """
        counts = np.bincount(sources[: position - sum(first)], minlength=len(self.portions))
        return [n + int(count) for n, count in zip(first, counts, strict=True)]


@lru_cache(maxsize=32)
def _permutation(rows: int, seed: int, epoch: int, source: int) -> Ints:
    """Return the permutation of an epoch, sorted by random keys.

    `Generator.permutation` is not used: numpy promises the same bits of a bit generator in every
    version, but not the same permutation.
    """
    keys = np.random.PCG64([seed, epoch, source]).random_raw(rows)
    order = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


@lru_cache(maxsize=32)
def _sort_rows(by: Ascending, permutation: tuple[int, int, int, int] | None) -> Ints:
    """Return the row indices sorted by `by`. Rows with equal numbers keep their earlier order.

    `permutation` has the arguments of `_permutation` for the earlier order; None: ascending
    indices.
    """
    before = np.arange(len(by.numbers)) if permutation is None else _permutation(*permutation)
    order: Ints = before[np.argsort(by.numbers[before], kind="stable")]
    order.flags.writeable = False
    return order
