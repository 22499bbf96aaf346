"""Render chat templates in a process with limits of time and memory.

A chat template is a program that comes with a model. Jinja's sandbox keeps it from files and from
Python's own objects, but not from endless work: a single filter can make gigabytes, or compare
nested lists for ever. The kernel ends a process. Every template is rendered there, whoever wrote
it. Rows are sent many at a time, so a row costs no more than in the run's own process.
"""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.errors import ConfigError, DataError, PlimsollError
from plimsoll.process.child import HELPER_SECONDS, ChildEnded, helpers
from plimsoll.process.template_runner import CPU_SECONDS, open_templates

MOST_CHARACTERS = 8_000_000
"""The most characters of one conversation as JSON, and of those that are sent at a time."""
_WHAT = "The process that renders chat templates"
_MEMORY_GIB = 0.5
_ENDED_BY_TEMPLATE = {
    -signal.SIGPROF: f"it takes more than {CPU_SECONDS:g} s of the processor",
    -signal.SIGSEGV: "it nests too deeply",
    -signal.SIGABRT: "it needs too much memory",
}


@dataclass(frozen=True)
class Rendering:
    """A rendered conversation."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """The ranges of characters inside the template's generation marks."""
    parts: tuple[tuple[int, str, int], ...]

    def beginnings(self) -> Iterator[tuple[str, int]]:
        """Yield each beginning that was asked for, rendered by itself, and its number of marks.

        A beginning that the text does not begin with is cut some characters after it differs.
        """
        for alike, rest, marks in self.parts:
            yield self.text[:alike] + rest, marks


@dataclass(frozen=True)
class RenderRequest:
    """A conversation that a chat template is to render."""

    template: str
    turns: Sequence[Mapping[str, Any]]
    asks: bool
    """Whether the text ends with the beginning of the assistant's next turn."""
    values: Mapping[str, Any]
    """Further variables of the template."""
    beginnings: Sequence[tuple[int, bool]] = ()
    """Beginnings to render by themselves: the number of their turns, and `asks`."""
    date: str | None = None
    """What `strftime_now` writes, as ISO 8601; None: the time of rendering."""


def check_template(source: str) -> None:
    """Raise ConfigError if a chat template is not valid Jinja."""
    [reply] = _ask(source, ["null"])
    if "syntax" in reply:
        message = f"line {reply['line']}: {reply['syntax']}."
        raise ConfigError(f"The chat template is not valid Jinja, {message}")
    if "refused" in reply:
        raise ConfigError(f"The chat template cannot be compiled: {reply['refused']}.")


def render(requests: Sequence[RenderRequest]) -> list[Rendering | DataError]:
    """Return each conversation as its chat template renders it, or the error that refuses it."""
    results: list[Rendering | DataError] = []
    for source, group in itertools.groupby(requests, key=lambda request: request.template):
        lines = [_encode(request) for request in group]
        replies = iter(_ask_all(source, [line for line in lines if isinstance(line, str)]))
        results += [_result(next(replies)) if isinstance(line, str) else line for line in lines]
    return results


def _encode(request: RenderRequest) -> str | DataError:
    fields = {name: value for name, value in vars(request).items() if name != "template"}
    try:
        line = _ENCODER.encode(fields)
    except (TypeError, ValueError, RecursionError) as error:
        return DataError(f"cannot be given to a chat template: {error}")
    if len(line) > MOST_CHARACTERS:
        return DataError(
            f"has {len(line):,} characters, over the {MOST_CHARACTERS:,} that a chat template gets"
        )
    return line


def _plain(value: object) -> object:
    """Return a value that JSON does not know, such as a date of Parquet, as templates write it."""
    return dict(value) if isinstance(value, Mapping) else str(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=_plain)


def _result(reply: dict[str, Any]) -> Rendering | DataError:
    if "refused" in reply:
        return DataError(f"is refused by the chat template: {reply['refused']}")
    return Rendering(reply["text"], tuple(map(tuple, reply["spans"])), reply["beginnings"])


def _ask_all(source: str, lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the replies to encoded requests, which are sent some megabytes at a time."""
    replies: list[dict[str, Any]] = []
    while len(replies) < len(lines):
        rest = lines[len(replies) :]
        sizes = itertools.accumulate(map(len, rest))
        count = sum(1 for _ in itertools.takewhile(lambda size: size <= MOST_CHARACTERS, sizes))
        replies += _ask(source, rest[:count])
    return replies


def _ask(source: str, lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the replies to the first requests, at least to one.

    If a rendering ends the process, all requests are sent again one by one.
    """
    pool = helpers(open_templates, _WHAT, _MEMORY_GIB, CPU_SECONDS, most=1)
    try:
        message = [source, f"[{','.join(lines)}]"]
        return [json.loads(reply) for reply in pool.ask(message, HELPER_SECONDS)]
    except (ChildEnded, TimeoutError) as error:
        reason = f"it takes more than {HELPER_SECONDS:g} s"
        if isinstance(error, ChildEnded):
            if error.code not in _ENDED_BY_TEMPLATE:
                raise PlimsollError(f"{_WHAT} {error}") from error
            reason = _ENDED_BY_TEMPLATE[error.code]
    if len(lines) == 1:
        return [{"refused": reason}]
    return [reply for line in lines for reply in _ask(source, [line])]
