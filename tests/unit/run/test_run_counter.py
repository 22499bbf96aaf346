"""A count where there is no terminal."""

from __future__ import annotations

import io

from plimsoll.run.displays import count_lines, counting


def test_a_line_at_every_tenth_and_at_the_end() -> None:
    stream = io.StringIO()
    with counting("rows", 30, stream) as advance:
        for _ in range(30):
            advance(1)
    lines = stream.getvalue().splitlines()
    assert lines == [f"rows {done}/30" for done in range(3, 31, 3)]


def test_without_a_total_a_line_at_every_hundred_thousand() -> None:
    said: list[str] = []
    advance = count_lines("rows read", None, said.append)
    for _ in range(140):
        advance(2048)
    assert said == ["rows read 100,352", "rows read 200,704"]


def test_large_parts_give_a_line_each() -> None:
    stream = io.StringIO()
    with counting("answers", 5, stream) as advance:
        advance(4)
        advance(1)
    assert stream.getvalue() == "answers 4/5\nanswers 5/5\n"
