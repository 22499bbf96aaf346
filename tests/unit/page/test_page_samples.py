"""Groups of responses, and the advantage of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from plimsoll.errors import ConfigError
from plimsoll.page.answers import freeze_replies
from plimsoll.page.samples import ends, group, groups
from plimsoll.page.watched import Watched, watch_runs
from plimsoll.records import ADVANTAGES, Prompt, RewardPart, Trajectory, Turn, single_turn
from plimsoll.run.directory import RunDirectory
from plimsoll.run.trajectories import write_trajectories

WORDS = ["<end>", "one", "Ġtwo", "Ġthree", "Ã", "¤"]
"""Tokens of bytes: the last two together are one character, ä."""


def response(number: int, tokens: Sequence[int], reward: float, sample: int = 0) -> Trajectory:
    one = single_turn(
        prompt=Prompt(number, np.array([1]), f"prompt {number}", "ref", "maths"),
        sample_index=sample,
        response_tokens=np.array(tokens),
        sampler_logprobs=np.zeros(len(tokens), dtype=np.float32),
        response_text="as text",
        finish_reason="stop",
        weight_version=3,
        rewards=(RewardPart("right", reward, 1.0),),
    )
    return replace(one, group=number)


def scored(trajectories: Sequence[Trajectory], *advantages: Sequence[float]) -> list[Trajectory]:
    return [
        t.add_columns({ADVANTAGES: np.array(own, dtype=np.float32)})
        for t, own in zip(trajectories, advantages, strict=True)
    ]


@pytest.fixture
def run(tmp_path: Path) -> Watched:
    """A run with a tokenizer in its final model."""
    vocabulary = {word: place for place, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    model = RunDirectory(tmp_path).model_path
    model.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    (found,) = watch_runs([tmp_path])
    return found


def test_a_step_has_its_groups_in_short(run: Watched) -> None:
    sampled = [response(0, [1, 2], 1.0), response(0, [1], 0.0, 1), response(4, [1], 0.5)]
    write_trajectories(run.run.trajectories_path(2), 2, sampled[:1])
    write_trajectories(run.run.trajectories_path(7), 7, sampled)
    found = groups(run, None)
    assert (found["step"], found["steps"]) == (7, [2, 7])
    first = {"group": 0, "prompt": "prompt 0", "source": "maths", "reward": 0.5, "lowest": 0.0}
    assert found["groups"][0] == first | {
        **{"highest": 1.0, "tokens": 1.5, "responses": 2, "cutOff": 0}
    }
    assert [one["group"] for one in found["groups"]] == [0, 4]
    assert [one["group"] for one in groups(run, 2)["groups"]] == [0]


def test_each_token_has_its_advantage(run: Watched) -> None:
    """Equal neighbours are one piece; a character's first half goes with its second."""
    sampled = [response(0, [1, 2, 4, 5, 3, 0], 1.0)]
    own = [0.5, 0.5, -1.0, -1.0, 0.25, 0.0]
    write_trajectories(run.run.trajectories_path(1), 1, scored(sampled, own))
    found = group(run, 1, 0)
    assert found["withTokens"] and found["reference"] == "ref"
    (turn,) = found["responses"][0]["branches"][0]
    assert turn["pieces"] == [("one two", 0.5), ("ä", -1.0), (" three", 0.25), ("<end>", 0.0)]


def test_turns_are_told_apart_and_only_what_is_learned_has_an_advantage(run: Watched) -> None:
    turns = (
        Turn("assistant", 0, 2, "call", problem="no such tool"),
        Turn("tool", 2, 3, "its answer", reward=0.5),
        Turn("assistant", 3, 5, "done"),
    )
    one = replace(
        response(0, [1, 2, 1, 3, 0], 1.0),
        turns=turns,
        loss_mask=np.array([True, True, False, True, False]),
    )
    write_trajectories(run.run.trajectories_path(1), 1, scored([one], [0.5, -0.5, 0, 1.0, 0]))
    (branch,) = group(run, 1, 0)["responses"][0]["branches"]
    assert branch == [
        {
            "role": "assistant",
            "reward": 0.0,
            "problem": "no such tool",
            "pieces": [("one", 0.5), (" two", -0.5)],
        },
        {"role": "tool", "reward": 0.5, "problem": "", "pieces": [("its answer", None)]},
        {
            "role": "assistant",
            "reward": 0.0,
            "problem": "",
            "pieces": [(" three", 1.0), ("<end>", None)],
        },
    ]


