"""Memory that runs out on one of two ranks while it trains: the step is done anew with smaller
micro-batches, and the weights are those of a run in which nothing happened."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from choice import slow
from engine_cases import Setting, make_batch, zero_stage
from ranks import RankProcesses
from safetensors.torch import load_file
from shortage_cases import Fault, train_through
from zero_cases import FORMS

SETTINGS = {
    "zero-0": Setting(zero_stage(0)),
    "zero-0-bf16": Setting(zero_stage(0), "bfloat16"),
    "zero-1": Setting(zero_stage(1)),
    "zero-1-bf16": Setting(zero_stage(1), "bfloat16"),
    "zero-2": Setting(zero_stage(2)),
    "zero-2-bf16": Setting(zero_stage(2), "bfloat16"),
    "zero-2-cpu-adam": Setting(zero_stage(2, optimizer_offload="cpu")),
    "zero-2-lora": Setting(zero_stage(2), adapter=FORMS["lora"]),
    "zero-2-small-buckets": Setting(zero_stage(2, bucket_elements=150_000)),
    "zero-3": Setting(zero_stage(3)),
    "zero-3-bf16": Setting(zero_stage(3), "bfloat16"),
    "zero-3-small-buckets": Setting(zero_stage(3, bucket_elements=150_000)),
    "zero-3-checkpointing": Setting(zero_stage(3), checkpointing=True),
    "zero-3-all-cpu": Setting(zero_stage(3, optimizer_offload="cpu", parameter_offload="cpu")),
    "zero-3-tiles": Setting(zero_stage(3), checkpointing="selective", mlp_tile=24),
    "zero-3-lora": Setting(zero_stage(3), adapter=FORMS["lora"]),
}
BATCHES = tuple(make_batch([3 + i % 7 for i in range(40)], seed) for seed in (1, 2, 3))
SHARED = tuple(make_batch([5 + i % 5 for i in range(32)], seed, shared=4) for seed in (1, 2, 3))
GROUPS = [i // 8 for i in range(32)]
"""Groups of 8 samples, which have their first 4 tokens in common."""
ROUNDING = {"float32": 1e-7, "bfloat16": 1e-4}
"""The largest mean difference of the weights, from a micro-batch that was split. A lost step makes
one of 8e-4."""


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(3)
    yield processes
    processes.kill()


def distance(first: Path, second: Path) -> float:
    """The mean difference of the weights of two models."""
    name = "adapter_model.safetensors"
    if not (first / name).is_file():
        name = "model.safetensors"
    ours, theirs = load_file(first / name), load_file(second / name)
    assert ours.keys() == theirs.keys()
    differences = [(ours[k].float() - theirs[k].float()).abs().flatten() for k in ours]
    return float(torch.cat(differences).mean())


@pytest.mark.parametrize(
    "name", [*[*SETTINGS][::4], *(slow(name) for i, name in enumerate(SETTINGS) if i % 4)]
)
def test_the_weights_are_those_of_an_undisturbed_run(
    name: str, tied: Path, two_ranks: RankProcesses, tmp_path: Path
) -> None:
    setting, drawn = replace(SETTINGS[name], micro_batch_tokens=75), random.Random(name)
    faults = [
        Fault(
            drawn.randrange(2),
            step,
            drawn.randrange(2),
            drawn.choice(["forward", "backward", "gradient"]),
            drawn.randrange(100),
        )
        for step in (0, 2)
    ]
    clean, spoilt = tmp_path / "clean", tmp_path / "spoilt"
    [undisturbed, _] = two_ranks.run(train_through, tied, setting, BATCHES, (), clean)
    seen = two_ranks.run(train_through, tied, setting, BATCHES, faults, spoilt)
    assert undisturbed.limits == [None] * 3
    for survived in seen:
        assert survived.before
    assert distance(clean, spoilt) < ROUNDING[setting.dtype]


def test_samples_that_share_their_prompt_share_it_after_the_split(
    tied: Path, two_ranks: RankProcesses, tmp_path: Path
) -> None:
    setting = replace(SETTINGS["zero-2"], micro_batch_tokens=60)
    clean, spoilt = tmp_path / "clean", tmp_path / "spoilt"
    two_ranks.run(train_through, tied, setting, SHARED, (), clean, GROUPS)
    fault = Fault(1, 0, 0, "backward", 30)
    [seen, _] = two_ranks.run(train_through, tied, setting, SHARED, [fault], spoilt, GROUPS)
    assert len(seen.before) == 1
    assert distance(clean, spoilt) < ROUNDING["float32"]


@pytest.mark.parametrize("name", [slow("zero-2-small-buckets"), "zero-3"])
def test_all_of_three_ranks_hear_of_the_one_that_fails(
    name: str, tied: Path, three_ranks: RankProcesses, tmp_path: Path
) -> None:
    setting = replace(SETTINGS[name], micro_batch_tokens=75)
    clean, spoilt = tmp_path / "clean", tmp_path / "spoilt"
    three_ranks.run(train_through, tied, setting, BATCHES[:1], (), clean)
    fault = Fault(1, 0, 0, "backward", 30)
    seen = three_ranks.run(train_through, tied, setting, BATCHES[:1], [fault], spoilt)
    assert [len(survived.before) for survived in seen] == [1, 1, 1]
    assert distance(clean, spoilt) < ROUNDING["float32"]
