"""The console of a terminal, on which rich draws tables, bars and colours."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from plimsoll.run.output import NOT_PLAIN, Drawn, beneath, safe_text, silence


class Terminal(Console):
    """A rich console whose texts are made safe; rich's own control codes are written as they are.

    It goes on if its output has no reader; rich's console would end the process.
    """

    def __init__(self, stream: TextIO, **more: Any) -> None:
        super().__init__(file=beneath(stream), markup=False, highlight=False, emoji=False, **more)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render an object; a text is made safe before it is fitted into its column."""
        if isinstance(renderable, Text):
            renderable = _safe(renderable)
        for text, style, control in super().render(renderable, options):
            if control:
                yield Segment(text, style, control)
            else:
                yield Segment(safe_text(text), style and style.update_link(None))

    def draw(self, *parts: RenderableType, soft_wrap: bool = False) -> Drawn:
        """Return what is drawn for these objects, each on lines of its own."""
        with self.capture() as capture:
            self.print(*parts, sep="\n", soft_wrap=soft_wrap)
        return Drawn(capture.get().rstrip("\n"))

    def on_broken_pipe(self) -> None:
        """Silence the output."""
        silence(self.file.fileno())


def _safe(text: Text) -> Text:
    """Return a text with all that is not safe escaped, each character in the style that it had."""
    if safe_text(text.plain) == text.plain:
        return text
    ends = [end for match in NOT_PLAIN.finditer(text.plain) for end in match.span()]
    pieces = text.divide(ends)
    for piece in pieces:
        piece.plain = safe_text(piece.plain)
    return text.blank_copy().join(pieces)


def terminal_of(stream: TextIO) -> Terminal | None:
    """Return the console of a stream, or None if the stream is no terminal that can draw."""
    # rich alone would also take FORCE_COLOR for a terminal, and write codes into log files.
    console = Terminal(stream) if stream.isatty() else None
    return None if console is None or console.is_dumb_terminal else console


def standard_terminal() -> Terminal:
    """Return the console of standard output."""
    return Terminal(cast(TextIO, sys.stdout))
