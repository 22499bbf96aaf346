"""Check the columns that a config names for a source: which of them each kind of job reads.

Every public function yields the problems of one source. `name` is the source's dotted key, such as
`data.train`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.config.data import COLUMNS, SourceConfig
from plimsoll.config.problems import Problem, Section


@dataclass(frozen=True)
class _Columns:
    """The columns of a source; `name` is its dotted key."""

    name: str
    source: SourceConfig

    def select_given(self, *columns: str) -> list[str]:
        """Return the given columns that the source names in its config."""
        return [column for column in columns if getattr(self.source, column) is not None]

    def wrong(self, column: str, why: str, fix: str) -> Problem:
        """Return a problem at the key of a column, given or missing."""
        return Section(self.name, self.source).invalid(column, why, fix, "data-columns")

    def unread(self, *read: str) -> Iterator[Problem]:
        """Yield a problem for each column in the config that is not in `read`."""
        why = f"This job does not look at it; of the columns it reads {', '.join(read)}."
        for column in self.select_given(*COLUMNS):
            if column not in read:
                yield self.wrong(column, why, f"leave {self.name}.{column} out")


def sft_source(name: str, source: SourceConfig) -> Iterator[Problem]:
    """Yield problems of a source of conversations or documents, for SFT.

    Conversations have `messages`, or `prompt` with `response`. Documents have `text`.
    """
    columns = _Columns(name, source)
    yield from columns.unread("messages", "prompt", "response", "tools", "text")
    given = columns.select_given("prompt", "response")
    if source.text is not None:
        why = f"Documents of plain text have no turns, and {name}.text is given."
        for column in columns.select_given(
            "messages", "prompt", "response", "tools", "chat_template"
        ):
            yield columns.wrong(column, why, f"{name}.text alone, or leave it out")
    elif source.messages is not None and given:
        yield columns.wrong(
            "messages",
            f"The rows are given two ways: {name}.{given[0]} is set too.",
            f"{name}.messages alone, or {name}.prompt with {name}.response",
        )
    elif source.messages is None and len(given) < 2:
        missing = [column for column in ("prompt", "response") if column not in given]
        yield columns.wrong(
            missing[0],
            f"SFT needs to know where prompt and response are; {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not given.",
            f"{name}.messages: COLUMN, or {name}.prompt: COLUMN with {name}.response: COLUMN, or "
            f"for plain text {name}.text: COLUMN",
        )


def rl_source(name: str, source: SourceConfig) -> Iterator[Problem]:
    """Yield problems of a source of prompts, for RL: it needs `messages` or `prompt`."""
    columns = _Columns(name, source)
    read = ("messages", "prompt", "tools", "reference", "source", "max_new_tokens", "environment")
    ordered = ("order_by",) if name.startswith("data.train") else ()
    yield from columns.unread(*read, *ordered)
    yield from _prompts(columns)


def _prompts(columns: _Columns) -> Iterator[Problem]:
    name, given = columns.name, columns.select_given("messages", "prompt")
    if len(given) == 2:
        why = f"The prompts are given two ways: {name}.prompt is set too."
        yield columns.wrong("messages", why, f"one of {name}.messages and {name}.prompt")
    if not given:
        fix = f"{name}.prompt: COLUMN, or {name}.messages: COLUMN"
        yield columns.wrong("prompt", "There is no column to take prompts from.", fix)


def pair_source(name: str, source: SourceConfig, *, margin: bool = False) -> Iterator[Problem]:
    """Yield problems of a source of pairs: it needs `chosen` and `rejected`; `prompt` is optional.

    `margin` says whether the job also reads the column `margin`.
    """
    columns = _Columns(name, source)
    more = ("margin",) if margin else ()
    yield from columns.unread("prompt", "tools", "chosen", "rejected", *more)
    for column in ("chosen", "rejected"):
        if not columns.select_given(column):
            yield columns.wrong(
                column,
                "Pairs need to know where the better and the worse response are.",
                f"{name}.chosen: COLUMN with {name}.rejected: COLUMN, and {name}.prompt: COLUMN "
                f"where the responses do not hold the prompt",
            )
    if source.chosen is not None and source.chosen == source.rejected:
        why = f"It is the same column as {name}.chosen."
        yield columns.wrong("rejected", why, "the column with the worse response")


def labelled_source(name: str, source: SourceConfig) -> Iterator[Problem]:
    """Yield problems of a source of labelled responses.

    It needs `label` with `messages`, or with `prompt` and `response`. It may have pairs instead:
    then `chosen` counts as desirable and `rejected` as undesirable.
    """
    columns = _Columns(name, source)
    labelled = columns.select_given("chosen", "rejected")
    if source.label is None and labelled:
        yield from pair_source(name, source)
        return
    read = ("messages", "prompt", "response", "tools", "label", "chosen", "rejected")
    yield from columns.unread(*read)
    if source.label is None:
        yield columns.wrong(
            "label",
            "There is no column that says which responses are desirable.",
            f"{name}.label: COLUMN, or for pairs {name}.chosen: COLUMN with {name}.rejected: "
            "COLUMN",
        )
    given = columns.select_given("messages", "prompt", "response")
    if given not in (["messages"], ["prompt", "response"]):
        yield columns.wrong(
            given[0] if given else "prompt",
            f"Labelled responses are read from messages, or from prompt and response; "
            f"{' and '.join(given) or 'none of them'} {'is' if len(given) < 2 else 'are'} given.",
            f"{name}.messages: COLUMN, or {name}.prompt: COLUMN with {name}.response: COLUMN",
        )
    why = f"Responses are labelled two ways: {name}.label is given too."
    for column in labelled:
        yield columns.wrong(column, why, f"leave {name}.{column} out, or {name}.label")


def step_source(name: str, source: SourceConfig) -> Iterator[Problem]:
    """Yield problems of a source of labelled steps: it needs a prompt, `steps` and `labels`."""
    columns = _Columns(name, source)
    yield from columns.unread("messages", "prompt", "tools", "steps", "labels")
    yield from _prompts(columns)
    why = "A process reward model needs to know where steps and their labels are."
    for column in ("steps", "labels"):
        if not columns.select_given(column):
            fix = f"{name}.steps: COLUMN with {name}.labels: COLUMN"
            yield columns.wrong(column, why, fix)
