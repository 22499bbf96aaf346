"""Replies to tool calls: what is read, and what is said of what cannot be."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.environment.protocol import Message, ToolCall
from plimsoll.environment.tool_calls import (
    check_tool,
    format_signature,
    hermes,
    read_reply,
    wrong_arguments,
)
from plimsoll.errors import ConfigError

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Calculate.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {"type": "string"},
                "digits": {"type": "integer", "nullable": True},
            },
            "required": ["expression"],
        },
    },
}
NOW = {"name": "now", "description": "The time.", "parameters": {"type": "object"}}
TOOLS = (CALCULATE, NOW)


def call(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def test_a_call_is_read_and_the_text_around_it_kept() -> None:
    reply = read_reply(f"I need this.\n{call('calculate', expression='1+1')}", TOOLS)
    assert reply.tool_calls == (ToolCall("calculate", {"expression": "1+1"}),)
    assert reply.message == Message("assistant", "I need this.", reply.tool_calls)
    assert reply.problem is None


def test_several_calls_keep_their_order() -> None:
    text = call("now") + "\n" + call("calculate", expression="2")
    assert [one.name for one in read_reply(text, TOOLS).tool_calls] == ["now", "calculate"]


def test_a_tag_within_an_argument_does_not_end_the_call() -> None:
    inner = 'a "</tool_call>" b <tool_call>'
    reply = read_reply(call("calculate", expression=inner), TOOLS)
    assert reply.tool_calls[0].arguments == {"expression": inner}


def test_the_end_tag_may_be_missing() -> None:
    text = call("calculate", expression="1").removesuffix("\n</tool_call>")
    assert read_reply(text, TOOLS).tool_calls == (ToolCall("calculate", {"expression": "1"}),)


@pytest.mark.parametrize("text", ["", "The answer is 2.", "{}", "</tool_call>"])
def test_text_alone_calls_nothing(text: str) -> None:
    reply = read_reply(text, TOOLS)
    assert (reply.tool_calls, reply.problem, reply.message) == (
        (),
        None,
        Message("assistant", text),
    )


def test_without_tools_nothing_is_a_call() -> None:
    text = call("calculate", expression="1")
    assert read_reply(text, ()).message == Message("assistant", text)


def test_thoughts_call_nothing() -> None:
    inner = call("now")
    assert read_reply(f"<think>{inner}", TOOLS).tool_calls == ()
    assert read_reply(f"<think>{inner}", TOOLS).problem is None
    reply = read_reply(f"{inner} or not</think>\n{call('calculate', expression='1')}", TOOLS)
    assert [one.name for one in reply.tool_calls] == ["calculate"]
    assert reply.message.content == f"{inner} or not</think>"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ('{"name": "calculate" "arguments": {}}', "(Expecting ',' delimiter)"),
        ('{"name": "calculate", "arguments": {"expression": "1', "not valid JSON"),
        ('{"name": "calculate", "arguments": {"expression": NaN}}', "NaN is no JSON"),
        ("[1]", "no JSON object: '[1]'"),
        ('{"arguments": {}}', "has no 'name'"),
        ('{"name": "calculate", "parameters": {}}', "has no 'arguments'"),
        ('{"name": "calculate", "arguments": "1+1"}', "'arguments' of a tool call is not an"),
        ('{"name": 3, "arguments": {}}', "'name' of a tool call is not a string"),
        ('{"name": "now", "arguments": {}} {"name": "now"}', "more than one JSON object"),
        ("[" * 100_000, "nests"),
        (
            '{"name": "calculate", "arguments": {"a": ' + "[" * 99 + "]" * 99 + "}}",
            "nests",
        ),
        ('{"name": "calculate", "arguments": {"digits": ' + "9" * 5000 + "}}", "not valid JSON"),
    ],
)
def test_a_malformed_call_is_reported_with_what_is_expected(body: str, why: str) -> None:
    for text in (f"<tool_call>{body}</tool_call>", f"<tool_call>{body}"):
        reply = read_reply(text, TOOLS)
        assert reply.tool_calls == ()
        assert reply.problem is not None and why in reply.problem
        assert '<tool_call>{"name": "...", "arguments": {...}}</tool_call>' in reply.problem
        assert len(reply.problem) < 700
        assert reply.message == Message("assistant", text)


def test_an_unknown_tool_is_reported_with_those_there_are() -> None:
    problem = read_reply(call("calculat", expression="1"), TOOLS).problem
    signatures = ", ".join(format_signature(tool) for tool in TOOLS)
    assert problem is not None and signatures in problem
    assert "'calculat'" in problem and "'calculate'?" in problem


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "'expression' is a required property"),
        ({"expression": 3}, "expression: 3 is not of type 'string'"),
        ({"expression": "1", "digits": "2"}, "digits: '2'"),
        ({"expression": "1", "places": 2}, "'places' was unexpected"),
    ],
)
def test_wrong_arguments_are_reported_with_the_tools_signature(
    arguments: dict[str, Any], why: str
) -> None:
    problem = read_reply(call("calculate", **arguments), TOOLS).problem
    assert problem is not None and why in problem
    assert f"Expected: {format_signature(TOOLS[0])}" in problem


def test_null_where_the_schema_is_nullable() -> None:
    reply = read_reply(call("calculate", expression="1", digits=None), TOOLS)
    assert reply.problem is None and reply.tool_calls[0].arguments["digits"] is None


def test_right_calls_are_carried_out_beside_wrong_ones() -> None:
    reply = read_reply(call("now") + call("never") + "<tool_call>{</tool_call>", TOOLS)
    assert [one.name for one in reply.tool_calls] == ["now"]
    assert reply.problem is not None
    assert "no tool 'never'" in reply.problem and "not valid JSON" in reply.problem


def test_only_a_few_of_many_wrong_calls_are_reported() -> None:
    problem = read_reply(call("never") * 50, TOOLS).problem
    assert problem is not None and problem.count("There is no tool") == 3
    assert problem.endswith("And 47 more calls are wrong.")


PIECES = ["<tool_call>", "</tool_call>", '{"name"', ': "calculate"', '"arguments"', "{", "}", "[",
          "]", ",", '"', "\\ud800", "<think>", "</think>", "1e999", "null", "\n", "x"]  # fmt: skip


def test_no_text_raises() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 30)))
        reply = read_reply(text, TOOLS)
        assert reply.text == text
        assert all(one.name in ("calculate", "now") for one in reply.tool_calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(), JSON, max_size=3))
def test_any_arguments_come_back_as_they_were_written(arguments: dict[str, Any]) -> None:
    tool = {"name": "any", "parameters": {"type": "object", "additionalProperties": True}}
    text = f'before <tool_call>{{"name": "any", "arguments": {json.dumps(arguments)}}}</tool_call>'
    reply = read_reply(text, (tool,))
    assert reply.problem is None
    assert reply.tool_calls == (ToolCall("any", arguments),)


def test_another_format_is_read_by_what_is_given() -> None:
    def shout(text: str, tools: object) -> tuple[str, list[tuple[str, str, str]], list[str]]:
        return "", [("calculate", text.removeprefix("CALL "), "its id")], ["And more."]

    reply = read_reply('CALL {"expression": "1"}', TOOLS, shout)
    assert reply.tool_calls == (ToolCall("calculate", {"expression": "1"}, "its id"),)
    assert reply.problem == "And more."
    problem = read_reply("CALL {", TOOLS, shout).problem
    assert problem is not None and re.search("arguments .*'calculate' .*JSON", problem)


def test_hermes_gives_the_text_outside_of_calls() -> None:
    outside, calls, problems = hermes(f"a{call('now')}b{call('now')}c", TOOLS)
    assert (outside, calls, problems) == ("abc", [("now", "{}", "")] * 2, [])


def test_calls_beyond_the_only_one_of_a_turn_are_reported() -> None:
    """Llama's template refuses a conversation with two."""
    text = call("now") + call("calculate", expression="2")
    reply = read_reply(text, TOOLS, one_call=True)
    assert [one.name for one in reply.message.tool_calls] == ["now"]
    assert reply.tool_calls == reply.message.tool_calls
    assert reply.problem is not None and "first call" in reply.problem and "'now'" in reply.problem
    assert read_reply(call("now"), TOOLS, one_call=True).problem is None


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="Two tools are called 'now'"):
        read_reply("x", (NOW, NOW))


