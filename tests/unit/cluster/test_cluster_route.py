"""How the actor's weights are sent: what the ranks and engines are asked for."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.cluster.ray_actors import RankActor
from plimsoll.cluster.route import ActorRoute
from plimsoll.config.rollout import RolloutConfig
from plimsoll.errors import EngineDied, WeightSyncError
from plimsoll.model.disturbance import Scaled
from plimsoll.sync.channel import Channel
from plimsoll.sync.proof import Rehearsal
from plimsoll.trainer.weights import PlannedBucket, WeightPlan

PLANS = {
    None: WeightPlan(("a", "b"), tuple(map(PlannedBucket, (("a",), ("b",)))), (80, 90)),
    ("b",): WeightPlan(("b",), tuple(map(PlannedBucket, (("b",),))), (100,)),
}
"""Of all weights, and of a rehearsal's layers, which fill a bucket better."""


class Recorded:
    """A cluster that writes down what it is asked for."""

    engines_near = True

    def __init__(self, fails: Exception | None = None) -> None:
        self.opened: list[int] = []
        self.broken_off = 0
        self.fails = fails

    def first(self, task: Any, *arguments: Any) -> WeightPlan:
        assert task.__name__ == "weight_plan"
        return PLANS[arguments[-1]]

    def all(self, task: Any, *arguments: Any) -> list[Channel]:
        if task.__name__ != "open_channel":
            return []
        _, largest, *_ = arguments
        self.opened.append(largest)
        return [Channel("host", largest)]

    def all_beside(self, task: Any) -> None:
        self.broken_off += 1

    def engines_do(self, *_: Any) -> list[Any]:
        return []

    def stream(self, *_: Any) -> None:
        if self.fails is not None:
            raise self.fails


def route_of(cluster: Any) -> ActorRoute:
    rollout = RolloutConfig.model_validate({"transformers": {}, "sync": {"route": "host"}})
    return ActorRoute(cluster, "actor", 64, rollout)


def test_a_rehearsal_with_a_larger_bucket_opens_a_larger_way() -> None:
    cluster = Recorded()
    route = route_of(cluster)
    assert route.transfer(100, 0) == 170
    assert route.transfer(100, 1, Rehearsal(Scaled(("b",), -1.0), ())) == 100
    assert route.transfer(100, 2) == 170
    assert cluster.opened == [90, 100]


@pytest.mark.parametrize("error", [EngineDied("gone"), WeightSyncError("damaged")])
def test_what_waits_for_a_transfer_that_fails_is_freed(error: Exception) -> None:
    cluster = Recorded(error)
    with pytest.raises(type(error)):
        route_of(cluster).transfer(100, 0)
    assert cluster.broken_off == 1


def test_a_rank_that_sends_to_nobody_stays_in_step_with_the_others() -> None:
    asked = []

    class Rank:
        def do(self, method: str, bucket: int) -> None:
            asked.append((method, bucket))
            if bucket == 1:
                raise WeightSyncError("the channel was given up")

    actor = RankActor.__new__(RankActor)
    actor._worker = Rank()  # type: ignore[assignment]
    with pytest.raises(WeightSyncError, match="given up"):
        actor.call_each("weight_bucket", [(0,), (1,), (2,)])
    assert asked == [("weight_bucket", number) for number in range(3)]
