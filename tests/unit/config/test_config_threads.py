"""How threads wait: asleep after a moment, unless the user says otherwise."""

from __future__ import annotations

import pytest

from plimsoll.machine.host import thread_wait_settings


def test_threads_soon_sleep_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert thread_wait_settings() == {"GOMP_SPINCOUNT": "2000"}
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert thread_wait_settings() == {"GOMP_SPINCOUNT": "7"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert thread_wait_settings() == {}
