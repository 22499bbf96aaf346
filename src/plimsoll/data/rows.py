"""What a row must hold: its columns checked field by field and turned into messages.

Every check raises `RowProblem` with the column's name as it is written in the config. Which columns
a job reads is settled before (spec/columns.py).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from math import inf, isfinite
from types import NoneType

from plimsoll.config.data import COLUMNS, SourceConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.data.pieces import Messages, Tools, tool_name
from plimsoll.data.report import Row, RowProblem, nearest
from plimsoll.errors import ConfigError

ROLES = ("system", "user", "assistant", "tool")
_SHARED_ROLES = {
    **{role: role for role in ROLES},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
"""The names of turns in ShareGPT's form, and in what was made of it, to those of messages."""
OF_EVERY_ROW = tuple(name for name in COLUMNS if name != "tools")
"""The settings of a source that name columns which every row has."""


def check_columns(
    source: SourceConfig,
    present: Collection[str],
    key: str,
    settings: Collection[str] = OF_EVERY_ROW,
) -> None:
    """ConfigError for a column that no row has: that is a wrong setting, not bad rows.

    present: the columns that rows of the source have. settings: of which columns, such as `prompt`.
    """
    for setting, column in missing_columns(source, present, settings):
        raise ConfigError(
            f"`{key}.{setting}: {column}`: no row of {source.path} has a column `{column}`;"
            f" there are {', '.join(f'`{name}`' for name in present)}."
            f"{nearest(column, present)}"
        )


def missing_columns(
    source: SourceConfig, present: Collection[str], settings: Collection[str]
) -> Iterator[tuple[str, str]]:
    """The settings that name a column which is none of those, and the column."""
    for setting in settings:
        column = getattr(source, setting)
        if present and column is not None and column not in present:
            yield setting, column


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


def environment_of(row: Row, column: str | None, known: Collection[str]) -> str:
    """The name of a row's environment, one of the known ones; empty without a column for it: there
    is one or none."""
    if column is None:
        return ""
    name = text_of(row.values, column)
    if name not in known:
        raise RowProblem(
            column,
            f"names no environment: {name!r}.{nearest(name, known)} `environments` has "
            f"{', '.join(known)}",
        )
    return name


def further_columns(row: Row, source: SourceConfig) -> Mapping[str, object]:
    """The columns that the source does not name, where they hold what JSON can: dates, bytes and
    the like are left out, as a run holds all its rows."""
    named = source.columns()
    return {
        name: value
        for name, value in row.values.items()
        if name not in named and value is not None and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, str | bool | int | float)


def label_of(row: Row, column: str) -> bool:
    """A row's label: true or 1 for a desirable response, false or 0 for an undesirable one. pandas
    writes such a column as 1.0 and 0.0 where some of its rows have no label."""
    value = _present(row.values, column)
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
    if turn.get("role") is None and turn.get("from") is not None:
        return _shared_message(turn, place)
    role = _checked_text(_present(turn, "role", place), f"{place}.role")
    if role not in ROLES:
        hint = nearest(role, ROLES)
        raise RowProblem(
            f"{place}.role", f"is `{role}`, which is none of {', '.join(ROLES)}.{hint}"
        )
    if turn.get("tool_calls") and turn.get("content") in (None, ""):
        return {**_without_missing(turn), "content": ""}  # it calls, and says nothing besides
    content = _content(_present(turn, "content", place), f"{place}.content")
    return {**_without_missing(turn), "content": content}


def _shared_message(turn: Mapping[str, object], place: str) -> Mapping[str, object]:
    """A turn of ShareGPT's form, `from` and `value`."""
    name = _checked_text(turn["from"], f"{place}.from")
    if name not in _SHARED_ROLES:
        hint = nearest(name, _SHARED_ROLES)
        known = ", ".join(_SHARED_ROLES)
        raise RowProblem(f"{place}.from", f"is `{name}`, which is none of {known}.{hint}")
    content = _content(_present(turn, "value", place), f"{place}.value")
    further = {k: v for k, v in _without_missing(turn).items() if k not in ("from", "value")}
    return {"role": _SHARED_ROLES[name], "content": content, **further}


def _without_missing(turn: Mapping[str, object]) -> dict[str, object]:
    """A missing key is None in columnar data; templates ask whether a key is there."""
    return {name: value for name, value in turn.items() if value is not None}


def _content(value: object, place: str) -> str:
    """A turn's text; of a list of text parts, as OpenAI's messages may have it, with line breaks
    between them, as vLLM joins them for a template that writes text."""
    if not isinstance(value, list):
        return _checked_text(value, place)
    parts = [_text_part(part, f"{place}[{i}]") for i, part in enumerate(value)]
    return _checked_text("\n".join(parts), place)


def _text_part(part: object, place: str) -> str:
    if not isinstance(part, dict):
        raise RowProblem(place, f"must be a part with type and text, but is {kind_of(part)}")
    kind = part.get("type", "text")
    if kind not in ("text", "input_text", "output_text"):
        raise RowProblem(place, f"is a part of type `{kind}`, and only text is read")
    return _checked_text(_present(part, "text", place), f"{place}.text")


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
        why = f"half of a surrogate pair, U+{ord(value[error.start]):04X}"
        raise RowProblem(field, f"is not valid Unicode: {why}") from error
    return value


def kind_of(value: object) -> str:
    """What JSON calls a value."""
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text"}
    kinds |= {list: "a list", dict: "an object", NoneType: "null"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def order_of(row: Row, column: str | None) -> float | None:
    """The number that a row is drawn by; None without a column for it."""
    if column is None:
        return None
    value = _number(row, column, "a number")
    if not -inf < value < inf:  # NaN is not, either
        raise RowProblem(column, f"is {value}, and rows are drawn by a finite number")
    return float(value)


def limit_of(row: Row, column: str | None, sampling: SamplingConfig) -> int | None:
    """The longest response to a prompt, in tokens, within what `sampling` allows; None without a
    column for it. pandas writes whole numbers as 64.0 where some rows have none."""
    if column is None:
        return None
    value = _number(row, column, "a whole number")
    least, most = max(1, sampling.min_new_tokens), sampling.max_new_tokens
    if value % 1 or not least <= value <= most:  # NaN and infinity, too
        why = f"is {value}, and the longest response is a whole number from {least} to {most:,}"
        raise RowProblem(column, f"{why}, as sampling's min_new_tokens and max_new_tokens say")
    return int(value)


def _number(row: Row, column: str, what: str) -> int | float:
    value = _present(row.values, column)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowProblem(column, f"must be {what}, but is {kind_of(value)}")
    return value
