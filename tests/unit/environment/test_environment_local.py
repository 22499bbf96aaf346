"""One episode's environment: what its methods may give, and what becomes of what they must not."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from plimsoll.environment.local import LocalEnvironment
from plimsoll.environment.protocol import (
    EnvironmentFailed,
    Message,
    Observation,
    Reply,
    Step,
    StepResult,
)

REPLY = Reply("7", Message("assistant", "7"), (), None)


class Plain:
    def reset(self, row: dict[str, Any]) -> str:
        return f"How much is {row['sum']}?"

    def step(self, reply: Reply) -> tuple[str, bool]:
        return "Yes.", reply.text == "7"

    def get_reward(self) -> float:
        return 0.5


class Awaited:
    async def reset(self, row: dict[str, Any]) -> None:
        await asyncio.sleep(0)

    async def step(self, reply: Reply) -> Step:
        await asyncio.sleep(0)
        answer = Observation((Message("tool", "8", name="add"),))
        return Step(answer, done=False, reward=0.25, figures={"calls": 1})

    async def get_reward(self) -> list[float]:
        return [0.5, 1]


async def _play(kind: type) -> tuple[Any, Any, Any]:
    environment = LocalEnvironment(kind, 5.0)
    begun, answer = await environment.reset({"sum": "3+4"}), await environment.step(REPLY)
    reward = await environment.reward()
    await environment.close()
    return begun, answer, reward


def test_plain_methods_are_called_in_a_thread() -> None:
    class Noted(Plain):
        def step(self, reply: Reply) -> tuple[str, bool]:
            assert threading.current_thread() is not threading.main_thread()
            return super().step(reply)

    begun, answer, reward = asyncio.run(_play(Noted))
    assert begun == Observation((Message("user", "How much is 3+4?"),))
    assert answer == StepResult((Message("user", "Yes."),), done=True)
    assert reward == 0.5


def test_async_methods_are_awaited() -> None:
    begun, answer, reward = asyncio.run(_play(Awaited))
    assert begun == Observation(())
    assert answer == StepResult((Message("tool", "8", name="add"),), False, 0.25, {"calls": 1.0})
    assert reward == (0.5, 1.0)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (7, "'s step gave 7 (int), not a pair"),
        (("more", "no"), "'s step gave 'no' (str)"),
        ((7, False), "'s step gave 7 (int)"),
        ((None, False), "'s step gave None (NoneType)"),
        (([{"role": "user"}], False), "not messages with role and content"),
        (Step("more", False, reward=float("nan")), "not a finite number as its reward"),
        (Step("more", False, figures={"x": "y"}), "not a finite number as its figure x"),  # type: ignore[dict-item]
    ],
)
def test_a_wrong_answer_is_reported_with_what_was_wanted(given: object, why: str) -> None:
    class Wrong(Plain):
        def step(self, reply: Reply) -> Any:
            return given

    with pytest.raises(EnvironmentFailed) as error:
        asyncio.run(_play(Wrong))
    assert why in error.value.failed.said


@pytest.mark.parametrize("given", ["much", float("inf"), [1.0, None]])
def test_a_wrong_reward_is_reported(given: object) -> None:
    class Wrong(Plain):
        def get_reward(self) -> Any:
            return given

    with pytest.raises(EnvironmentFailed, match=r"get_reward gave .* not a finite number"):
        asyncio.run(_play(Wrong))


def test_an_error_of_an_environment_is_reported_with_its_own_lines() -> None:
    class Raising(Plain):
        def step(self, reply: Reply) -> Any:
            raise KeyError("door")

    with pytest.raises(EnvironmentFailed) as error:
        asyncio.run(_play(Raising))
    assert error.value.failed.said == " raised KeyError: 'door'"
    assert "in step" in error.value.failed.lines


def test_a_method_that_hangs_costs_its_time_limit() -> None:
    class Hanging(Plain):
        def step(self, reply: Reply) -> Any:
            time.sleep(60)

    async def asked() -> None:
        environment = LocalEnvironment(Hanging, 0.05)
        await environment.reset({"sum": ""})
        await environment.step(REPLY)

    with pytest.raises(EnvironmentFailed, match=r"step .*call_seconds.* 0\.05"):
        asyncio.run(asked())
