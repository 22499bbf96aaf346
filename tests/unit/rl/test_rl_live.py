"""When ranks give the memory that they only keep for later to engines on the same cards."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from plimsoll.rl import live
from plimsoll.rl.live import Live


@pytest.mark.parametrize("placement", ["shared", "own"])
def test_ranks_give_back_what_loading_left_before_engines_are_first_used(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    cluster = SimpleNamespace(all=lambda task: calls.append(task.__name__))
    cluster.critics = cluster
    monkeypatch.setattr(live, "set_up", lambda *_: None)
    monkeypatch.setattr(live, "first_sync", lambda *_: calls.append("sync"))
    work: Any = SimpleNamespace(
        cluster=cluster,
        spec=SimpleNamespace(config=SimpleNamespace(rollout=SimpleNamespace(placement=placement))),
        session=SimpleNamespace(phase=lambda *_: nullcontext()),
        data=None,
    )
    scorer: Any = None
    kinds: Any = None
    Live.start(work, scorer, kinds)
    assert calls == (["give_back", "sync"] if placement == "shared" else ["sync"])
