"""No modules of the source import each other, at the top of a file or within a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src"


def names_of_modules(source: Path) -> dict[str, Path]:
    """Return the file of each module, by its dotted name."""
    files = {".".join(p.relative_to(source).with_suffix("").parts): p for p in source.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


def imported_by(path: Path) -> Iterator[str]:
    """Yield what a file imports when it runs: not what it imports for type checkers alone."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            pending += ast.iter_child_nodes(node)


def imports_of(source: Path) -> Mapping[str, set[str]]:
    """Return the modules that each module imports, lazily or not."""
    modules = names_of_modules(source)
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {n if n in modules else n.rpartition(".")[0] for n in imported_by(path)}
        found[module] = {name for name in names if name in modules and name != module}
    return found


def circle_in(imports: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of a circle of imports; none if there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def test_no_modules_import_each_other() -> None:
    assert circle_in(imports_of(SOURCE)) == []


@pytest.mark.parametrize(
    "text", ["import b", "def f():\n    from b import x", "if True:\n    import b"]
)
def test_a_circle_is_found_wherever_the_import_stands(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text("from a import y")
    assert set(circle_in(imports_of(tmp_path))) == {"a", "b"}


def test_what_types_alone_need_is_no_circle(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("if TYPE_CHECKING:\n    import b")
    (tmp_path / "b.py").write_text("from a import y")
    assert circle_in(imports_of(tmp_path)) == []
