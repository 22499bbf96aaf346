"""Tokens of an episode: kept as they were sampled, masked where they were not, rewarded by turn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plimsoll.environment.episode import Conversation, build_trajectory
from plimsoll.environment.protocol import EnvironmentFailed
from plimsoll.records import Prompt, Trajectory, single_turn


def prompt() -> Prompt:
    return Prompt(0, np.array([1, 2], np.int32), "How much?")


def answer(tokens: list[int], version: int = 0) -> Trajectory:
    logprobs = np.array([-0.5 * token for token in tokens], np.float32)
    ids = np.array(tokens, np.int64)
    return single_turn(prompt(), 0, ids, logprobs, f"said {tokens}", "stop", version)


def two_turns() -> Conversation:
    first = Conversation(prompt()).add_sampled(answer([5, 6])).with_turn_reward(0.25)
    answered = first.add_answer("tool", [7, 8, 9], "so")
    return answered.add_sampled(answer([3], version=1)).with_turn_reward(0.5)


def test_what_is_sampled_and_what_is_put_between_stand_in_their_order() -> None:
    trajectory = build_trajectory([two_turns()], 4, "stop", 2.0, {"seconds": 0.5})
    assert trajectory.figures == {"turns": 2, "seconds": 0.5}
    assert trajectory.response_tokens.tolist() == [5, 6, 7, 8, 9, 3]
    assert trajectory.loss_mask.tolist() == [True, True, False, False, False, True]
    assert trajectory.sampler_logprobs.tolist() == [-2.5, -3.0, 0, 0, 0, -1.5]
    assert trajectory.weight_versions.tolist() == [0, 0, 0, 0, 0, 1]
    assert [(turn.role, turn.begin, turn.end) for turn in trajectory.turns] == [
        *(("assistant", 0, 2), ("tool", 2, 5), ("assistant", 5, 6)),
    ]
    assert (trajectory.response_text, trajectory.sample_index) == ("said [3]", 4)


def test_tokens_keep_the_experts_with_which_the_next_ones_were_sampled() -> None:
    """The second request reads five tokens of the branch and an answer; it says what the last
    token of the first turn took, and what the answer did."""

    def taken(tokens: list[int], first: int, count: int) -> Trajectory:
        rows = np.arange(first, first + count, dtype=np.uint8)[:, None, None]
        return replace(answer(tokens), routing=rows)

    first = Conversation(prompt()).add_sampled(taken([5, 6], 0, 3))
    second = first.add_answer("tool", [7, 8], "so").add_sampled(taken([3], 10, 6))
    assert second.routing is not None
    assert second.routing.ravel().tolist() == [0, 1, 2, 13, 14, 15]
    built = build_trajectory([first, second], 0, "stop", None, {})
    assert built.routing is second.routing and built.earlier[0].routing is first.routing
    assert two_turns().routing is None


def test_the_next_turn_is_asked_for_after_all_that_was_said() -> None:
    assert two_turns().all_tokens.tolist() == [1, 2, 5, 6, 7, 8, 9, 3]


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
    trajectory = build_trajectory([two_turns()], 0, "stop", whole, {})
    assert trajectory.token_rewards is not None and trajectory.token_rewards.tolist() == expected
    [part] = trajectory.rewards
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
    trajectory = build_trajectory(
        [two_turns(), other.add_sampled(answer([4, 4])).with_turn_reward(1.0)],
        3,
        "turns",
        whole,
        {},
    )
    [earlier] = trajectory.earlier
    assert earlier.token_rewards is not None and trajectory.token_rewards is not None
    assert (earlier.token_rewards.tolist(), trajectory.token_rewards.tolist()) == (first, last)
    assert (earlier.sample_index, earlier.finish_reason, earlier.rewards) == (3, "stop", ())
    assert trajectory.reward == sum(first) + sum(last) and trajectory.finish_reason == "turns"
    assert trajectory.prompt.tokens.tolist() == [1, 2, 5, 9]
    assert [branch.response_tokens.tolist() for branch in trajectory.branches] == [
        [5, 6, 7, 8, 9, 3],
        [4, 4],
    ]


def test_a_reward_for_each_token_must_be_for_all_of_them() -> None:
    with pytest.raises(EnvironmentFailed, match="gave 2 numbers for 3 sampled tokens"):
        build_trajectory([two_turns()], 0, "stop", (1.0, 2.0), {})
