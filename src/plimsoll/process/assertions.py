"""Run assertions about a program in another process than the program's; program_runner.py uses it.

The process of the assertions is the judge. It knows the program by its names alone: a function of
the program is called in the program's process. Plain values (numbers, texts, lists, arrays, ...)
cross as copies, so the judge compares them itself. Other objects stay where they are, and the other
process gets a `Remote` in their place. The program may use a judge's object only as `_is_open`
allows. This module imports only the standard library, because it runs in the sandbox.
"""

from __future__ import annotations

import ast
import builtins
import datetime
import decimal
import fractions
import importlib
import json
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import IO, Any

_ATOMS = (type(None), bool, int, float, str)
_CONTAINERS: dict[str, Callable[[Iterable[Any]], Any]] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset, deque, bytearray, bytes)
}
_MADE: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(complex, range, decimal.Decimal, fractions.Fraction),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta),
    )
}
"""The further types whose values are made again from the arguments that pickle would keep."""
_PLAIN: tuple[Any, ...] = (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
_ARRAYS = "biufcU"  # numpy's kinds of elements that hold no Python objects
_JUDGE = "judge"
"""The module that the classes of assertions are in."""


class _RemoteError(Exception):
    """An error of a type that is not one of Python's own."""


class Peer:
    """One of the two processes, which asks the other and answers it.

    Args:
        reads: Where the other's messages come from; each is a line of JSON.
        writes: Where messages to the other go.
        names: The program's names. None in the judge, which opens only some of its objects.
    """

    def __init__(
        self, reads: IO[bytes], writes: IO[bytes], names: dict[str, Any] | None = None
    ) -> None:
        self._reads, self._writes, self._names = reads, writes, names
        self._kept: list[object] = []  # our objects that the other knows, by number
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}

    def ask(self, what: str, *values: Any, **named: Any) -> Any:
        """Have the other do something with values, and return the result or raise its error.

        The other works on copies of plain values. What it changes in a list or a dictionary that
        is one of `values` is changed here, too.
        """
        self._send(["ask", what, self._pack(values), self._pack(named)])
        while True:
            match self._receive():
                case ["ask", str(asked), given, given_named]:
                    self._answer(asked, self._unpack(given), self._unpack(given_named))
                case ["done", result, changes]:
                    for value, change in zip(values, changes, strict=True):
                        if what == "call" and _is_changeable(value) and change is not None:
                            _overwrite(value, self._unpack(change))
                    return self._unpack(result)
                case ["raised", name, text]:
                    raise _error(name, text)
                case _:
                    raise ConnectionError

    def serve(self) -> None:
        """Answer the other until it is gone."""
        while True:
            try:
                _, what, given, named = self._receive()
            except ConnectionError:
                return
            self._answer(what, self._unpack(given), self._unpack(named))

    def _answer(self, what: str, values: Any, named: Any) -> None:
        before = [_is_changeable(value) and self._pack(value) for value in values]
        try:
            result = self._pack(self._do(what, values, named))
        except BaseException as error:  # noqa: BLE001  it is raised in the other process
            self._send(["raised", type(error).__name__, str(error)])
            return
        after = [_is_changeable(value) and self._pack(value) for value in values]
        changes = [None if a == b else b for a, b in zip(before, after, strict=True)]
        self._send(["done", result, changes])

    def _do(self, what: str, values: Any, named: Any) -> Any:
        if self._names is None and not _is_open(what, *values):
            raise PermissionError(f"the assertions do not open this to the program: {what}")
        match what:
            case "call":
                return values[0](*values[1:], **named)
            case "name":
                return (self._names or {})[values[0]]
            case "plain":
                (value,) = values
                return next((kind(value) for kind in _PLAIN if isinstance(value, kind)), ...)
        function = getattr(operator, what, None) or getattr(builtins, what)
        return function(*values)

    def _pack(self, value: Any) -> Any:
        """Return a value as JSON has it: atoms as they are, all else as [kind, content]."""
        kind = type(value)
        if kind is int and value.bit_length() > 64:  # Python reads no more than 4,300 digits
            return ["int", hex(value)]
        if kind in _ATOMS:
            return value
        if kind.__name__ in _CONTAINERS and _CONTAINERS[kind.__name__] is kind:
            return [kind.__name__, [self._pack(item) for item in value]]
        if kind is dict:
            return ["dict", [[self._pack(a), self._pack(b)] for a, b in value.items()]]
        if kind in _MADE.values():
            arguments = value.__reduce_ex__(4)[1]
            made = arguments[1:] if arguments[0] is kind else arguments
            return [kind.__name__, self._pack(made)]
        if kind is type(...):
            return ["ellipsis", None]
        if kind is Remote and _peer_of(value) is self:
            return ["yours", _number_of(value)]
        if (
            kind.__module__ == "numpy"
            and str(getattr(getattr(value, "dtype", None), "kind", "O")) in _ARRAYS
        ):
            return ["array", [value.dtype.str, self._pack(value.tolist())]]
        if kind is ModuleType:
            return ["module", value.__name__]
        place = (getattr(value, "__module__", None), getattr(value, "__name__", None))
        if self._names is None and _at(*place) is value:
            return ["at", place]  # such as len; never to the judge
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
        return ["mine", self._numbers[id(value)]]

    def _unpack(self, packed: Any) -> Any:
        if not isinstance(packed, list):
            return packed
        kind, content = packed
        match kind:
            case "dict":
                return {self._unpack(a): self._unpack(b) for a, b in content}
            case "ellipsis":
                return ...
            case "yours":
                return self._kept[content]
            case "mine":
                return self._remotes.setdefault(content, Remote(self, content))
            case "at" if self._names is not None:
                importlib.import_module(content[0])
                return _at(*content)
            case "int":
                return int(content, 16)
            case "module":
                return importlib.import_module(content)
            case "array":
                numpy = importlib.import_module("numpy")
                if numpy.dtype(content[0]).kind not in _ARRAYS:
                    raise ConnectionError
                return numpy.array(self._unpack(content[1]), content[0])[()]
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](map(self._unpack, content))
        return _MADE[kind](*self._unpack(content))

    def _send(self, message: object) -> None:
        self._writes.write(json.dumps(message).encode() + b"\n")
        self._writes.flush()

    def _receive(self) -> Any:
        line = self._reads.readline()
        if not line:
            raise ConnectionError
        return json.loads(line)


