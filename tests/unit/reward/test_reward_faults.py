"""Faults of rewards and environments are failures of their calls, as real ones are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import fault_injection  # noqa: F401  loading it must not count in a time limit
import httpx
import pytest

from plimsoll.environment.local import LocalEnvironment
from plimsoll.environment.protocol import EnvironmentFailed
from plimsoll.machine.faults import FAULTS
from plimsoll.reward.functions import call_here
from plimsoll.reward.outcome import Failed, Outcome, TimeLimit
from plimsoll.reward.servers import Replicas

LIMIT = TimeLimit(0.05, "rewards.one.time_limit")


async def coroutine(given: Any) -> float:
    return 0.5


def outcome(in_loop: bool) -> Outcome:
    function = coroutine if in_loop else lambda given: 0.5

    async def ask() -> Outcome:
        call = call_here(partial(function), False, LIMIT)
        (only,) = await call([None])  # type: ignore[list-item]
        return only

    return asyncio.run(ask())


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_function_that_is_not_reached_fails_and_another_try_may_not(
    monkeypatch: pytest.MonkeyPatch, in_loop: bool
) -> None:
    monkeypatch.setenv(FAULTS, f"reward.call:network:call=1,rank.step:delay={int(in_loop)}")
    failed = outcome(in_loop)
    assert isinstance(failed, Failed) and "ConnectionResetError" in failed.said
    assert outcome(in_loop) == 0.5


def test_a_wrong_value_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, "reward.call:wrong")
    broken = outcome(in_loop=False)
    assert isinstance(broken, Failed) and broken.final and "nan" in broken.said


def test_a_function_that_hangs_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, "reward.call:hang")
    failed = outcome(in_loop=True)
    assert isinstance(failed, Failed) and failed.unanswered


def test_a_server_that_is_not_reached_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, "reward.call:network")

    async def ask() -> object:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, json=[1.0]))
        async with httpx.AsyncClient(transport=transport) as client:
            return await Replicas(client, ["http://here/score"], LIMIT).post({})

    failed = asyncio.run(ask())
    assert isinstance(failed, Failed) and "http://here/score cannot be reached" in failed.said


class Environment:
    def reset(self, row: Mapping[str, Any]) -> str:
        return "begin"


def test_an_environment_that_is_not_reached_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULTS, "environment.call:network")
    with pytest.raises(EnvironmentFailed, match="ConnectionResetError"):
        asyncio.run(LocalEnvironment(Environment, 5.0).reset({}))
