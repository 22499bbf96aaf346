"""All keys of a job's config, with type, default and meaning, from the config's models.

The keys are also written as help text, and a config as YAML.

What a field means is the text below it in the source. Pydantic could read these texts for every
class as the class is made, which takes a quarter of the time of a command that shows none of them.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MultipleOf
from pydantic.fields import FieldInfo

from plimsoll.config.base import Settings
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import Path, write_tree
from plimsoll.errors import ConfigError


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


ANY = "<name>"
"""The placeholder in a key's path for a name that the user chooses."""


@dataclass(frozen=True)
class Key:
    """One key of a config.

    Attributes:
        path: the names from the top of the config.
        kind: which values may be written, in words.
        doc: what the key means.
        default: as YAML; None if the key is required or is a section.
        required: whether a config without the key is refused.
        section: whether it holds keys, not a value.
        choices: the fixed values, if only those may be written.
    """

    path: Path
    kind: str
    doc: str
    default: str | None = None
    required: bool = False
    section: bool = False
    choices: tuple[object, ...] = ()

    @property
    def name(self) -> str:
        """The dotted name."""
        return ".".join(self.path)

    def covers(self, path: Path) -> bool:
        """Return whether `path` is this key."""
        return len(path) == len(self.path) and all(
            mine in (ANY, given) for mine, given in zip(self.path, path, strict=True)
        )


def keys_of(model: type[Settings], above: Path = ()) -> Iterator[Key]:
    """Yield every section and key of a config model, in the order of its fields."""
    texts = [_texts_in(cls.__module__).get(cls.__qualname__, {}) for cls in model.__mro__]
    for name, field in model.model_fields.items():
        # The text below the field, in the class or in the one that it inherits the field from.
        doc = field.description or next((text[name] for text in texts if name in text), "")
        yield from _keys_of_field((*above, name), field, doc)


def find_key(keys: tuple[Key, ...], path: Path) -> Key | None:
    """Return the key at `path`, or None."""
    return next((key for key in keys if key.covers(path)), None)


def below(keys: tuple[Key, ...], section: Path) -> list[Key]:
    """Return the keys directly in a section (`()` is the top level)."""
    depth = len(section)
    return [
        key
        for key in keys
        if len(key.path) == depth + 1
        and all(a in (ANY, b) for a, b in zip(key.path, section, strict=False))
    ]


def _keys_of_field(path: Path, field: FieldInfo, doc: str) -> Iterator[Key]:
    optional, plain = _without_null(field.annotation)
    if forms := _forms(plain):
        yield Key(path, "section", doc, required=field.is_required(), section=True)
        yield from keys_of(forms[0], path)
        yield from _keys_of_entries((*path, ANY), forms[1])
    elif isinstance(plain, type) and issubclass(plain, Settings):
        about = f"{doc}{_default_of_section(field)}"
        yield Key(path, "section", about, required=field.is_required(), section=True)
        # Within an optional section keys are required only once the section is there.
        yield from keys_of(plain, path)
    elif get_origin(plain) is dict:
        yield Key(path, "names", doc, required=field.is_required(), section=True)
        yield from _keys_of_entries((*path, ANY), get_args(plain)[1])
    else:
        kind = _words(plain, tuple(field.metadata)) + (" or null" if optional else "")
        default = None if field.is_required() else show(field.default)
        choices = get_args(plain) if get_origin(plain) is Literal else ()
        yield Key(path, kind, doc, default, required=field.is_required(), choices=choices)


def _forms(annotation: Any) -> tuple[type[Settings], Any] | None:
    """Return both types of a section that holds one entry or several by name; None for others.

    The first is the model of a single entry; the second annotates an entry of several.
    """
    # Beside null pydantic leaves the discriminator around the union.
    union = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(union) not in (Union, UnionType):
        return None
    first, *several = [get_args(a)[0] if get_origin(a) is Annotated else a for a in get_args(union)]
    if isinstance(first, type) and issubclass(first, Settings):
        return first, get_args(several[0])[1]
    return None


