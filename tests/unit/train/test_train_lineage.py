"""What may change so that a run still learns from what it has sampled."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.config.load import validate
from plimsoll.config.yaml_tree import Tree
from plimsoll.jobs import JOBS
from plimsoll.resolve.run_spec import resolve
from plimsoll.train.session import lineage_of

TRAIN = {"path": "rows.jsonl", "prompt": "prompt"}


def lineage(**changes: Any) -> str:
    values = {
        "run": {"directory": "out", "steps": 1},
        "cluster": {"device": "cpu"},
        "data": {"train": TRAIN},
        "batch": {"prompts": 8, "responses": 2},
        "actor": {"model": {"path": "model"}},
        "rewards": {"length": {"name": "length"}},
        "rollout": {"transformers": {}, "engines": 4},
    }
    return lineage_of(resolve(JOBS["rl"], validate(JOBS["rl"].config, Tree(values | changes, {}))))


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"transformers": {}, "engines": 2}},
        {"cluster": {"device": "cpu", "ranks": 2}},
        {"run": {"directory": "out", "steps": 9}},
        {"data": {"train": TRAIN, "processes": 2, "cache": "none"}},
        {"rollout": {"transformers": {}, "engines": 4, "sync": {"bucket_bytes": 2**20}}},
        {"rollout": {"transformers": {}, "engines": 4, "staleness": 0}},  # the default
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_fewer_engines_and_ranks_learn_from_what_is_there(changes: dict[str, Any]) -> None:
    assert lineage(**changes) == lineage()


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"transformers": {}, "engines": 4, "sampling": {"max_new_tokens": 9}}},
        {"rewards": {"length": {"name": "length", "weight": 2}}},
        {"run": {"directory": "out", "steps": 1, "seed": 1}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_decides_samples_or_rewards_begins_anew(changes: dict[str, Any]) -> None:
    assert lineage(**changes) != lineage()
