"""Check the columns of a row, and turn them into messages, labelled steps and other values.

Every check raises `RowProblem` with the column's name as the config writes it. Which columns a job
reads is decided before (resolve/columns.py).

In a row of labelled steps, the prompt is one piece of text and each step another. So a step's
tokens never depend on later text, and the steps of an unfinished response get the same scores as in
the finished response. The score of a step is read at its last token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf, isfinite

import numpy as np

from plimsoll.config.data import COLUMNS, SourceConfig
from plimsoll.config.files import nearest
from plimsoll.config.json_text import parse_json
from plimsoll.config.rollout import SamplingConfig
from plimsoll.data.fields import (
    HISTORY,
    INPUT,
    SYSTEM,
    RawRow,
    RowProblem,
    checked_text,
    is_plain,
    kind_of,
    list_of,
    number_of,
    present,
    text_of,
)
from plimsoll.data.pieces import (
    SYSTEM_ROLES,
    TOOL_ROLES,
    Messages,
    TextPiece,
    Tools,
    drop_marks,
    is_learned,
    tool_name,
)
from plimsoll.data.turns import MARKS, messages_of
from plimsoll.errors import ConfigError, DataError
from plimsoll.records import Floats

INSTRUCTION = "instruction"
"""Alpaca's column of prompts, beside which `input` is a part of the prompt."""
OF_EVERY_ROW = tuple(name for name in COLUMNS if name != "tools")
"""The settings of a source whose column every row must have."""


