"""The process that renders chat templates; templates.py sends templates and conversations.

Templates see what transformers' `apply_chat_template` gives them: jinja's immutable sandbox, the
same filters and functions, and `{% generation %}` marks. A test compares both. This module imports
only jinja and the standard library, so that the process is small.
"""

from __future__ import annotations

import functools
import json
import math
import random
import signal
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
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
FEW_BEGINNINGS = 4
"""Up to so many beginnings are rendered by themselves."""
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
    followed: dict[tuple[int, bool], tuple[int, str, int]] = {}
    if len(request["beginnings"]) > FEW_BEGINNINGS:
        for asks in {asks for _, asks in request["beginnings"]}:
            followed |= _follow_beginnings(template, turns, asks, values, text)
    beginnings = []
    for length, asks in request["beginnings"]:
        if (length, asks) in followed:
            beginnings.append(followed[length, asks])
            continue
        begun, marks = _render_once(template, turns[:length], asks, values)
        alike = len(begun) if text.startswith(begun) else _count_alike(text, begun)
        beginnings.append((alike, begun[alike : alike + _QUOTED], len(marks)))
    return {"text": text, "spans": spans, "beginnings": beginnings}


def _follow_beginnings(
    template: jinja2.Template, turns: list[Any], asks: bool, values: dict[str, Any], text: str
) -> dict[tuple[int, bool], tuple[int, str, int]]:
    """Return the beginnings that one rendering shows, as `_render` does, by length and `asks`.

    A template is a program without side effects. As long as it has only looked at the first k
    turns, it has written what it writes for these alone. If it then asks for the next turn where an
    iteration of its loop ends, the loop would end there for k turns, and what follows the loop is
    the same for any number of turns, as `_following` has seen.
    """
    follower = _Follower(_marks_of(template))
    try:
        shown, _ = _render_once(template, turns, asks, values)
        followed, _ = _render_once(template, _Turns(turns, follower), asks, values)
    except Exception:  # noqa: BLE001  what refuses some of the turns may take fewer
        return {}
    places, whole = follower.places, len(turns)
    if not template.globals[_CONSTANT] or followed != shown or follower.looked_back:
        return {}
    if whole not in places:
        return {}
    end, marks_before_end = places[whole]
    rest, marks_after = shown[end:], len(follower.marks.spans) - marks_before_end
    common = len(text) if text.startswith(shown) else _count_alike(text, shown)
    found = {}
    for length, (place, marks) in places.items():
        if place > common or length < whole - follower.marks.ended:  # another loop asked for it
            continue
        more = len(rest)
        if not text.startswith(rest, place):
            more = _count_alike(text[place : place + more], rest)
        quoted = rest[more : more + _QUOTED]
        found[length, asks] = (place + more, quoted, marks + marks_after)
    return found


