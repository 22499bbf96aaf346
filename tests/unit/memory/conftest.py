"""Plans of these tests are for the cards that each names, whatever this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from plimsoll.machine.hardware import parse_cluster
from plimsoll.spec import decisions


@pytest.fixture(scope="module", autouse=True)
def _machine_with_a_card() -> Iterator[None]:
    """`cluster.device: auto` is cuda; a plan without cards is one on the CPU nevertheless."""
    [card] = parse_cluster("80GB", 1, None).nodes[0].cards
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decisions, "_cards_here", lambda: (card,))
        yield
