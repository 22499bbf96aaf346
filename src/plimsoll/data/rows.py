"""What a row must hold: its columns checked field by field and turned into messages.

Every check raises `RowProblem` with the column's name as it is written in the config. Which columns
a job reads is settled before (spec/columns.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from math import isfinite
from types import NoneType

from plimsoll.config.data import SourceConfig
from plimsoll.data.pieces import Messages, Tools, tool_name
from plimsoll.data.report import RowProblem, nearest
from plimsoll.data.sources import Row
from plimsoll.errors import ConfigError

ROLES = ("system", "user", "assistant", "tool")
COLUMNS = tuple(
    name
    for name in SourceConfig.model_fields
    if name not in ("path", "name", "split", "limit", "tools")
)
"""The settings of a source that name columns which every row has."""


def check_columns(
    source: SourceConfig, present: Collection[str], key: str, settings: Collection[str] = COLUMNS
) -> None:
    """ConfigError for a column that no row has: that is a wrong setting, not bad rows.

    present: the columns that rows of the source have. settings: of which columns, such as `prompt`.
    """
    for setting in settings:
        column = getattr(source, setting)
        if present and column is not None and column not in present:
            raise ConfigError(
                f"`{key}.{setting}: {column}`: no row of {source.path} has a column `{column}`;"
                f" there are {', '.join(f'`{name}`' for name in present)}."
                f"{nearest(column, present)}"
            )


def turns_field(source: SourceConfig) -> str:
    """The column that a problem with the whole conversation is reported under."""
    return source.messages or source.response or source.prompt or ""


def conversation_of(row: Row, source: SourceConfig) -> Messages:
    """The messages of an SFT row."""
    if source.messages is None:
        assert source.prompt is not None and source.response is not None
        return [
            {"role": "user", "content": text_of(row.values, source.prompt)},
            {"role": "assistant", "content": text_of(row.values, source.response)},
        ]
    return messages_of(row.values, source.messages)


def check_answered(messages: Messages, field: str) -> None:
    """RowProblem for a conversation without a turn of the assistant's."""
    if not any(turn["role"] == "assistant" for turn in messages):
        raise RowProblem(field, "has no assistant turn, so nothing to learn from")


def prompt_of(row: Row, source: SourceConfig) -> Messages:
    """The messages of an RL row, the last of them the user's (or a tool's)."""
    if source.messages is None:
        assert source.prompt is not None
        return [{"role": "user", "content": text_of(row.values, source.prompt)}]
    messages = messages_of(row.values, source.messages)
    last = messages[-1]["role"]
    if last not in ("user", "tool"):
        raise RowProblem(
            f"{source.messages}[{len(messages) - 1}].role",
            f"is `{last}`, but the last turn of a prompt must be the user's",
        )
    return messages


def answer_of(row: Row, source: SourceConfig) -> tuple[Messages, Messages]:
    """What is asked, and the assistant's turn at the end that is labelled."""
    messages, field = conversation_of(row, source), turns_field(source)
    last = messages[-1]["role"]
    if last != "assistant":
        raise RowProblem(
            f"{field}[{len(messages) - 1}].role",
            f"is `{last}`, but the labelled response must be the assistant's",
        )
    if len(messages) == 1:
        raise RowProblem(field, "has no turn before the response that is labelled")
    return messages[:-1], messages[-1:]


def reference_of(row: Row, column: str | None) -> str | None:
    """The reference answer; a number becomes text."""
    if column is None:
        return None
    value = _present(row.values, column)
    if isinstance(value, float) and not isfinite(value):
        raise RowProblem(column, f"is {value}, which is no answer")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return _checked_text(value, column)


def label_of(row: Row, column: str) -> bool:
    """A row's label: true or 1 for a desirable response, false or 0 for an undesirable one. pandas
    writes such a column as 1.0 and 0.0 where some of its rows have no label."""
    value = row.values.get(column)
    if value is None:
        raise RowProblem(column, "is missing")
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    shown = f" ({value})" if isinstance(value, int | float) else ""
    raise RowProblem(column, f"must be true, false, 1 or 0, but is {kind_of(value)}{shown}")


def messages_of(values: Mapping[str, object], column: str) -> Messages:
    """A column's messages, at least one, each with a known role and text."""
    turns = list_of(values, column, "messages")
    return [_message(turn, f"{column}[{i}]") for i, turn in enumerate(turns)]


def list_of(values: Mapping[str, object], column: str, what: str) -> list[object]:
    """A column's list, not empty; what: is in it."""
    value = _present(values, column)
    if not isinstance(value, list):
        raise RowProblem(column, f"must be a list of {what}, but is {kind_of(value)}")
    if not value:
        raise RowProblem(column, "is empty")
    return value


def _message(turn: object, place: str) -> Mapping[str, object]:
    if not isinstance(turn, dict):
        raise RowProblem(place, f"must be an object with role and content, but is {kind_of(turn)}")
    role = _checked_text(_present(turn, "role", place), f"{place}.role")
    if role not in ROLES:
        hint = nearest(role, ROLES)
        raise RowProblem(
            f"{place}.role", f"is `{role}`, which is none of {', '.join(ROLES)}.{hint}"
        )
    if turn.get("tool_calls") and turn.get("content") is None:
        why = "is missing beside tool_calls: write them into it, as the model's template has them"
        raise RowProblem(f"{place}.content", why)
    _checked_text(_present(turn, "content", place), f"{place}.content")
    # a missing key is None in columnar data; templates ask whether a key is there
    return {name: value for name, value in turn.items() if value is not None}


def tools_of(values: Mapping[str, object], column: str | None) -> Tools:
    """A column's tools, each with a name; none where it is null or an empty list."""
    given = None if column is None else values.get(column)
    if column is None or given is None:
        return ()
    tools = _from_json(given, column) if isinstance(given, str) else _without_nulls(given)
    if not isinstance(tools, list):
        raise RowProblem(column, f"must be a list of tools, but is {kind_of(tools)}")
    for i, tool in enumerate(tools):
        try:
            tool_name(tool)
        except (AttributeError, LookupError, TypeError) as error:
            raise RowProblem(
                f"{column}[{i}]", "must be an object with a `name`, or with one under `function`"
            ) from error
    return tools


def _from_json(text: str, column: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowProblem(column, f"is text, and not valid JSON: {error}") from error


def _without_nulls(value: object) -> object:
    """Columnar data have every key of any tool in all of them, mostly null."""
    if isinstance(value, dict):
        return {key: _without_nulls(held) for key, held in value.items() if held is not None}
    return [_without_nulls(held) for held in value] if isinstance(value, list) else value


def text_of(values: Mapping[str, object], column: str) -> str:
    """A column's text, not empty."""
    return _checked_text(_present(values, column), column)


def _present(values: Mapping[str, object], name: str, place: str = "") -> object:
    value = values.get(name)
    if value is None:
        raise RowProblem(f"{place}.{name}" if place else name, "is missing")
    return value


def _checked_text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise RowProblem(field, f"must be text, but is {kind_of(value)}")
    if not value.strip():
        raise RowProblem(field, "is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        broken = f"U+{ord(value[error.start]):04X}"
        raise RowProblem(field, f"is not valid Unicode: half of a surrogate pair, {broken}") from (
            error
        )
    return value


def kind_of(value: object) -> str:
    """What JSON calls a value."""
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    kinds |= {list: "a list", dict: "an object", NoneType: "null"}
    return kinds.get(type(value), f"a {type(value).__name__}")
