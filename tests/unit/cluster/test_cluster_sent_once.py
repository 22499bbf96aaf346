"""What a group's streams get in several calls crosses once, and leaves the store with its owner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from plimsoll.cluster.protocol import SentOnce, Shortages
from plimsoll.cluster.ray import RankGroup
from plimsoll.cluster.ray_actors import Member
from plimsoll.trainer.worker import Worker


def test_packs_are_put_into_the_store_once_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    stored, calls = list[Any](), list[tuple[Any, ...]]()

    def put(value: object) -> str:
        stored.append(value)
        return f"reference {len(stored)}"

    def call(*arguments: object) -> object:
        calls.append(arguments)
        return object()

    monkeypatch.setattr(ray, "put", put)
    actor = SimpleNamespace(call=SimpleNamespace(remote=call))
    members = [cast(Member, SimpleNamespace(actor=actor, name=str(i))) for i in range(2)]
    group = RankGroup(members, lambda name, calls: [], lambda member, error: error, Shortages())
    packs = [SentOnce(["a", "b"]), SentOnce(["c"])]
    for role in ("reference", "actor"):
        group.call(Worker.log_probs, ((role, own, ["sent again"]) for own in packs))
    assert stored == [["a", "b"], ["c"]] and {type(value) for value in stored} == {list}
    assert calls == [
        ("log_probs", role, reference, ["sent again"])
        for role in ("reference", "actor")
        for reference in ("reference 1", "reference 2")
    ]
    assert packs[0] == ["a", "b"]  # where a stream is in this process, it is the list itself
