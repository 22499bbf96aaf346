"""Read what the fields of settings mean: the texts below them in the source.

Pydantic could read them for every class as the class is made, which takes a quarter of the time of
a command that shows none of them.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise


def field_doc(model: type, name: str) -> str:
    """Return the text below a field of a class, or of the class that it inherits the field from."""
    texts = (_texts_in(cls.__module__).get(cls.__qualname__, {}) for cls in model.__mro__)
    return next((text[name] for text in texts if name in text), "")


@cache
def _texts_in(module: str) -> Mapping[str, Mapping[str, str]]:
    """Return the texts of a module's classes, by the class and the field; {} without source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}
    return {name: dict(_texts_of(cls)) for name, cls in _classes_in(tree, "")}


def _classes_in(node: ast.AST, above: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield the classes below a node with their qualified names, such as `outer.<locals>.Inner`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield f"{above}{child.name}", child
            yield from _classes_in(child, f"{above}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield from _classes_in(child, f"{above}{child.name}.<locals>.")


def _texts_of(cls: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(cls.body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                yield name, " ".join(doc.split())
