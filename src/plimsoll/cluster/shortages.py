"""Shortages of memory in training, and the smaller micro-batches that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from plimsoll.data.packing import split_packs
from plimsoll.machine.incident import OutOfMemory
from plimsoll.records import Pack
from plimsoll.resolve.roles import RoleName


@dataclass(frozen=True)
class Halving:
    """A smaller limit for a role, after a rank ran out of memory in an optimizer step.

    Attributes:
        role: The role that was trained.
        error: The error, as the cluster saw it.
        before: The tokens of the micro-batch at which memory ran out.
        after: The most tokens of the role's micro-batches from now on.
    """

    role: RoleName
    error: OutOfMemory
    before: int
    after: int


@dataclass
class Shortages:
    """The shortages of memory of a group of ranks, and the limits that follow from them.

    Attributes:
        most: How often the limit of a role may be halved; see `cluster.memory_halvings`.
        limits: The most tokens of a micro-batch of each role that has run out of memory.
    """

    most: int = 0
    limits: dict[RoleName, int] = field(default_factory=dict)
    _halvings: Counter[RoleName] = field(default_factory=Counter)
    _unreported: list[Halving] = field(default_factory=list)

    def split(
        self, role: RoleName, packs: Sequence[Sequence[Pack]], unit: int
    ) -> Sequence[Sequence[Pack]]:
        """Return the packs within the role's limit; see `split_packs`."""
        limit = self.limits.get(role)
        if limit is None or all(p.tokens <= limit for rank_packs in packs for p in rank_packs):
            return packs
        return split_packs(packs, limit, unit)

    def add(self, role: RoleName, error: OutOfMemory, pack: Pack, unit: int) -> None:
        """Halve the role's limit after memory ran out at a pack.

        Raises `error` if the pack has a single row, or the limit has been halved too often.
        """
        if len(pack.samples_S) <= unit or self._halvings[role] == self.most:
            raise error
        self._halvings[role] += 1
        self.limits[role] = max(1, pack.tokens // 2)
        self._unreported.append(Halving(role, error, pack.tokens, self.limits[role]))

    def take_unreported(self) -> list[Halving]:
        """Return the halvings since the last call."""
        taken, self._unreported = self._unreported, []
        return taken
