"""Agreement among the ranks that none of them has failed, before each step that they take together.

A rank that fails alone leaves the others waiting for it in the next collective. So the ranks vote
before every collective of a step that may fail, and at its end. A rank that has failed votes
against once. The vote is the next one of all the others, and they leave the step at the same place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.distributed as dist

from plimsoll.errors import PlimsollError
from plimsoll.trainer.process_group import Place


class PeerFailed(PlimsollError):
    """Another rank has failed, so this rank leaves the step, too."""


class Vote:
    """The votes of one rank.

    A vote is a message to other ranks in each of log2(ranks) rounds, in host memory: the cards do
    not wait for it. In a round each rank passes on what it has heard to the rank that is 1, 2, 4,
    ... places further, so that all have heard of all in the end (Hensgen, Finkel and Manber 1988,
    the dissemination barrier).
    """

    def __init__(self, place: Place) -> None:
        self._rank, self._ranks = place.rank, place.ranks
        self._on_cards = place.device == "cuda"
        self._is_inside = False

    @cached_property
    def _group(self) -> dist.ProcessGroup | None:
        """The group of the messages, made at the first vote; None for that of all ranks.

        NCCL has no messages in host memory. A run that never votes needs no second group.
        """
        return dist.new_group(backend="gloo") if self._on_cards else None

    @property
    def is_inside(self) -> bool:
        """Whether the last collective has not ended: then the others wait in it for this rank."""
        return self._is_inside

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Vote in favour, then allow a collective in the block. Raise PeerFailed as `in_favour`."""
        self.in_favour()
        self._is_inside = True
        yield
        self._is_inside = False

    def in_favour(self) -> None:
        """Vote that this rank has not failed. Raise PeerFailed if another rank has."""
        if self._any_against(False):
            raise PeerFailed("another rank has failed in this step")

    def against(self) -> None:
        """Vote that this rank has failed."""
        self._any_against(True)

    def _any_against(self, own: bool) -> bool:
        """Return whether this rank, or one that it has heard of by now, votes against."""
        against, distance = own, 1
        while distance < self._ranks:
            sent, heard = torch.tensor(int(against)), torch.tensor(0)
            to, source = (
                (self._rank + distance) % self._ranks,
                (self._rank - distance) % self._ranks,
            )
            sending = dist.isend(sent, to, self._group)
            dist.recv(heard, source, self._group)
            assert sending is not None, "a rank that is not in the group"
            sending.wait()
            against, distance = against or bool(heard), 2 * distance
        return against
