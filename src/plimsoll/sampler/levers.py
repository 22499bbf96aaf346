"""The memory levers of engines of any kind: where they are, how many, how they get new weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from plimsoll.config.problems import CROWDED, UNPLACED
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.timeline.levers import Lever, Move, Relief, Situation, halves

_PLACEMENT = "rollout.placement"
ENGINES = "rollout.engines"
_BUCKET = "rollout.sync.bucket_bytes"
_STALENESS = "rollout.staleness"
_RANKS = "cluster.ranks"

_SMALL = 64 * 2**20
"""Bytes of weights sent at once; less saves little more memory."""


def _has_engines(spec: RunSpec[Any]) -> bool:
    return spec.engines is not None and spec.cluster.where == "ray"


def _on_shared_cards(at: Situation) -> Sequence[Move]:
    """Return the move of engines to the ranks' cards, with as many of both as there is room for."""
    rollout, cluster = at.rollout, at.spec.cluster
    if rollout.placement == "shared":
        return ()
    ranks = min(cluster.ranks, at.cards or cluster.ranks)
    engines = max(1, min(rollout.engines, cluster.all_ranks // rollout.parts))
    move: dict[str, Any] = {_PLACEMENT: "shared", _RANKS: ranks, ENGINES: engines}
    return [move | {_STALENESS: 0} if rollout.staleness else move]


def _on_own_cards(at: Situation) -> Sequence[Move]:
    """Return the move of engines to cards without ranks, with fewer ranks if cards are too few."""
    rollout, cluster = at.rollout, at.spec.cluster
    if rollout.placement == "own":
        return ()
    left = at.cards - rollout.all_parts
    if not at.cards or left >= cluster.all_ranks:
        return [{_PLACEMENT: "own"}]
    return [{_PLACEMENT: "own", _RANKS: left}] if not cluster.own_ranks and left > 0 else ()


_engine_lever = partial(Lever, applies=_has_engines)

LEVERS: tuple[Lever, ...] = (
    _engine_lever(
        keys=(_BUCKET,),
        words="smaller buckets of new weights",
        cost="weights are sent in smaller buckets",
        rank=10,
        settings=lambda at: [{_BUCKET: _SMALL}] if at.rollout.sync.decided_bucket > _SMALL else (),
        reliefs=(Relief(("rollout engines", "buffers")),),
    ),
    _engine_lever(
        keys=(_STALENESS,),
        words="fewer groups that wait",
        cost="engines sample less far ahead, or not while ranks train",
        rank=15,
        settings=lambda at: [{_STALENESS: n} for n in halves(at.rollout.staleness, 0)],
        reliefs=(Relief(("rollout engines",), where=("host",)),),
    ),
    _engine_lever(
        keys=(_PLACEMENT,),
        words="engines on the ranks' cards",
        cost="engines and ranks take turns on the same cards",
        rank=20,
        settings=_on_shared_cards,
        reliefs=(),
        codes=UNPLACED,
        control=True,
    ),
    _engine_lever(
        keys=(_PLACEMENT,),
        words="engines on cards of their own",
        cost="engines on cards of their own are idle while ranks train",
        rank=40,
        settings=_on_own_cards,
        reliefs=(Relief(("rollout engines",), where=("device",)),),
        codes=CROWDED | UNPLACED,
    ),
    _engine_lever(
        keys=(ENGINES,),
        words="fewer engines",
        cost="fewer engines share the prompts",
        rank=40,
        settings=lambda at: [{ENGINES: count} for count in halves(at.rollout.engines, 1)],
        reliefs=(Relief(("rollout engines", "processes"), where=("host",)),),
        codes=UNPLACED,
        control=True,
    ),
)