def _keys_of_entries(path: Path, entry: Any) -> Iterator[Key]:
    if isinstance(entry, type) and issubclass(entry, Settings):
        yield Key(path, "section", " ".join((entry.__doc__ or "").split()), section=True)
        yield from keys_of(entry, path)
    else:
        yield Key(path, _words(entry, ()), "One option.")


def _default_of_section(field: FieldInfo) -> str:
    """Return a section's default that the keys below do not show, such as a name; else ""."""
    default: object = field.default
    if isinstance(default, Settings) and any(
        below.is_required() for below in type(default).model_fields.values()
    ):
        return f" Default: {show(default.model_dump())}."
    return ""


def _without_null(annotation: Any) -> tuple[bool, Any]:
    """Return whether the value may be null, and the annotation without null.

    A union of several types is returned as it is, with False.
    """
    members = [a for a in get_args(annotation) if a is not NoneType]
    if get_origin(annotation) in (Union, UnionType) and len(members) == 1:
        return True, members[0]
    return False, annotation


def _words(annotation: Any, bounds: tuple[object, ...]) -> str:
    """Return in words which values may be written, such as `integer >= 1`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [
            m for a in arguments[1:] for m in (a.metadata if isinstance(a, FieldInfo) else [a])
        ]
        return _words(arguments[0], (*inner, *bounds))
    if origin in (Union, UnionType):
        return " | ".join(_words(member, ()) for member in arguments)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (list, dict):
        return "list" if origin is list else "mapping"
    if origin is tuple:
        return f"list of {_words(arguments[0], ())}"
    if annotation is Any:
        return "value, list or mapping"
    return f"{_NAMES[annotation]} {' and '.join(_bounds(bounds))}".rstrip()


_NAMES = {bool: "true | false", int: "integer", float: "number", str: "text", NoneType: "null"}


def _bounds(bounds: tuple[object, ...]) -> Iterator[str]:
    for bound in bounds:
        match bound:
            case Gt(gt=limit):
                yield f"> {limit}"
            case Ge(ge=limit):
                yield f">= {limit}"
            case Le(le=limit):
                yield f"<= {limit}"
            case MultipleOf(multiple_of=unit):
                yield f"a multiple of {unit}"


def describe_keys(model: type[Settings], section: str = "", width: int = 100) -> str:
    """Return every key of a job with its type, default and meaning, one paragraph each.

    Args:
        model: the config of the job.
        section: only keys at or below this dotted name, such as `actor.zero`.
        width: the longest line, in characters.

    Raises:
        ConfigError: the section does not exist.
    """
    keys = tuple(keys_of(model))
    path = tuple(section.split(".")) if section else ()
    chosen = [key for key in keys if key.path[: len(path)] == path]
    if not chosen:
        close = difflib.get_close_matches(section, [key.name for key in keys], n=1)
        top = ", ".join(key.name for key in keys if len(key.path) == 1)
        raise ConfigError(
            f"There is no key or section {section!r} to show help for. "
            + (f"Nearest: {close[0]}." if close else f"Sections: {top}.")
        )
    return "\n".join(_paragraph(key, width) for key in chosen)


def dump_config(config: Settings) -> str:
    """Return the config as YAML, every default written out, in the order of the models' fields.

    Loading it gives an equal config.
    """
    return write_tree(config.model_dump(mode="json"))


def _paragraph(key: Key, width: int) -> str:
    if key.section:
        head = f"\n{key.name}:" if len(key.path) == 1 else f"{key.name}:"
    else:
        default = "required" if key.required else f"default {key.default}" if key.default else ""
        head = f"  --{key.name}"
        kind = f"[{'; '.join(part for part in (key.kind, default) if part)}]"
        head += f"  {kind}" if len(head) + 2 + len(kind) <= width else f"\n      {kind}"
    indent = " " * (2 if key.section else 6)
    return "\n".join(
        [head, textwrap.fill(key.doc, width, initial_indent=indent, subsequent_indent=indent)]
    )
