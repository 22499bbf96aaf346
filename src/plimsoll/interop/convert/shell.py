"""Read the commands of a shell script, and expand everything that is known without running it.

tree-sitter's grammar of bash parses the script. Variables, arrays, defaults, sums, here-documents
and a few commands that only make paths are expanded. Text with an unknown value stays unchanged and
is reported. A branch that cannot run is skipped. A branch that may run is read.
"""

from __future__ import annotations

import ast
import itertools
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from plimsoll.errors import ConfigError

_BASH = Language(tree_sitter_bash.language())
_DEEPEST = 20
"""The most nested levels of scripts and substitutions that are read."""
_MOST_CHARACTERS = 1_000_000
"""The most characters of a variable's value or of a word; variables may double themselves."""
_LONGEST_NUMBER = 100
_MOST_COMMANDS = 10_000
"""The most commands that are read; scripts in variables may run each other."""
_NAME = re.compile(r"\$?\{([A-Za-z_]\w*)\}|\$?([A-Za-z_]\w*)")
_OPENING = ("'", '"', "${", "$(", "`", "<<")
_CLOSING = (")", "))", "}", "`", '"')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b", "0": "\0"}
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


class _Unread(str):
    """Text that could not be expanded. It is never split into words."""


@dataclass(frozen=True)
class Expanded:
    """The words of one command.

    Attributes:
        line: Line of the script, from 1.
        words: The words, after expansion.
        unknown: Parts of the words that could not be expanded, each with the reason.
    """

    line: int
    words: tuple[str, ...]
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Piece:
    """A part of a word.

    Attributes:
        texts: The text of the part after expansion; several texts for an array.
        splits: Whether white space in the part separates words.
        array: Whether each text is a separate word, even in quotes.
    """

    texts: Sequence[str]
    splits: bool = False
    array: bool = False


@dataclass
class _Scope:
    """The known variables at one point of a script, which is read from its beginning.

    Attributes:
        path: Name of the script, for messages.
        values: Values of each variable; several for an array.
        fixed: Variables that assignments in the script do not change.
        unknown: Unknown parts of the words that are being read.
        commands: Numbers the commands that were read.
        unknown_in: The unknown part of a variable's value, by the variable's name.
        ambiguous: Variables that may still have an earlier value.
    """

    path: str
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    unknown: dict[str, None] = field(default_factory=dict)
    commands: Iterator[int] = field(default_factory=itertools.count)
    unknown_in: dict[str, str] = field(default_factory=dict)
    ambiguous: set[str] = field(default_factory=set)


def script_commands(text: str, path: str, given: Mapping[str, str]) -> list[Expanded]:
    """Return all commands of a script that may run, including those in `bash -c "..."`.

    Args:
        text: The script.
        path: The script's name, for messages.
        given: Values of variables, which assignments in the script do not change.

    Raises:
        ConfigError: A quote, bracket or here-document is not closed, or the script nests too deep.
    """
    values = {"@": (), "*": (), "#": ("0",), "HOME": (str(Path.home()),), "PWD": (os.getcwd(),)}
    values |= {name: (value,) for name, value in given.items()}
    scope = _Scope(path, values, frozenset(given))
    try:
        return list(_run(_parse(text, path), scope, True, 0))
    except RecursionError as error:
        raise ConfigError(
            f"{path}: its commands are nested too deeply to be read. Give the command itself after "
            "`--`."
        ) from error


def _parse(text: str, path: str) -> Node:
    root = _tree(text.replace("\r\n", "\n").encode("utf-8", "replace"))
    for node in _broken(root):
        opened = node.parent if node.is_missing and node.type in _CLOSING else None
        if node.type == "ERROR" and _text(node).lstrip().startswith(_OPENING):
            opened = node
        if opened is not None:
            raise ConfigError(
                f"{path}:{opened.start_point.row + 1}: what begins here is not closed: "
                f"{_text(opened).strip()[:20]!r}. Give a script that bash reads, or the command "
                "itself after `--`."
            )
    return root


def _tree(source: bytes) -> Node:
    """Return the syntax tree of a script.

    The grammar ignores `$1` in here-documents, and may end an unquoted word at the `$` of a `$NAME`
    in its middle. Such names are put in braces first; then the grammar agrees with bash.
    """
    source = re.sub(rb"\$(\d)", rb"${\1}", source)
    while True:
        root = Parser(_BASH).parse(source).root_node
        names = (re.compile(rb"[A-Za-z_]\w*").match(source, at) for at in _cut_names(root))
        name = next((name for name in names if name is not None), None)
        if name is None:
            return root
        source = b"".join((source[: name.start()], b"{", name[0], b"}", source[name.end() :]))


