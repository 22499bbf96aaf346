"""Read sampled responses from a step's trajectory file, and choose some to show.

Files of older versions are read, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from plimsoll.run.numbers import mean, rank
from plimsoll.run.output import safe_text
from plimsoll.run.trajectories import iter_bounded

_GAP = " ... "


def excerpt(text: str, length: int) -> str:
    """Return the beginning and the end of a text as one line of at most `length` characters.

    They are counted as they are printed.
    """
    line = safe_text(" ".join(text.split()))
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
class SampledResponse:
    """One sampled response: a row of a trajectory file."""

    group: int
    """Number of the group; a group's responses answer the same prompt in the same step."""
    prompt_index: int
    sample_index: int
    source: str
    prompt: str
    response: str
    """Its text; of an episode with an environment, the turns of all branches."""
    reference: str | None
    reward: float
    parts: Mapping[str, float]
    """Parts of the reward by name, before their weights."""
    advantage: float | None
    """Mean advantage of the tokens that are learned from; None if there are no advantages."""
    tokens: int
    """Number of response tokens."""
    version: int | None
    """Version of the weights that sampled the first token; None without tokens."""
    cut_off: bool
    """Whether the response was cut at the longest length."""

    @property
    def rank(self) -> float:
        """A number to sort responses by: the reward, with NaN below all others."""
        return rank(self.reward)


@dataclass(frozen=True)
class ResponseGroup:
    """The responses to one prompt in one step, from the highest reward to the lowest."""

    responses: Sequence[SampledResponse]

    @property
    def number(self) -> int:
        """Number of the group in its step."""
        return self.responses[0].group

    @property
    def prompt(self) -> str:
        """The prompt of all responses."""
        return self.responses[0].prompt

    @property
    def reward(self) -> float:
        """Mean reward."""
        return mean(r.reward for r in self.responses)

    @property
    def spread(self) -> float:
        """Highest reward minus the lowest; 0 if they are equal, also if they are infinite."""
        highest, lowest = self.responses[0].rank, self.responses[-1].rank
        return highest - lowest if highest > lowest else 0.0


def read_responses(path: Path) -> list[SampledResponse]:
    """Return all responses of a trajectory file, in the order of its rows."""
    names = pq.read_schema(path).names
    parts = [name for name in names if name.startswith(_PART)]
    responses = []
    for batch in iter_bounded(path, [*(n for n in _READ if n in names), "tokens", *parts]):
        lengths = pc.list_value_length(batch["tokens"]).to_pylist()
        rows = batch.drop_columns(["tokens"]).to_pylist()
        pairs = zip(rows, lengths, strict=True)
        responses += [_response(row, length, parts) for row, length in pairs]
    return responses


def _response(row: Mapping[str, Any], tokens: int, parts: Sequence[str]) -> SampledResponse:
    """Return the response of a row; its group is the prompt's index in files of old versions."""
    return SampledResponse(
        group=row.get("group", row["prompt_index"]),
        prompt_index=row["prompt_index"],
        sample_index=row["sample_index"],
        source=row.get("source", ""),
        prompt=row["prompt"],
        response=join_branches(row, _turns_text),
        reference=row["reference"],
        reward=row["reward"],
        parts={n.removeprefix(_PART): row[n] for n in parts if row[n] is not None},
        advantage=row["advantage_mean"],
        tokens=tokens,
        version=row["weight_version"],
        cut_off=row["finish_reason"] == "length",
    )


def join_branches(row: Mapping[str, Any], text_of: Callable[[Mapping[str, Any]], str]) -> str:
    """Return the text of a row; several branches of an episode stand below headings."""
    texts = [text_of(branch) for branch in (*(row.get("earlier") or ()), row)]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"[branch {n} of {len(texts)}]\n{text}" for n, text in enumerate(texts, 1))


def _turns_text(branch: Mapping[str, Any]) -> str:
    """Return the turns of a branch, each after the name of its speaker; without, the response."""
    texts = []
    for turn in branch.get("turns") or ():
        reward = f", reward {turn['reward']:.4g}" if turn["reward"] else ""
        problem = f" (wrong: {turn['problem']})" if turn["problem"] else ""
        texts.append(f"[{turn['role']}{reward}] {turn['text']}{problem}")
    return "\n".join(texts) if texts else str(branch["response"])


def read_groups(path: Path) -> list[ResponseGroup]:
    """Return the groups of a trajectory file in the order of their numbers."""
    ordered = sorted(read_responses(path), key=lambda r: (r.group, -r.rank))
    return [ResponseGroup(list(group)) for _, group in groupby(ordered, lambda r: r.group)]


def widest_group(groups: Sequence[ResponseGroup]) -> ResponseGroup:
    """Return the first group with the largest spread of rewards, which teaches most."""
    return max(groups, key=lambda group: group.spread)


def read_some(path: Path, count: int) -> list[SampledResponse]:
    """Return at most `count` responses of a trajectory file, evenly from the best to the worst."""
    ordered = sorted(read_responses(path), key=lambda r: -r.rank)
    return [ordered[place] for place in pick_evenly(len(ordered), count)]


def best_and_worst(
    groups: Sequence[ResponseGroup], count: int
) -> tuple[list[SampledResponse], list[SampledResponse]]:
    """Return two lists without common responses: the best and the worst, each at most `count`.

    Each list has only one response per prompt, so that one easy prompt does not fill it. Among
    equally bad responses, the worst list prefers prompts that are not in the best list.
    """
    by_prompt: dict[str, list[SampledResponse]] = {}
    for group in groups:
        by_prompt.setdefault(group.prompt, []).extend(group.responses)
    highest = [max(responses, key=lambda r: r.rank) for responses in by_prompt.values()]
    best = sorted(highest, key=lambda r: -r.rank)[:count]
    best_prompts, best_keys = {r.prompt for r in best}, {(r.group, r.sample_index) for r in best}
    lowest = [
        min(rest, key=lambda r: r.rank)
        for responses in by_prompt.values()
        if (rest := [r for r in responses if (r.group, r.sample_index) not in best_keys])
    ]
    return best, sorted(lowest, key=lambda r: (r.rank, r.prompt in best_prompts))[:count]


def pick_evenly(length: int, count: int) -> list[int]:
    """Return at most `count` indices below `length`, evenly spaced from the first to the last."""
    kept = min(count, length)
    return [round(i * (length - 1) / max(kept - 1, 1)) for i in range(kept)]
