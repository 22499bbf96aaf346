"""Which columns of a source each job reads, and what must agree between them.

Every function yields the problems of one source; name: its dotted key, such as `data.train`.
"""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.data import SourceConfig
from plimsoll.config.problems import Problem, show


def sft_source(name: str, source: SourceConfig) -> Iterator[Problem]:
    """Conversations: `messages`, or `prompt` with `response`."""
    columns = {"prompt": source.prompt, "response": source.response}
    given = [column for column, value in columns.items() if value is not None]
    if source.messages is not None and given:
        yield Problem(
            f"{name}.messages",
            show(source.messages),
            f"The rows are given two ways: {name}.{given[0]} is set too.",
            f"{name}.messages alone, or {name}.prompt with {name}.response",
            code="data-columns",
        )
    elif source.messages is None and len(given) < 2:
        missing = [column for column in columns if column not in given]
        yield Problem(
            f"{name}.{missing[0]}",
            None,
            f"SFT needs to know where prompt and response are; {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not given.",
            f"{name}.messages: COLUMN, or {name}.prompt: COLUMN with {name}.response: COLUMN",
            code="data-columns",
        )


def rl_source(name: str, source: SourceConfig) -> Iterator[Problem]:
    """Prompts: `messages` or `prompt`."""
    if source.messages is not None and source.prompt is not None:
        yield Problem(
            f"{name}.messages",
            show(source.messages),
            f"The prompts are given two ways: {name}.prompt is set too.",
            f"one of {name}.messages and {name}.prompt",
            code="data-columns",
        )
    if source.messages is None and source.prompt is None:
        yield Problem(
            f"{name}.prompt",
            None,
            "There is no column to take prompts from.",
            f"{name}.prompt: COLUMN, or {name}.messages: COLUMN",
            code="data-columns",
        )


def pair_source(name: str, source: SourceConfig) -> Iterator[Problem]:
    """Pairs: `chosen` and `rejected`, with `prompt` or without."""
    for column, value in (("chosen", source.chosen), ("rejected", source.rejected)):
        if value is None:
            yield Problem(
                f"{name}.{column}",
                None,
                "Pairs need to know where the better and the worse response are.",
                f"{name}.chosen: COLUMN with {name}.rejected: COLUMN, and {name}.prompt: COLUMN "
                f"where the responses do not hold the prompt",
                code="data-columns",
            )
    if source.chosen is not None and source.chosen == source.rejected:
        yield Problem(
            f"{name}.rejected",
            show(source.rejected),
            f"It is the same column as {name}.chosen.",
            "the column with the worse response",
            code="data-columns",
        )
    for column, value in (("messages", source.messages), ("response", source.response)):
        if value is not None:
            yield Problem(
                f"{name}.{column}",
                show(value),
                "Pairs are not read from it, but from their chosen and rejected columns.",
                f"leave {name}.{column} out",
                code="data-columns",
            )