def _cut_names(node: Node) -> Iterator[int]:
    """Yield the byte positions after words that end in a bare `$`."""
    if node.type == "concatenation" and node.children[-1].type.strip() == "$":
        yield node.end_byte
    for child in node.children:
        yield from _cut_names(child)


def _broken(node: Node) -> Iterator[Node]:
    """Yield the nodes of syntax errors."""
    if node.type == "ERROR" or node.is_missing:
        yield node
    for child in node.children:
        if child.has_error or child.is_missing:
            yield from _broken(child)


def _text(node: Node) -> str:
    return (node.text or b"").decode("utf-8", "replace")


def _run(node: Node, scope: _Scope, certain: bool, depth: int) -> Iterator[Expanded]:
    """Yield the commands of a statement. `certain` says whether the statement surely runs."""
    match node.type:
        case "variable_assignment":
            _assign(node, scope, certain)
        case "command":
            yield from _run_command(node, scope, certain, depth)
        case "if_statement":
            yield from _run_arms(_if_arms(node, scope), scope, certain, depth)
        case "case_statement":
            yield from _run_arms(_case_arms(node, scope), scope, certain, depth)
        case "redirected_statement" if (text := _here_document(node, scope)) is not None:
            words = _command_words(node.child_by_field_name("body"), scope)
            if words[:1] == ["read"] and words[-1].isidentifier():
                if words[-1] not in scope.fixed:
                    scope.values[words[-1]] = (text.strip(),)
            else:
                yield from _run_all(node, scope, certain, depth)
        case _:
            certain = certain and node.type != "do_group"
            yield from _run_all(node, scope, certain, depth)


def _run_all(node: Node, scope: _Scope, certain: bool, depth: int) -> Iterator[Expanded]:
    for child in node.named_children:
        yield from _run(child, scope, certain, depth)


def _run_command(node: Node, scope: _Scope, certain: bool, depth: int) -> Iterator[Expanded]:
    if next(scope.commands) == _MOST_COMMANDS:
        raise ConfigError(
            f"{scope.path}: it runs over {_MOST_COMMANDS:,} commands. Give the command itself "
            "after `--`."
        )
    assignments = [child for child in node.children if child.type == "variable_assignment"]
    prefix = [_assign(child, scope, certain) for child in assignments]
    scope.unknown.clear()
    words = _command_words(node, scope)
    name = node.child_by_field_name("name")
    if assignments and name is not None:
        start = node.start_byte
        gap = (node.text or b"")[assignments[-1].end_byte - start : name.start_byte - start]
        if b"\n" in gap.replace(b"\\\n", b""):  # the grammar reads on to the next line
            prefix = []
    if words:
        line = node.start_point.row + 1
        yield Expanded(line, (*prefix, *words), tuple(scope.unknown))
    for i, word in enumerate(words[:-2]):
        is_shell = os.path.basename(word) in ("bash", "sh") and words[i + 1] in ("-c", "-lc")
        if is_shell and depth < _DEEPEST:
            yield from _run(_parse(words[i + 2], scope.path), scope, certain, depth + 1)
            return


def _command_words(node: Node | None, scope: _Scope) -> list[str]:
    """Return the words of a simple command, without assignments and redirections."""
    if node is None or node.type != "command":
        return []
    nodes = [node.child_by_field_name("name"), *node.children_by_field_name("argument")]
    return [text for word in nodes if word is not None for text in _fields(word, scope)]


def _run_arms(
    arms: Iterable[tuple[bool | None, list[Node]]], scope: _Scope, certain: bool, depth: int
) -> Iterator[Expanded]:
    """Yield the commands of all arms of an `if` or `case` that may run.

    Args:
        arms: (result of the test, statements) of each arm; the result is None if it is unknown.
        scope: The known variables.
        certain: Whether the `if` or `case` surely runs.
        depth: Number of scripts around it.
    """
    ran_before: bool | None = False
    for test, body in arms:
        runs = _both(test, None if ran_before is None else not ran_before)
        for part in body if runs is not False else ():
            yield from _run(part, scope, certain and bool(runs), depth)
        ran_before = True if ran_before or runs else None if None in (ran_before, runs) else False


