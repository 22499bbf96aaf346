"""How often micro-batches are halved after a shortage of memory, and what is then an error."""

from __future__ import annotations

import numpy as np
import pytest

from plimsoll.cluster.protocol import Shortages
from plimsoll.data.packing import pack_one
from plimsoll.machine.incident import Incident, OutOfMemory
from plimsoll.records import Pack, Sample

ERROR = OutOfMemory("rank 1 ran out", Incident("device", "no room"))


def packed(*lengths: int) -> Pack:
    samples = [Sample(np.arange(n), np.arange(n) > 0) for n in lengths]
    return pack_one(samples, range(len(samples)))


def test_a_limit_is_half_of_the_pack_that_failed_and_holds_for_its_role() -> None:
    shortages, full = Shortages(most=2), [[packed(5, 5, 5, 5)]]
    assert shortages.split("actor", full, 1) is full
    shortages.add("actor", ERROR, full[0][0], 1)
    [halves] = shortages.split("actor", full, 1)
    assert [made.tokens for made in halves] == [10, 10]
    assert shortages.split("critic", full, 1) is full
    [shortage] = shortages.take_unreported()
    assert (shortage.before, shortage.after) == (20, 10)
    assert shortages.take_unreported() == []


def test_halvings_are_bounded() -> None:
    shortages = Shortages(most=1)
    shortages.add("actor", ERROR, packed(5, 5), 1)
    shortages.add("critic", ERROR, packed(5, 5), 1)
    with pytest.raises(OutOfMemory, match="rank 1 ran out"):
        shortages.add("actor", ERROR, packed(5, 5), 1)


def test_a_single_row_cannot_be_split() -> None:
    with pytest.raises(OutOfMemory, match="rank 1 ran out"):
        Shortages(most=1).add("actor", ERROR, packed(5), 1)
    with pytest.raises(OutOfMemory, match="rank 1 ran out"):
        Shortages(most=1).add("actor", ERROR, packed(5, 5), 2)
