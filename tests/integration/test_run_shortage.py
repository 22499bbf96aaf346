"""Memory that runs out once, in jobs whose micro-batches carry more than single sequences: pairs
stay together, and a teacher reads the smaller micro-batches again."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from commands import SFT, run, write_config, write_task
from safetensors.torch import load_file

OWN = """
import os

import torch

from plimsoll.algorithm.divergence import forward_kl as plain_divergence
from plimsoll.algorithm.preference_loss import simpo as plain_preference

done = []


def fail_once():
    if os.environ["SHORT"] and not done:
        done.append(True)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")


def preference(inputs):
    fail_once()
    return plain_preference(inputs)


def divergence(inputs):
    fail_once()
    return plain_divergence(inputs)
"""


def dpo(settings: dict[str, Any]) -> None:
    settings["data"]["train"] = {
        **{"path": "rows.jsonl", "prompt": "prompt"},
        **{"chosen": "response", "rejected": "rejected"},
    }
    settings["batch"] = {"pairs": 6, "micro_batch_tokens": 4000}
    settings["algorithm"] = {"loss": {"name": "short:preference"}}


def distill(settings: dict[str, Any]) -> None:
    settings["batch"] = {"sequences": 8, "micro_batch_tokens": 4000}
    settings["teacher"] = {"model": {"path": "model", "dtype": "float32"}}
    settings["algorithm"] = {"divergence": {"name": "short:divergence"}, "nll_share": 0.5}


@pytest.mark.parametrize("change", [dpo, distill], ids=lambda change: change.__name__)
def test_the_model_is_that_of_an_undisturbed_run(change: Any, tmp_path: Path) -> None:
    write_task(tmp_path)
    (tmp_path / "short.py").write_text(OWN)
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"rejected": " #### 9"} for line in lines]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    job, weights = change.__name__, {}
    for short in ("", "yes"):
        settings = copy.deepcopy(SFT)
        settings["run"] = {"directory": f"run{short}", "steps": 3, "tensorboard": False}
        del settings["data"]["eval"]
        change(settings)
        write_config(tmp_path, job, settings)
        outcome = run(tmp_path, job, f"{job}.yaml", environment={"SHORT": short})
        assert outcome.code == 0, outcome.err
        assert ("The step was done anew" in " ".join(outcome.out.split())) == bool(short)
        weights[short] = load_file(tmp_path / f"run{short}" / "model" / "model.safetensors")
    ours, theirs = weights["yes"], weights[""]
    assert (
        max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-4
    )  # of steps of up to 0.01
