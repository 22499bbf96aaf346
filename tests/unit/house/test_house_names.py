"""A name of a type has one meaning in the whole source."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "plimsoll"


def type_names(source: str) -> Iterator[str]:
    """Yield the public classes and aliases of types that a module defines."""
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) if name[0].isupper():
                if not name.isupper() and not name.endswith("T"):  # a constant, a type variable
                    yield name


def test_a_type_has_a_name_of_its_own() -> None:
    files = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in type_names(path.read_text()):
            files[name].append(str(path.relative_to(SOURCE)))
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def test_the_search_finds_classes_and_aliases() -> None:
    source = (
        'class Row: ...\nclass _Own: ...\nKind = Literal["a"]\nMOST = 3\nRowT = TypeVar("RowT")\n'
    )
    assert [*type_names(source)] == ["Row", "Kind"]
