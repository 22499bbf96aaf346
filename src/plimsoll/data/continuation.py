"""Tokens in, tokens out: what follows a sampled reply, and whether a template rewrites the past.

What was sampled is never tokenized again. A conversation is rendered with a mark at the end of the
reply, and only the text behind the mark becomes tokens:

    <|im_end|>\\n<|im_start|>user\\nAnd 3+3?<|im_end|>\\n<|im_start|>assistant\\n

less the first token where it was sampled.

Some templates write earlier turns otherwise once a conversation goes on (Qwen3 drops reasoning,
Mistral moves the system text and the tools to the last user turn). `rewrites` finds that at start,
`is_rewritten` in one conversation. What was sampled may then be kept, as `following` does, or the
episode be branched: the next prompt is then the whole conversation rendered anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plimsoll.data.pieces import Messages, Piece, Tools, join_plain, tool_name
from plimsoll.data.template import Template
from plimsoll.data.tokenize import tokenize
from plimsoll.errors import DataError
from plimsoll.records import Ints, TokenIds

Message = Mapping[str, Any]
"""`role`, `content`, and what else the template reads: `tool_calls`, `tool_call_id`, `name`."""

_SHOWN = 60
"""Characters of a text that an error quotes."""


def following(
    template: Template,
    before: Messages,
    said: Message,
    after: Messages,
    sampled: TokenIds | Sequence[int],
    ends: Collection[int],
) -> Ints:
    """The tokens that come right after a sampled reply, up to where the model samples again.

    before: the messages up to the reply. said: the reply as a message; where it has `tool_calls`,
        what was sampled is their text. after: the new messages, at least one.
    sampled: the reply's tokens, which may end with one of `ends`, the tokens at which sampling
        stops, or with none where it was cut or a stop string ended it.
    Returns the rest of the reply's turn, less the token in `sampled` that ended it; the new
    messages; and the prompt for the next reply; shape [n]. Where another of `ends` was sampled than
    the template writes, the template's follows it. In plain text only the contents follow.
    Raises DataError, which names the role and the template, where the template refuses or leaves
    out one of the new messages.
    """
    assert after, "nothing follows the reply"
    if template.jinja is None:
        return _encode(template, join_plain(after))
    reply = _rendered(template, before, said, after)
    _check_written(template, reply, after)
    last = int(sampled[-1]) if len(sampled) and int(sampled[-1]) in ends else None
    end = None if last is None else _text(template, last)
    rest = _behind(template, reply, ends, end)
    if end is None or not rest.lstrip().startswith(end):
        return _encode(template, (Piece(rest),))
    # With the token before it, as some tokenizers put a space before the first word of a text.
    tokens = _encode(template, (Piece(rest.lstrip()),))
    if tokens[0] == last:
        return tokens[1:]
    return _encode(template, (Piece(rest.lstrip().removeprefix(end)),))


def rewrites(template: Template, tools: Tools | None = None) -> str | None:
    """Whether the template writes earlier turns otherwise as a conversation goes on: a sentence
    with when, and what becomes of which text; or None.

    Tried on short conversations: plain ones, with reasoning, with a system message, and with calls
    of `tools` where there are any. Those that the template refuses are left out.
    """
    if template.jinja is None:
        return None
    probes = _probes(template, tools or ())
    found = {when: change for when, tried in probes if (change := _first_change(tried))}
    if not found:
        return None
    told = {"always": found["always"]} if "always" in found else found
    changes = "; ".join(f"{when}, {change}" for when, change in told.items())
    return f"{_name(template)} rewrites earlier turns as a conversation goes on: {changes}."


def is_rewritten(template: Template, before: Messages, said: Message, after: Messages) -> bool:
    """Whether the conversation rendered with what comes after the reply begins otherwise than the
    prompt of the reply and the reply. White space within the reply does not count, as many
    templates trim it. Arguments and errors as `following`."""
    return template.jinja is not None and _change(template, before, said, after) is not None


def most_calls(template: Template) -> int:
    """How many tool calls the template takes in a turn, of the two that are tried; arguments are
    objects. 0: it refuses them, or leaves them or their results out. Plain text takes any: they are
    in what was sampled."""
    if template.jinja is None:
        return 2
    for calls in (2, 1):
        turns = [_ASKED, *_called([f"call{i:05}" for i in range(calls)], "reckon", "", {})]
        try:
            [piece] = template.render_prompt(turns)
        except DataError:
            continue
        return calls if _RESULT in piece.text else 0
    return 0


@dataclass(frozen=True)
class _Reply:
    """A conversation rendered with a mark at the end of a reply.

    turns: up to the reply, which has the mark. stem: letters that are nowhere else; the mark begins
        with them.
    until, alone: the text up to the mark and behind it, of a conversation that the reply ends.
    until_on, on: the same where it goes on.
    """

    turns: Messages
    stem: str
    until: str
    alone: str
    until_on: str
    on: str


def _rendered(template: Template, before: Messages, said: Message, after: Messages) -> _Reply:
    stem = _unused(template, before, said, after)
    mark = f"{stem}R"
    turns = [*template.with_system(before), _marked(said, mark)]
    texts = (_render_alone(template, turns), _render_on(template, turns, after))
    if not all(mark in text for text in texts):
        raise DataError(
            f"{_name(template)} leaves out a reply, {_shown(said.get('content'))}, so it cannot be"
            f" seen what follows it: set `data.chat_template` to a template that writes it."
        )
    (until, _, alone), (until_on, _, on) = (text.rpartition(mark) for text in texts)
    return _Reply(turns, stem, until, alone, until_on, on)


def _unused(template: Template, *conversation: object) -> str:
    """Letters that are neither in the conversation nor in the template."""
    used = repr((conversation, template.jinja, template.system, template.tools))
    return next(stem for i in itertools.count() if (stem := f"MARK{i}K") not in used)


def _marked(said: Message, mark: str) -> Message:
    """The reply with the mark at the end of its content, and of the arguments of its calls, beside
    which some templates write no content. A call without content stays so: templates look at it."""
    calls = [_marked_call(call, mark) for call in said.get("tool_calls") or ()]
    content = said.get("content")
    if not calls:
        return {**said, "content": f"{content or ''}{mark}"}
    return {**said, "content": content + mark if content else content, "tool_calls": calls}


def _marked_call(call: Message, mark: str) -> Message:
    function = call.get("function", call)
    given = function.get("arguments") or {}
    # Some templates take text and some an object: each stays what it is.
    arguments = given + mark if isinstance(given, str) else {**given, mark: mark}
    marked = {**function, "arguments": arguments}
    return {**call, "function": marked} if "function" in call else marked


def _render_alone(template: Template, turns: Messages) -> str:
    try:
        [piece] = template.render_whole(turns)
    except DataError as error:
        raise DataError(f"The conversation up to a reply {error} ({_name(template)}).") from error
    return piece.text


def _render_on(template: Template, turns: Messages, after: Messages) -> str:
    try:
        [piece] = template.render_prompt([*turns, *after])
    except DataError as error:
        role = _refused_role(template, turns, after)
        raise DataError(
            f"A message of the role `{role}` after a reply {error} ({_name(template)})."
            f" {_other_role(role)}"
        ) from error
    return piece.text


def _refused_role(template: Template, turns: Messages, after: Messages) -> str:
    """Of the first new message that the template refuses; of the last where only the prompt for the
    next reply is refused."""
    for i in range(1, len(after)):
        try:
            template.render_whole([*turns, *after[:i]])
        except DataError:
            return str(after[i - 1]["role"])
    return str(after[-1]["role"])


def _other_role(role: str) -> str:
    other = "S" if role == "user" else "Have the environment answer as `user`, or s"
    return f"{other}et `data.chat_template` to a template that takes `{role}` there."


def _check_written(template: Template, reply: _Reply, after: Messages) -> None:
    """DataError for a new message whose content is not written behind the reply."""
    marks = [f"{reply.stem}{i}T" for i in range(len(after))]
    marked = [{**turn, "content": mark} for turn, mark in zip(after, marks, strict=True)]
    text = _render_on(template, reply.turns, marked)
    behind = text.rpartition(f"{reply.stem}R")[2]
    for turn, mark in zip(after, marks, strict=True):
        if mark not in behind:
            raise DataError(
                f"{_name(template)} {'moves' if mark in text else 'leaves out'} a message of the"
                f" role `{turn['role']}` after a reply, {_shown(turn['content'])}, so what is"
                f" sampled next would not follow it. {_other_role(str(turn['role']))}"
            )


def _behind(template: Template, reply: _Reply, ends: Collection[int], end: str | None) -> str:
    """What is written behind a reply, from the end of its turn on. end: of what was sampled."""
    turn_end = _turn_end(template, reply, ends)
    calls = reply.alone.removesuffix(turn_end)
    if not reply.on.startswith(calls):
        raise DataError(
            f"{_name(template)} ends a reply's calls otherwise once the conversation goes on:"
            f" {_shown(calls)} becomes {_shown(reply.on)}. Set `data.chat_template` to a"
            f" template that does not."
        )
    behind = reply.on[len(calls) :]
    if end is None or not turn_end.lstrip().startswith(end) or behind.lstrip().startswith(end):
        return behind
    # gpt-oss ends the last turn by <|return|>, and by <|end|> once the conversation goes on.
    begins = filter(behind.lstrip().startswith, template.specials)
    return end + behind.lstrip().removeprefix(max(begins, key=len, default=""))


def _turn_end(template: Template, reply: _Reply, ends: Collection[int]) -> str:
    """How the template ends the turn of the reply when nothing follows; empty where the next turn
    does it. Behind calls, whose text was sampled: as of a reply without, else from an end token."""
    *before, said = reply.turns
    if not said.get("tool_calls"):
        return reply.alone
    mark = f"{reply.stem}R"
    text = _render_alone(template, [*before, {"role": said["role"], "content": mark}])
    plain = text.rpartition(mark)[2]
    if plain and reply.alone.endswith(plain):
        return plain
    start = max((reply.alone.rfind(_text(template, end)) for end in ends), default=-1)
    return reply.alone[start:] if start >= 0 else ""


def _change(template: Template, before: Messages, said: Message, after: Messages) -> str | None:
    """What of the prompt and the reply is written otherwise once the conversation goes on."""
    reply = _rendered(template, before, said, after)
    [piece] = template.render_prompt(template.with_system(before))
    prompt, on = piece.text, reply.until_on
    if not on.startswith(prompt):
        pairs = enumerate(zip(prompt, on, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), len(on))
        begin = len(prompt[:same].rstrip("<[|"))  # of a special token that differs later on
        return _becomes(reply, prompt[begin:], (on + reply.on)[begin:])
    was, now = (_dense(text[len(prompt) :]) for text in (reply.until, on))
    texts = [_dense(text) for key, text in said.items() if key != "role" and isinstance(text, str)]
    if all(text in now for text in texts if text in was):
        return None
    return _becomes(reply, reply.until[len(prompt) :], on[len(prompt) :])


def _becomes(reply: _Reply, was: str, now: str) -> str:
    was, now = (text.replace(f"{reply.stem}R", "") for text in (was, now))
    return f"{_shown(was)} becomes {_shown(now)}"


def _dense(text: str) -> str:
    """Without white space."""
    return "".join(text.split())


def _name(template: Template) -> str:
    name = template.tokenizer.name_or_path
    return f"The chat template of {name}" if name else "The chat template"


def _shown(text: object) -> str:
    return repr(str(text)[:_SHOWN])


def _text(template: Template, token: int) -> str:
    return str(template.tokenizer.decode([token]))


def _encode(template: Template, pieces: Sequence[Piece]) -> Ints:
    [(tokens, _)] = tokenize(template.tokenizer, [tuple(pieces)], None, template.vocabulary)
    return tokens.astype(np.int64)


_ASKED: Message = {"role": "user", "content": "How much is 2+2?"}
_ANSWERED: Message = {"role": "assistant", "content": "It is 4."}
_AGAIN: Message = {"role": "user", "content": "And 3+3?"}
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_RESULT = "8152"
_WITHIN = "<think>\nTwice two.\n</think>\n\nIt is 4."

_Probe = tuple[Template, Messages, Message, Messages]
"""A template, and of a conversation what is before the reply, the reply, and what is after it."""


def _probes(template: Template, tools: Tools) -> Iterator[tuple[str, list[_Probe]]]:
    """When something may change, and conversations that show it."""
    thoughts = ({"content": _WITHIN}, {"reasoning_content": "Twice two."})
    thinking = [{**_ANSWERED, **thought} for thought in thoughts]
    yield "always", [(template, [_ASKED], _ANSWERED, [_AGAIN])]
    yield "where a reply has reasoning", [(template, [_ASKED], t, [_AGAIN]) for t in thinking]
    yield "with a system message", [(template, [_SYSTEM, _ASKED], _ANSWERED, [_AGAIN])]
    yield "with tools", [*_tool_probes(template.knowing(tools), tools)] if tools else []


def _tool_probes(template: Template, tools: Tools) -> Iterator[_Probe]:
    """Templates differ in what a call has for content, and in the form of its arguments."""
    yield template, [_ASKED], _ANSWERED, [_AGAIN]
    for content, arguments in itertools.product(("", None), ({}, "{}")):
        calling, result = _called(["call00000"], tool_name(tools[0]), content, arguments)
        yield template, [_ASKED], calling, [result]
        yield template, [_ASKED, calling, result], _ANSWERED, [_AGAIN]


def _called(ids: Sequence[str], name: str, content: str | None, arguments: object) -> list[Message]:
    """A turn with calls of a tool, and their results."""
    function = {"name": name, "arguments": arguments}
    calls = [{"type": "function", "id": own, "function": function} for own in ids]
    results = [
        {"role": "tool", "content": _RESULT, "name": name, "tool_call_id": own} for own in ids
    ]
    return [{"role": "assistant", "content": content, "tool_calls": calls}, *results]


def _first_change(probes: Sequence[_Probe]) -> str | None:
    for template, before, said, after in probes:
        try:
            change = _change(template, before, said, after)
        except DataError:
            continue
        if change is not None:
            return change
    return None
