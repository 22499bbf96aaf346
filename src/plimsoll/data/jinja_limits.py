"""Compile chat templates, which models bring along, with a limit of work for each rendering.

The environment is transformers' own: jinja's ImmutableSandboxedEnvironment, in which a template
reaches no attribute such as `__class__` and changes no list, with the same filters and functions.
It counts characters: those of each value that a template makes, and those of the template at each
turn of a loop. So endless loops, deep recursion and values that double end in jinja's
SecurityError, at the same place on every machine.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _compile_jinja_template

MOST_WORK = 2**28
"""Characters that one rendering may make: some 2 seconds."""
_LEAST_TURN = 1024
"""Characters that one turn of a loop counts for at least."""
_BYTES_OF_ITEM = 8
_WORK_OF_ITEM = 64
"""Characters that an item counts for which a filter reads."""
_ITEMS = (list, tuple, dict, range, Iterator)
_MOST_ITEMS = 100_000
"""Items that a range may have in jinja's sandbox, and so what a filter of one gives."""
_LARGEST_NUMBER = 10**7
"""The largest number that a function, filter or format may get: most are widths."""
_MULTIPLYING = frozenset(
    {"batch", "center", "expandtabs", "join", "ljust", "replace", "rjust", "slice", "zfill"}
)
"""Functions whose result may be as long as the product of their arguments."""
_WIDE = re.compile(r"\d{7}")
_TURN, _JOIN = "_plimsoll_turn", "_plimsoll_join"


@functools.lru_cache
def compile_template(source: str) -> jinja2.Template:
    """Return a compiled chat template. Raises jinja2.TemplateSyntaxError if it is not valid."""
    return _Limited(_compile_jinja_template("").environment, source).from_string(source)


def begin_rendering(template: jinja2.Template) -> None:
    """Give this thread's next rendering of a template its work; call this before each."""
    environment = template.environment
    assert isinstance(environment, _Limited)
    environment.rendering.work = 0


class _Limited(ImmutableSandboxedEnvironment):  # type: ignore[misc]
    """transformers' environment with limits."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, theirs: jinja2.Environment, source: str) -> None:
        super().__init__(
            trim_blocks=theirs.trim_blocks,
            lstrip_blocks=theirs.lstrip_blocks,
            extensions=[type(extension) for extension in theirs.extensions.values()],
            finalize=self._count,
        )
        self.rendering = threading.local()
        self._turn_work = max(_LEAST_TURN, len(source))
        self.globals.update(theirs.globals)
        self.globals.pop("lipsum", None)  # makes texts of any length
        self._own_turn, self._own_join = self._turn, self._join
        self.globals[_TURN], self.globals[_JOIN] = self._own_turn, self._own_join
        self.filters = {name: self._limit(name, f) for name, f in theirs.filters.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree

    def call(self, context: Any, function: Any, *args: Any, **options: Any) -> Any:
        """Call a function of a template, and count its result."""
        if function is self._own_turn or function is self._own_join:
            return function(*args)
        name = getattr(function, "__name__", "")
        self._check(name, getattr(function, "__self__", None), *args, *options.values())
        return self._count(super().call(context, function, *args, **options))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator, and count its result."""
        if operator == "%" and isinstance(left, str):
            self._check_format(left)
        elif operator == "**" or (operator == "*" and _are_numbers(left, right)):
            too_large = max(_size(left), _size(right)) > _LARGEST_NUMBER
            if too_large or (operator == "**" and right > 64):
                raise SecurityError(f"it computes {left!r:.20} {operator} {right!r:.20}")
        elif operator == "*":
            self._add(_size(left) * _size(right))
        return self._count(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the safe form of str.format, or None for another function."""
        wrapped: Callable[..., str] | None = super().wrap_str_format(value)
        if wrapped is not None:
            self._check_format(str(value.__self__))
        return wrapped

    def _limit(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def limited(*args: Any, **options: Any) -> Any:
            self._check(name, *args, *options.values())
            self._add(sum(_WORK_OF_ITEM * _size(arg) for arg in args if isinstance(arg, _ITEMS)))
            return self._count(function(*args, **options))

        return limited

    def _check(self, name: str, *values: Any) -> None:
        """Refuse large numbers, and count what a multiplying function may make."""
        sizes = [_size(value) for value in values]
        if any(isinstance(value, int) and _size(value) > _LARGEST_NUMBER for value in values):
            raise SecurityError(f"it gives {name} a number over {_LARGEST_NUMBER:,}")
        if name == "format" and values and isinstance(values[0], str):
            self._check_format(values[0])
        product = 1
        for size in sizes if name in _MULTIPLYING else ():
            product *= max(size, 1)
        self._add(product)

    def _check_format(self, pattern: str) -> None:
        if _WIDE.search(pattern) or "*" in pattern:
            raise SecurityError("it formats to a width of millions, or of another value")

    def _turn(self) -> None:
        self._add(self._turn_work)

    def _join(self, *parts: Any) -> str:
        joined = "".join(map(str, parts))
        self._add(len(joined))
        return joined

    def _count(self, value: Any) -> Any:
        if isinstance(value, str):
            self._add(len(value))
        elif isinstance(value, list | tuple | dict):
            self._add(_BYTES_OF_ITEM * len(value))
        return value

    def _add(self, work: int) -> None:
        total = getattr(self.rendering, "work", 0) + work
        self.rendering.work = total
        if total > MOST_WORK:
            raise SecurityError(f"it makes over {MOST_WORK:,} characters, or loops without an end")


class _Counting(NodeTransformer):  # type: ignore[misc]
    """Lets loops count their turns, and `~` call a function whose result is counted."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        turn = nodes.ExprStmt(_call(_TURN, [], node.lineno), lineno=node.lineno)
        node.body = [turn, *node.body]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call(_JOIN, node.nodes, node.lineno)


def _call(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load", lineno=line), args, [], None, None, lineno=line)


def _size(value: Any) -> int:
    if isinstance(value, str | list | tuple | dict):
        return len(value)
    if isinstance(value, int):
        return abs(value)
    return _MOST_ITEMS if isinstance(value, Iterator | range) else 1


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)
