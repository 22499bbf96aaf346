"""Tokens of an episode: kept as they were sampled, masked where they were not, rewarded by turn."""

from __future__ import annotations

import numpy as np
import pytest

from plimsoll.environment.conversation import Conversation
from plimsoll.records import Prompt, Trajectory, single_turn


def prompt() -> Prompt:
    return Prompt(0, np.array([1, 2], np.int32), "How much?")


def answer(tokens: list[int], version: int = 0) -> Trajectory:
    logprobs = np.array([-0.5 * token for token in tokens], np.float32)
    ids = np.array(tokens, np.int64)
    return single_turn(prompt(), 0, ids, logprobs, f"said {tokens}", "stop", version)


def two_turns() -> Conversation:
    first = Conversation(prompt()).said(answer([5, 6])).rewarded(0.25)
    return first.told("tool", [7, 8, 9], "so").said(answer([3], version=1)).rewarded(0.5)


def test_what_is_sampled_and_what_is_put_between_stand_in_their_order() -> None:
    found = two_turns().trajectory(4, "stop", 2.0, {"turns": 2})
    assert found.response_tokens.tolist() == [5, 6, 7, 8, 9, 3]
    assert found.loss_mask.tolist() == [True, True, False, False, False, True]
    assert found.sampler_logprobs.tolist() == [-2.5, -3.0, 0, 0, 0, -1.5]
    assert found.weight_versions.tolist() == [0, 0, 0, 0, 0, 1]
    assert [(turn.role, turn.begin, turn.end) for turn in found.turns] == [
        *(("assistant", 0, 2), ("tool", 2, 5), ("assistant", 5, 6)),
    ]
    assert (found.response_text, found.sample_index) == ("said [3]", 4)


def test_the_next_turn_is_asked_for_after_all_that_was_said() -> None:
    assert two_turns().asked().tokens.tolist() == [1, 2, 5, 6, 7, 8, 9, 3]


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        (None, [0, 0.25, 0, 0, 0, 0.5]),
        (2.0, [0, 0.25, 0, 0, 0, 2.5]),
        ((1.0, 2.0, 3.0), [1, 2.25, 0, 0, 0, 3.5]),
    ],
)
def test_rewards_stand_at_the_last_token_of_their_turn(
    whole: float | tuple[float, ...] | None, expected: list[float]
) -> None:
    found = two_turns().trajectory(0, "stop", whole, {})
    assert found.token_rewards is not None and found.token_rewards.tolist() == expected
    [part] = found.rewards
    assert (part.name, part.value) == ("environment", sum(expected))
