"""Sampled responses as people read them: from a step's trajectories on the disk, the columns that
say something to a person; of files of older versions too. And texts that models wrote, made fit to
be shown on a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

_GAP = " ... "
_SHOWN_AS_CODES = {"Cc", "Cf", "Cs"}
"""Unicode's categories of control codes, marks that turn the direction of writing, and halves of
characters."""


def escape_controls(text: str) -> str:
    """The text with its control codes escaped, such as `\\x1b`, but for tabs and ends of lines:
    shown as they are, they would be commands to the terminal."""

    def shown(one: str) -> str:
        plain = one in "\t\n" or unicodedata.category(one) not in _SHOWN_AS_CODES
        return one if plain else one.encode("unicode_escape").decode()

    return "".join(map(shown, text))


def excerpt(text: str, length: int) -> str:
    """On one line, at most so many characters: of a longer text its beginning and its end, which is
    where an answer stands."""
    line = escape_controls(" ".join(text.split()))
    if len(line) <= length:
        return line
    if length <= 2 * len(_GAP):
        return line[:length]
    end = (length - len(_GAP)) // 2
    return line[: length - len(_GAP) - end] + _GAP + line[-end:]


_PART = "reward_"
_READ = (
    *("group", "prompt_index", "sample_index", "source", "prompt", "response", "reference"),
    *("reward", "advantage_mean", "weight_version", "finish_reason", "turns", "earlier"),
)


@dataclass(frozen=True)
class TextPiece:
    """Part of what is shown of a response. kind: the role of who said it; `call`, of the policy's
    tool calls; `wrong`, of what is wrong with them; or whether its tokens are `learned` from, or
    `other`."""

    text: str
    kind: str


_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)|\[TOOL_CALLS\].*", re.DOTALL)


@dataclass(frozen=True)
class SampledResponse:
    """A row as a person reads it.

    group: which responses answer the same prompt in the same step. parts: of the reward, before
    their weights. advantage: the mean over the tokens that are learned; None where none was
    estimated. version: of the weights that began it; None of one without tokens. pieces: of an
    episode with an environment; together they are the response's text.
    """

    group: int
    prompt_index: int
    sample_index: int
    source: str
    prompt: str
    response: str
    reference: str | None
    reward: float
    parts: Mapping[str, float]
    advantage: float | None
    tokens: int
    version: int | None
    cut_off: bool
    pieces: tuple[TextPiece, ...] = ()

    @property
    def shown(self) -> tuple[TextPiece, ...]:
        """The response in pieces."""
        return self.pieces or (TextPiece(self.response, "assistant"),)


@dataclass(frozen=True)
class ResponseGroup:
    """The responses to one prompt in one step, from the highest reward to the lowest."""

    responses: Sequence[SampledResponse]

    @property
    def number(self) -> int:
        """The group's id in its step."""
        return self.responses[0].group

    @property
    def prompt(self) -> str:
        """What all of them answer."""
        return self.responses[0].prompt

    @property
    def reward(self) -> float:
        """The mean."""
        return fmean(one.reward for one in self.responses)

    @property
    def spread(self) -> float:
        """The highest reward less the lowest."""
        return self.responses[0].reward - self.responses[-1].reward


def read_responses(path: Path) -> list[SampledResponse]:
    """All of a step, in the order in which they were written."""
    names = pq.read_schema(path).names
    parts = [name for name in names if name.startswith(_PART)]
    table = pq.read_table(path, columns=[*(n for n in _READ if n in names), "tokens", *parts])
    lengths = pc.list_value_length(table["tokens"]).to_pylist()
    rows = table.drop_columns(["tokens"]).to_pylist()
    return [_response(row, length, parts) for row, length in zip(rows, lengths, strict=True)]


