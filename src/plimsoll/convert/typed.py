"""Options of a command line with the words that follow them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.config.problems import Problem, invalid
from plimsoll.convert.setting import is_option


@dataclass(frozen=True)
class Typed:
    """An option and the words that follow it. name: without dashes."""

    name: str
    words: tuple[str, ...]


def split_flags(words: Sequence[str]) -> tuple[list[Typed], list[Problem]]:
    """The options, each with what follows it; and words that follow none."""
    found: list[tuple[str, list[str]]] = []
    stray: list[Problem] = []
    for word in words:
        if is_option(word):
            name, equals, after = word.partition("=")
            found.append((name.lstrip("-"), [after] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            why = "It follows no flag."
            stray.append(invalid(shlex.quote(word), None, why, "leave it out, or quote the value"))
    return [Typed(name, tuple(values)) for name, values in found], stray


def shown_words(start: str, words: Sequence[str]) -> str:
    """On one line, whatever is in it."""
    quoted = (shlex.quote(word) if word.isprintable() else repr(word) for word in words)
    return " ".join([start, *quoted])
