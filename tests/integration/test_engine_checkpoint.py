"""Checkpoints restore training bit for bit; saved models are what plain transformers loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from choice import slow
from engine_cases import (
    BATCHES,
    RATES,
    Setting,
    load_both,
    own_packs,
    policy_step,
    save_both,
    value_step,
    zero_stage,
)
from engine_reference import plain_logprobs, plain_policy, plain_values, summed
from ranks import RankProcesses
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from plimsoll.config.engine import AdapterConfig, EmaConfig
from plimsoll.engine.process_group import Place
from plimsoll.engine.worker import UpdateResult, Worker
from plimsoll.engine.zero.config import ZeroConfig
from plimsoll.errors import ConfigError
from plimsoll.records import Floats, from_packed

CPU_ADAM = ZeroConfig(stage=2, optimizer_offload="cpu")
ALL_CPU = ZeroConfig(stage=3, optimizer_offload="cpu", parameter_offload="cpu")
SETTINGS = {
    **{f"zero-{stage}-bf16": Setting(zero_stage(stage), "bfloat16") for stage in range(4)},
    "zero-0-fp32": Setting(ZeroConfig(stage=0)),
    "zero-3-fp32": Setting(ZeroConfig(stage=3)),
    **{
        f"zero-{stage}-8-bit": Setting(zero_stage(stage), "bfloat16", optimizer="adamw_8bit")
        for stage in range(4)
    },
    "zero-2-cpu-adam-bf16": Setting(CPU_ADAM, "bfloat16"),
    "zero-3-all-cpu-bf16": Setting(ALL_CPU, "bfloat16"),
}


@dataclass(frozen=True)
class Seen:
    """What a rank saw after a checkpoint: the bytes of its scores, then two steps of each role."""

    scores: list[bytes]
    steps: list[UpdateResult]


def score_and_step(worker: Worker, place: Place) -> Seen:
    packs = own_packs(place, BATCHES[0], 31)
    scores = worker.log_probs("actor", packs) + worker.values("critic", packs)
    return Seen([array.tobytes() for array in scores], take_steps(worker, place, (2, 0)))


def take_steps(worker: Worker, place: Place, numbers: Sequence[int]) -> list[UpdateResult]:
    return [
        step(worker, place, BATCHES[i], 31, RATES[i])
        for i in numbers
        for step in (value_step, policy_step)
    ]


def train_and_resume(place: Place, model: Path, setting: Setting, out: Path) -> tuple[Seen, Seen]:
    """Two steps, a checkpoint, two more steps; then from the checkpoint the last two again."""
    straight = load_both(place, model, setting)
    take_steps(straight, place, (0, 1))
    straight.save_checkpoint("actor", out / "checkpoint" / "actor")
    straight.save_checkpoint("critic", out / "checkpoint" / "critic")
    seen = score_and_step(straight, place)
    save_both(straight, out / "straight")

    resumed = load_both(place, model, setting)
    resumed.load_checkpoint("actor", out / "checkpoint" / "actor")
    resumed.load_checkpoint("critic", out / "checkpoint" / "critic")
    again = score_and_step(resumed, place)
    save_both(resumed, out / "resumed")
    return seen, again


def check_resumed(ranks: RankProcesses, name: str, model: Path, out: Path) -> None:
    for seen, again in ranks.run(train_and_resume, model, SETTINGS[name], out):
        assert seen == again
    for role in ("actor", "critic"):
        straight = load_file(out / "straight" / role / "model.safetensors")
        resumed = load_file(out / "resumed" / role / "model.safetensors")
        assert straight.keys() == resumed.keys()
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)


ALONE = ("zero-0-bf16", "zero-1-8-bit")
"""What is tested on one rank each time; two ranks are tested with others."""


@pytest.mark.parametrize("name", [*ALONE, *(slow(name) for name in SETTINGS if name not in ALONE)])
def test_a_checkpoint_restores_bit_for_bit(
    name: str, untied: Path, tmp_path: Path, one_rank: RankProcesses
) -> None:
    check_resumed(one_rank, name, untied, tmp_path)


@pytest.mark.parametrize(
    "name", [slow("zero-2-bf16"), "zero-3-bf16", "zero-3-all-cpu-bf16", slow("zero-3-8-bit")]
)
def test_a_checkpoint_of_two_ranks_restores_bit_for_bit(
    name: str, untied: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    check_resumed(two_ranks, name, untied, tmp_path)


def train_and_save(place: Place, model: Path, setting: Setting, out: Path) -> list[UpdateResult]:
    """Two steps, a checkpoint, two more steps, the actor and its average."""
    worker = load_both(place, model, setting)
    take_steps(worker, place, (0, 1))
    worker.save_checkpoint("actor", out / "checkpoint" / "actor")
    worker.save_checkpoint("critic", out / "checkpoint" / "critic")
    return finish(worker, place, out / "straight")


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


def saved(directory: Path) -> dict[str, Tensor]:
    """A model's weights, or an adapter's."""
    (file,) = directory.glob("*.safetensors")
    return {name: tensor.float() for name, tensor in load_file(file).items()}


LORA = AdapterConfig(rank=4, alpha=8, targets=("all-linear",))
AVERAGE = EmaConfig(decay=0.5)
ANEW = {
    # ranks and setting of the checkpoint, and of the run that goes on from it
    "zero-3-to-zero-2-on-one": (
        (2, Setting(ZeroConfig(stage=3), ema=AVERAGE)),
        (1, Setting(ZeroConfig(stage=2), ema=AVERAGE)),
    ),
    "zero-2-to-two-ranks": ((1, Setting(zero_stage(2))), (2, Setting(zero_stage(2)))),
    "zero-0-to-zero-3-all-cpu": (
        (1, Setting(ZeroConfig(stage=0), ema=AVERAGE)),
        (2, Setting(ALL_CPU, ema=AVERAGE)),
    ),
    "lora-zero-1-bf16-to-zero-0": (
        (2, Setting(zero_stage(1), "bfloat16", adapter=LORA, ema=AVERAGE)),
        (1, Setting(zero_stage(0), "bfloat16", adapter=LORA, ema=AVERAGE)),
    ),
}


@pytest.mark.parametrize(
    "name", [slow(name) if name == "zero-2-to-two-ranks" else name for name in ANEW]
)
def test_a_run_goes_on_with_masters_and_moments_divided_anew(
    name: str, untied: Path, tmp_path: Path, one_rank: RankProcesses, two_ranks: RankProcesses
) -> None:
    pools = {1: one_rank, 2: two_ranks}
    (ranks, setting), (other_ranks, other) = ANEW[name]
    want = summed(pools[ranks].run(train_and_save, untied, setting, tmp_path))
    found = summed(pools[other_ranks].run(resume, untied, other, tmp_path))
    close = 2e-2 if setting.dtype == "bfloat16" else 1e-4
    losses = [[step["loss"] for step in steps] for steps in (want, found)]
    assert losses[1] == pytest.approx(losses[0], rel=close)
    for role in ("actor", "critic", "average"):
        straight, resumed = (saved(tmp_path / run / role) for run in ("straight", "resumed"))
        assert straight.keys() == resumed.keys()
        gaps = [float((straight[n] - resumed[n]).abs().max()) for n in straight]
        assert max(gaps) < close


def refused_checkpoint(place: Place, model: Path, out: Path) -> str:
    worker = load_both(place, model, Setting(ZeroConfig(stage=0)))
    with pytest.raises(ConfigError) as refusal:
        worker.load_checkpoint("actor", out / "nothing")
    return str(refusal.value)


def test_a_checkpoint_that_is_not_there_is_refused(
    untied: Path, tmp_path: Path, one_rank: RankProcesses
) -> None:
    (missing,) = one_rank.run(refused_checkpoint, untied, tmp_path)
    assert f"{tmp_path / 'nothing'} holds no whole checkpoint" in missing


def train_save_score(
    place: Place, model: Path, setting: Setting, out: Path
) -> tuple[list[Floats], list[Floats]]:
    """One step of both, saved; their scores of the whole first batch, the same on every rank."""
    worker = load_both(place, model, setting)
    take_steps(worker, place, (1,))
    save_both(worker, out)
    packs = own_packs(Place(0, 1, 0, "", 0, "cpu", 1), BATCHES[0], 31)
    samples = len(BATCHES[0].samples)
    logprobs = from_packed(packs, worker.log_probs("actor", packs), samples)
    return logprobs, from_packed(packs, worker.values("critic", packs), samples)


@pytest.mark.parametrize(
    ("setting", "is_tied", "bound"),
    [
        (Setting(ZeroConfig(stage=2)), False, 1e-5),
        (Setting(ZeroConfig(stage=3)), True, 1e-5),
        slow(Setting(ZeroConfig(stage=3), "bfloat16"), True, 0.06),
        (Setting(ZeroConfig(stage=3), "bfloat16"), False, 0.06),
    ],
    ids=["zero-2-untied", "zero-3-tied", "zero-3-tied-bf16", "zero-3-untied-bf16"],
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
