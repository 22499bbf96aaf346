"""PPO whose ranks sleep while the engine samples: on the CPU they move to other memory and back."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from commands import PPO, cut_off, metrics, run_here, write_config, write_task
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from plimsoll.config.cluster import RankSleep
from plimsoll.records import Trajectory
from plimsoll.sampler.protocol import Request
from plimsoll.sampler.transformers.engine import TransformersEngine
from plimsoll.trainer.zero.engine import ZeroEngine
from plimsoll.trainer.zero.frozen import FrozenZeroEngine

STEPS = 2


def sleeping(depth: RankSleep, directory: str, stage: int) -> dict[str, Any]:
    """PPO of every kind of role, whose engine shares the rank's memory."""
    config = copy.deepcopy(PPO)
    run = {"directory": directory, "resume": "auto", "steps": STEPS, "save_every": 1}
    config["run"] |= run | {"eval_every": 1, "keep_checkpoints": STEPS}
    config["cluster"]["rank_sleep"] = depth
    config["rollout"]["placement"] = "shared"
    config["actor"] |= {"zero": {"stage": stage}, "ema": {"decay": 0.9}}
    config["critic"] |= {"zero": {"stage": stage}}
    config["reward_model"] = {"role": {"model": {"path": "judge"}, "zero": {"stage": 3}}}
    return config


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sleep")
    write_task(home)
    torch.manual_seed(1)
    judge = AutoModelForSequenceClassification.from_pretrained(home / "model", num_labels=1)
    judge.save_pretrained(home / "judge")
    return home


def learn(home: Path, name: str, config: dict[str, Any]) -> None:
    write_config(home, name, config)
    outcome = run_here(home, "ppo", f"{name}.yaml")
    assert outcome.code == 0, outcome.err


@contextmanager
def noting_sleepers() -> Iterator[list[tuple[bool, bool]]]:
    """Note for each request whether the states, and the weights, of all roles are asleep."""
    found: list[tuple[bool, bool]] = []
    generate = TransformersEngine.generate

    async def noted(self: TransformersEngine, request: Request) -> list[Trajectory]:
        trained = [o for o in gc.get_objects() if type(o) is ZeroEngine]
        frozen = [o for o in gc.get_objects() if type(o) is FrozenZeroEngine]
        weights = [bool(one._weights_asleep) for one in trained]
        weights += [bool(one._asleep) for one in frozen]
        found.append((all(bool(one._states_asleep) for one in trained), all(weights)))
        return await generate(self, request)

    with patch.object(TransformersEngine, "generate", noted):
        yield found


@pytest.mark.parametrize(("depth", "stage"), [("states", 2), ("all", 3)])
def test_a_run_whose_ranks_sleep_is_the_same_and_goes_on(
    depth: RankSleep, stage: int, home: Path
) -> None:
    awake, asleep, resumed = f"awake-{stage}", f"asleep-{stage}", f"resumed-{stage}"
    learn(home, awake, sleeping("none", awake, stage))
    gc.collect()  # the engines of the run before
    with noting_sleepers() as found:
        learn(home, asleep, sleeping(depth, asleep, stage))
    assert len(found) > 2 * STEPS and set(found) == {(True, depth == "all")}
    cut_off(home / asleep, home / resumed, 1)
    learn(home, resumed, sleeping(depth, resumed, stage))
    expected = load_file(home / awake / "model" / "model.safetensors")
    for directory in (asleep, resumed):
        assert metrics(home / directory) == metrics(home / awake)
        learned = load_file(home / directory / "model" / "model.safetensors")
        assert learned.keys() == expected.keys()
        assert all(torch.equal(learned[name], expected[name]) for name in expected)
