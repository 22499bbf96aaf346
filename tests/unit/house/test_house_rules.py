"""docs/rules.md explains every code that there is, and no other; and none is without a rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

import plimsoll
from plimsoll.config.problems import Code

SOURCE = Path(plimsoll.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "rules.md"
CODES: tuple[Code, ...] = get_args(Code)


def test_the_page_has_a_line_for_each_code() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line[:3] == "| `"]
    codes = [row[0].split("`")[1] for row in rows]
    assert sorted(codes) == sorted(CODES)
    assert all(len(row) == 4 and all(cell.strip(" |") for cell in row) for row in rows)


@pytest.mark.parametrize("code", sorted(CODES))
def test_a_code_is_some_rules(code: str) -> None:
    files = (file for file in SOURCE.rglob("*.py") if file.name != "problems.py")
    assert any(re.search(rf'"{code}"', file.read_text()) for file in files)
