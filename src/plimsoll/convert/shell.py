"""Shell scripts as text: their simple commands in order, with quotes, here-documents and what would
be expanded told apart. Nothing is executed; expand.py puts in what is known.

Of bash's grammar: words and quotes, comments, line continuations, `NAME=value`, `NAME+=value`,
arrays, here-documents, `$NAME`, `${...}`, `$(...)`, backticks, `$((...))`. Control flow is read
through: commands within `if`, `case`, loops and functions stand in the order of the text, with
marks where branches begin and end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from plimsoll.errors import ConfigError

Kind = Literal["text", "variable", "command", "arithmetic"]


@dataclass(frozen=True)
class Part:
    """A piece of a word. text: as it is; or what stands within `${}`, `$()` or `$(())`. quoted: it
    is not split into words."""

    kind: Kind
    text: str
    quoted: bool = False


Word = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    """`NAME=value`, `NAME+=value` (added), or of an array `NAME=(value ...)`."""

    name: str
    values: tuple[Word, ...]
    added: bool = False
    array: bool = False


@dataclass(frozen=True)
class Simple:
    """A simple command. assignments: before its words, or alone. here: a here-document that it
    reads. line: where it begins, from 1."""

    line: int
    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    here: Word | None = None


@dataclass(frozen=True)
class Mark:
    """Where a branch begins or ends. kind: a reserved word; `not` is `!`; `arm` is a pattern list
    of `case`. words: of `case` what is compared, of `arm` the patterns."""

    kind: str
    words: tuple[Word, ...] = ()


_SEPARATORS = ";|&()\n"
_BLANK = " \t\r"
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "e": "\x1b", "0": "\0"}
_LEADING = {"do", "while", "until", "{", "time", "exec"}
_MARKS = {"if": "if", "then": "then", "elif": "elif", "else": "else", "fi": "fi", "!": "not"}
_LOOPS = {"do", "done"}
_DECLARING = {"export", "readonly", "local", "declare", "typeset"}


def read_script(text: str, name: str) -> list[Simple | Mark]:
    """The simple commands of a script, and the marks between them. name: what messages call it.

    Raises ConfigError with name and line where a quote or bracket is not closed.
    """
    return [*_Reader(text, name).commands()]


def text_word(text: str, name: str) -> Word:
    """A text with what would be expanded in double quotes."""
    return _Reader(text, name).until("", quotes=False)


@dataclass
class _Pending:
    """What was read of a command so far."""

    line: int
    assignments: list[Assignment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    heres: list[Word] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def done(self) -> list[Simple | Mark]:
        """With the marks before it; of nothing, nothing."""
        if not (self.words or self.assignments):
            return [*self.marks]
        here = self.heres[-1] if self.heres else None
        return [*self.marks, Simple(self.line, tuple(self.assignments), tuple(self.words), here)]


@dataclass
class _Reader:
    """Reads a text from `at` on. heres: (delimiter, whether tabs are dropped, and names expanded,
    where it is named, and of which command) of here-documents that begin at the next line."""

    text: str
    name: str
    at: int = 0
    heres: list[tuple[str, bool, bool, int, _Pending]] = field(default_factory=list)
    cases: int = 0

    def commands(self) -> Iterator[Simple | Mark]:
        """All of the text. A command waits for the here-documents that begin after its line."""
        waiting: list[_Pending] = []
        current = _Pending(self._line())
        while self.at < len(self.text):
            self._skip_blank()
            here = self._peek()
            if here in _SEPARATORS:
                arm = self.cases > 0 and self.text.startswith(";;", self.at)
                self._separate()
                waiting.append(current)
                current = _Pending(self._line())
                if here == "\n":
                    yield from self._ended(waiting)
                    waiting, current = [], _Pending(self._line())
                if arm:
                    self._arm(current)
            elif here == "#":
                self._to_line_end()
            elif here in "<>":
                self._redirect(current)
            else:
                self._word_or_assignment(current)
        yield from self._ended([*waiting, current])

    def _ended(self, waiting: list[_Pending]) -> Iterator[Simple | Mark]:
        for delimiter, tabs, expanded, begun, owner in self.heres:
            owner.heres.append(self._here_document(delimiter, tabs, expanded, begun))
        self.heres.clear()
        yield from (done for one in waiting for done in one.done())

    def _separate(self) -> None:
        """Over one or more of `;`, `&&`, `(`, ...; of `((...))` all of it."""
        if self.text.startswith("((", self.at):
            self.at += 2
            self._balanced("))", "((")
        elif self._peek() == "&" and self.text[self.at + 1 : self.at + 2] == ">":
            self.at += 1  # a redirection of both streams
        else:
            self.at += 1

    def _word_or_assignment(self, current: _Pending) -> None:
        found = _ASSIGNED.match(self.text, self.at)
        declares = bool(current.words) and _plain(current.words[0]) in _DECLARING
        if found and (not current.words or declares):
            self.at = found.end()
            current.assignments.append(self._assigned(found[1], found[2] == "+"))
            return
        word = self._word()
        redirects = self._peek() in ("<", ">") and all(part.kind == "text" for part in word)
        if redirects and _plain(word).isdigit():
            return  # of a redirection, such as 2>&1
        self._take(word, current)

    def _take(self, word: Word, current: _Pending) -> None:
        """A word of a command; or one that is reserved where a command begins."""
        name = _plain(word) if not current.words and not any(p.quoted for p in word) else ""
        if name in _MARKS:
            current.marks.append(Mark(_MARKS[name]))
        elif name == "case":
            self._case(current)
        elif name == "esac" and self.cases:
            self.cases -= 1
            current.marks.append(Mark("esac"))
        elif name in _LOOPS:
            current.marks.append(Mark(name))
        elif name not in _LEADING:
            current.words.append(word)

    def _case(self, current: _Pending) -> None:
        """`case WORD in`, up to the end of the first patterns."""
        self._skip_blank()
        current.marks.append(Mark("case", (self._word(),)))
        self._skip_blank()
        self._word()
        self.cases += 1
        self._arm(current)

    def _arm(self, current: _Pending) -> None:
        """Patterns up to `)`, or `esac`."""
        self.at += self.text.startswith(";", self.at)
        patterns: list[Word] = []
        while self.at < len(self.text) and self._peek() != ")":
            if self._peek() in _BLANK + "\n|(;":
                self.at += 1
            elif self._peek() == "#":
                self._to_line_end()
            elif (word := self._word()) and _plain(word) == "esac" and not patterns:
                self.cases -= 1
                current.marks.append(Mark("esac"))
                return
            else:
                patterns.append(word)
        self.at += 1
        current.marks.append(Mark("arm", tuple(patterns)))

    def _assigned(self, name: str, added: bool) -> Assignment:
        if self._peek() != "(":
            return Assignment(name, (self._word(),), added)
        self.at += 1
        begun, values = self.at, []
        while self._peek() != ")":
            if self.at >= len(self.text):
                raise self._unclosed("(", begun)
            if self._peek() in _BLANK + "\n":
                self.at += 1
            elif self._peek() == "#":
                self._to_line_end()
            else:
                values.append(self._word())
        self.at += 1
        return Assignment(name, tuple(values), added, array=True)

    def _redirect(self, current: _Pending) -> None:
        if not self.text.startswith("<<", self.at) or self.text.startswith("<<<", self.at):
            while self._peek() in "<>&|" and self.at < len(self.text):
                self.at += 1
            self._skip_blank()
            self._word()
            return
        begun, self.at = self.at, self.at + 2
        tabs = self._peek() == "-"
        self.at += tabs
        self._skip_blank()
        word = self._word()
        expanded = not any(part.quoted for part in word)
        self.heres.append((_plain(word), tabs, expanded, begun, current))

    def _here_document(self, delimiter: str, tabs: bool, expanded: bool, begun: int) -> Word:
        lines: list[str] = []
        while self.at < len(self.text):
            end = self.text.find("\n", self.at)
            line = self.text[self.at :] if end < 0 else self.text[self.at : end]
            self.at = len(self.text) if end < 0 else end + 1
            line = line.lstrip("\t") if tabs else line
            if line.rstrip("\r") == delimiter:
                text = "".join(f"{one}\n" for one in lines)
                return text_word(text, self.name) if expanded else (Part("text", text, True),)
            lines.append(line)
        raise self._unclosed(f"<<{delimiter}", begun)

    def _word(self) -> Word:
        begun = self.at
        word = self.until(_BLANK + _SEPARATORS + "<>", quotes=True)
        if self.at == begun:  # a character that begins no word
            self.at += 1
        return word

    def until(self, ends: str, *, quotes: bool) -> Word:
        """One word, up to one of these characters, or to the end of the text. quotes: without them
        it is text within double quotes, or of a here-document."""
        parts: list[Part] = []
        while self.at < len(self.text) and self._peek() not in ends:
            here = self._peek()
            if here == "\\":
                parts += self._escaped(quotes, special='$`"\\' if ends else "$`\\")
            elif here in "'\"" and quotes:
                parts += self._quoted(here)
            elif here == "$":
                parts += self._dollar(quotes)
            elif here == "`":
                self.at += 1
                parts.append(Part("command", self._balanced("`", ""), not quotes))
            else:
                parts.append(Part("text", here, not quotes))
                self.at += 1
        return _joined(parts)

    def _escaped(self, quotes: bool, special: str) -> list[Part]:
        following = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        if following == "\n":
            return []
        if self.text.startswith("\r\n", self.at - 1):
            self.at += 1
            return []
        if not quotes and following not in special:
            return [Part("text", f"\\{following}", True)]
        return [Part("text", following, True)]

    def _quoted(self, quote: str) -> list[Part]:
        begun = self.at
        self.at += 1
        if quote == "'":
            end = self.text.find("'", self.at)
            if end < 0:
                raise self._unclosed(quote, begun)
            text, self.at = self.text[self.at : end], end + 1
            return [Part("text", text, True)]
        found = self.until('"', quotes=False)
        if self._peek() != '"':
            raise self._unclosed(quote, begun)
        self.at += 1
        return [Part("text", "", True), *found]  # "" is a word, too

    def _dollar(self, quotes: bool) -> list[Part]:
        begun, quoted = self.at, not quotes
        if self.text.startswith("$((", self.at):
            self.at += 3
            return [Part("arithmetic", self._balanced("))", "("), quoted)]
        if self.text.startswith("$(", self.at):
            self.at += 2
            return [Part("command", self._balanced(")", "("), quoted)]
        if self.text.startswith("${", self.at):
            self.at += 2
            return [Part("variable", self._balanced("}", "{"), quoted)]
        if self.text.startswith("$'", self.at) and quotes:
            self.at += 2
            return [Part("text", self._c_string(begun), True)]
        if found := _NAME.match(self.text, self.at + 1):
            self.at = found.end()
            return [Part("variable", found[0], quoted)]
        self.at += 1
        return [Part("text", "$", quoted)]

    def _c_string(self, begun: int) -> str:
        text = ""
        while (here := self._peek()) != "'":
            if not here:
                raise self._unclosed("$'", begun)
            if here == "\\":
                self.at += 1
                text += _ESCAPES.get(self._peek(), f"\\{self._peek()}")
            else:
                text += here
            self.at += 1
        self.at += 1
        return text

    def _balanced(self, close: str, opening: str) -> str:
        """The text up to a closing bracket, and over it."""
        begun, depth = self.at, 0
        while self.at < len(self.text):
            if depth == 0 and self.text.startswith(close, self.at):
                text = self.text[begun : self.at]
                self.at += len(close)
                return text
            here = self._peek()
            if here == "\\":
                self.at += 1
            elif opening and here in opening[0]:
                depth += 1
            elif opening and here == _CLOSING[opening[0]]:
                depth -= 1
            self.at += 1
        raise self._unclosed(close, begun)

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _skip_blank(self) -> None:
        while self.at < len(self.text):
            if self._peek() in _BLANK:
                self.at += 1
            elif self.text.startswith(("\\\n", "\\\r\n"), self.at):
                self.at += 2 if self.text.startswith("\\\n", self.at) else 3
            else:
                return

    def _to_line_end(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _unclosed(self, what: str, begun: int) -> ConfigError:
        line = self.text.count("\n", 0, begun) + 1
        return ConfigError(
            f"{self.name}:{line}: what begins here is not closed: {what}. Give a script that bash "
            f"reads, or the command itself after `--`."
        )


_CLOSING = {"(": ")", "{": "}"}


def _plain(word: Word) -> str:
    """A word without what would be expanded."""
    return "".join(part.text for part in word if part.kind == "text")


def _joined(parts: list[Part]) -> Word:
    """With neighbouring characters in one part."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last and (last.kind, last.quoted) == (part.kind, part.quoted) == ("text", last.quoted):
            found[-1] = Part("text", last.text + part.text, last.quoted)
        else:
            found.append(part)
    return tuple(found)
