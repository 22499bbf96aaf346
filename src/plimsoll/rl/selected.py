"""The best and the worst of what was sampled for a prompt, as rows that SFT and DPO learn from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from plimsoll.records import Prompt, Trajectory

Row = dict[str, Any]
Conversations = Mapping[int, Sequence[Mapping[str, Any]]]
"""The messages of prompts, by their index."""


@dataclass(frozen=True)
class Selected:
    """best: rows of prompt, response and reward. pairs: rows of prompt, chosen, rejected and their
    rewards. groups: how many were looked at."""

    best: list[Row]
    pairs: list[Row]
    groups: int


def conversations_of(prompts: Sequence[Prompt]) -> Conversations:
    """Of all prompts, where one has several turns: then rows are whole conversations."""
    turns = {prompt.index: prompt.messages for prompt in prompts}
    return turns if any(len(own) > 1 for own in turns.values()) else {}


def select(steps: Iterable[Sequence[Trajectory]], conversations: Conversations) -> Selected:
    """Rows of each group of each step: of its best response, and of it beside the worst one, where
    their rewards differ. Of responses with the same reward the first is taken.

    Responses that were cut off are left out, and so are empty ones: a row's response is learned
    with an end. conversations: of prompts that no plain text can stand for; their rows have
    `messages` for prompt and response, and whole conversations as chosen and rejected.
    """
    groups = [
        list(group)
        for trajectories in steps
        for _, group in groupby(trajectories, key=lambda t: t.group)
    ]
    ended = [
        [t for t in group if t.finish_reason == "stop" and t.response_text.strip()]
        for group in groups
    ]
    best = [max(own, key=lambda t: t.reward) for own in ended if own]
    worst = [min(own, key=lambda t: t.reward) for own in ended if own]
    pairs = [
        _pair(high, low, conversations)
        for high, low in zip(best, worst, strict=True)
        if high.reward > low.reward and high.response_text != low.response_text
    ]
    return Selected([_single(t, conversations) for t in best], pairs, len(groups))


def _single(best: Trajectory, conversations: Conversations) -> Row:
    if conversations:
        return {"messages": _conversation(best, conversations), "reward": best.reward}
    text = best.response_text
    return {"prompt": best.prompt.text, "response": text, "reward": best.reward}


def _pair(high: Trajectory, low: Trajectory, conversations: Conversations) -> Row:
    rewards = {"chosen_reward": high.reward, "rejected_reward": low.reward}
    if conversations:
        chosen, rejected = (_conversation(t, conversations) for t in (high, low))
        return {"chosen": chosen, "rejected": rejected, **rewards}
    texts = {"chosen": high.response_text, "rejected": low.response_text}
    return {"prompt": high.prompt.text, **texts, **rewards}


def _conversation(t: Trajectory, conversations: Conversations) -> list[Mapping[str, Any]]:
    return [*conversations[t.prompt.index], {"role": "assistant", "content": t.response_text}]
