r"""Tokens in, tokens out: find the tokens that follow a sampled reply.

Sampled tokens are never tokenized again. A conversation is rendered with a mark at the end of the
reply, and only the text behind the mark becomes tokens:

    <|im_end|>\\n<|im_start|>user\\nAnd 3+3?<|im_end|>\\n<|im_start|>assistant\\n

without the first token if it was sampled.

Some templates change earlier turns once a conversation goes on (Qwen3 drops reasoning, Mistral
moves the system text and the tools to the last user turn). `rewrites` finds that at start,
`is_rewritten` in one conversation. The sampled tokens may then be kept, as `following` does, or the
episode may be branched: its next prompt is the whole conversation rendered again.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.data.pieces import (
    ChatTurn,
    Messages,
    TextPiece,
    Tools,
    count_alike,
    dense_text,
    join_plain,
    quote,
    tokenize,
    tool_name,
)
from plimsoll.data.template import Template
from plimsoll.errors import DataError
from plimsoll.records import Ints, TokenIds


def following(
    template: Template,
    before: Messages,
    reply: ChatTurn,
    after: Messages,
    sampled: TokenIds | Sequence[int],
    ends: Collection[int],
) -> Ints:
    """Return the tokens between a sampled reply and the next reply; shape [n].

    These are the rest of the reply's turn, without the end token if it was sampled; the new
    messages; and the beginning of the assistant's turn. If the sampled end token is not the
    template's, the template's end token follows it. In plain text only the contents follow.

    Args:
        template: the template of the run.
        before: the messages up to the reply.
        reply: the reply as a message. If it has `tool_calls`, the sampled tokens are their text.
        after: the new messages, at least one.
        sampled: the reply's tokens. They may end with one of `ends`; they do not if the reply was
            cut or a stop string ended it.
        ends: the tokens at which sampling stops.

    Raises:
        DataError: the template refuses or leaves out a new message. The error names the role and
            the template.
    """
    assert after, "nothing follows the reply"
    if template.jinja is None:
        return _encode(template, join_plain(after))
    rendered = _render_reply(template, before, reply, after)
    _check_written(template, rendered, after)
    last = int(sampled[-1]) if len(sampled) and int(sampled[-1]) in ends else None
    end = None if last is None else _decode(template, last)
    rest = _behind(template, rendered, ends, end)
    if end is None or not rest.lstrip().startswith(end):
        return _encode(template, (TextPiece(rest),))
    # Encode the end token too, as some tokenizers put a space before the first word of a text.
    tokens = _encode(template, (TextPiece(rest.lstrip()),))
    if tokens[0] == last:
        return tokens[1:]
    return _encode(template, (TextPiece(rest.lstrip().removeprefix(end)),))


def rewrites(template: Template, tools: Tools | None = None) -> str | None:
    """Return a sentence on how the template changes earlier turns as a conversation goes on.

    None if it does not. Short conversations show it: plain ones, with reasoning, with a system
    message, and with calls of `tools` if there are any. Conversations that the template refuses are
    skipped.
    """
    if template.jinja is None:
        return None
    probes = _probes(template, tools or ())
    changes = {when: change for when, tried in probes if (change := _first_change(tried))}
    if not changes:
        return None
    listed = {"always": changes["always"]} if "always" in changes else changes
    listing = "; ".join(f"{when}, {change}" for when, change in listed.items())
    return f"{_title(template)} rewrites earlier turns as a conversation goes on: {listing}."


def is_rewritten(template: Template, before: Messages, reply: ChatTurn, after: Messages) -> bool:
    """Return whether the new messages change how the template writes the prompt and the reply.

    White space within the reply does not count, as many templates trim it. Arguments and errors as
    `following`.
    """
    return template.jinja is not None and _find_change(template, before, reply, after) is not None


def most_calls(template: Template) -> int:
    """Return how many tool calls one turn may have with this template: 0, 1 or 2 (or more).

    It is tried with calls whose arguments are objects. 0 means that the template refuses calls, or
    leaves out calls or results. Plain text gives 2, because the calls are in the sampled text.
    """
    if template.jinja is None:
        return 2
    for calls in (2, 1):
        turns = [_ASKED, *_call_turns([f"call{i:05}" for i in range(calls)], "reckon", "", {})]
        try:
            [piece] = template.render_prompt(turns)
        except DataError:
            continue
        return calls if _RESULT in piece.text else 0
    return 0


@dataclass(frozen=True)
class _MarkedText:
    """A conversation rendered with a mark at the end of a reply."""

    turns: Messages
    """The turns up to the reply, which has the mark."""
    stem: str
    """Letters that occur nowhere else. The mark begins with them."""
    until: str
    """The text up to the mark if the reply ends the conversation."""
    behind: str
    """The text behind the mark if the reply ends the conversation."""
    until_on: str
    """The text up to the mark if the conversation goes on."""
    behind_on: str
    """The text behind the mark if the conversation goes on."""


def _render_reply(
    template: Template, before: Messages, reply: ChatTurn, after: Messages
) -> _MarkedText:
    stem = _free_letters(template, before, reply, after)
    mark = f"{stem}R"
    turns = [*template.with_system(before), _mark_reply(reply, mark)]
    texts = (_render_alone(template, turns), _render_on(template, turns, after))
    if not all(mark in text for text in texts):
        raise DataError(
            f"{_title(template)} leaves out a reply, {quote(reply.get('content'))}, so what"
            f" follows the reply cannot be seen: set `data.chat_template` to a template that writes"
            f" replies."
        )
    (until, _, behind), (until_on, _, behind_on) = (text.rpartition(mark) for text in texts)
    return _MarkedText(turns, stem, until, behind, until_on, behind_on)


def _free_letters(template: Template, *conversation: object) -> str:
    """Return letters that occur neither in the conversation nor in the template."""
    used = repr((conversation, template.jinja, template.system, template.tools))
    return next(stem for i in itertools.count() if (stem := f"MARK{i}K") not in used)


def _mark_reply(reply: ChatTurn, mark: str) -> ChatTurn:
    """Return the reply with the mark at the end of its content and of its calls' arguments.

    The arguments have the mark because some templates write no content beside calls. A turn with
    calls and without content stays without, as templates test for content.
    """
    calls = [_mark_call(call, mark) for call in reply.get("tool_calls") or ()]
    content = reply.get("content")
    if not calls:
        return {**reply, "content": f"{content or ''}{mark}"}
    return {**reply, "content": content + mark if content else content, "tool_calls": calls}


def _mark_call(call: ChatTurn, mark: str) -> ChatTurn:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    # Some templates take text and some an object: keep the type.
    marked_arguments = arguments + mark if isinstance(arguments, str) else {**arguments, mark: mark}
    marked = {**function, "arguments": marked_arguments}
    return {**call, "function": marked} if "function" in call else marked


def _render_alone(template: Template, turns: Messages) -> str:
    try:
        [piece] = template.render_whole(turns)
    except DataError as error:
        raise DataError(f"The conversation up to a reply {error} ({_title(template)}).") from error
    return piece.text


def _render_on(template: Template, turns: Messages, after: Messages) -> str:
    try:
        [piece] = template.render_prompt([*turns, *after])
    except DataError as error:
        role = _refused_role(template, turns, after)
        raise DataError(
            f"A message of the role `{role}` after a reply {error} ({_title(template)})."
            f" {_advise_role(role)}"
        ) from error
    return piece.text


def _refused_role(template: Template, turns: Messages, after: Messages) -> str:
    """Return the role of the first new message that the template refuses.

    If only the prompt for the next reply is refused, return the role of the last message.
    """
    for i in range(1, len(after)):
        try:
            template.render_whole([*turns, *after[:i]])
        except DataError:
            return str(after[i - 1]["role"])
    return str(after[-1]["role"])


def _advise_role(role: str) -> str:
    begin = "S" if role == "user" else "Have the environment answer as `user`, or s"
    return f"{begin}et `data.chat_template` to a template that takes `{role}` there."


def _check_written(template: Template, reply: _MarkedText, after: Messages) -> None:
    """Raise DataError if the content of a new message is not written behind the reply."""
    marks = [f"{reply.stem}{i}T" for i in range(len(after))]
    marked = [{**turn, "content": mark} for turn, mark in zip(after, marks, strict=True)]
    text = _render_on(template, reply.turns, marked)
    behind = text.rpartition(f"{reply.stem}R")[2]
    for turn, mark in zip(after, marks, strict=True):
        if mark not in behind:
            raise DataError(
                f"{_title(template)} {'moves' if mark in text else 'leaves out'} a"
                f" message of the role `{turn['role']}` after a reply, {quote(turn['content'])}, so"
                f" what is sampled next would not follow it. {_advise_role(str(turn['role']))}"
            )


def _behind(template: Template, reply: _MarkedText, ends: Collection[int], end: str | None) -> str:
    """Return the text behind a reply, from the end of its turn on.

    `end` is the text of the end token that was sampled; None if no end token was.
    """
    turn_end = _turn_end(template, reply, ends)
    calls = reply.behind.removesuffix(turn_end)
    if not reply.behind_on.startswith(calls):
        raise DataError(
            f"{_title(template)} ends a reply's calls otherwise once the conversation goes"
            f" on: {quote(calls)} becomes {quote(reply.behind_on)}. Set `data.chat_template` to a"
            f" template that does not."
        )
    behind = reply.behind_on[len(calls) :]
    if end is None or not turn_end.lstrip().startswith(end) or behind.lstrip().startswith(end):
        return behind
    # gpt-oss ends the last turn by <|return|>, and by <|end|> once the conversation goes on.
    ends_now = filter(behind.lstrip().startswith, template.specials)
    return end + behind.lstrip().removeprefix(max(ends_now, key=len, default=""))


def _turn_end(template: Template, reply: _MarkedText, ends: Collection[int]) -> str:
    """Return the text that ends the reply's turn when nothing follows; "" if there is none.

    The text of calls was sampled, so it is not part of the end. For a reply with calls, this is the
    end of a reply without calls, or else the text from the last end token on.
    """
    *before, turn = reply.turns
    if not turn.get("tool_calls"):
        return reply.behind
    mark = f"{reply.stem}R"
    text = _render_alone(template, [*before, {"role": turn["role"], "content": mark}])
    end_without_calls = text.rpartition(mark)[2]
    if end_without_calls and reply.behind.endswith(end_without_calls):
        return end_without_calls
    start = max((reply.behind.rfind(_decode(template, end)) for end in ends), default=-1)
    return reply.behind[start:] if start >= 0 else ""


def _find_change(
    template: Template, before: Messages, reply: ChatTurn, after: Messages
) -> str | None:
    """Return a sentence on what changes in prompt and reply as the conversation goes on.

    None if nothing changes.
    """
    rendered = _render_reply(template, before, reply, after)
    [piece] = template.render_prompt(template.with_system(before))
    prompt, until = piece.text, rendered.until_on
    if not until.startswith(prompt):
        common = count_alike(prompt, until)
        # Special tokens that differ may begin alike: quote them whole.
        begin = len(prompt[:common].rstrip("<[|"))
        return _describe(rendered, prompt[begin:], (until + rendered.behind_on)[begin:])
    was, now = (dense_text(text[len(prompt) :]) for text in (rendered.until, until))
    texts = [
        dense_text(text) for key, text in reply.items() if key != "role" and isinstance(text, str)
    ]
    # The template may write a text otherwise from the start, as Qwen3 does reasoning with `<think>`
    # in it. What it writes must then stay.
    if was == now or all(text in was and text in now for text in texts):
        return None
    return _describe(rendered, rendered.until[len(prompt) :], until[len(prompt) :])


def _describe(reply: _MarkedText, was: str, now: str) -> str:
    was, now = (text.replace(f"{reply.stem}R", "") for text in (was, now))
    return f"{quote(was)} becomes {quote(now)}"


def _title(template: Template) -> str:
    name = template.tokenizer.name_or_path
    return f"The chat template of {name}" if name else "The chat template"


def _decode(template: Template, token: int) -> str:
    return str(template.tokenizer.decode([token]))


def _encode(template: Template, pieces: Sequence[TextPiece]) -> Ints:
    [(tokens, _)] = tokenize(template.tokenizer, [tuple(pieces)], None, template.vocabulary)
    return tokens.astype(np.int64)


_ASKED: ChatTurn = {"role": "user", "content": "How much is 2+2?"}
_ANSWERED: ChatTurn = {"role": "assistant", "content": "It is 4."}
_AGAIN: ChatTurn = {"role": "user", "content": "And 3+3?"}
_SYSTEM: ChatTurn = {"role": "system", "content": "Be brief."}
_RESULT = "8152"
_REASONED = "<think>\nTwice two.\n</think>\n\nIt is 4."

_Probe = tuple[Template, Messages, ChatTurn, Messages]
"""A template, and a conversation in three parts: before the reply, the reply, after it."""


def _probes(template: Template, tools: Tools) -> Iterator[tuple[str, list[_Probe]]]:
    """Yield each circumstance in which a template may change turns, and conversations to try it."""
    thoughts = ({"content": _REASONED}, {"reasoning_content": "Twice two."})
    thinking = [{**_ANSWERED, **thought} for thought in thoughts]
    yield "always", [(template, [_ASKED], _ANSWERED, [_AGAIN])]
    yield "where a reply has reasoning", [(template, [_ASKED], t, [_AGAIN]) for t in thinking]
    yield "with a system message", [(template, [_SYSTEM, _ASKED], _ANSWERED, [_AGAIN])]
    yield "with tools", [*_tool_probes(template.with_tools(tools), tools)] if tools else []


def _tool_probes(template: Template, tools: Tools) -> Iterator[_Probe]:
    """Yield conversations with tools.

    Templates differ in the content that a turn with calls has, and in the form of the arguments.
    """
    yield template, [_ASKED], _ANSWERED, [_AGAIN]
    for content, arguments in itertools.product(("", None), ({}, "{}")):
        calling, result = _call_turns(["call00000"], tool_name(tools[0]), content, arguments)
        yield template, [_ASKED], calling, [result]
        yield template, [_ASKED, calling, result], _ANSWERED, [_AGAIN]


def _call_turns(
    ids: Sequence[str], name: str, content: str | None, arguments: object
) -> list[ChatTurn]:
    """Return a turn with calls of a tool, and the turns with their results."""
    function = {"name": name, "arguments": arguments}
    calls = [{"type": "function", "id": call_id, "function": function} for call_id in ids]
    results = [
        {"role": "tool", "content": _RESULT, "name": name, "tool_call_id": call_id}
        for call_id in ids
    ]
    return [{"role": "assistant", "content": content, "tool_calls": calls}, *results]


def _first_change(probes: Sequence[_Probe]) -> str | None:
    for template, before, reply, after in probes:
        try:
            change = _find_change(template, before, reply, after)
        except DataError:
            continue
        if change is not None:
            return change
    return None
