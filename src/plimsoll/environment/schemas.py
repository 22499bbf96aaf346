"""Tools as JSON schemas: what chat templates are told, and what calls are checked against."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match

from plimsoll.data.pieces import tool_name
from plimsoll.errors import ConfigError

Tool = Mapping[str, Any]
"""A function's JSON schema: `{"type": "function", "function": {"name", "description",
"parameters"}}`, or the inner mapping alone."""

MOST_CHARACTERS = 200
"""Of a value that a sentence shows."""


def function_of(tool: Tool) -> Mapping[str, Any]:
    """The mapping with the name and the parameters."""
    inner: Mapping[str, Any] = tool.get("function", tool)
    return inner


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Raises ConfigError where two have one name."""
    found: dict[str, Tool] = {}
    for tool in tools:
        name = tool_name(tool)
        if name in found:
            raise ConfigError(
                f"Two tools are called {name!r}, and a call could mean either: rename one."
            )
        found[name] = tool
    return found


def written(tool: Tool) -> str:
    """A tool as a line tells it: `name(argument: type, optional?: type)`."""
    parameters = _parameters(tool)
    required = parameters.get("required", ())
    known = parameters.get("properties", {}).items()
    arguments = [f"{name}{'' if name in required else '?'}: {_type(own)}" for name, own in known]
    return f"{tool_name(tool)}({', '.join(arguments)})"


def _type(schema: object) -> str:
    if not isinstance(schema, Mapping):
        return "anything"
    if "enum" in schema:
        return " or ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    kinds = schema.get("type", "anything")
    name = kinds if isinstance(kinds, str) else " or ".join(kinds)
    inner = f" of {_type(schema['items'])}" if "items" in schema else ""
    return f"{name}{inner}{' or null' if schema.get('nullable') else ''}"


def check_tool(tool: object) -> None:
    """Raises ConfigError for what calls cannot be checked against."""
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise ConfigError(
            f"{shown(tool)} is no tool: a JSON schema of a function is needed, with a name, a "
            f"description and parameters."
        )
    parameters = inner.get("parameters", {})
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"The parameters of the tool {inner['name']!r} are no JSON schema.")
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        where = "/".join(map(str, error.absolute_path)) or "its top"
        raise ConfigError(
            f"The parameters of the tool {inner['name']!r} are no JSON schema: at {where}, "
            f"{_cut(error.message)}."
        ) from error
    for reference in _references(parameters):
        if not _leads_somewhere(reference, parameters):
            raise ConfigError(
                f"The parameters of the tool {inner['name']!r} refer to {reference!r}, which is not"
                f" in them: write it into their `$defs`."
            )


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from _references(value)


def _leads_somewhere(reference: str, parameters: Mapping[str, Any]) -> bool:
    place: Any = parameters
    root, *keys = reference.split("/")
    for key in keys:
        if not isinstance(place, Mapping) or key not in place:
            return False
        place = place[key]
    return root == "#"


def wrong_arguments(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a call, in words that a sentence goes on with; None:
    nothing. An argument that the schema does not name is wrong, unless it has
    `additionalProperties`: functions take no others."""
    validator = _validator(json.dumps(_parameters(tool), sort_keys=True, default=str))
    error = best_match(validator.iter_errors(dict(arguments)))
    return None if error is None else _told(error)


@functools.lru_cache(maxsize=1024)
def _validator(parameters: str) -> Draft202012Validator:
    return Draft202012Validator(_strict(json.loads(parameters)))


def _strict(parameters: dict[str, Any]) -> dict[str, Any]:
    composed = {"allOf", "anyOf", "oneOf", "$ref"} & parameters.keys()
    closed = {} if composed else {"additionalProperties": False}
    own: dict[str, Any] = _with_null({"properties": {}, **closed, **parameters})
    return own


def _with_null(schema: Any) -> Any:
    """`nullable` is OpenAPI's, and transformers writes it; a JSON schema says null as a type."""
    if isinstance(schema, list):
        return [_with_null(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _with_null(value) for key, value in schema.items()}
    if inner.get("nullable") is not True:  # of a parameter by this name it is a schema
        return inner
    return {"anyOf": [{k: v for k, v in inner.items() if k != "nullable"}, {"type": "null"}]}


def _parameters(tool: Tool) -> Mapping[str, Any]:
    found: Mapping[str, Any] = function_of(tool).get("parameters", {})
    return found


def _told(error: ValidationError) -> str:
    place = "".join(f"[{key!r}]" if at else str(key) for at, key in enumerate(error.absolute_path))
    return f"{f'{place}: ' if place else ''}{_cut(error.message)}"


def shown(value: object) -> str:
    """As Python writes it, cut where it is long."""
    try:
        return _cut(repr(value))
    except ValueError:  # an integer of over 4,300 digits
        return _cut(object.__repr__(value))


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2  # a validator's message begins with the value and ends with why
    return f"{text[:half]} ... {text[-half:]}"