def _if_arms(node: Node, scope: _Scope) -> Iterator[tuple[bool | None, list[Node]]]:
    clauses = ("elif_clause", "else_clause")
    for arm in (node, *(c for c in node.children if c.type in clauses)):
        at = next((i for i, c in enumerate(arm.children) if c.type in ("then", "else")), 0)
        condition = [c for c in arm.children[:at] if c.is_named]
        body = [c for c in arm.children if c.is_named and c.type not in clauses]
        yield arm.type == "else_clause" or _test(condition, scope), body


def _case_arms(node: Node, scope: _Scope) -> Iterator[tuple[bool | None, list[Node]]]:
    subject = node.child_by_field_name("value")
    value = subject and _known_text(subject, scope)
    for arm in (c for c in node.children if c.type == "case_item"):
        nodes = arm.children_by_field_name("value")
        patterns = [_known_text(pattern, scope) for pattern in nodes]
        matches: bool | None = True
        if "*" not in patterns:
            known = value is not None and None not in patterns
            matches = any(fnmatchcase(value or "", p or "") for p in patterns) if known else None
        yield matches, [c for c in arm.named_children if c not in nodes]


def _known_text(node: Node, scope: _Scope) -> str | None:
    """Return a word's text after expansion without splitting, or None if a part is unknown."""
    scope.unknown.clear()
    text = "".join(_fields(node, scope, split=False))
    return None if scope.unknown else text


def _both(a: bool | None, b: bool | None) -> bool | None:
    return False if a is False or b is False else None if None in (a, b) else True


def _test(condition: Sequence[Node], scope: _Scope) -> bool | None:
    """Return the result of `[ ... ]` or `[[ ... ]]` with one comparison; None if it is unknown."""
    if len(condition) != 1 or condition[0].type != "test_command":
        return None
    expressions = condition[0].named_children
    parts = expressions[0].children if len(expressions) == 1 else []
    signs = ("test_operator", *_COMPARISONS)
    texts = [
        _text(part) if part.type in signs or not part.is_named else _known_text(part, scope)
        for part in parts
        if not part.type.endswith("_expression")
    ]
    if None in texts or len(texts) < len(parts):
        return None
    alike = fnmatchcase if _text(condition[0]).startswith("[[") else operator.eq
    match texts:
        case ["-z", text]:
            return not text
        case ["-n", text]:
            return bool(text)
        case [str(a), "=" | "==", str(b)]:
            return bool(alike(a, b))
        case [str(a), "!=", str(b)]:
            return not alike(a, b)
        case [str(a), str(sign), str(b)] if sign in _COMPARISONS and (a + b).isdigit():
            return _COMPARISONS[sign](int(a), int(b))
    return None


def _assign(node: Node, scope: _Scope, certain: bool) -> str:
    """Set a variable in the scope, unless it is fixed, and return the assignment as text."""
    name_node, value_node = node.child_by_field_name("name"), node.child_by_field_name("value")
    name = "" if name_node is None else _text(name_node)
    scope.unknown.clear()
    is_array = value_node is not None and value_node.type == "array"
    if value_node is None:
        values: tuple[str, ...] = ("",)
    elif is_array:
        values = tuple(t for word in value_node.named_children for t in _fields(word, scope))
    else:
        values = ("".join(_fields(value_node, scope, split=False)),)
    text = f"{name}={' '.join(values)}"
    if name in scope.fixed:
        return text
    if scope.unknown:
        scope.unknown_in[name] = next(iter(scope.unknown))
    before = scope.values.get(name)
    if before is not None and any(child.type == "+=" for child in node.children):
        values = before + values if is_array else ("".join(before + values),)
    _checked_size(values, scope, node)
    if before not in (None, values) and not certain:
        scope.ambiguous.add(name)
    scope.values[name] = values
    return text


def _checked_size(texts: Sequence[str], scope: _Scope, node: Node) -> int:
    """Return how many characters texts have, each counted as one more; ConfigError if too many."""
    size = len(texts) + sum(map(len, texts))
    if size > _MOST_CHARACTERS:
        raise _too_large(scope, node)
    return size


def _too_large(scope: _Scope, node: Node) -> ConfigError:
    return ConfigError(
        f"{scope.path}:{node.start_point.row + 1}: expanded, this has over {_MOST_CHARACTERS:,} "
        "characters, which is no command. Give the command itself after `--`."
    )