def test_a_tool_that_no_call_could_be_checked_against() -> None:
    """An image among the arguments, as transformers describes it."""
    with pytest.raises(ConfigError, match="properties/b/type"):
        check_tool({"name": "a", "parameters": {"properties": {"b": {"type": "image"}}}})


def test_schemas_of_others() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "nullable": {"type": "string"},
            "place": {"$ref": "#/$defs/place"},
            "unit": {"anyOf": [{"enum": ["C", "F"]}, {"type": "null"}]},
            "days": {"type": "array", "items": {"type": "integer"}},
        },
        "$defs": {"place": {"type": "string", "minLength": 2}},
    }
    tool = {"name": "weather", "parameters": parameters}
    check_tool(tool)
    signature = format_signature(tool)
    assert signature.startswith("weather(")
    assert signature.removeprefix("weather(").removesuffix(")").split(", ") == [
        "nullable?: string",
        "place?: anything",
        'unit?: "C" or "F" or null',
        "days?: array of integer",
    ]
    assert wrong_arguments(tool, {"nullable": "x", "place": "Oslo", "unit": "C"}) is None
    assert wrong_arguments(tool, {"place": "O"}) == "place: 'O' is too short"
    assert wrong_arguments(tool, {"days": [1, "2"]}) == "days[1]: '2' is not of type 'integer'"


@pytest.mark.parametrize("body", ["", "{", '{"name": "", "arguments": {}}'])
def test_calls_without_an_end_are_read_up_to_a_limit(body: str) -> None:
    """Each error in JSON counts the lines before it: 43,000 empty calls took 17 s."""
    text = f"<tool_call>{body}</tool_call>" * 43_000
    reply = read_reply(text, TOOLS)
    assert reply.tool_calls == () and reply.problem is not None
    assert re.search(r"And 9[78] more calls are wrong", reply.problem)
    reply = read_reply(call("now") * 101, TOOLS)
    assert len(reply.tool_calls) == 100 and reply.problem == "Only the first 100 calls were read."
