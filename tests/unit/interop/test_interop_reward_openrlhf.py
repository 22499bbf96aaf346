"""Reward functions in files of OpenRLHF's form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import ConfigError
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.reward.adapters import reward_function
from plimsoll.reward.score import open_rewards

FILE = """
import torch

def reward_func(queries, prompts, labels):
    assert all(query.startswith(prompt) for query, prompt in zip(queries, prompts))
    found = [len(q) * 100 + len(p) * 10 + len(l) for q, p, l in zip(queries, prompts, labels)]
    return {GIVES}
"""


def trajectory(prompt: str, response: str, reference: str | None) -> Trajectory:
    ids = np.array([1, 0], np.int64)  # `<s> a` by the tokenizer below
    asked = Prompt(0, ids, prompt, reference)
    return single_turn(asked, 0, np.array([2]), np.zeros(1, np.float32), response, "stop", 0)


def rewards_of(path: Path, *trajectories: Trajectory, **options: str) -> list[float]:
    config = RewardConfig(name="openrlhf_function", options={"path": str(path), **options})
    with open_rewards({"mine": config}) as scorer:
        return [one.rewards[0].value for one in scorer(trajectories)]


@pytest.mark.parametrize(
    "gives", ["torch.tensor(found)", "found", "{'rewards': torch.tensor(found), 'scores': found}"]
)
def test_texts_and_labels_are_those_of_the_rows(gives: str, tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(FILE.replace("{GIVES}", gives))
    found = rewards_of(file, trajectory("abc", "de", "f"), trajectory("a", "", None))
    assert found == [5 * 100 + 3 * 10 + 1, 1 * 100 + 1 * 10]


def test_with_a_tokenizer_texts_are_as_the_actor_saw_them(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0, "<s>": 1, "b": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>").save_pretrained(tmp_path / "t")
    file = tmp_path / "reward.py"
    file.write_text(FILE.replace("{GIVES}", "found"))
    found = rewards_of(file, trajectory("abc", "de", "f"), tokenizer=str(tmp_path / "t"))
    assert found == [len("<s> a b") * 100 + len("<s> a") * 10 + 1]


def test_a_function_of_this_form_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FILE.replace("{GIVES}", "found"))
    config = RewardConfig(name=f"{tmp_path}/own.py:reward_func")
    with open_rewards({"mine": config}) as scorer:
        [scored] = scorer([trajectory("abc", "de", "f")])
    assert scored.rewards[0].value == 5 * 100 + 3 * 10 + 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "needs the option 'path'"),
        ({"path": "{folder}/gone.py"}, "gone.py"),
        ({"path": "{folder}/own.py"}, "has no 'reward_func'"),
        ({"path": "{folder}/own.py", "function": "SCORE"}, "is a int"),
        ({"path": "{folder}/own.py", "function": "score", "tokeniser": "x"}, "tokenizer"),
        ({"path": "{folder}/own.py", "function": "none"}, "too many positional arguments"),
    ],
)
def test_what_cannot_be_called_is_refused_before_a_run(
    options: dict[str, str], why: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("SCORE = 3\ndef score(q, p, l): ...\ndef none(): ...\n")
    options = {key: value.format(folder=tmp_path) for key, value in options.items()}
    with pytest.raises(ConfigError, match=why):
        reward_function(RewardConfig(name="openrlhf_function", options={**options}))
