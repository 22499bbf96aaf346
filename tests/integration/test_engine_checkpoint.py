"""A run goes on from a checkpoint in another division, and saved models are what plain transformers
loads. That a checkpoint restores a run bit for bit is shown in test_engine_zero.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engine_cases import (
    BATCHES,
    RATES,
    Setting,
    load_both,
    own_packs,
    policy_step,
    save_both,
    sft_step,
    value_step,
    zero_stage,
)
from engine_reference import (
    plain_logprobs,
    plain_policy,
    plain_run,
    plain_values,
    saved_weights,
    sft_loss,
    summed,
    whole_distance,
)
from ranks import RankProcesses
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from plimsoll.config.engine import AdapterConfig, EmaConfig
from plimsoll.errors import ConfigError
from plimsoll.records import Floats, from_packed
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import UpdateResult, Worker
from plimsoll.trainer.zero.config import ZeroConfig

ALL_CPU = ZeroConfig(stage=3, optimizer_offload="cpu", parameter_offload="cpu")


def take_steps(worker: Worker, place: Place, numbers: Sequence[int]) -> list[UpdateResult]:
    return [
        step(worker, place, BATCHES[i], 31, RATES[i])
        for i in numbers
        for step in (value_step, policy_step)
    ]


def train_and_save(place: Place, model: Path, setting: Setting, out: Path) -> list[UpdateResult]:
    """Two steps, a checkpoint, two more steps, the actor and its average.

    The critic's checkpoint is written while it takes these steps.
    """
    worker = load_both(place, model, setting)
    take_steps(worker, place, (0, 1))
    worker.save_checkpoint("actor", out / "checkpoint" / "actor")
    worker.begin_checkpoint("critic", out / "checkpoint" / "critic")
    results = finish(worker, place, out / "straight")
    worker.finish_checkpoint("critic")
    return results


def resume(place: Place, model: Path, setting: Setting, out: Path) -> list[UpdateResult]:
    """From the checkpoint the last two steps."""
    worker = load_both(place, model, setting)
    worker.load_checkpoint("actor", out / "checkpoint" / "actor")
    worker.load_checkpoint("critic", out / "checkpoint" / "critic")
    return finish(worker, place, out / "resumed")


def finish(worker: Worker, place: Place, out: Path) -> list[UpdateResult]:
    results = take_steps(worker, place, (2, 0))
    save_both(worker, out)
    worker.swap_average("actor")
    worker.save_model("actor", out / "average")
    return results


LORA = AdapterConfig(rank=4, alpha=8, targets=("all-linear",))
EXPERTS = AdapterConfig(rank=4, alpha=8, targets=("q_proj", "experts"))
AVERAGE = EmaConfig(decay=0.5)
ANEW = {
    # ranks and setting of the checkpoint, and of the run that goes on from it
    "zero-3-to-zero-2-on-one": (
        (2, Setting(ZeroConfig(stage=3), ema=AVERAGE)),
        (1, Setting(ZeroConfig(stage=2), ema=AVERAGE)),
    ),
    "zero-0-to-zero-3-all-cpu": (
        (1, Setting(ZeroConfig(stage=0), ema=AVERAGE)),
        (2, Setting(ALL_CPU, ema=AVERAGE)),
    ),
    "lora-zero-1-bf16-to-zero-0": (
        (2, Setting(zero_stage(1), "bfloat16", adapter=LORA, ema=AVERAGE)),
        (1, Setting(zero_stage(0), "bfloat16", adapter=LORA, ema=AVERAGE)),
    ),
    "experts-zero-3-to-zero-1": (
        (2, Setting(zero_stage(3), adapter=EXPERTS, ema=AVERAGE)),
        (1, Setting(zero_stage(1), adapter=EXPERTS, ema=AVERAGE)),
    ),
}


@pytest.mark.parametrize("name", ANEW)
def test_a_run_goes_on_with_masters_and_moments_divided_anew(
    name: str,
    untied: Path,
    mixture: Path,
    tmp_path: Path,
    one_rank: RankProcesses,
    two_ranks: RankProcesses,
) -> None:
    pools, base = {1: one_rank, 2: two_ranks}, mixture if "experts" in name else untied
    (ranks, setting), (other_ranks, other) = ANEW[name]
    want = summed(pools[ranks].run(train_and_save, base, setting, tmp_path))
    found = summed(pools[other_ranks].run(resume, base, other, tmp_path))
    close = 2e-2 if setting.dtype == "bfloat16" else 1e-4
    losses = [[step["loss"] for step in steps] for steps in (want, found)]
    assert losses[1] == pytest.approx(losses[0], rel=close)
    for role in ("actor", "critic", "average"):
        straight, resumed = (
            saved_weights(tmp_path / run / role) for run in ("straight", "resumed")
        )
        assert straight.keys() == resumed.keys()
        gaps = [float((straight[n] - resumed[n]).abs().max()) for n in straight]
        assert max(gaps) < close


def train_save_score(
    place: Place, model: Path, setting: Setting, out: Path
) -> tuple[list[Floats], list[Floats]]:
    """One step of both, saved; their scores of the whole first batch, the same on every rank."""
    worker = load_both(place, model, setting)
    take_steps(worker, place, (1,))
    save_both(worker, out)
    packs = own_packs(Place(0, 1, "", 0, "cpu", 1), BATCHES[0], 31)
    logprobs = from_packed(packs, worker.log_probs("actor", packs))
    return logprobs, from_packed(packs, worker.values("critic", packs))


@pytest.mark.parametrize(
    ("setting", "is_tied", "bound"),
    [
        (Setting(ZeroConfig(stage=2)), False, 1e-5),
        (Setting(ZeroConfig(stage=3), "bfloat16"), True, 0.06),
    ],
    ids=["zero-2-untied", "zero-3-tied-bf16"],
)
def test_transformers_loads_what_was_saved(
    setting: Setting,
    is_tied: bool,
    bound: float,
    tied: Path,
    untied: Path,
    tmp_path: Path,
    two_ranks: RankProcesses,
) -> None:
    model = tied if is_tied else untied
    scored = two_ranks.run(train_save_score, model, setting, tmp_path)
    actor = plain_policy(tmp_path / "actor", "auto")
    critic = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", dtype="auto")
    assert (critic.config.num_labels, actor.config.tie_word_embeddings) == (1, is_tied)
    for plain in (actor, critic):
        assert {p.dtype for p in plain.parameters()} == {getattr(torch, setting.dtype)}
    for logprobs, values in scored:
        for i, sample in enumerate(BATCHES[0].samples):
            with torch.no_grad():
                want, _ = plain_logprobs(actor, sample)
                assert (torch.from_numpy(logprobs[i]) - want).abs().max() < bound
                assert (
                    torch.from_numpy(values[i]) - plain_values(critic, sample)
                ).abs().max() < bound
    kept = load_file(tmp_path / "actor" / "model.safetensors")
    assert ("lm_head.weight" in kept) is not is_tied
    assert AutoTokenizer.from_pretrained(tmp_path / "actor").eos_token_id is not None


def train_in_short_rows(place: Place, model: Path, setting: Setting, out: Path) -> int:
    """Train in groups of few elements, as those of large models are; return their number."""
    with patch("plimsoll.trainer.zero.optimizer._MOST_IN_8_BITS", 150_000):
        worker = Worker(place)
        worker.load_model("actor", setting.role(model), temperature=1.0)
    for batch, rate in zip(BATCHES, RATES, strict=True):
        sft_step(worker, place, batch, 31, rate)
        worker.save_checkpoint("actor", out / "checkpoint")
        worker.load_checkpoint("actor", out / "checkpoint")
    worker.save_model("actor", out)
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        worker.load_checkpoint("actor", out / "nothing")
    engine: Any = worker._engines["actor"]
    return len(engine.masters())


def test_rows_of_8_bit_moments_may_be_cut(
    tied: Path, tmp_path: Path, one_rank: RankProcesses
) -> None:
    want = plain_run(plain_policy(tied), sft_loss, BATCHES, 1.0)
    setting = Setting(zero_stage(2), optimizer="adamw_8bit")
    (rows,) = one_rank.run(train_in_short_rows, tied, setting, tmp_path)
    assert rows > 2 and whole_distance(saved_weights(tmp_path), want) < 0.1
