"""Tokens of an episode: kept as they were sampled, masked where they were not, rewarded by turn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plimsoll.environment.calls import EnvironmentFailed
from plimsoll.environment.conversation import Conversation, ended
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
    found = ended([two_turns()], 4, "stop", 2.0, {"turns": 2})
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
    found = ended([two_turns()], 0, "stop", whole, {})
    assert found.token_rewards is not None and found.token_rewards.tolist() == expected
    [part] = found.rewards
    assert (part.name, part.value) == ("environment", sum(expected))


@pytest.mark.parametrize(
    ("whole", "first", "last"),
    [
        (2.0, [0, 0.25, 0, 0, 0, 0.5], [0, 3.0]),
        ((1.0, 2.0, 3.0, 4.0, 5.0), [1, 2.25, 0, 0, 0, 3.5], [4, 6.0]),
    ],
)
def test_a_branch_has_its_turns_rewards_and_the_last_one_the_episodes(
    whole: float | tuple[float, ...], first: list[float], last: list[float]
) -> None:
    other = Conversation(replace(prompt(), tokens=np.array([1, 2, 5, 9], np.int32)))
    found = ended([two_turns(), other.said(answer([4, 4])).rewarded(1.0)], 3, "turns", whole, {})
    [earlier] = found.earlier
    assert earlier.token_rewards is not None and found.token_rewards is not None
    assert (earlier.token_rewards.tolist(), found.token_rewards.tolist()) == (first, last)
    assert (earlier.sample_index, earlier.finish_reason, earlier.rewards) == (3, "stop", ())
    assert found.reward == sum(first) + sum(last) and found.finish_reason == "turns"
    assert found.prompt.tokens.tolist() == [1, 2, 5, 9]
    assert [one.response_tokens.tolist() for one in found.branches] == [
        [5, 6, 7, 8, 9, 3],
        [4, 4],
    ]


def test_a_reward_for_each_token_must_be_for_all_of_them() -> None:
    with pytest.raises(EnvironmentFailed, match="gave 2 numbers for 3 sampled tokens"):
        ended([two_turns()], 0, "stop", (1.0, 2.0), {})
