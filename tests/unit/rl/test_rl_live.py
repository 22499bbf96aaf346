"""Who gives up the cards that ranks and engines share, and in which order."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.rl import live
from plimsoll.rl.live import Live
from plimsoll.rl.setup import wake_ranks, wake_sleeping_ranks


def watched(calls: list[str]) -> Any:
    """Return a cluster that notes which methods are called, with their arguments."""

    def note(task: Any, *arguments: str) -> None:
        calls.append(" ".join((task.__qualname__, *arguments)))

    return SimpleNamespace(all=note, engines_do=note, own_groups={})


def shared(depth: str, placement: str = "shared") -> Any:
    rollout = SimpleNamespace(placement=placement, staleness=0)
    config, roles = SimpleNamespace(rollout=rollout), {"actor": SimpleNamespace(sends=True)}
    return SimpleNamespace(config=config, roles=roles, rank_sleep=depth)


@pytest.mark.parametrize(
    ("placement", "depth", "expected"),
    [
        ("own", "none", ["sync"]),
        ("shared", "none", ["Worker.give_back", "sync"]),
        ("shared", "states", ["Worker.sleep states actor", "sync"]),
        ("shared", "all", ["Worker.sleep all actor", "sync", "Worker.sleep all"]),
    ],
)
def test_ranks_make_room_before_engines_are_first_used(
    placement: str, depth: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(live, "set_up", lambda *_: None)
    monkeypatch.setattr(live, "first_sync", lambda *_: calls.append("sync"))
    work: Any = SimpleNamespace(
        cluster=watched(calls),
        spec=shared(depth, placement),
        session=SimpleNamespace(phase=lambda *_: nullcontext()),
        data=None,
    )
    scorer: Any = None
    kinds: Any = None
    Live.start(work, scorer, kinds)
    assert calls == expected


@pytest.mark.parametrize("depth", ["none", "states", "all"])
def test_ranks_wake_when_engines_are_asleep(depth: str) -> None:
    calls: list[str] = []
    wake_ranks(watched(calls), shared(depth))
    assert calls == ["RolloutEngine.sleep", *(["Worker.wake"] if depth != "none" else [])]
    calls.clear()
    wake_sleeping_ranks(watched(calls), shared(depth))
    assert calls == ([] if depth == "none" else ["RolloutEngine.sleep", "Worker.wake"])
