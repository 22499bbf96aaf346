"""The house's budget: each package has bounds on lines of code, files and dataclasses.

A line of code holds a token that is no comment, docstring or import. Lower a bound with what was
taken out; raise one only with the reason in docs/decisions.md.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[3] / "src" / "plimsoll"
CONVERTERS = SOURCE.parent / "plimsoll_convert"
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Size(NamedTuple):
    """lines: of code."""

    lines: int
    files: int
    dataclasses: int


BUDGET: dict[str, Size] = {
    ".": Size(323, 4, 12),
    "algorithm": Size(938, 18, 18),
    "cli": Size(969, 7, 1),
    "cluster": Size(1672, 16, 15),
    "commands": Size(2798, 22, 12),
    "config": Size(1756, 19, 6),
    "data": Size(3181, 20, 27),
    "environment": Size(1638, 17, 18),
    "interop": Size(256, 7, 1),
    "jobs": Size(1053, 19, 1),
    "machine": Size(1013, 12, 14),
    "memory": Size(2651, 15, 23),
    "model": Size(3872, 28, 32),
    "page": Size(1301, 11, 7),
    "plimsoll_convert": Size(3561, 20, 11),
    "process": Size(1310, 13, 8),
    "resolve": Size(2033, 19, 13),
    "reward": Size(1404, 18, 11),
    "rl": Size(1713, 17, 19),
    "run": Size(2815, 22, 30),
    "sampler": Size(2285, 24, 13),
    "shapes": Size(721, 5, 10),
    "sync": Size(689, 5, 7),
    "timeline": Size(237, 3, 8),
    "train": Size(1347, 13, 5),
    "trainer": Size(2889, 24, 31),
}
"""At most so much in each package of the house, and in the converters; the files beside the
packages are under `.`."""


def size_of(files: list[Path]) -> Size:
    trees = [(text := path.read_text(encoding="utf-8"), ast.parse(text)) for path in files]
    lines = sum(code_lines(text, tree) for text, tree in trees)
    classes = [n for _, tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    return Size(lines, len(files), sum(map(is_dataclass, classes)))


def code_lines(text: str, tree: ast.Module) -> int:
    left_out = Counter[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or is_text_alone(node):
            assert isinstance(node, ast.stmt) and node.end_lineno is not None
            left_out.update(range(node.lineno, node.end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    held = {
        line
        for token in tokens
        if token.type not in _LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(held - left_out.keys())


def is_text_alone(node: ast.AST) -> bool:
    """Return whether it is a docstring, of a module, class, function or attribute."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def is_dataclass(node: ast.ClassDef) -> bool:
    calls = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(isinstance(d, ast.Name) and d.id == "dataclass" for d in calls)


def sizes() -> dict[str, Size]:
    packages = [p for p in sorted(SOURCE.iterdir()) if (p / "__init__.py").is_file()]
    found = {p.name: size_of(sorted(p.rglob("*.py"))) for p in packages}
    found["plimsoll_convert"] = size_of(sorted(CONVERTERS.rglob("*.py")))
    return {".": size_of(sorted(SOURCE.glob("*.py")))} | found


def test_each_package_is_within_its_budget() -> None:
    found = sizes()
    over = [
        f"{name}: {value} {kind}, and the budget is {bound}"
        for name, size in found.items()
        for kind, value, bound in zip(Size._fields, size, BUDGET[name], strict=True)
        if value > bound
    ]
    assert over == []
    assert found.keys() == BUDGET.keys()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('"""Say what."""\n\nimport os\n\n# why\nX = 1  # this\n"""Of X."""\n', 1),
        ('def f(\n    x,\n):\n    """Say."""\n    return """\n\n"""\n', 6),
        ("from a import (\n    b,\n    c,\n)\n", 0),
    ],
)
def test_lines_of_code_by_hand(text: str, lines: int) -> None:
    assert code_lines(text, ast.parse(text)) == lines


if __name__ == "__main__":
    for package, size in sizes().items():
        print(f"    {package!r}: Size{tuple(size)},")
    print(f"    # in all: {Size(*(sum(column) for column in zip(*sizes().values(), strict=True)))}")