def _response(row: Mapping[str, Any], tokens: int, parts: Sequence[str]) -> SampledResponse:
    """Before groups were kept, the prompt's place in the data told them apart."""
    pieces = tuple(_branches(row))
    return SampledResponse(
        group=row.get("group", row["prompt_index"]),
        prompt_index=row["prompt_index"],
        sample_index=row["sample_index"],
        source=row.get("source", ""),
        prompt=row["prompt"],
        response="".join(one.text for one in pieces) or row["response"],
        reference=row["reference"],
        reward=row["reward"],
        parts={n.removeprefix(_PART): row[n] for n in parts if row[n] is not None},
        advantage=row["advantage_mean"],
        tokens=tokens,
        version=row["weight_version"],
        cut_off=row["finish_reason"] == "length",
        pieces=pieces,
    )


def _branches(row: Mapping[str, Any]) -> Iterator[TextPiece]:
    """Of an episode's turns, or of its branches; none of a response without an environment."""
    branches = [*(row.get("earlier") or ()), row]
    for number, branch in enumerate(branches, 1):
        turns = branch.get("turns") or ()
        if len(branches) > 1:
            yield TextPiece(
                "\n" * (number > 1) + f"[branch {number} of {len(branches)}]\n", "branch"
            )
            yield from _pieces(turns) if turns else (TextPiece(branch["response"], "assistant"),)
        else:
            yield from _pieces(turns)


def _pieces(turns: Sequence[Mapping[str, Any]]) -> Iterator[TextPiece]:
    """All that was said, each turn under who said it."""
    for number, turn in enumerate(turns):
        role, end = turn["role"], 0
        reward = f", reward {turn['reward']:.4g}" if turn["reward"] else ""
        text = "\n" * (number > 0) + f"[{role}{reward}] {turn['text']}"
        for call in _CALL.finditer(text) if role == "assistant" else ():
            yield TextPiece(text[end : call.start()], role)
            yield TextPiece(call[0], "call")
            end = call.end()
        yield TextPiece(text[end:], role)
        if turn["problem"]:
            yield TextPiece(f" (wrong: {turn['problem']})", "wrong")


def read_groups(path: Path) -> list[ResponseGroup]:
    """All of a step, group by group, in the order of their numbers."""
    ordered = sorted(read_responses(path), key=lambda one: (one.group, -one.reward))
    return [ResponseGroup(list(own)) for _, own in groupby(ordered, lambda one: one.group)]


def widest_group(groups: Sequence[ResponseGroup]) -> ResponseGroup:
    """The first of those whose rewards are furthest apart: what is learned most from."""
    return max(groups, key=lambda group: group.spread)


def read_some(path: Path, count: int) -> list[SampledResponse]:
    """Of a step so many, or all: the best first, the worst last, and between them others at even
    distances in that order."""
    ordered = sorted(read_responses(path), key=lambda one: -one.reward)
    return [ordered[place] for place in pick_evenly(len(ordered), count)]


def best_and_worst(
    groups: Sequence[ResponseGroup], count: int
) -> tuple[list[SampledResponse], list[SampledResponse]]:
    """Return at most so many of the best responses and so many of the worst; none is in both.

    Within each the prompts differ, so that one easy prompt does not fill it; of equally bad ones
    those come first whose prompts are not among the best.
    """
    by_prompt: dict[str, list[SampledResponse]] = {}
    for group in groups:
        by_prompt.setdefault(group.prompt, []).extend(group.responses)
    highest = [max(own, key=lambda one: one.reward) for own in by_prompt.values()]
    best = sorted(highest, key=lambda one: -one.reward)[:count]
    shown, taken = {one.prompt for one in best}, {(one.group, one.sample_index) for one in best}
    lowest = [
        min(others, key=lambda one: one.reward)
        for own in by_prompt.values()
        if (others := [one for one in own if (one.group, one.sample_index) not in taken])
    ]
    return best, sorted(lowest, key=lambda one: (one.reward, one.prompt in shown))[:count]


def pick_evenly(length: int, count: int) -> list[int]:
    """Of so many places so many, or all: the first, the last, and between them others at even
    distances."""
    shown = min(count, length)
    return [round(i * (length - 1) / max(shown - 1, 1)) for i in range(shown)]