def check_columns(
    source: SourceConfig,
    present: Collection[str],
    key: str,
    settings: Collection[str] = OF_EVERY_ROW,
) -> None:
    """Raise ConfigError for a column that no row has: the setting is wrong, not the rows.

    Args:
        source: the settings of the source.
        present: the columns that rows of the source have.
        key: the key of the source in the config.
        settings: the settings whose columns are checked, such as `prompt`.
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
    """Yield each setting that names a column which is not present, and the column."""
    for setting in settings:
        column = getattr(source, setting)
        if present and column is not None and column not in present:
            yield setting, column


def turns_field(source: SourceConfig) -> str:
    """Return the column under which a problem with the whole conversation is reported."""
    return source.messages or source.response or source.prompt or ""


def conversation_of(row: RawRow, source: SourceConfig) -> tuple[Messages, Messages]:
    """Return the turns of an SFT row: the prompt, which is not learned, and the turns after it.

    A column of whole conversations gives an empty prompt.
    """
    if source.messages is None:
        assert source.prompt is not None and source.response is not None
        return prompt_turns(row, source.prompt), response_turns(row, source.response)
    return [], turns_of(row, source.messages)


def check_answered(messages: Messages, field: str) -> None:
    """Raise RowProblem for a conversation without an assistant turn that is learned."""
    answers = [turn for turn in messages if turn["role"] == "assistant"]
    if not answers:
        raise RowProblem(field, "has no assistant turn, so nothing to learn from")
    if not any(map(is_learned, answers)):
        raise RowProblem(field, "has no assistant turn that is learned: all are marked otherwise")


def check_unmarked(messages: Messages, field: str) -> None:
    """Raise RowProblem for a turn marked as not to be learned, for jobs that learn all text."""
    for i, turn in enumerate(messages, start=1):
        if turn["role"] == "assistant" and not is_learned(turn):
            raise RowProblem(
                field,
                f"has a turn {i} that is marked as not to be learned ({' or '.join(MARKS)}), and "
                f"`algorithm.learned_tokens: all` learns every turn: set it to `assistant`",
            )


def prompt_of(row: RawRow, source: SourceConfig) -> Messages:
    """Return the prompt of a row as messages. The last is the user's (or a tool's)."""
    if source.messages is None:
        assert source.prompt is not None
        return prompt_turns(row, source.prompt)
    return _asking_turns(row, source.messages)


def sampled_prompt_of(row: RawRow, source: SourceConfig) -> Messages:
    """Return the prompt that is sampled from: as `prompt_of`, or with a last turn to continue.

    That turn is the assistant's, and has text alone.
    """
    column = source.messages or source.prompt
    if column is not None and isinstance(row.values.get(column), list):
        messages = turns_of(row, column)
        if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
            return drop_marks(messages)
    return prompt_of(row, source)


def prompt_turns(row: RawRow, column: str) -> Messages:
    """Return the turns of a column of prompts, after the row's system message if it has one.

    Text becomes a turn of the user, after the turns of `history`. Beside Alpaca's `instruction`,
    the text of `input` follows it in a line of its own. A list of turns must end with the user's
    (or a tool's).
    """
    if isinstance(row.values.get(column), list):
        return _asking_turns(row, column)
    text = _text_or_turns(row, column)
    if column == INSTRUCTION and (further := _text_beside(row, INPUT)):
        text = f"{text}\n{further}"
    return with_system([*_history_turns(row), {"role": "user", "content": text}], row, column)


def _text_beside(row: RawRow, column: str) -> str:
    """Return the text of a column beside the one that is read; "" if it is missing or empty."""
    value = row.values.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return ""
    return checked_text(value, column)


def _history_turns(row: RawRow) -> Messages:
    """Return the turns of `history`: pairs of what the user and the assistant said before."""
    pairs = row.values.get(HISTORY) or []
    texts = [_said(pair) for pair in pairs] if isinstance(pairs, list) else [None]
    if None in texts:
        raise RowProblem(
            HISTORY,
            "is not empty, and no list of [user's text, assistant's text], as it is beside a "
            "prompt of text: write its turns into the prompt, or rename the column",
        )
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text}
        for said in texts
        for role, text in zip(roles, said or (), strict=True)
    ]


def _said(pair: object) -> list[str] | None:
    """Return what was said in a pair of turns; None if it is not two texts."""
    if not isinstance(pair, list) or len(pair) != 2:
        return None
    return pair if all(isinstance(text, str) and text.strip() for text in pair) else None


def response_turns(row: RawRow, column: str) -> Messages:
    """Return the turns of a column of responses. Text becomes one turn of the assistant.

    A list of turns must begin with the assistant's.
    """
    if not isinstance(row.values.get(column), list):
        return [{"role": "assistant", "content": _text_or_turns(row, column)}]
    messages = messages_of(row.values, column)
    if messages[0]["role"] != "assistant":
        raise RowProblem(
            f"{column}[0].role",
            f"is `{messages[0]['role']}`, but a response begins with the assistant's turn: where "
            f"the column holds the prompt too, leave out the column of prompts",
        )
    return messages


def _text_or_turns(row: RawRow, column: str) -> str:
    value = present(row.values, column)
    if not isinstance(value, str):
        raise RowProblem(column, f"must be text or a list of messages, but is {kind_of(value)}")
    return checked_text(value, column)


def _asking_turns(row: RawRow, column: str) -> Messages:
    messages = turns_of(row, column)
    last = messages[-1]["role"]
    if last not in ("user", *TOOL_ROLES):
        raise RowProblem(
            f"{_last_place(row, column)}.role",
            f"is `{last}`, but the last turn of a prompt must be the user's",
        )
    return drop_marks(messages)


def _last_place(row: RawRow, column: str) -> str:
    return f"{column}[{len(list_of(row.values, column, 'messages')) - 1}]"


def turns_of(row: RawRow, column: str) -> Messages:
    """Return the turns of a column, after the row's system message if the row has one."""
    return with_system(messages_of(row.values, column), row, column)


def with_system(messages: Messages, row: RawRow, column: str) -> Messages:
    """Return the messages of a column, after the row's system message if the row has one."""
    system = "" if column == SYSTEM else _text_beside(row, SYSTEM)
    if not system:
        return messages
    in_turns = next((turn["content"] for turn in messages if turn["role"] in SYSTEM_ROLES), None)
    if in_turns is None:
        return [{"role": "system", "content": system}, *messages]
    if in_turns.strip() != system.strip():
        raise RowProblem(
            SYSTEM, f"is another system message than the one in `{column}`: keep one of them"
        )
    return messages


def answer_of(row: RawRow, source: SourceConfig) -> tuple[Messages, Messages]:
    """Return the prompt and the response that is labelled.

    In a column of whole conversations, the response is the assistant's turn at the end.
    """
    prompt, answer = conversation_of(row, source)
    if prompt:
        return prompt, answer
    field, last = turns_field(source), answer[-1]["role"]
    if last != "assistant":
        raise RowProblem(
            f"{_last_place(row, field)}.role",
            f"is `{last}`, but the labelled response must be the assistant's",
        )
    if len(answer) == 1:
        raise RowProblem(field, "has no turn before the response that is labelled")
    return answer[:-1], answer[-1:]


def reference_of(row: RawRow, column: str | None) -> object:
    """Return the reference answer as the row has it; None if there is no column."""
    if column is None:
        return None
    value = present(row.values, column)
    if isinstance(value, float) and not isfinite(value):
        raise RowProblem(column, f"is {value}, which is no answer")
    if isinstance(value, str) or not is_plain(value):
        return checked_text(value, column)
    return value


def environment_of(row: RawRow, column: str | None, known: Collection[str]) -> str:
    """Return the name of a row's environment; "" if there is no column for it.

    Args:
        row: the row.
        column: the column with the name.
        known: the names that a row may have.
    """
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


def plain_columns(row: RawRow, source: SourceConfig) -> tuple[dict[str, object], dict[str, object]]:
    """Return the values of columns that the source names, and of the others, if JSON can hold them.

    Dates, bytes and the like are left out, as a run keeps all its rows in memory.
    """
    columns = source.columns()
    named: dict[str, object] = {}
    others: dict[str, object] = {}
    for name, value in row.values.items():
        if value is not None and is_plain(value):
            (named if name in columns else others)[name] = value
    return named, others


def label_of(row: RawRow, column: str) -> bool:
    """Return a row's label: true or 1 if the response is desirable, false or 0 if it is not.

    pandas writes such a column as 1.0 and 0.0 if some rows have no label.
    """
    value = present(row.values, column)
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    number = f" ({value})" if isinstance(value, int | float) else ""
    raise RowProblem(column, f"must be true, false, 1 or 0, but is {kind_of(value)}{number}")


def tools_of(values: Mapping[str, object], column: str | None) -> Tools:
    """Return a column's tools, each with a name; none if the column is null or an empty list."""
    value = None if column is None else values.get(column)
    if column is None or value is None:
        return ()
    tools = _from_json(value, column) if isinstance(value, str) else value
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
        return parse_json(text)
    except ValueError as error:
        raise RowProblem(column, f"is text, and not valid JSON: {error}") from error


def order_of(row: RawRow, column: str | None) -> float | None:
    """Return the number that a row is sorted by; None if there is no column for it."""
    if column is None:
        return None
    value = number_of(row.values, column, "a number")
    if not -inf < value < inf:  # also false for NaN
        raise RowProblem(column, f"is {value}, and rows are drawn by a finite number")
    return float(value)


def limit_of(row: RawRow, column: str | None, sampling: SamplingConfig) -> int | None:
    """Return the longest response to a prompt, in tokens; None if there is no column for it.

    The limit must be within what `sampling` allows. pandas writes whole numbers as 64.0 if some
    rows have none.
    """
    if column is None:
        return None
    value = number_of(row.values, column, "a whole number")
    least, most = max(1, sampling.min_new_tokens), sampling.max_new_tokens
    if value % 1 or not least <= value <= most:  # also for NaN and infinity
        why = f"is {value}, and the longest response is a whole number from {least} to {most:,}"
        raise RowProblem(column, f"{why}, as sampling's min_new_tokens and max_new_tokens say")
    return int(value)


def steps_of(row: RawRow, column: str) -> list[str]:
    """Return the texts of the steps: at least one, none empty."""
    steps = list_of(row.values, column, "texts")
    return [text_of({place: step}, place) for place, step in _places(column, steps)]


def labels_of(row: RawRow, column: str, steps_column: str) -> Floats:
    """Return the label of each step of the response, 0 (wrong) to 1 (right); shape [steps]."""
    labels = list_of(row.values, column, "labels")
    steps = len(list_of(row.values, steps_column, "texts"))
    if len(labels) != steps:
        raise RowProblem(
            column, f"is of length {len(labels)}, but `{steps_column}` of length {steps}"
        )
    checked = [_label(label, place) for place, label in _places(column, labels)]
    return np.array(checked, dtype=np.float32)


def _places(column: str, values: Sequence[object]) -> list[tuple[str, object]]:
    return [(f"{column}[{i}]", value) for i, value in enumerate(values)]


def _label(value: object, place: str) -> float:
    if not isinstance(value, bool | int | float):
        raise RowProblem(
            place, f"must be true or false, or a number from 0 to 1, but is {kind_of(value)}"
        )
    if not 0 <= value <= 1:  # also false for NaN
        raise RowProblem(place, f"is {value}, and a label is from 0 (wrong) to 1 (right)")
    return float(value)


def step_parts(steps: Sequence[str], separator: str, *, plain: bool) -> list[str]:
    """Return the text of each step, with the separator before all but the first.

    Unless the text is `plain`, white space around a step is left out, as many chat templates strip
    a turn.
    """
    texts = list(steps) if plain else [step.strip() for step in steps]
    return [texts[0], *(separator + text for text in texts[1:])]


def step_pieces(parts: Sequence[str], rendered: Sequence[TextPiece]) -> tuple[TextPiece, ...]:
    """Return the pieces of a rendered prompt and of each step of its answer.

    Nothing comes after the last step.

    Args:
        parts: the texts of the steps, from `step_parts`; the answer is these joined.
        rendered: the pieces of the prompt and the answer.

    Raises:
        DataError: the chat template changed the steps' text.
    """
    text = "".join(piece.text for piece in rendered)
    start = text.rfind("".join(parts))
    if start < 0:
        raise DataError("has steps that the chat template writes in another way")
    spans = pairwise(accumulate(map(len, parts), initial=start))
    return (TextPiece(text[:start]), *(TextPiece(text[a:b], scored=True) for a, b in spans))
