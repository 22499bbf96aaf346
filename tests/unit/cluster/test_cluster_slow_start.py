"""A start that takes long names what it waits for."""

from __future__ import annotations

from threading import Event

import pytest

from plimsoll.cluster import ray_watch
from plimsoll.cluster.ray_watch import naming_slow_starts


def test_a_long_start_names_once_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    named, lines = Event(), list[str]()

    def note(line: str) -> None:
        lines.append(line)
        named.set()

    monkeypatch.setattr(ray_watch, "_SLOW_SECONDS", 0.0)
    with naming_slow_starts(lambda: ["rank 0", "rollout engine 0"], note):
        assert named.wait(60)
    [line] = lines
    assert "rank 0, rollout engine 0" in line and "0 s" in line
