"""Classes whose public methods are tools, of the shape that TRL documents; and plain functions."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from plimsoll.environment.library.functions import Functions
from plimsoll.environment.protocol import (
    Message,
    Observation,
    Reply,
    Step,
    ToolCall,
)
from plimsoll.environment.tool_calls import read_reply
from plimsoll.environment.tool_environment import (
    MAX_CHARACTERS,
    ToolEnvironment,
    result_text,
)
from plimsoll.errors import ConfigError


class CounterEnv:
    """An environment in the form of TRL's documentation: state, a reward of its own, tools."""

    def __init__(self) -> None:
        self.count = self.target = 0
        self.closed = False

    def reset(self, target: int, **kwargs: Any) -> str | None:
        self.count, self.target = 0, target
        return f"Increment the counter to {target}."

    def get_reward(self) -> float:
        return float(self.count == self.target)

    def increment(self, by: int, twice: bool = False) -> int:
        """
        Increment the counter.

        Args:
            by: What to add.
            twice: Whether to add it twice.

        Returns:
            The counter.
        """
        if by < 0:
            raise ValueError("The counter only goes up.")
        self.count += by * (2 if twice else 1)
        return self.count

    def close(self) -> None:
        self.closed = True

    def _hidden(self) -> None: ...


class LookupEnv:
    """Asynchronous tools beside a plain one; no reward of its own."""

    async def reset(self, **kwargs: Any) -> None:
        self.asked: list[str] = []

    async def look_up(self, word: str) -> dict[str, str]:
        """Look a word up.

        Args:
            word: The word.
        """
        await asyncio.sleep(0)
        self.asked.append(word)
        return {"word": word, "meaning": "ein Schiff – ⚓"}

    def count_letters(self, word: str) -> int:
        """Count letters.

        Args:
            word: The word.
        """
        return len(word)


def calls(*written: tuple[str, dict[str, Any]], problem: str | None = None) -> Reply:
    made = tuple(ToolCall(name, arguments) for name, arguments in written)
    return Reply("...", Message("assistant", "...", made), made, problem)


def counter(target: int = 4) -> tuple[ToolEnvironment, CounterEnv, Observation]:
    inner = CounterEnv()
    environment = ToolEnvironment(inner)
    begun = reset(environment, {"target": target, "other": "column"})
    return environment, inner, begun


def reset(environment: ToolEnvironment, row: dict[str, Any]) -> Observation:
    return asyncio.run(environment.reset(row))


def step_of(environment: ToolEnvironment, reply: Reply) -> Step:
    return asyncio.run(environment.step(reply))


def results_of(step: Step) -> list[tuple[str, str, str]]:
    assert isinstance(step.observation, Observation)
    return [(result.role, result.name, result.content) for result in step.observation.messages]


def test_reset_takes_the_columns_and_gives_text_and_tools() -> None:
    _, inner, begun = counter()
    assert inner.target == 4
    assert begun.messages == (Message("user", "Increment the counter to 4."),)
    assert [tool["function"]["name"] for tool in begun.tools] == ["increment"]
    parameters = begun.tools[0]["function"]["parameters"]
    assert parameters["properties"]["by"] == {"type": "integer", "description": "What to add."}
    assert parameters["required"] == ["by"]


def test_an_episode_from_text_to_reward() -> None:
    environment, _, begun = counter()
    text = '<tool_call>{"name": "increment", "arguments": {"by": 2, "twice": true}}</tool_call>'
    step = step_of(environment, read_reply(text, begun.tools))
    assert results_of(step) == [("tool", "increment", "4")] and not step.done
    end = step_of(environment, read_reply("Done.", begun.tools))
    assert end.done and results_of(end) == []
    assert environment.get_reward() == 1.0


def test_calls_are_carried_out_in_their_order() -> None:
    environment, _, _ = counter()
    step = step_of(environment, calls(("increment", {"by": 1}), ("increment", {"by": 2})))
    assert results_of(step) == [("tool", "increment", "1"), ("tool", "increment", "3")]
    assert step.figures == {
        "tool_calls": 2.0,
        "tool_calls_failed": 0.0,
        "tool_calls_malformed": 0.0,
    }


def test_a_tool_that_raises_is_answered_and_counted() -> None:
    environment, inner, _ = counter()
    step = step_of(environment, calls(("increment", {"by": -1}), ("increment", {"by": 3})))
    assert results_of(step)[0] == ("tool", "increment", "Error: The counter only goes up.")
    assert inner.count == 3 and not step.done
    assert step.figures["tool_calls_failed"] == 1.0


def test_a_malformed_call_is_answered_and_the_episode_goes_on() -> None:
    environment, inner, begun = counter()
    step = step_of(environment, read_reply("<tool_call>{increment}</tool_call>", begun.tools))
    assert not step.done and inner.count == 0
    assert [result[0] for result in results_of(step)] == [
        "user"
    ] and "not valid JSON" in results_of(step)[0][2]
    assert step.figures["tool_calls_malformed"] == 1.0


def test_beside_a_right_call_what_is_wrong_stands_under_its_result() -> None:
    environment, _, _ = counter()
    step = step_of(environment, calls(("increment", {"by": 1}), problem="There is no tool 'x'."))
    assert results_of(step) == [("tool", "increment", "1\nThere is no tool 'x'.")]


