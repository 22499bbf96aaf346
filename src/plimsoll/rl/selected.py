"""The best and the worst of what was sampled for a prompt, as rows that SFT and DPO learn from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from plimsoll.records import Prompt, Trajectory

SelectedRow = dict[str, Any]
Conversations = Mapping[int, Sequence[Mapping[str, Any]]]
"""The messages of prompts, by their index."""


@dataclass(frozen=True)
class Selected:
    """The rows that were chosen.

    Attributes:
        best: rows of prompt, response and reward.
        pairs: rows of prompt, chosen, rejected and their rewards.
        groups: how many groups were looked at.
    """

    best: list[SelectedRow]
    pairs: list[SelectedRow]
    groups: int


def conversations_of(prompts: Sequence[Prompt]) -> Conversations:
    """Return the messages of all prompts, for rows of conversations, if one has several turns."""
    turns = {prompt.index: prompt.messages for prompt in prompts}
    return turns if any(len(messages) > 1 for messages in turns.values()) else {}


def select(steps: Iterable[Sequence[Trajectory]], conversations: Conversations) -> Selected:
    """Return each group's best response, and pairs of best and worst if their rewards differ.

    Of responses with the same reward the first is taken. Responses that were cut off are left out,
    and so are empty ones: a row's response is learned with an end. Rows of prompts with
    `conversations` have `messages` for prompt and response, and whole conversations as chosen and
    rejected.
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
    best = [max(responses, key=lambda t: t.reward) for responses in ended if responses]
    worst = [min(responses, key=lambda t: t.reward) for responses in ended if responses]
    pairs = [
        _pair(high, low, conversations)
        for high, low in zip(best, worst, strict=True)
        if high.reward > low.reward and high.response_text != low.response_text
    ]
    return Selected([_single(t, conversations) for t in best], pairs, len(groups))


def _single(best: Trajectory, conversations: Conversations) -> SelectedRow:
    if conversations:
        return {"messages": _conversation(best, conversations), "reward": best.reward}
    text = best.response_text
    return {"prompt": best.prompt.text, "response": text, "reward": best.reward}


def _pair(high: Trajectory, low: Trajectory, conversations: Conversations) -> SelectedRow:
    rewards = {"chosen_reward": high.reward, "rejected_reward": low.reward}
    if conversations:
        chosen, rejected = (_conversation(t, conversations) for t in (high, low))
        return {"chosen": chosen, "rejected": rejected, **rewards}
    texts = {"chosen": high.response_text, "rejected": low.response_text}
    return {"prompt": high.prompt.text, **texts, **rewards}


def _conversation(t: Trajectory, conversations: Conversations) -> list[Mapping[str, Any]]:
    return [*conversations[t.prompt.index], {"role": "assistant", "content": t.response_text}]
