"""The commands of a script with what is known put in: variables that it sets, arrays, defaults,
sums, and the few commands that only make paths. Nothing is executed: what is not known stands as it
was written, and is named."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plimsoll.convert.shell import Assignment, Part, Simple, Word, read_script, text_word
from plimsoll.errors import ConfigError

_VARIABLE = re.compile(
    r"(?P<name>\w+|[@*#?$!-])(?:\[(?P<at>[^]]*)\])?(?P<more>:?[-+].*)?", re.DOTALL
)
_NUMBER = r"[A-Za-z_]\w*"
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_DEEPEST = 20
"""Of expansions within expansions."""


class _Unread(str):
    """What stands as it was written: it is not split into words, either."""


@dataclass(frozen=True)
class Expanded:
    """A command's words. line: of the script. unknown: what stands in them as it was written, and
    why."""

    line: int
    words: tuple[str, ...]
    unknown: tuple[str, ...] = ()


@dataclass
class _Scope:
    """What is known while a script is read from its beginning. fixed: what the script does not
    change. unknown: found in the words at hand. set_by: variables, and what is unknown in them.
    again: variables that have had another value before."""

    path: str
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    unknown: dict[str, None] = field(default_factory=dict)
    set_by: dict[str, str] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)


def script_commands(text: str, path: str, given: Mapping[str, str]) -> list[Expanded]:
    """All commands of a script, and those within `bash -c "..."`. given: variables with values that
    the script's own do not change.

    Raises ConfigError as `read_script`.
    """
    scope = _Scope(path, {name: (value,) for name, value in given.items()}, frozenset(given))
    return [*_run(read_script(text, path), scope, 0)]


def _run(commands: Sequence[Simple], scope: _Scope, depth: int) -> Iterator[Expanded]:
    for command in commands:
        before = [_assign(one, scope) for one in command.assignments]
        scope.unknown.clear()
        words = [text for word in command.words for text in _fields(word, scope, depth)]
        if words and words[0] == "read" and command.here is not None:
            _read(words, "".join(_fields(command.here, scope, depth)), scope)
            continue
        if words and command.words:
            own = before if not _declares(words[0]) else []
            yield Expanded(command.line, (*own, *words), tuple(scope.unknown))
        if (inner := _inner(words)) is not None and depth < _DEEPEST:
            yield from _run(read_script(inner, scope.path), scope, depth + 1)


def _declares(word: str) -> bool:
    return word in ("export", "readonly", "local", "declare", "typeset")


def _inner(words: Sequence[str]) -> str | None:
    """The script of `bash -c SCRIPT`, whatever comes before it."""
    for i, word in enumerate(words[:-2]):
        if os.path.basename(word) in ("bash", "sh") and words[i + 1] in ("-c", "-lc"):
            return words[i + 2]
    return None


def _assign(one: Assignment, scope: _Scope) -> str:
    """As text; and it holds from here on."""
    scope.unknown.clear()
    values = tuple(text for word in one.values for text in _fields(word, scope, 0, one.array))
    if not one.array:
        values = ("".join(values),)
    text = f"{one.name}={' '.join(values)}"
    if one.name in scope.fixed:
        return text
    if scope.unknown:
        scope.set_by[one.name] = next(iter(scope.unknown))
    before = scope.values.get(one.name)
    if one.added and before is not None:
        values = before + values if one.array else ("".join(before + values),)
    elif before not in (None, values):
        scope.again.add(one.name)
    scope.values[one.name] = values
    return text


def _read(words: Sequence[str], text: str, scope: _Scope) -> None:
    """`read -r -d '' NAME` of a here-document."""
    names = [word for word in words[1:] if re.fullmatch(_NUMBER, word)]
    if names and names[-1] not in scope.fixed:
        scope.values[names[-1]] = (text.strip(),)


def _fields(word: Word, scope: _Scope, depth: int, split: bool = True) -> list[str]:
    """The words that a word becomes: unquoted expansions are split at white space. split: false in
    an assignment."""
    fields: list[str] = []
    current: str | None = None
    for part in word:
        texts = _texts(part, scope, depth)
        if part.quoted or part.kind == "text" or not split:
            several = part.kind == "variable" and "@" in part.text
            pieces = texts if several and split else [" ".join(texts)]
        else:
            pieces = [piece for text in texts for piece in _split(text)]
            if not pieces:
                continue
        for i, piece in enumerate(pieces):
            if i > 0 and current is not None:
                fields.append(current)
                current = None
            current = (current or "") + piece
    return fields if current is None else [*fields, current]


def _split(text: str) -> list[str]:
    return [text] if isinstance(text, _Unread) else text.split()


def _texts(part: Part, scope: _Scope, depth: int) -> list[str]:
    """What a part stands for; several of an array."""
    if part.kind == "text":
        return [part.text]
    if part.kind == "variable":
        return _variable(part.text, scope, depth)
    if part.kind == "arithmetic":
        return [_arithmetic(part.text, scope)]
    return [_command(part.text, scope, depth)]


def _variable(text: str, scope: _Scope, depth: int) -> list[str]:
    written = "$" + (text if re.fullmatch(_NUMBER, text) else f"{{{text}}}")
    found = _VARIABLE.fullmatch(text)
    if found is None or depth > _DEEPEST:
        return [_left(written, scope, "an expansion of this kind is not read")]
    name, at, more = found["name"], found["at"], found["more"]
    if name == "0":
        return [scope.path]
    values = scope.values.get(name)
    if values is None or (more is not None and more[0] == ":" and not "".join(values)):
        if more is not None and more.lstrip(":")[0] == "-":
            default = text_word(more.lstrip(":")[1:], scope.path)
            return _fields(default, scope, depth + 1, split=False) or [""]
        return [_left(written, scope, f"{name} is set nowhere before")] if values is None else [""]
    if name in scope.set_by:
        scope.unknown[scope.set_by[name]] = None
        values = tuple(map(_Unread, values))
    if name in scope.again:
        scope.unknown[f"${name}: it is set more than once, and the last value counts"] = None
    if at in ("@", "*"):
        return [*values]
    index = int(at) if at is not None and at.isdigit() else 0
    return [values[index]] if index < len(values) else [""]


def _left(written: str, scope: _Scope, why: str) -> str:
    """It stands as it was written."""
    shown = " ".join(written.split())
    scope.unknown[f"{shown if len(shown) < 60 else shown[:57] + '...'}: {why}"] = None
    return _Unread(written)


def _arithmetic(text: str, scope: _Scope) -> str:
    def named(found: re.Match[str]) -> str:
        return "".join(scope.values.get(found[0], (found[0],)))

    known = re.sub(_NUMBER, named, text.replace("$", ""))
    try:
        return str(_number(ast.parse(known.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return _left(f"$(({text}))", scope, "a sum of what is not known")


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_number(left), _number(right))
    raise ValueError("no sum")


def _command(text: str, scope: _Scope, depth: int) -> str:
    """What a command would print, of those that only make paths of others; any other is left."""
    path = _path_of(text, scope, depth) if depth < _DEEPEST else None
    if path is not None:
        return path
    return _left(f"$({text})", scope, "a command, which is not run")


def _path_of(text: str, scope: _Scope, depth: int) -> str | None:
    try:
        commands = read_script(text, scope.path)
    except ConfigError:
        return None
    if len(commands) == 1 and commands[0].here is not None:
        name = "".join(_fields(commands[0].words[0], scope, depth + 1)) if commands[0].words else ""
        here = "".join(_fields(commands[0].here, scope, depth + 1))
        return here.rstrip("\n") if name == "cat" else None
    words = [[t for w in one.words for t in _fields(w, scope, depth + 1)] for one in commands]
    match words:
        case [["dirname", path]]:
            return os.path.dirname(path) or "."
        case [["basename", path]]:
            return os.path.basename(path)
        case [["pwd"]]:
            return str(Path.cwd())
        case [["cd", folder], ["pwd"]] | [["realpath", folder]] | [["readlink", "-f", folder]]:
            return os.path.abspath(folder)
    return None
