"""An exponential moving average of the trained weights.

It is held where the masters are and divided as they are. See Polyak and Juditsky 1992, as used for
networks in Tarvainen and Valpola 2017 (https://arxiv.org/abs/1703.01780).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

_PIECE = 2**24
"""The elements that are worked on at once, so that no second copy of a master is made."""


class Average:
    """The moving average of a rank's masters.

    Attributes:
        rows: The average of each master (fp32, flat).
    """

    def __init__(self, masters: Sequence[Tensor], decay: float) -> None:
        self._decay = decay
        self.rows = [master.clone() for master in masters]

    def add(self, masters: Sequence[Tensor], updates: int) -> None:
        """Take in the masters after so many updates (1 after the first).

        The decay rises to its value by (1 + n) / (10 + n), so that the first weights are soon
        forgotten.
        """
        decay = min(self._decay, (1 + updates) / (10 + updates))
        for row, master in self._pieces(masters):
            row.lerp_(master, 1 - decay)

    def swap(self, masters: Sequence[Tensor]) -> None:
        """Exchange masters and average."""
        for row, master in self._pieces(masters):
            averaged = row.clone()
            row.copy_(master)
            master.copy_(averaged)

    def _pieces(self, masters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        for row, master in zip(self.rows, masters, strict=True):
            yield from zip(row.split(_PIECE), master.split(_PIECE), strict=True)
