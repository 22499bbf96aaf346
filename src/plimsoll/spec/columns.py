"""Which columns of a source each job reads, and what must agree between them.

Every function yields the problems of one source; name: its dotted key, such as `data.train`.
"""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.data import SourceConfig
from plimsoll.config.problems import Problem, invalid, show

_WHERE = ("path", "name", "split", "limit")
_COLUMNS = tuple(key for key in SourceConfig.model_fields if key not in _WHERE)


def sft_source(name: str, source: SourceConfig) -> Iterator[Problem]:
    """Conversations: `messages`, or `prompt` with `response`; or documents: `text`."""
    yield from _unread(name, source, "messages", "prompt", "response", "tools", "text")
    if source.text is not None:
        yield from _only_text(name, source)
        return
    columns = {"prompt": source.prompt, "response": source.response}
    given = [column for column, value in columns.items() if value is not None]
    if source.messages is not None and given:
        yield invalid(
            f"{name}.messages",
            show(source.messages),
            f"The rows are given two ways: {name}.{given[0]} is set too.",
            f"{name}.messages alone, or {name}.prompt with {name}.response",
            code="data-columns",
        )
    elif source.messages is None and len(given) < 2:
        missing = [column for column in columns if column not in given]
        yield invalid(
            f"{name}.{missing[0]}",
            None,
            f"SFT needs to know where prompt and response are; {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not given.",
            f"{name}.messages: COLUMN, or {name}.prompt: COLUMN with {name}.response: COLUMN, or "
            f"for plain text {name}.text: COLUMN",
            code="data-columns",
        )


def _only_text(name: str, source: SourceConfig) -> Iterator[Problem]:
    columns = {c: getattr(source, c) for c in ("messages", "prompt", "response", "tools")}
    for column, value in columns.items():
        if value is not None:
            yield invalid(
                f"{name}.{column}",
                show(value),
                f"Documents of plain text have no turns, and {name}.text is given.",
                f"{name}.text alone, or leave it out",
                code="data-columns",
            )


def _unread(name: str, source: SourceConfig, *read: str) -> Iterator[Problem]:
    """Columns that are given, and that the job does not look at."""
    for column in _COLUMNS:
        value = getattr(source, column)
        if value is not None and column not in read:
            yield invalid(
                f"{name}.{column}",
                show(value),
                f"This job does not look at it; of the columns it reads {', '.join(read)}.",
                f"leave {name}.{column} out",
                code="data-columns",
            )


def rl_source(name: str, source: SourceConfig) -> Iterator[Problem]:
    """Prompts: `messages` or `prompt`."""
    yield from _unread(name, source, "messages", "prompt", "tools", "reference")
    yield from _prompts(name, source)


def _prompts(name: str, source: SourceConfig) -> Iterator[Problem]:
    if source.messages is not None and source.prompt is not None:
        yield invalid(
            f"{name}.messages",
            show(source.messages),
            f"The prompts are given two ways: {name}.prompt is set too.",
            f"one of {name}.messages and {name}.prompt",
            code="data-columns",
        )
    if source.messages is None and source.prompt is None:
        yield invalid(
            f"{name}.prompt",
            None,
            "There is no column to take prompts from.",
            f"{name}.prompt: COLUMN, or {name}.messages: COLUMN",
            code="data-columns",
        )


def pair_source(name: str, source: SourceConfig, *, margin: bool = False) -> Iterator[Problem]:
    """Pairs: `chosen` and `rejected`, with `prompt` or without, and where asked for a `margin`."""
    more = ("margin",) if margin else ()
    yield from _unread(name, source, "prompt", "tools", "chosen", "rejected", *more)
    for column, value in (("chosen", source.chosen), ("rejected", source.rejected)):
        if value is None:
            yield invalid(
                f"{name}.{column}",
                None,
                "Pairs need to know where the better and the worse response are.",
                f"{name}.chosen: COLUMN with {name}.rejected: COLUMN, and {name}.prompt: COLUMN "
                f"where the responses do not hold the prompt",
                code="data-columns",
            )
    if source.chosen is not None and source.chosen == source.rejected:
        yield invalid(
            f"{name}.rejected",
            show(source.rejected),
            f"It is the same column as {name}.chosen.",
            "the column with the worse response",
            code="data-columns",
        )


def labelled_source(name: str, source: SourceConfig) -> Iterator[Problem]:
    """Labelled responses: `label` beside `messages`, or beside `prompt` and `response`; or pairs,
    whose responses are labelled by being chosen or rejected."""
    if source.label is None and (source.chosen is not None or source.rejected is not None):
        yield from pair_source(name, source)
        return
    yield from _unread(
        name, source, "messages", "prompt", "response", "tools", "label", "chosen", "rejected"
    )
    if source.label is None:
        yield invalid(
            f"{name}.label",
            None,
            "There is no column that says which responses are desirable.",
            f"{name}.label: COLUMN, or for pairs {name}.chosen: COLUMN with {name}.rejected: "
            "COLUMN",
            code="data-columns",
        )
    given = [c for c in ("messages", "prompt", "response") if getattr(source, c) is not None]
    if given not in (["messages"], ["prompt", "response"]):
        yield invalid(
            f"{name}.{given[0]}" if given else f"{name}.prompt",
            show(getattr(source, given[0])) if given else None,
            f"Labelled responses are read from messages, or from prompt and response; "
            f"{' and '.join(given) or 'none of them'} {'is' if len(given) < 2 else 'are'} given.",
            f"{name}.messages: COLUMN, or {name}.prompt: COLUMN with {name}.response: COLUMN",
            code="data-columns",
        )
    for column in ("chosen", "rejected"):
        if getattr(source, column) is not None:
            yield invalid(
                f"{name}.{column}",
                show(getattr(source, column)),
                f"Responses are labelled two ways: {name}.label is given too.",
                f"leave {name}.{column} out, or {name}.label",
                code="data-columns",
            )


def step_source(name: str, source: SourceConfig) -> Iterator[Problem]:
    """Labelled steps: a prompt, `steps` and `labels`."""
    yield from _unread(name, source, "messages", "prompt", "tools", "steps", "labels")
    yield from _prompts(name, source)
    for column, value in (("steps", source.steps), ("labels", source.labels)):
        if value is None:
            yield invalid(
                f"{name}.{column}",
                None,
                "A process reward model needs to know where steps and their labels are.",
                f"{name}.steps: COLUMN with {name}.labels: COLUMN",
                code="data-columns",
            )
