"""Which call a result of a tool answers."""

from __future__ import annotations

import pytest

from plimsoll.environment.messages import match_results, render_message, with_call_ids
from plimsoll.environment.protocol import Message, Reply, StepResult, ToolCall, read_step

ADD, NOW = ToolCall("add", {"a": 1}), ToolCall("now", {})


def replied(*calls: ToolCall) -> Reply:
    return Reply("...", Message("assistant", "...", calls), calls, None)


def test_each_call_of_an_episode_has_an_id_of_its_own() -> None:
    turns = [with_call_ids(replied(ADD, NOW), turn) for turn in (1, 2)]
    ids = [call.id for reply in turns for call in reply.tool_calls]
    assert ids == ["c00010000", "c00010001", "c00020000", "c00020001"]
    assert all(len(own) == 9 and own.isalnum() for own in ids)
    written = render_message(turns[0].message)["tool_calls"]
    assert [call["id"] for call in written] == ids[:2]


def test_the_id_that_the_policy_wrote_stays() -> None:
    own = ToolCall("add", {"a": 1}, "VvvODy9mT")
    assert [call.id for call in with_call_ids(replied(own, NOW), 1).tool_calls] == [
        *("VvvODy9mT", "c00010001"),
    ]


@pytest.mark.parametrize(
    ("answer", "answered"),
    [
        ([Message("tool", "1"), Message("tool", "2")], ["c00010000", "c00010001"]),
        ([Message("user", "x"), Message("tool", "1")], ["", "c00010000"]),
        # one that names its call leaves the other to the one that does not
        ([Message("tool", "2", call_id="c00010001"), Message("tool", "1")], None),
        ([Message("tool", "1"), Message("tool", "2", call_id="c00010000")], None),
        ([Message("tool", str(i)) for i in range(3)], ["c00010000", "c00010001", ""]),
    ],
)
def test_results_answer_the_calls_in_their_order(
    answer: list[Message], answered: list[str] | None
) -> None:
    matched = match_results(answer, with_call_ids(replied(ADD, NOW), 1).tool_calls)
    ids = [message.call_id for message in matched]
    assert ids == (["c00010001", "c00010000"] if answered is None else answered)
    assert [message.content for message in matched] == [message.content for message in answer]
    assert render_message(matched[-1]).get("tool_call_id", "") == ids[-1]


def test_an_environments_own_messages_may_name_their_call() -> None:
    message = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "c00010000"}
    matched = read_step(([message], False))
    assert isinstance(matched, StepResult)
    assert matched.messages == (Message("tool", "4", name="add", call_id="c00010000"),)
