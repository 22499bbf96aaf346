"""Peaks over instants, the allocator's gap, and verdicts; against sums made by hand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.memory.contents.layout import EqualSlots
from plimsoll.memory.contents.stores import (
    Band,
    Store,
    phase_peaks,
    uses_of,
    verdict_of,
)
from plimsoll.resolve.run_spec import PHASES
from plimsoll.timeline.items import Allocation, Item, Level, Moment

STEP = Moment("train_actor", "step")
BACKWARD = Moment("train_actor", "forward_backward")
SCORE = Moment("score", "forward")


def item(name: str, size: int, level: Level = "allocated", role: str = "actor") -> Item:
    return Item(role, "weights", name, "device", level, size, f"{size} bytes", "by hand")


WEIGHTS = Allocation(item("weights", 100), frozenset({STEP, BACKWARD, SCORE}))
ACTIVATIONS = Allocation(item("activations", 70), frozenset({BACKWARD}))
MOMENTS = Allocation(item("moments", 40), frozenset({STEP}))
CONTEXT = Allocation(
    item("CUDA context", 10, "process", "process"), frozenset({STEP, BACKWARD, SCORE})
)
ALL = (WEIGHTS, ACTIVATIONS, MOMENTS, CONTEXT)


def store(capacity: int | None, held: tuple[Allocation, ...] = ALL, gap: float = 0.0) -> Store:
    return Store("device", (((0,), 0),), "card", capacity, held, gap)


def test_a_peak_is_the_largest_instant_and_no_sum_over_instants() -> None:
    uses = {use.moment: use for use in uses_of(ALL)}
    assert uses[BACKWARD].bytes == 100 + 70 + 10
    assert uses[STEP].bytes == 100 + 40 + 10
    assert uses[SCORE].bytes == 100 + 10
    assert [use.moment for use in phase_peaks(uses.values())] == [SCORE, BACKWARD]


def test_the_gap_is_reserved_and_not_allocated() -> None:
    use = next(use for use in uses_of(ALL, gap=0.1) if use.moment == BACKWARD)
    assert (use.allocated, use.reserved, use.bytes) == (170, 187, 197)
    gap = next(one for one in use.items if one.name == "allocator gap")
    assert (gap.bytes, gap.formula) == (17, "10% of 170 allocated bytes")


def test_items_of_several_processes_are_one() -> None:
    use = uses_of([WEIGHTS, WEIGHTS, Allocation(item("weights", 5), frozenset({SCORE}))])[0]
    assert use.moment == SCORE and len(use.items) == 1
    assert use.items[0].bytes == 205
    assert use.items[0].formula == "2 x (100 bytes) + (5 bytes)"


def test_verdicts_have_a_band_on_what_is_predicted() -> None:
    band = Band(0.1, "by hand")
    assert verdict_of(store(198), band) == "fits"
    assert verdict_of(store(197), band) == "risky"
    assert verdict_of(store(180), band) == "risky"
    assert verdict_of(store(179), band) == "does not fit"
    assert verdict_of(store(None), band) == "fits"


def test_the_share_of_an_engine_is_no_prediction() -> None:
    share = Allocation(item("KV cache", 180, "process", "rollout"), frozenset({BACKWARD}))
    assert verdict_of(store(181, (share,)), Band(0.1, "by hand")) == "fits"


def test_slots_in_words() -> None:
    def places(*equal: EqualSlots) -> str:
        return replace(store(None), equal=equal).places

    assert places(((0,), None)) == "node 0"
    assert places(((0, 1), None), ((2, 5), None)) == "nodes 0-2, 5"
    assert places(((0, 1), 0), ((0, 1), 1)) == "nodes 0-1, cards 0-1"


moments = st.builds(Moment, st.sampled_from(PHASES), st.sampled_from(["a", "b", "c"]))
items = st.builds(
    item,
    st.sampled_from(["weights", "moments", "logits"]),
    st.integers(0, 10**12),
    st.sampled_from(["allocated", "process"]),
    st.sampled_from(["actor", "critic"]),
)
helds = st.lists(st.builds(Allocation, items, st.frozensets(moments, min_size=1)), min_size=1)


@given(helds, st.sampled_from([0.0, 0.06]))
def test_items_add_up_to_the_peak_of_their_phase(found: list[Allocation], gap: float) -> None:
    uses = uses_of(found, gap)
    for use in phase_peaks(uses):
        assert sum(one.bytes for one in use.items) == use.bytes
        assert use.allocated <= use.reserved <= use.bytes
    for use in uses:
        expected = sum(h.item.bytes for h in found if use.moment in h.moments)
        gap_bytes = sum(i.bytes for i in use.items if i.name == "allocator gap")
        assert use.bytes == expected + gap_bytes
        assert gap_bytes == round(gap * use.allocated)
