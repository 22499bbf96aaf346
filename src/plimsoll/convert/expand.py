"""The commands of a script with what is known put in: variables that it sets, arrays, defaults,
sums, and the few commands that only make paths. Nothing is executed: what is not known stands as it
was written, and is named. Of branches those are left out that what is known rules out."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from plimsoll.convert.shell import Assignment, Mark, Part, Simple, Word, read_script, text_word
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
_REST = re.compile(r"[@*](:\d+)+")
"""The script's arguments from some on: there are none."""
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
class _Branch:
    """An `if`, a `case` or a loop. holds: whether the arm that is read is run; None: not known.
    before: whether one of the arms before it is run. tests: what was read of a condition, while it
    is. value: of `case`, None where it is not known."""

    holds: bool | None = True
    before: bool | None = False
    tests: list[bool | None] | None = None
    value: str | None = None

    def enter(self, test: bool | None) -> None:
        """An arm that is run if no other was and the test holds."""
        self.before = _either(self.before, self.holds if self.tests is None else False)
        self.holds = _both(test, None if self.before is None else not self.before)


def _both(one: bool | None, other: bool | None) -> bool | None:
    return False if one is False or other is False else None if None in (one, other) else True


def _either(one: bool | None, other: bool | None) -> bool | None:
    return True if one or other else None if None in (one, other) else False


@dataclass
class _Scope:
    """What is known while a script is read from its beginning. fixed: what the script does not
    change. unknown: found in the words at hand. set_by: variables, and what is unknown in them.
    again: variables that another value may have come before. branches: those around what is read,
    the innermost last."""

    path: str
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    unknown: dict[str, None] = field(default_factory=dict)
    set_by: dict[str, str] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)
    branches: list[_Branch] = field(default_factory=list)

    @property
    def dead(self) -> bool:
        """Whether what is read is never run."""
        return any(one.holds is False for one in self.branches)

    @property
    def certain(self) -> bool:
        return all(one.holds for one in self.branches)


def script_commands(text: str, path: str, given: Mapping[str, str]) -> list[Expanded]:
    """All commands of a script, and those within `bash -c "..."`. given: variables with values that
    the script's own do not change.

    Raises ConfigError as `read_script`.
    """
    known = {"@": (), "*": (), "#": ("0",), "HOME": (str(Path.home()),), "PWD": (str(Path.cwd()),)}
    values = {name: (value,) for name, value in given.items()}
    scope = _Scope(path, known | values, frozenset(given))
    return [*_run(read_script(text, path), scope, 0)]


def _run(commands: Sequence[Simple | Mark], scope: _Scope, depth: int) -> Iterator[Expanded]:
    for command in commands:
        if isinstance(command, Mark):
            _branch(command, scope)
        elif not scope.dead:
            yield from _command_of(command, scope, depth)


def _command_of(command: Simple, scope: _Scope, depth: int) -> Iterator[Expanded]:
    before = [_assign(one, scope) for one in command.assignments]
    scope.unknown.clear()
    words = [text for word in command.words for text in _fields(word, scope, depth)]
    if scope.branches and scope.branches[-1].tests is not None:
        scope.branches[-1].tests.append(None if scope.unknown else _test(words))
    if words and words[0] == "read" and command.here is not None:
        _read(words, "".join(_fields(command.here, scope, depth)), scope)
        return
    if words and command.words:
        own = before if not _declares(words[0]) else []
        yield Expanded(command.line, (*own, *words), tuple(scope.unknown))
    if (inner := _inner(words)) is not None and depth < _DEEPEST:
        yield from _run(read_script(inner, scope.path), scope, depth + 1)


def _branch(mark: Mark, scope: _Scope) -> None:
    """What follows is of another branch."""
    branches = scope.branches
    if mark.kind == "if":
        branches.append(_Branch(holds=None, tests=[]))
    elif mark.kind == "case":
        scope.unknown.clear()
        value = "".join(_fields(mark.words[0], scope, 0, split=False))
        branches.append(_Branch(holds=False, value=None if scope.unknown else value))
    elif mark.kind == "do":
        branches.append(_Branch(holds=None))
    elif not branches:
        return
    elif mark.kind in ("fi", "esac", "done"):
        branches.pop()
    elif mark.kind == "not" and branches[-1].tests is not None:
        branches[-1].tests.append(None)
    elif mark.kind == "elif":
        branches[-1].before = _either(branches[-1].before, branches[-1].holds)
        branches[-1].holds, branches[-1].tests = None, []
    elif mark.kind == "then":
        tests = branches[-1].tests or [None]
        branches[-1].enter(tests[0] if len(tests) == 1 else None)
        branches[-1].tests = None
    elif mark.kind == "else":
        branches[-1].enter(True)
    elif mark.kind == "arm":
        branches[-1].enter(_matches(mark, branches[-1].value, scope))


def _matches(arm: Mark, value: str | None, scope: _Scope) -> bool | None:
    """Whether one of its patterns is like the value."""
    scope.unknown.clear()
    patterns = ["".join(_fields(word, scope, 0, split=False)) for word in arm.words]
    if "*" in patterns:
        return True
    if value is None or scope.unknown:
        return None
    return any(fnmatchcase(value, pattern) for pattern in patterns)


_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def _test(words: Sequence[str]) -> bool | None:
    """What `[ ... ]` or `[[ ... ]]` of a single comparison says; None of any other command."""
    if not words or (words[0], words[-1]) not in (("[", "]"), ("[[", "]]")):
        return None
    match list(words[1:-1]):
        case ["-z", text]:
            return not text
        case ["-n", text]:
            return bool(text)
        case [one, "=" | "==", other]:
            return fnmatchcase(one, other) if words[0] == "[[" else one == other
        case [one, "!=", other]:
            return not fnmatchcase(one, other) if words[0] == "[[" else one != other
        case [one, sign, other] if sign in _COMPARED and one.isdigit() and other.isdigit():
            return _COMPARED[sign](int(one), int(other))
    return None


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
    if before not in (None, values) and not scope.certain:
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
            several = part.kind == "variable" and "@" in part.text and split
            pieces = texts if several else [" ".join(texts)]
            if not pieces and len(word) <= 2 and not current:
                return []  # "$@" of nothing, and no empty word
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
    if _REST.fullmatch(text):
        return []
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
    if "@" in (at, name) or "*" in (at, name):
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
        commands = [one for one in read_script(text, scope.path) if isinstance(one, Simple)]
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