def _at(module: Any, name: Any) -> Any:
    """Return what a module that is imported here has under a name."""
    return getattr(sys.modules.get(str(module)), str(name), None)


def _is_open(what: str, target: Any = None, name: Any = "_", *_: Any) -> bool:
    """Return whether the program may do something with an object of the judge.

    It may call the assertions' own functions and classes that it was given, and use objects of the
    assertions' own classes, except private attributes.
    """
    if what == "call":
        return getattr(target, "__module__", None) == _JUDGE
    is_public = what not in _ATTRIBUTES or (type(name) is str and not name.startswith("_"))
    return what in _OPERATIONS and type(target).__module__ == _JUDGE and is_public


def _is_changeable(value: object) -> bool:
    return type(value) in (list, dict, set, deque, bytearray)


def _overwrite(value: Any, content: Any) -> None:
    value.clear()
    (value.update if isinstance(value, dict | set) else value.extend)(content)


def _error(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # such as UnicodeDecodeError, which wants five arguments
            pass
    return _RemoteError(f"{name}: {text}")


class Remote:
    """An object of the other process."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Call a function of the other process there."""
        return _peer_of(self).ask("call", self, *values, **named)

    def __getattr__(self, name: str) -> Any:
        return _peer_of(self).ask("getattr", self, name)

    def __instancecheck__(self, value: object) -> Any:
        return _peer_of(self).ask("isinstance", value, self)


def _peer_of(remote: Remote) -> Peer:
    peer: Peer = object.__getattribute__(remote, "_peer")
    return peer


def _number_of(remote: Remote) -> int:
    number: int = object.__getattribute__(remote, "_number")
    return number


_ATTRIBUTES = ("getattr", "setattr", "delattr")
_ARITHMETIC = {
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("and_", "or_", "xor"),
}
_COMPARISONS = {"eq", "lt", "le", "gt", "ge"}
_OPERATIONS = {
    *_ARITHMETIC,
    *_ATTRIBUTES,
    *_COMPARISONS,
    *("hash", "bool", "str", "repr"),
    *("len", "iter", "next", "reversed", "contains", "getitem", "setitem", "delitem"),
    *("neg", "pos", "abs", "invert", "round", "int", "float", "index"),
}


def _forward(operation: str) -> None:
    """Give `Remote` the method of an operation, which the other process does."""
    name = operation.rstrip("_")

    def ask(self: Remote, *values: Any) -> Any:
        return _peer_of(self).ask(operation, self, *values)

    def ask_reflected(self: Remote, value: Any) -> Any:
        return _peer_of(self).ask(operation, value, self)

    setattr(Remote, f"__{name}__", ask)
    if operation in _ARITHMETIC:
        setattr(Remote, f"__r{name}__", ask_reflected)


def _compare(operation: str) -> None:
    """Give `Remote` a comparison; the other process does it if both objects are there."""

    def compare(self: Remote, other: object) -> Any:
        if type(other) is Remote:
            return _peer_of(self).ask(operation, self, other)
        # Else a class whose objects equal everything, or are within every tolerance, would pass.
        value = _peer_of(self).ask("plain", self)
        is_plain = value is not ... and type(value) is not Remote
        return getattr(operator, operation)(value, other) if is_plain else NotImplemented

    setattr(Remote, f"__{operation}__", compare)


for _operation in _OPERATIONS - _COMPARISONS - {"getattr"}:
    _forward(_operation)
for _operation in _COMPARISONS:
    _compare(_operation)


class _Names(dict[str, Any]):
    """The names that assertions see: their own, the program's, Python's, in this order.

    A name of Python's own is the program's only if the assertions use no other name of a program,
    as in `assert sum(1, 2) == 3`. Else a program could give another `set` to its assertions.
    """

    def __init__(self, peer: Peer, text: str) -> None:
        super().__init__(__name__=_JUDGE, __builtins__=builtins)
        self._peer = peer
        used, known = set[str](), set[str]()
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    used.add(name)
                case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                    known.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    known.add(name)
                case ast.alias(name=name, asname=other):
                    known.add(other or name.split(".")[0])
        self._shadows = used - known <= set(dir(builtins))

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) and not self._shadows:
            raise KeyError(name)
        return self._peer.ask("name", name)


def judge(text: str, reads: IO[bytes], writes: IO[bytes]) -> None:
    """Run assertions about the program at the other end; raise an error if one fails."""
    exec(compile(text, "tests", "exec"), _Names(Peer(reads, writes), text))
