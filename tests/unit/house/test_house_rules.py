"""docs/rules.md explains every code that a rule gives, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import plimsoll

SOURCE = Path(plimsoll.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "rules.md"
FORM = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+|distillation|vocabulary")
MAKERS = {"Problem": 0, "conflict": None, "invalid": None, "password_in": None}
"""The functions that take a code, and at which place; None: at the last, or by its name."""


def codes_in(tree: ast.AST) -> Iterator[str]:
    """The texts that stand where a code is needed: in calls, and in values of type `Code`."""
    for node in ast.walk(tree):
        found: list[ast.AST | None] = []
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found = [keyword.value for keyword in node.keywords if keyword.arg in ("code", "codes")]
            if name in MAKERS and node.args:
                place = MAKERS[name]
                found.append(node.args[-1 if place is None else place])
        elif isinstance(node, ast.AnnAssign) and "Code" in ast.unparse(node.annotation):
            found = [node.value]
        for value in filter(None, found):
            for text in ast.walk(value):
                if isinstance(text, ast.Constant) and FORM.fullmatch(str(text.value)):
                    yield str(text.value)


def test_the_page_has_a_line_for_each_code() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line[:3] == "| `"]
    assert all(len(row) == 4 and all(cell.strip(" |") for cell in row) for row in rows)
    codes = [row[0].split("`")[1] for row in rows]
    assert len(codes) == len({*codes})
    trees = (ast.parse(file.read_text()) for file in SOURCE.rglob("*.py"))
    assert {*codes} == {code for tree in trees for code in codes_in(tree)}
