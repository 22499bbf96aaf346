"""The plan of each process is compared with the nodes and cards of the run; sizes are made up."""

from __future__ import annotations

import pytest

from plimsoll.errors import DoesNotFit
from plimsoll.run.readings import CardReading, Footprint, Footprints, HostReading, Reading
from plimsoll.train.from_data import refuse_smaller_nodes

GB = 10**9


def reading(node: str, capacity: int, card: int | None = None) -> Reading:
    on_card = None if card is None else CardReading(0, 0, 0, 0, 0, card)
    return Reading(HostReading(node, 0, 0, 0, capacity), on_card)


def peaks(**phases: Footprint) -> Footprints:
    return dict(phases)


PREDICTED = {
    "rank 0": peaks(load=Footprint(30 * GB), train_actor=Footprint(10 * GB, 0, 0, 70 * GB)),
    "critic rank 0": peaks(load=Footprint(20 * GB), train_actor=Footprint(25 * GB)),
}


def test_each_on_a_node_of_its_own_fits() -> None:
    refuse_smaller_nodes(
        PREDICTED,
        {"rank 0": reading("a", 30 * GB, 70 * GB), "critic rank 0": reading("b", 25 * GB)},
    )


def test_two_on_one_node_are_added_up_phase_by_phase() -> None:
    both = {"rank 0": reading("a", 50 * GB), "critic rank 0": reading("a", 50 * GB)}
    refuse_smaller_nodes(PREDICTED, both)  # 50 GB while loading, 35 in training
    both = {name: reading("a", 49 * GB) for name in both}
    with pytest.raises(DoesNotFit, match=r"49\.0 GB.* 50\.0 GB .*rank 0, critic rank 0"):
        refuse_smaller_nodes(PREDICTED, both)


def test_a_card_that_is_too_small_is_named() -> None:
    with pytest.raises(DoesNotFit, match=r"rank 0.* node a.* 69\.0 GB.* 70\.0 GB"):
        refuse_smaller_nodes(PREDICTED, {"rank 0": reading("a", 99 * GB, 69 * GB)})


def test_a_process_without_a_prediction_is_accepted() -> None:
    refuse_smaller_nodes({}, {"rank 0": reading("a", 1, 1)})
