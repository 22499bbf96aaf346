"""The buffer of an asynchronous run: what is in flight and waits is bounded, nothing is lost or
learned twice, and nothing that a step learns from is too old."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.records import SAMPLER_LOGPROBS, WEIGHT_VERSIONS, Prompt, TokenColumns, Trajectory
from plimsoll.rl.ahead import FinishedGroup, GroupBuffer, staleness_metrics

PROMPT = Prompt(0, np.array([1]), "?")


def response(*versions: int, mask: tuple[bool, ...] = ()) -> Trajectory:
    """A response whose tokens were sampled by these versions."""
    size = len(versions)
    zeros = np.zeros(size, np.int64)
    loss_mask = np.array(mask or [True] * size, np.bool_)
    columns: TokenColumns = {
        SAMPLER_LOGPROBS: zeros.astype(np.float32),
        WEIGHT_VERSIONS: np.array(versions, np.int64),
    }
    return Trajectory(PROMPT, 0, 0, zeros, loss_mask, columns, "", "stop")


def finished(place: int, *versions: int) -> FinishedGroup:
    return FinishedGroup(place, [response(*versions)])


def begun(prompts: int = 2, staleness: int = 1, version: int = 0) -> GroupBuffer:
    return GroupBuffer(prompts, staleness, 99, 99, version, next_place=0).begin(version)[0]


def test_the_oldest_token_that_was_sampled_counts() -> None:
    from_elsewhere = response(0, 4, 5, mask=(False, True, True))
    assert FinishedGroup(0, [response(7, 8), from_elsewhere]).oldest == 4


def test_as_many_groups_begin_as_will_not_be_too_old() -> None:
    buffer = begun(prompts=2, staleness=1)
    assert sorted(buffer.in_flight) == [0, 1, 2, 3] and buffer.room(0) == 0
    buffer = buffer.finish(finished(1, 0)).finish(finished(3, 0))
    assert buffer.room(0) == 0
    taken = buffer.take(2)
    assert taken is not None
    buffer = taken[0].advance(waited=False)
    assert buffer.room(0) == 0  # the ranks train: a group of version 0 would be too old at its turn
    buffer, places = buffer.begin(1)
    assert places == [4, 5]


def test_the_oldest_groups_come_first_then_those_that_ended_first() -> None:
    buffer = begun(prompts=3, staleness=9)
    for place, version in ((5, 1), (2, 0), (0, 1), (1, 0)):
        buffer = buffer.finish(finished(place, version))
    taken = buffer.take(3)
    assert taken is not None
    assert [group.place for group in taken[1]] == [1, 2, 5]
    assert [group.place for group in taken[0].finished] == [0]
    assert taken[0].take(2) is None


def test_a_group_that_is_too_old_is_sampled_again_before_new_ones() -> None:
    buffer = GroupBuffer(1, 1, 99, 99, learns=5, next_place=3, in_flight=frozenset({0, 1, 2}))
    buffer = buffer.finish(finished(1, 3, 5))
    assert (buffer.dropped, buffer.again, buffer.finished) == (1, (1,), ())
    buffer = buffer.finish(finished(0, 4))
    assert buffer.dropped == 1
    buffer = buffer.advance(waited=False)
    assert (buffer.dropped, buffer.again) == (1, (0, 1))
    assert buffer.unlearned == (0, 1, 2) and buffer.settled == 0
    buffer, places = buffer.begin(6)
    assert places == [0]


def test_room_is_made_for_groups_that_teach_nothing() -> None:
    buffer = begun(prompts=2, staleness=1).finish(finished(0, 0)).finish(finished(1, 0))
    taken = buffer.take(2)
    assert taken is not None
    buffer, places = taken[0].set_aside(1).begin(0)
    assert places == [4] and buffer.settled == 2


@given(st.data())
def test_nothing_is_lost_or_too_old(data: st.DataObject) -> None:
    """Whatever ends in whichever order, and however long it takes; only what was overtaken goes."""
    prompts, staleness = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    version = 0
    learned: set[int] = set()
    failed: set[int] = set()
    at_once, steps = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 60))
    buffer = GroupBuffer(prompts, staleness, at_once, steps, version, next_place=0)
    began: dict[int, int] = {}
    overtaken: set[int] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        buffer, places = buffer.begin(version)
        assert not learned.intersection(places) and not failed.intersection(places)
        began |= dict.fromkeys(places, version)
        overtaken -= set(places)
        waiting = len(buffer.in_flight) + len(buffer.finished)
        assert waiting <= min(staleness + 1, steps - version) * prompts
        ends: bool = data.draw(st.booleans())
        if buffer.in_flight and ends:
            place = data.draw(st.sampled_from(sorted(buffer.in_flight)))
            if data.draw(st.integers(0, 9)) == 0:
                buffer = buffer.give_up(place)
                failed.add(place)
            else:
                late = buffer.learns - began[place] > staleness
                dropped = buffer.dropped
                buffer = buffer.finish(finished(place, began[place], version))
                assert buffer.dropped == dropped + late
        elif version < steps and (taken := buffer.take(prompts)) is not None:
            for group in taken[1]:
                assert group.place not in learned
                assert buffer.learns - began[group.place] <= staleness
                learned.add(group.place)
            youngest = max(began[group.place] for group in taken[1])
            overtaken |= {place for place in buffer.in_flight if began[place] < youngest}
            buffer = taken[0].advance(waited=data.draw(st.booleans()))
            before, left = ({g.place for g in b.finished} for b in (taken[0], buffer))
            assert before - left <= overtaken
            if data.draw(st.booleans()):
                buffer, places = buffer.begin(version)  # while the ranks train
                began |= dict.fromkeys(places, version)
            version += 1
        drawn = set(range(buffer.next_place))
        assert drawn == learned | failed | set(buffer.unlearned)
        assert buffer.settled == len(learned) + len(failed)


def test_ages_are_those_of_the_sampled_tokens() -> None:
    trajectories = [response(3, 3, 4), response(0, 4, mask=(False, True))]
    assert staleness_metrics(trajectories, 5) == pytest.approx(
        {
            "staleness/mean": (2 + 2 + 1 + 1) / 4,
            "staleness/p90": 2.0,
            "staleness/max": 2.0,
            "staleness/continued": 1 / 4,
        }
    )


def test_no_more_is_sampled_ahead_than_keeps_the_ranks_busy() -> None:
    buffer = GroupBuffer(1, 3, 99, 99, 0, next_place=0)
    assert buffer.room(0) == 2
    waited = buffer.advance(waited=True)
    assert waited.room(1) == 3
    assert waited.advance(waited=True).advance(waited=True).room(3) == 4, "bounded by staleness"
    buffer = waited.begin(1)[0].finish(finished(0, 1)).finish(finished(1, 1))
    taken = buffer.take(1)
    assert taken is not None
    assert taken[0].advance(waited=False).ahead == 1, "the next group waits already"


def test_no_more_groups_are_in_flight_than_engines_work_on() -> None:
    buffer, places = GroupBuffer(4, 2, 3, 99, 0, next_place=0).begin(0)
    assert places == [0, 1, 2]
    assert buffer.finish(finished(1, 0)).begin(0)[1] == [3]


def test_nothing_is_sampled_for_steps_after_the_last() -> None:
    buffer, places = GroupBuffer(2, 3, 99, 1, 0, next_place=0).begin(0)
    assert places == [0, 1]
    taken = buffer.finish(finished(0, 0)).finish(finished(1, 0)).take(2)
    assert taken is not None
    assert taken[0].set_aside(1).begin(0)[1] == [2], "one that taught nothing is replaced"
    assert taken[0].advance(waited=True).begin(1)[1] == []


def test_a_group_that_was_overtaken_may_end_in_time_and_find_no_place() -> None:
    """Two of version 1 end for the last step that may learn from them, which takes one."""
    buffer = begun(prompts=1, staleness=2).finish(finished(0, 0))
    for version, place in ((1, 1), (2, 4)):
        taken = buffer.take(1)
        assert taken is not None
        buffer = taken[0].advance(waited=True).begin(version)[0]
        buffer = buffer.finish(finished(place, 0 if place == 1 else version))
    taken = buffer.take(1)
    assert taken is not None
    buffer = taken[0].advance(waited=False).finish(finished(2, 1)).finish(finished(3, 1))
    taken = buffer.take(1)
    assert taken is not None and taken[0].advance(waited=False).dropped == 1
