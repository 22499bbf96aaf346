from __future__ import annotations

from plimsoll.run.numbers import plural


def test_one_is_one_and_the_rest_are_many() -> None:
    assert [plural(n, "bad row") for n in (0, 1, 2, 4096)] == [
        "0 bad rows",
        "1 bad row",
        "2 bad rows",
        "4,096 bad rows",
    ]
