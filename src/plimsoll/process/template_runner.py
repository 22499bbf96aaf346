"""The process that renders chat templates; templates.py sends templates and conversations.

Templates see what transformers' `apply_chat_template` gives them: jinja's immutable sandbox, the
same filters and functions, and `{% generation %}` marks. A test compares both. This module imports
only jinja and the standard library, so that the process is small.
"""

from __future__ import annotations

import functools
import json
import random
import signal
from bisect import bisect_left
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2.0
"""The most processor time for compiling a template, and for each rendering."""
MOST_BYTES = 7 * 2**20
"""The most bytes of JSON in one answer, below the limit of a line."""
_QUOTED = 40
"""Characters of a difference that an error message quotes."""
_LONGEST_REASON = 1000


def open_templates(setup: None) -> Callable[[list[Any]], list[str]]:
    """Return the function that answers (template, requests); see templates.py."""
    return answer


def answer(message: list[Any]) -> list[str]:
    """Return a reply to each request, as JSON; fewer if they would not fit one line."""
    source, requests = message
    replies: list[str] = []
    size = 0
    for request in json.loads(requests):
        reply = json.dumps(_reply(source, request), ensure_ascii=False)
        bytes_of_reply = len(json.dumps(reply))
        if bytes_of_reply > MOST_BYTES:
            refusal = f"it writes {bytes_of_reply:,} bytes, over the {MOST_BYTES:,} of an answer"
            reply, bytes_of_reply = json.dumps({"refused": refusal}), 0
        size += bytes_of_reply
        if replies and size > MOST_BYTES:
            break
        replies.append(reply)
    return replies


def _reply(source: str, request: dict[str, Any] | None) -> dict[str, Any]:
    try:
        template = _compile(source)
        return {} if request is None else _render(template, request)
    except jinja2.TemplateSyntaxError as error:
        return {"line": error.lineno, "syntax": str(error.message)[:_LONGEST_REASON]}
    except MemoryError:
        return {"refused": "it needs too much memory"}
    except Exception as error:  # noqa: BLE001  a template is a program, which may raise anything
        return {"refused": f"{error}"[:_LONGEST_REASON] or type(error).__name__}


def _render(template: jinja2.Template, request: dict[str, Any]) -> dict[str, Any]:
    """Return the text of a conversation, its spans inside generation marks, and its beginnings.

    A beginning, rendered by itself, becomes three values: how many of its characters the text
    begins with, the characters that come next if it then differs, and its number of marks.
    """
    turns = request["turns"]
    values = {**request["values"], "strftime_now": _clock(request["date"])}
    text, spans = _render_once(template, turns, request["asks"], values)
    beginnings = []
    for length, asks in request["beginnings"]:
        begun, marks = _render_once(template, turns[:length], asks, values)
        alike = len(begun) if text.startswith(begun) else _count_alike(text, begun)
        beginnings.append((alike, begun[alike : alike + _QUOTED], len(marks)))
    return {"text": text, "spans": spans, "beginnings": beginnings}


def _render_once(
    template: jinja2.Template, turns: list[Any], asks: bool, values: dict[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    random.seed(0)  # jinja's `random` then picks the same for the same turns
    blocks: list[str] = []
    spans: list[tuple[int, int]] = []
    marks = next(e for e in template.environment.extensions.values() if isinstance(e, _Marks))
    marks.blocks, marks.spans = blocks, spans
    blocks.extend(template.generate(messages=turns, add_generation_prompt=asks, **values))
    return "".join(blocks), spans


def _count_alike(first: str, second: str) -> int:
    """Return how many characters at the beginning of both texts are equal."""
    most = range(1, min(len(first), len(second)) + 1)
    return bisect_left(most, True, key=lambda length: first[:length] != second[:length])


class _Marks(Extension):  # type: ignore[misc]  # jinja is not typed here
    """The statement `generation`, which notes where its text begins and ends."""

    tags = {"generation"}  # noqa: RUF012  jinja's own way
    blocks: list[str]
    spans: list[tuple[int, int]]

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a block that calls `_mark` with its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        begin = sum(map(len, self.blocks))
        self.spans.append((begin, begin + len(text)))
        return text


@functools.lru_cache
def _compile(source: str) -> jinja2.Template:
    """Return a compiled chat template. Raises TemplateSyntaxError if it is not valid."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse}
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    return environment.from_string(source)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as it is; jinja's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _clock(date: str | None) -> Callable[[str], str]:
    """Return the function that writes the date of a run, or what time it is now."""

    def write_date(format_: str) -> str:
        moment = datetime.now() if date is None else datetime.fromisoformat(date)
        return moment.strftime(format_)

    return write_date