def _render_once(
    template: jinja2.Template, turns: Sequence[Any], asks: bool, values: dict[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    random.seed(0)  # jinja's `random` then picks the same for the same turns
    blocks: list[str] = []
    spans: list[tuple[int, int]] = []
    _marks_of(template).begin(blocks, spans)
    blocks.extend(template.generate(messages=turns, add_generation_prompt=asks, **values))
    return "".join(blocks), spans


def _count_alike(first: str, second: str) -> int:
    """Return how many characters at the beginning of both texts are equal."""
    most = range(1, min(len(first), len(second)) + 1)
    return bisect_left(most, True, key=lambda length: first[:length] != second[:length])


def _marks_of(template: jinja2.Template) -> _Marks:
    return next(e for e in template.environment.extensions.values() if isinstance(e, _Marks))


class _Marks(Extension):  # type: ignore[misc]  # jinja is not typed here
    """The statement `generation`, which notes where its text begins and ends."""

    tags = {"generation"}  # noqa: RUF012  jinja's own way
    blocks: list[str]
    spans: list[tuple[int, int]]
    ended = 0
    """Iterations of the template's last loop that have come to their end."""
    _counted = _length = 0

    def begin(self, blocks: list[str], spans: list[tuple[int, int]]) -> None:
        """Note what is rendered next into these lists."""
        self.blocks, self.spans = blocks, spans
        self.ended = self._counted = self._length = 0

    def place(self) -> int:
        """Return the number of characters that are written."""
        self._length += sum(map(len, self.blocks[self._counted :]))
        self._counted = len(self.blocks)
        return self._length

    def end_iteration(self) -> str:
        """Note the end of an iteration; a template calls it, and writes nothing."""
        self.ended += 1
        return ""

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a block that calls `_mark` with its text."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        begin = self.place()
        self.spans.append((begin, begin + len(text)))
        return text


class _Follower:
    """Notes which turns a template has looked at, and where it asks for the next one.

    Attributes:
        places: By number of turns: the characters and marks that were written when the turn after
            these was last asked for, if an iteration ended there and no later turn was known.
        looked_back: Whether turns were looked at after the loop.
    """

    def __init__(self, marks: _Marks) -> None:
        self.marks = marks
        self.places: dict[int, tuple[int, int]] = {}
        self.looked_back = False
        self._ended = False
        self._known: float = 0

    def look(self, turns: float) -> None:
        """Note that a template has looked at so many turns."""
        self._known = max(self._known, turns)
        self.looked_back |= self._ended

    def ask(self, number: int, yielded: int, last: bool) -> None:
        """Note that the turn of this number, from 0, is asked for after so many iterations."""
        self.places.pop(number, None)
        if self.marks.ended == yielded and self._known <= number:
            self.places[number] = self.marks.place(), len(self.marks.spans)
        self.look(number + 1)
        self._ended |= last


class _Turns(Sequence[Any]):
    """A conversation's turns from one on, which tells a follower how they are looked at."""

    def __init__(self, turns: list[Any], follower: _Follower, first: int = 0) -> None:
        self._turns, self._follower, self._first = turns, follower, first

    def _all(self) -> list[Any]:
        self._follower.look(math.inf)
        return self._turns[self._first :]

    def __bool__(self) -> bool:
        self._follower.look(self._first + 1)
        return len(self._turns) > self._first

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def __eq__(self, other: object) -> bool:
        return self._all() == other

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __iter__(self) -> Iterator[Any]:
        for number in range(self._first, len(self._turns)):
            self._follower.ask(number, number - self._first, last=False)
            yield self._turns[number]
        self._follower.ask(len(self._turns), len(self._turns) - self._first, last=True)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start = index.start or 0
            if index.stop is None and index.step is None and start >= 0:
                return _Turns(self._turns, self._follower, self._first + start)
        elif 0 <= index < len(self._turns) - self._first:
            self._follower.look(self._first + index + 1)
            return self._turns[self._first + index]
        return self._all()[index]


_CONSTANT = " what follows the last loop is constant"
_CALLED = ("raise_exception", "strftime_now", "namespace", "range", "dict")
"""Functions that give the same whenever they are called."""


def _watch_last_loop(template: nodes.Template, end_iteration: nodes.Expr) -> bool:
    """Have the template's last loop tell of the end of each iteration.

    Returns:
        Whether what follows the loop is the same for any number of its iterations.
    """
    loops = [i for i, node in enumerate(template.body) if isinstance(node, nodes.For)]
    if not loops:
        return False
    loop, rest = template.body[loops[-1]], template.body[loops[-1] + 1 :]
    changed = {ref.name for ref in template.find_all(nodes.NSRef)}
    names = {name.name for node in rest for name in _all(node, nodes.Name)}
    read = [get.node for node in rest for get in _all(node, (nodes.Getattr, nodes.Getitem))]
    plain = all(isinstance(of, nodes.Name) and of.name in ("messages", "tools") for of in read)
    called = {call.node for node in rest for call in _all(node, nodes.Call)}
    simple = all(isinstance(f, nodes.Name) and f.name in _CALLED for f in called)
    drawn = any(f.name == "random" for f in template.find_all(nodes.Filter))
    kept = any(name.name in ("cycler", "joiner") for name in template.find_all(nodes.Name))
    end = nodes.Output([end_iteration]).set_lineno(loop.lineno)
    loop.body.append(end.set_environment(template.environment))
    alone = not (loop.else_ or loop.test or loop.recursive)
    return simple and plain and alone and not (names & changed or drawn or kept)


def _all(node: nodes.Node, kind: type[nodes.Node] | tuple[type[nodes.Node], ...]) -> list[Any]:
    return [*node.find_all(kind), *([node] if isinstance(node, kind) else [])]


@functools.lru_cache
def _compile(source: str) -> jinja2.Template:
    """Return a compiled chat template. Raises TemplateSyntaxError if it is not valid."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse}
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    parsed = environment.parse(source)
    marks = next(e for e in environment.extensions.values() if isinstance(e, _Marks))
    constant = _watch_last_loop(parsed, marks.call_method("end_iteration"))
    return environment.from_string(parsed, {_CONSTANT: constant})


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
