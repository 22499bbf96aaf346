"""GRPO with vLLM, whose ranks share packs, learns what one rank learns from whole packs."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
from commands import GRPO, VLLM, column, metrics, run_here, write_config, write_task

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_ranks_that_share_packs_learn_the_same_from_what_vllm_samples(
    tmp_path: Path, shared_ray: tuple[str, ...]
) -> None:
    write_task(tmp_path)
    found = {}
    for shards, exchange in ((1, "auto"), (2, "keys")):
        config = copy.deepcopy(GRPO)
        config["run"] = {"directory": exchange, "steps": 3, "tensorboard": False}
        config["cluster"] = {"device": "cpu", "threads": 1, "ranks": shards}
        config["cluster"] |= {"sequence_parallel": shards, "sequence_exchange": exchange}
        config["batch"] = {"prompts": 8, "responses": 4, "share_prompts": True}
        config["batch"]["micro_batch_tokens"] = 240 // shards
        config["rewards"] = {"length": {"name": "length", "weight": -1.0}}
        config["rollout"] |= VLLM | {"dtype": "float32", "sampling": {"max_new_tokens": 24}}
        write_config(tmp_path, exchange, config)
        outcome = run_here(tmp_path, "grpo", f"{exchange}.yaml", *shared_ray)
        assert outcome.code == 0, outcome.err
        found[shards] = metrics(tmp_path / exchange)
    for name in ("reward", "policy_loss", "entropy", "ratio", "actor/grad_norm"):
        np.testing.assert_allclose(
            column(found[2], name), column(found[1], name), rtol=1e-4, atol=1e-6, err_msg=name
        )
    assert max(column(found[2], "sync/logprob_gap")) < 1e-5
