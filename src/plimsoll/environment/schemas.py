"""Tools as JSON schemas: chat templates describe them, and calls are checked against them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match

from plimsoll.data.pieces import tool_name
from plimsoll.errors import ConfigError
from plimsoll.reward.outcome import safe_repr

Tool = Mapping[str, Any]
"""A function's JSON schema: `{"type": "function", "function": {"name", "description",
"parameters"}}`, or the inner mapping alone."""

MAX_CHARACTERS = 200
"""The most characters of a value in a message."""


def tools_by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Return tools by their names. Raises ConfigError if two have one name."""
    named: dict[str, Tool] = {}
    for tool in tools:
        name = tool_name(tool)
        if name in named:
            raise ConfigError(
                f"Two tools are called {name!r}, and a call could mean either: rename one."
            )
        named[name] = tool
    return named


def format_signature(tool: Tool) -> str:
    """Return a tool as one line: `name(argument: type, optional?: type)`."""
    parameters = _parameters(tool)
    required = parameters.get("required", ())
    arguments = [
        f"{name}{'' if name in required else '?'}: {_type_name(schema)}"
        for name, schema in parameters.get("properties", {}).items()
    ]
    return f"{tool_name(tool)}({', '.join(arguments)})"


def _type_name(schema: object) -> str:
    if not isinstance(schema, Mapping):
        return "anything"
    if "enum" in schema:
        return " or ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(map(_type_name, schema["anyOf"]))
    kinds = schema.get("type", "anything")
    name = kinds if isinstance(kinds, str) else " or ".join(kinds)
    inner = f" of {_type_name(schema['items'])}" if "items" in schema else ""
    return f"{name}{inner}{' or null' if schema.get('nullable') else ''}"


def check_tool(tool: Tool) -> None:
    """Raise ConfigError if calls cannot be checked against a tool's parameters."""
    try:
        Draft202012Validator.check_schema(_parameters(tool))
    except SchemaError as error:
        where = "/".join(map(str, error.absolute_path)) or "its top"
        raise ConfigError(
            f"The parameters of the tool {tool_name(tool)!r} are not a JSON schema: at {where}, "
            f"{_cut(error.message)}."
        ) from error


def wrong_arguments(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """Return a phrase on what is wrong with a call's arguments, or None if they fit the schema.

    An argument that the schema does not name is wrong, unless the schema has
    `additionalProperties`.
    """
    validator = _validator(json.dumps(_parameters(tool), sort_keys=True, default=str))
    error = best_match(validator.iter_errors(dict(arguments)))
    return None if error is None else _describe_error(error)


@functools.lru_cache(maxsize=1024)
def _validator(parameters: str) -> Draft202012Validator:
    return Draft202012Validator(_strict(json.loads(parameters)))


def _strict(parameters: dict[str, Any]) -> dict[str, Any]:
    composed = {"allOf", "anyOf", "oneOf", "$ref"} & parameters.keys()
    closed = {} if composed else {"additionalProperties": False}
    strict: dict[str, Any] = _with_null({"properties": {}, **closed, **parameters})
    return strict


def _with_null(schema: Any) -> Any:
    """Return the schema with OpenAPI's `nullable`, which transformers writes, as `anyOf` null."""
    if isinstance(schema, list):
        return [_with_null(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _with_null(value) for key, value in schema.items()}
    if inner.get("nullable") is not True:  # of a parameter by this name it is a schema
        return inner
    return {"anyOf": [{k: v for k, v in inner.items() if k != "nullable"}, {"type": "null"}]}


def _parameters(tool: Tool) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = tool.get("function", tool).get("parameters", {})
    return parameters


def _describe_error(error: ValidationError) -> str:
    place = "".join(f"[{key!r}]" if at else str(key) for at, key in enumerate(error.absolute_path))
    return f"{f'{place}: ' if place else ''}{_cut(error.message)}"


def show_value(value: object) -> str:
    """Return the `repr` of a value, without its middle if it is long."""
    return _cut(safe_repr(value))


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2  # a validator's message begins with the value and ends with why
    return f"{text[:half]} ... {text[-half:]}"
