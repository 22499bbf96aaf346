"""An engine that dies: it is started again, and the display and the webhook are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from plimsoll.errors import EngineDied
from plimsoll.rl.setup import RlWork
from plimsoll.rl.source import Revived, Source

DEATH = "rollout engine 1 died\n  Why: it was killed\n  Logs: logs/engine-1.{out,err}"


class Dying:
    """A source whose engine dies as often as it is said."""

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths

    def renew(self, step: int) -> dict[str, float]:
        self.deaths -= 1
        if self.deaths >= 0:
            raise EngineDied(DEATH)
        return {"step": float(step)}

    def revive(self, version: int) -> None:
        pass


def revived(deaths: int) -> tuple[Revived, list[str], list[str]]:
    """Return the source, what the display shows, and what the webhook is sent."""
    notes: list[str] = []
    sent: list[str] = []
    session = SimpleNamespace(
        progress=SimpleNamespace(note=notes.append),
        sink=SimpleNamespace(notify=sent.append),
        step_under_way=7,
    )
    work: Any = SimpleNamespace(
        session=session,
        spec=SimpleNamespace(run=SimpleNamespace(restarts=3)),
        cluster=SimpleNamespace(let_engines_die=lambda: None),
    )
    return Revived(cast(RlWork, work), cast(Source, Dying(deaths))), notes, sent


def test_the_webhook_is_told_of_a_death_in_one_line() -> None:
    source, notes, sent = revived(1)
    assert source.renew(6) == {"step": 6.0}
    [line] = sent
    assert line.startswith("step 7: rollout engine 1 died") and "(1 of 3 times" in line
    assert len(notes) == 1 and DEATH in notes[0]


def test_too_many_deaths_end_the_run() -> None:
    source, _, sent = revived(4)
    with pytest.raises(EngineDied):
        source.renew(6)
    assert len(sent) == 3