def _here_document(node: Node, scope: _Scope) -> str | None:
    """Return the expanded text of a redirected command's here-document; None without one."""
    redirect = next((c for c in node.children if c.type == "heredoc_redirect"), None)
    body = redirect and next((c for c in redirect.children if c.type == "heredoc_body"), None)
    if redirect is None or body is None:
        return None
    starts = [_text(c) for c in redirect.children if c.type == "heredoc_start"]
    if any(mark in start for start in starts for mark in "'\"\\"):
        return _text(body)
    texts = [t for piece in _within(body, scope, 0, "$`\\") for t in piece.texts]
    _checked_size(texts, scope, body)
    text = "".join(texts)
    tabs = any(c.type == "<<-" for c in redirect.children)
    return re.sub(r"(?m)^\t+", "", text) if tabs else text


def _fields(node: Node, scope: _Scope, depth: int = 0, split: bool = True) -> list[str]:
    """Return the words into which a word expands. `split` is False where bash does not split."""
    fields: list[str] = []
    current: str | None = None
    size = 0
    for piece in _pieces(node, scope, depth):
        size += _checked_size(piece.texts, scope, node)
        if size > _MOST_CHARACTERS:
            raise _too_large(scope, node)
        if not split or not (piece.splits or piece.array):
            words = [" ".join(piece.texts)]
        elif piece.splits:
            words = [w for t in piece.texts for w in ([t] if isinstance(t, _Unread) else t.split())]
        else:
            words = list(piece.texts)
        for i, word in enumerate(words):
            if i > 0 and current is not None:
                fields.append(current)
                current = None
            current = (current or "") + word
    return fields if current is None else [*fields, current]


def _pieces(node: Node, scope: _Scope, depth: int) -> Iterator[_Piece]:
    """Yield the parts of an unquoted word."""
    text = _text(node)
    match node.type:
        case "string":
            pieces = list(_within(node, scope, depth, '$`"\\'))
            if not any(piece.array for piece in pieces):
                yield _Piece(("",))  # an empty string is a word, too
            yield from (_Piece(piece.texts, False, piece.array) for piece in pieces)
        case "raw_string":
            yield _Piece((text[1:-1],))
        case "ansi_c_string":
            plain = re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), text[2:-1], flags=re.S)
            yield _Piece((plain,))
        case "concatenation" | "command_name":
            for child in node.children:
                yield from _pieces(child, scope, depth)
        case "comment":
            return
        case _:
            yield from _expansion(node, scope, depth, "")


def _within(node: Node, scope: _Scope, depth: int, escapable: str) -> Iterator[_Piece]:
    """Yield the parts of text in double quotes or of a here-document."""
    source, begin, end = node.text or b"", node.start_byte, node.end_byte
    quotes = node.type == "string"
    at = begin + quotes
    for child in node.named_children:
        if child.type in ("string_content", "heredoc_content"):
            continue
        blanks = len(_text(child)) - len(_text(child).lstrip())  # some tokens begin with them
        if (start := child.start_byte + blanks) > at:
            yield _Piece((_unescape(source[at - begin : start - begin], escapable),))
        yield from _expansion(child, scope, depth, escapable)
        at = child.end_byte
    if end - quotes > at:
        yield _Piece((_unescape(source[at - begin : end - quotes - begin], escapable),))


def _unescape(source: bytes, escapable: str) -> str:
    """Return the text without backslashes before `escapable` characters (if empty, before all)."""

    def plain(match: re.Match[str]) -> str:
        if match[1] == "\n":
            return ""
        return match[1] if not escapable or match[1] in escapable else match[0]

    return re.sub(r"\\(.)", plain, source.decode("utf-8", "replace"), flags=re.S)


def _expansion(node: Node, scope: _Scope, depth: int, escapable: str) -> Iterator[_Piece]:
    """Yield the expansion of `$NAME`, `${...}`, `$(...)` or `$((...))`; other text unchanged."""
    text = _text(node).lstrip()
    if node.type in ("simple_expansion", "expansion") and not text[1:2].isspace():
        yield _variable(node, scope, depth)
    elif node.type == "command_substitution":
        path = _path_of(node, scope) if depth < _DEEPEST else None
        yield _Piece((_keep_command(text, scope) if path is None else path,), splits=True)
    elif node.type == "arithmetic_expansion":
        yield _Piece((_arithmetic(node, scope),), splits=True)
    else:
        literal = text if escapable else _text(node)  # blanks before it stand already in quotes
        yield _Piece((_unescape(literal.encode(), escapable),))