def test_without_a_tokenizer_a_response_is_its_text(run: Watched) -> None:
    (run.run.model_path / "tokenizer.json").unlink()
    write_trajectories(run.run.trajectories_path(1), 1, scored([response(0, [1], 1.0)], [0.5]))
    found = group(run, 1, 0)
    assert not found["withTokens"]
    assert found["responses"][0]["branches"][0][0]["pieces"] == [("as text", None)]
    assert found["responses"][0]["advantage"] == 0.5


def test_what_was_not_sampled_is_refused(run: Watched) -> None:
    assert groups(run, None) == {"step": None, "steps": [], "groups": []}
    with pytest.raises(ConfigError, match="has no trajectories of step 3"):
        groups(run, 3)
    write_trajectories(run.run.trajectories_path(1), 1, [response(0, [1], 1.0)])
    with pytest.raises(ConfigError, match="has no group 9"):
        group(run, 1, 9)


def test_the_best_and_the_worst_are_of_different_prompts(run: Watched) -> None:
    """The prompt 0 was sampled in two groups, and has the two best and the two worst rewards."""
    rewards = {0: [1.0, -1.0], 1: [0.5, 0.4], 2: [0.3, 0.2], 3: [0.1, 0.1], 9: [0.9, -0.9]}
    sampled = [
        replace(response(0 if number == 9 else number, [1], reward, sample), group=number)
        for number, own in rewards.items()
        for sample, reward in enumerate(own)
    ]
    write_trajectories(run.run.trajectories_path(1), 1, scored(sampled, *[[0.5]] * len(sampled)))
    found = ends(run, 1)
    told = {
        what: [(one["prompt"], one["response"]["reward"]) for one in found[what]]
        for what in ("best", "worst")
    }
    assert told["best"] == [("prompt 0", 1.0), ("prompt 1", 0.5), ("prompt 2", 0.3)]
    assert told["worst"] == [("prompt 0", -1.0), ("prompt 3", 0.1), ("prompt 2", 0.2)]
    assert found["worst"][0]["response"]["branches"][0][0]["pieces"] == [("one", 0.5)]
    assert (found["step"], found["withTokens"], found["best"][0]["reference"]) == (1, True, "ref")


def test_among_equals_the_worst_are_of_prompts_that_are_not_among_the_best(run: Watched) -> None:
    sampled = [
        response(number, [1], reward, i)
        for number in range(6)
        for i, reward in enumerate((1.0, 0.0))
    ]
    write_trajectories(run.run.trajectories_path(1), 1, sampled)
    found = ends(run, 1)
    prompts = [one["prompt"] for what in ("best", "worst") for one in found[what]]
    assert len(set(prompts)) == 6


def test_a_lone_response_is_shown_once(run: Watched) -> None:
    write_trajectories(run.run.trajectories_path(1), 1, [response(0, [1], 1.0)])
    found = ends(run, 1)
    assert (len(found["best"]), found["worst"]) == (1, [])


def test_a_frozen_page_has_every_group_that_it_can_be_asked_for(run: Watched) -> None:
    """It has the best and the worst of 40 groups, and a few between them."""
    rewards = [number / 40 for number in range(40)]
    sampled = [response(number, [1], reward) for number, reward in enumerate(rewards)]
    write_trajectories(run.run.trajectories_path(3), 3, sampled)
    found = freeze_replies([run], [])
    asked = [one["group"] for one in found["groups?run=0"]["groups"]]
    best_and_worst = found["ends?run=0&step=3"]
    asked += [one["group"] for what in ("best", "worst") for one in best_and_worst[what]]
    assert {0, 1, 2, 37, 38, 39} < set(asked)
    assert len(set(asked)) == 12  # eight, of which the first and the last are among the six
    assert all(f"group?run=0&step=3&group={number}" in found for number in asked)
