"""What engines are told of the sequences to come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from plimsoll.config.rl import RlConfig
from plimsoll.jobs.which import spec_of
from plimsoll.records import Prompt
from plimsoll.rl.setup import longest_sequence

CONFIG: dict[str, Any] = {
    "run": {"directory": "runs/x", "steps": 1},
    "data": {"train": {"path": "x.jsonl", "prompt": "p"}, "max_tokens": 300},
    "actor": {"model": {"path": "m"}},
    "rollout": {"sampling": {"max_new_tokens": 20}},
    "rewards": {"length": {"name": "length"}},
}
GAME = {"name": "guess_number", "max_tokens": 100}


@pytest.mark.parametrize(
    ("environments", "expected"),
    [
        ({}, 7 + 20),
        # an environment's first words, and its tools, come to the prompts: up to data.max_tokens
        ({"game": GAME}, 300 + 100),
        ({"game": GAME, "long": GAME | {"max_tokens": 500}}, 300 + 500),
    ],
)
def test_engines_take_the_longest_prompt_and_what_follows_it(
    environments: dict[str, Any], expected: int
) -> None:
    spec = spec_of(RlConfig.model_validate(CONFIG | {"environments": environments}))
    prompts = [Prompt(i, np.zeros(length, np.int32), "") for i, length in enumerate((7, 4))]
    assert longest_sequence(spec, prompts) == expected
