"""Which responses of a group are taken for SFT and DPO."""

from __future__ import annotations

from typing import Literal

import numpy as np

from plimsoll.jobs.sample_loop import conversations_of, select
from plimsoll.records import SAMPLER_LOGPROBS, WEIGHT_VERSIONS, Prompt, RewardPart, Trajectory


def answer(
    group: int, text: str, reward: float, finish: Literal["stop", "length"] = "stop"
) -> Trajectory:
    return Trajectory(
        prompt=Prompt(7 + group, np.arange(2, dtype=np.int32), f"p{group}", None),
        group=group,
        sample_index=0,
        response_tokens=np.arange(1),
        loss_mask=np.ones(1, np.bool_),
        columns={
            SAMPLER_LOGPROBS: np.zeros(1, np.float32),
            WEIGHT_VERSIONS: np.zeros(1, np.int64),
        },
        response_text=text,
        finish_reason=finish,
        rewards=(RewardPart("r", reward, 2.0),),
    )


def test_the_best_and_the_worst_of_those_that_ended() -> None:
    group = [
        answer(0, "cut off", 9.0, "length"),
        answer(0, "good", 1.0),
        answer(0, "as good", 1.0),
        answer(0, " ", -5.0),
        answer(0, "bad", -1.0),
    ]
    found = select([group], {})
    assert found.best == [{"prompt": "p0", "response": "good", "reward": 2.0}]
    (pair,) = found.pairs
    assert (pair["chosen"], pair["rejected"]) == ("good", "bad")
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (2.0, -2.0)


def test_a_group_without_a_difference_gives_no_pair() -> None:
    found = select([[answer(0, "a", 1.0), answer(0, "b", 1.0)], [answer(0, "a", 1.0)]], {})
    assert [row["response"] for row in found.best] == ["a", "a"]
    assert not found.pairs
    assert found.groups == 2  # the same number in two steps is two groups


def test_the_same_text_with_two_rewards_is_no_pair() -> None:
    assert not select([[answer(0, "a", 1.0), answer(0, "a", 0.0)]], {}).pairs


def test_a_group_of_which_none_ended_gives_nothing() -> None:
    found = select([[answer(0, "a", 1.0, "length"), answer(1, "b", 0.0)]], {})
    assert [row["prompt"] for row in found.best] == ["p1"]
    assert found.groups == 2


def test_prompts_of_several_turns_become_conversations() -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prompt = Prompt(7, np.arange(2, dtype=np.int32), "system: s\n\nuser: u", messages=turns)
    found = select([[answer(0, "a", 1.0), answer(0, "b", 0.0)]], conversations_of([prompt]))
    good, bad = ({"role": "assistant", "content": text} for text in "ab")
    assert found.best == [{"messages": [*turns, good], "reward": 2.0}]
    (pair,) = found.pairs
    assert (pair["chosen"], pair["rejected"]) == ([*turns, good], [*turns, bad])


def test_prompts_of_one_turn_stay_text() -> None:
    prompt = Prompt(7, np.arange(2, dtype=np.int32), "u", messages=[{"role": "user"}])
    assert conversations_of([prompt]) == {}
