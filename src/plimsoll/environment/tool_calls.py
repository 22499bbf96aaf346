"""From a reply's text to tool calls that can be carried out, and a sentence on those that cannot.

Whatever the policy writes, nothing raises: a call that cannot be read, names no tool or has wrong
arguments becomes a `problem` that says what is wrong and what was expected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from plimsoll.config.files import nearest
from plimsoll.environment.protocol import Message, Reply, ToolCall
from plimsoll.environment.schemas import Tool, by_name, shown, written, wrong_arguments

Extracted = tuple[str, Sequence[tuple[str, str, str]], Sequence[str]]
"""The text outside of calls; each call's name, its arguments as JSON text, and the id that was
written with it, or nothing; and a sentence for each call that cannot be read."""

Extract = Callable[[str, Sequence[Tool]], Extracted]
"""Finds calls in a text, with the tools that there are; one for each format that models write.
It raises nothing."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_EXPECTED = (
    f'Write {_OPEN}{{"name": "...", "arguments": {{...}}}}{_CLOSE}, with the name of a tool and an '
    f"object of its arguments."
)
_ONE_CALL = "a turn may have one."
_MOST_NESTED = 64
_MOST_TOLD = 3
_BLANKS = re.compile(r"\s*")


def read_reply(
    text: str, tools: Sequence[Tool], extract: Extract | None = None, *, one_call: bool = False
) -> Reply:
    """What the policy said. text: with the special tokens that its format of calls has, without the
    end of turn. tools: that it may call; of none, the text holds no calls. extract: finds the
    calls; default: `hermes`. one_call: the chat template takes no more in a turn, so that further
    ones are wrong. What is within `<think>` calls nothing.
    """
    if not tools:
        return Reply(text, Message("assistant", text), (), None)
    thought, rest = _after_thinking(text)
    content, found, unreadable = (extract or hermes)(rest, tools)
    known = by_name(tools)
    checked = [_checked(*call, known) for call in found]
    calls = tuple(call for call in checked if isinstance(call, ToolCall))
    problems = [*(wrong for wrong in checked if isinstance(wrong, str)), *unreadable]
    if one_call and len(calls) > 1:
        problems += [f"Only the first call was carried out, of {calls[0].name!r}: {_ONE_CALL}"]
        calls = calls[:1]
    said = (thought + content).rstrip() if calls else text
    return Reply(text, Message("assistant", said, calls), calls, _told(problems))


def _told(problems: Sequence[str]) -> str | None:
    more = len(problems) - _MOST_TOLD
    end = [f"And {more} more calls are wrong."] if more > 0 else []
    return " ".join([*problems[:_MOST_TOLD], *end]) or None


def hermes(text: str, tools: Sequence[Tool]) -> Extracted:
    """Calls as Hermes, Qwen 2.5 and Qwen 3 write them: `<tool_call>` and an object with `name` and
    `arguments`. The end tag may be missing, as where it ends sampling."""
    begin, outside = 0, []
    calls: list[tuple[str, str, str]] = []
    problems: list[str] = []
    while (at := text.find(_OPEN, begin)) >= 0:
        outside.append(text[begin:at])
        call, begin = _hermes_call(text, at + len(_OPEN))
        if isinstance(call, str):
            problems.append(f"{call} {_EXPECTED}")
            outside.append(text[at:begin])
        else:
            calls.append((*call, ""))
    outside.append(text[begin:])
    return "".join(outside), calls, problems


def _hermes_call(text: str, begin: int) -> tuple[tuple[str, str] | str, int]:
    """The call, or what is wrong with it; and where what follows it begins."""
    close = text.find(_CLOSE, begin)
    end = len(text) if close < 0 else close + len(_CLOSE)
    try:
        value, stop = _decoded(text, begin)
    except (ValueError, RecursionError) as error:
        return f"A tool call is not valid JSON ({_reason(error)}): {_excerpt(text, begin)}.", end
    after = _blanks_end(text, stop)
    closed = text.startswith(_CLOSE, after)
    if not closed and after < len(text):
        return (
            f"A tool call has more than one JSON object: {_excerpt(text, begin)}.",
            max(end, after),
        )
    end = after + len(_CLOSE) if closed else after
    if not isinstance(value, dict):
        return f"A tool call is no JSON object: {_excerpt(text, begin)}.", end
    for key, kind, name in (("name", str, "a string"), ("arguments", dict, "an object")):
        if key not in value:
            return f"A tool call has no {key!r}: {_excerpt(text, begin)}.", end
        if not isinstance(value[key], kind):
            return f"The {key!r} of a tool call is not {name}: {_excerpt(text, begin)}.", end
    return (value["name"], json.dumps(value["arguments"])), end


def _decoded(text: str, begin: int) -> tuple[object, int]:
    """Raises ValueError for what is not JSON; and for what nests too deeply, and RecursionError for
    what nests more deeply yet."""
    found, end = json.JSONDecoder(parse_constant=_refuse).raw_decode(text, _blanks_end(text, begin))
    if _nests_more(found, _MOST_NESTED):
        raise ValueError(f"it nests more than {_MOST_NESTED} deep")
    return found, end


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _nests_more(value: object, most: int) -> bool:
    layer = [value]
    for _ in range(most):
        inner: list[object] = []
        for one in layer:
            inner += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        layer = inner
    return bool(layer)


def _blanks_end(text: str, begin: int) -> int:
    found = _BLANKS.match(text, begin)
    return begin if found is None else found.end()


def _checked(name: str, arguments: str, call_id: str, known: Mapping[str, Tool]) -> ToolCall | str:
    """The call, or what is wrong with it."""
    if name not in known:
        return _unknown(name, known)
    expected = f"Expected: {written(known[name])}."
    try:
        values, end = _decoded(arguments, 0)
        if _blanks_end(arguments, end) < len(arguments):
            raise ValueError("more follows its end")
    except (ValueError, RecursionError) as error:
        said = f"The arguments of the call of {name!r} are not valid JSON ({_reason(error)})"
        return f"{said}: {_excerpt(arguments, 0)}. {expected}"
    if not isinstance(values, dict):
        return f"The arguments of the call of {name!r} are no object: {shown(values)}. {expected}"
    wrong = wrong_arguments(known[name], values)
    if wrong is not None:
        return f"The arguments of the call of {name!r} are wrong: {wrong}. {expected}"
    return ToolCall(name, values, call_id)


def _unknown(name: str, known: Mapping[str, Tool]) -> str:
    tools = _listed(known.values())
    return f"There is no tool {shown(name)}.{nearest(name, known)} The tools: {tools}."


def _listed(tools: Iterable[Tool]) -> str:
    return ", ".join(map(written, tools))


def _after_thinking(text: str) -> tuple[str, str]:
    """What was thought, with its tags, and the rest. A thought that is not over has no rest; one
    may have been begun by the prompt."""
    thought, over, rest = text.partition("</think>")
    if over:
        return thought + over, rest
    return (text, "") if text.lstrip().startswith("<think>") else ("", text)


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "it nests too deeply" if isinstance(error, RecursionError) else str(error)


def _excerpt(text: str, begin: int) -> str:
    """What a call begins with, on one line."""
    return shown(" ".join(text[begin : begin + 500].partition(_CLOSE)[0].split()))


def figures_of(reply: Reply, failed: int = 0) -> dict[str, float]:
    """What a turn with tools is counted by. failed: calls that a tool could not answer."""
    return {
        "tool_calls": float(len(reply.tool_calls)),
        "tool_calls_failed": float(failed),
        "tool_calls_malformed": float(reply.problem is not None),
    }