def _variable(node: Node, scope: _Scope, depth: int) -> _Piece:
    parts = [c for c in node.children if c.type.strip() not in ("$", "${", "}")]
    name, index = _name_and_index(parts[0]) if parts else ("", "")
    sign = _text(parts[1]) if len(parts) > 1 else ""
    plain = name.isidentifier() or name.isdigit()
    source = f"${name}" if len(parts) == 1 and plain else _text(node).strip()
    if name in ("@", "*") and sign == ":":
        return _Piece((), splits=True, array=True)  # the script's own arguments: there are none
    if not name or depth > _DEEPEST or sign not in ("", "-", ":-", "+", ":+", "=", ":="):
        why = "an expansion of this kind is not read"
        return _Piece((_keep(source, scope, why),), splits=True)
    values = (scope.path,) if name == "0" else scope.values.get(name)
    is_set = values is not None and (sign[:1] != ":" or bool("".join(values)))
    if sign[-1:] == "+" or (sign and not is_set):
        if is_set is not (sign[-1:] == "+"):
            return _Piece(("",), splits=True)
        default = "".join(t for part in parts[2:] for t in _fields(part, scope, depth + 1, False))
        if sign[-1:] == "=":
            scope.values[name] = (default,)
        return _Piece((default,), splits=True)
    if values is None:
        return _Piece((_keep(source, scope, f"{name} is set nowhere before"),), splits=True)
    if name in scope.unknown_in:
        scope.unknown[scope.unknown_in[name]] = None
        values = tuple(map(_Unread, values))
    if name in scope.ambiguous:
        scope.unknown[f"${name}: it is set more than once, and the last value counts"] = None
    if name in ("@", "*") or index in ("@", "*"):
        return _Piece(values, splits=True, array="@" in (name, index))
    at = int(index) if index.isdigit() else 0
    return _Piece((values[at] if at < len(values) else "",), splits=True)


def _name_and_index(node: Node) -> tuple[str, str]:
    """Return (name, index) of a variable or array element; "" for a missing name or index."""
    if node.type == "subscript":
        name, index = node.child_by_field_name("name"), node.child_by_field_name("index")
        return _text(name) if name else "", _text(index) if index else ""
    return (_text(node).strip(), "") if node.type.endswith("variable_name") else ("", "")


def _keep(source: str, scope: _Scope, why: str) -> str:
    """Return the text unchanged, and report why it is not expanded."""
    short = " ".join(source.split())
    scope.unknown[f"{short if len(short) < 60 else short[:57] + '...'}: {why}"] = None
    return _Unread(source)


def _keep_command(source: str, scope: _Scope) -> str:
    """Return a command's text unchanged, and report its name: its words may be secrets."""
    shown = re.sub(r"(?<=\S)\s+\S.*(?=[)`])", " ...", source.strip(), count=1, flags=re.DOTALL)
    scope.unknown[f"{shown}: a command, which is not run"] = None
    return _Unread(source)


def _arithmetic(node: Node, scope: _Scope) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        held = "".join(scope.values.get(name, (name,)))
        return held if len(held) <= _LONGEST_NUMBER else name

    known = _NAME.sub(value, _text(node).strip()[3:-2])
    try:
        return str(_number(ast.parse(known.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return _keep(_text(node).strip(), scope, "a sum of what is not known")


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_number(left), _number(right))
    raise ValueError("no sum")


def _path_of(node: Node, scope: _Scope) -> str | None:
    """Return the output of a command that only makes a path or is `cat` of a here-document.

    Return None for any other command.
    """
    inner = node.named_children
    if len(inner) == 1 and inner[0].type == "redirected_statement":
        text = _here_document(inner[0], scope)
        words = _command_words(inner[0].child_by_field_name("body"), scope)
        return text.rstrip("\n") if text is not None and words == ["cat"] else None
    commands = [n for c in inner for n in (c.named_children if c.type == "list" else [c])]
    match [_command_words(command, scope) for command in commands]:
        case [["dirname", path]]:
            return os.path.dirname(path) or "."
        case [["basename", path]]:
            return os.path.basename(path)
        case [["pwd"]]:
            return os.getcwd()
        case [["cd", folder], ["pwd"]] | [["realpath", folder]] | [["readlink", "-f", folder]]:
            return os.path.abspath(folder)
    return None
