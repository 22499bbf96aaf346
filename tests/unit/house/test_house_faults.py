"""notes/reliability.md lists the points, kinds and conditions of faults as the program has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fault_injection.points import ANYWHERE, CONDITIONS, KINDS, POINTS

PAGE = Path(__file__).parents[3] / "notes" / "reliability.md"


def lines() -> Iterator[str]:
    yield from (f"| `{kind}` | {meaning} |" for kind, meaning in KINDS.items())
    yield from (f"| `{key}` | {meaning} |" for key, meaning in CONDITIONS.items())
    for point in POINTS.values():
        more = ", ".join(f"`{kind}`" for kind in point.more_kinds) or "–"
        step = "yes" if point.has_step else "no"
        yield f"| `{point.name}` | {point.process} | {point.meaning} | {more} | {step} |"


def test_the_page_has_each_line_and_no_other() -> None:
    text = PAGE.read_text(encoding="utf-8")
    begin = text.index("## Kinds")
    rows = [line for line in text[begin:].splitlines() if line.startswith("| `")]
    assert rows == [*lines()], "\n".join(lines())
    anywhere = ", ".join(f"`{kind}`" for kind in ANYWHERE)
    assert f"Anywhere: {anywhere}." in text