def test_properties_are_not_looked_at() -> None:
    class Shy(CounterEnv):
        @property
        def depth(self) -> int:
            raise RuntimeError("not before the first call")

    environment = ToolEnvironment(Shy())
    assert len(reset(environment, {"target": 1}).tools) == 1


def test_close_is_the_objects() -> None:
    environment, inner, _ = counter()
    environment.close()
    assert inner.closed


def test_what_an_object_lacks_is_not_there() -> None:
    environment = ToolEnvironment(LookupEnv())
    assert not hasattr(environment, "get_reward") and not hasattr(environment, "close")


def test_async_tools_are_awaited() -> None:
    async def play() -> tuple[Observation, Step]:
        environment = ToolEnvironment(LookupEnv())
        begun = await environment.reset({"prompt": "?"})
        asked = calls(("look_up", {"word": "keel"}), ("count_letters", {"word": "keel"}))
        return begun, await environment.step(asked)

    begun, step = asyncio.run(play())
    assert begun.messages == ()
    meaning, letters = [content for _, _, content in results_of(step)]
    assert json.loads(meaning) == {"word": "keel", "meaning": "ein Schiff – ⚓"}
    assert "⚓" in meaning and letters == "4"  # not escaped


def test_plain_tools_run_in_threads_and_keep_the_event_loop_free() -> None:
    class Blocking:
        def reset(self) -> None: ...

        def block(self) -> str:
            """Block."""
            return threading.current_thread().name

    environment = ToolEnvironment(Blocking())
    [(_, _, thread)] = results_of(step_of(environment, calls(("block", {}))))
    assert thread != threading.main_thread().name


def test_an_episodes_time_limit_reaches_through_a_tool() -> None:
    class Slow:
        async def reset(self) -> None: ...

        async def wait(self) -> None:
            """Wait."""
            await asyncio.sleep(60)

    async def play() -> None:
        environment = ToolEnvironment(Slow())
        async with asyncio.timeout(0.05):
            await environment.step(calls(("wait", {})))

    with pytest.raises(TimeoutError):
        asyncio.run(play())


def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def test_functions_alone_and_beside_methods() -> None:
    alone = ToolEnvironment(Functions(), [add])
    assert results_of(step_of(alone, calls(("add", {"a": 1, "b": 0.5})))) == [
        ("tool", "add", "1.5")
    ]
    both = ToolEnvironment(CounterEnv(), [add])
    for environment, names in ((alone, ["add"]), (both, ["add", "increment"])):
        begun = reset(environment, {"target": 1})
        assert [tool["function"]["name"] for tool in begun.tools] == names


def test_reset_without_keywords_gets_what_it_takes() -> None:
    class Small(CounterEnv):
        def reset(self, target: int) -> None:  # type: ignore[override]
            self.target = target

    inner = Small()
    reset(ToolEnvironment(inner), {"target": 3, "prompt": "?", "source": ""})
    assert inner.target == 3


def undescribed(a: int) -> int:
    """Do it."""
    return a


def untyped(a) -> int:  # type: ignore[no-untyped-def]
    """Do it.

    Args:
        a: What.
    """
    return int(a)


def undocumented(a: int) -> int:
    return a


@pytest.mark.parametrize("function", [undescribed, untyped, undocumented])
def test_a_function_that_cannot_be_a_tool_is_refused(function: Callable[..., int]) -> None:
    with pytest.raises(ConfigError, match=f"{function.__name__} cannot be a tool: .*docstring"):
        ToolEnvironment(Functions(), [function])


def test_an_object_without_tools_is_refused() -> None:
    class Idle:
        def reset(self) -> None: ...

    with pytest.raises(ConfigError, match="Idle has no tool"):
        ToolEnvironment(Idle())


def test_reset_that_gives_no_text_is_refused() -> None:
    class Wrong(CounterEnv):
        def reset(self, target: int, **kwargs: Any) -> Any:
            return 7

    with pytest.raises(ConfigError, match=r"reset gave 7 \(int\)"):
        reset(ToolEnvironment(Wrong()), {"target": 1})


def test_a_tool_that_leaves_the_process_does_not() -> None:
    class Leaving(CounterEnv):
        def leave(self) -> None:
            """Leave."""
            raise SystemExit(3)

    environment = ToolEnvironment(Leaving())
    assert results_of(step_of(environment, calls(("leave", {})))) == [("tool", "leave", "Error: 3")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        (True, "true"),
        ([1, "ü"], '[1, "ü"]'),
        ({1}, "{1}"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "ship"}], '[{"type": "ship"}]'),
        ("half \ud800 a pair", "half ? a pair"),
    ],
)
def test_results_as_text(value: object, text: str) -> None:
    assert result_text(value, "tool") == text


def test_a_long_result_is_cut_and_says_so() -> None:
    text = result_text("x" * 10_000_000, "tool")
    assert text.startswith("x" * MAX_CHARACTERS) and len(text) < MAX_CHARACTERS + 100
    assert "20,000 of 10,000,000 characters" in text
    assert json.dumps(text)


def test_an_image_is_refused() -> None:
    with pytest.raises(ConfigError, match="screenshot gave an image"):
        result_text([{"type": "image", "image": object()}], "screenshot")


def test_something_to_await_from_a_plain_tool_is_refused() -> None:
    async def later() -> None: ...

    waiting = later()
    with pytest.raises(ConfigError, match="write it as an `async def`"):
        result_text(waiting, "tool")
    waiting.close()
