"""Training on a card is training on a CPU: its kernels, its process group, offload over its bus.

One rank on one card. What two cards would show (NCCL between them) is not here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from buckets import gathered, open_way, tensors_in
from engine_cases import (
    BATCHES,
    RATES,
    Setting,
    own_packs,
    sft_step,
    train_ppo,
    train_sft,
    zero_stage,
)
from engine_reference import (
    PlainRun,
    distance,
    plain_critic,
    plain_policy,
    plain_run,
    policy_loss,
    saved_weights,
    sft_loss,
    value_loss,
    whole_distance,
    worst_error,
)
from ranks import RankProcesses
from safetensors.torch import load_file

from plimsoll.config.cluster import RankSleep
from plimsoll.config.engine import AdapterConfig, DecidedDtype, FrozenRole
from plimsoll.machine.incident import Incident, OutOfMemory
from plimsoll.records import Floats
from plimsoll.run.readings import CardReading
from plimsoll.trainer.memory import explain_shortage, read_card
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker
from plimsoll.trainer.zero.config import FrozenZeroConfig, ZeroConfig
from plimsoll.trainer.zero.engine import ZeroEngine
from plimsoll.trainer.zero.sleep import buckets_of, states_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
    ),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed"),
]
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None or find_spec("peft") is None,
    reason="needs bitsandbytes and PEFT",
)

ZERO = {f"zero-{stage}": zero_stage(stage) for stage in (0, 1, 2, 3)} | {
    "zero-2-cpu-adam": ZeroConfig(stage=2, optimizer_offload="cpu"),
    "zero-3-all-cpu": ZeroConfig(stage=3, optimizer_offload="cpu", parameter_offload="cpu"),
}
METRICS_BOUND, WEIGHTS_BOUND = 1e-3, 5e-3
"""In fp32. A card adds in another order than a CPU; a wrong step is 0.05 and more from a right
one (test_engine_zero.py)."""
BF16_BOUND = 0.1
"""Of the way that all weights went together: bfloat16, by kernels of another order."""


def plain_ppo(model: Path) -> tuple[PlainRun, PlainRun]:
    """Train the actor and the critic in plain PyTorch, on a CPU."""
    return (
        plain_run(plain_policy(model), policy_loss, BATCHES, 1.0),
        plain_run(plain_critic(model), value_loss, BATCHES, 1.0),
    )


@pytest.mark.parametrize("zero", ZERO)
def test_ppo_in_float32_is_that_of_plain_pytorch(
    zero: str, tied: Path, tmp_path: Path, card_rank: RankProcesses
) -> None:
    actor, critic = plain_ppo(tied)
    results = card_rank.run(train_ppo, tied, Setting(ZERO[zero]), BATCHES, tmp_path)
    assert worst_error([of_actor for of_actor, _ in results], actor) < METRICS_BOUND
    assert worst_error([of_critic for _, of_critic in results], critic) < METRICS_BOUND
    assert distance(saved_weights(tmp_path / "actor"), actor) < WEIGHTS_BOUND
    assert distance(saved_weights(tmp_path / "critic"), critic) < WEIGHTS_BOUND


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
@pytest.mark.parametrize("zero", ["zero-0", "zero-2", "zero-3", "zero-3-all-cpu"])
def test_sft_in_bfloat16_is_nearly_that_of_plain_pytorch(
    zero: str, checkpointing: bool, tied: Path, tmp_path: Path, card_rank: RankProcesses
) -> None:
    """Attention is varlen, which `auto` takes here."""
    want = plain_run(plain_policy(tied, torch.bfloat16), sft_loss, BATCHES, 1.0)
    setting = Setting(ZERO[zero], dtype="bfloat16", checkpointing=checkpointing)
    (found,) = card_rank.run(train_sft, tied, setting, BATCHES, tmp_path)
    assert whole_distance(saved_weights(tmp_path), want) < BF16_BOUND
    for step, plain in zip(found, want.steps, strict=True):
        assert step.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=0.02)
        assert step.grad_norm == pytest.approx(plain.grad_norm, rel=0.05)


@needs_bitsandbytes
@pytest.mark.parametrize("zero", ["zero-2", "zero-3", "zero-2-cpu-adam"])
def test_qlora_learns_what_it_learns_on_a_cpu(
    zero: str,
    untied: Path,
    tmp_path: Path,
    one_rank: RankProcesses,
    card_rank: RankProcesses,
) -> None:
    adapter = AdapterConfig(rank=4, alpha=8.0)
    setting = Setting(ZERO[zero], adapter=adapter, quantization="nf4")
    (want,) = one_rank.run(train_sft, untied, setting, BATCHES, tmp_path / "cpu")
    (found,) = card_rank.run(train_sft, untied, setting, BATCHES, tmp_path / "card")
    for step, other in zip(found, want, strict=True):
        assert step.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=0.01)
    on_cpu, on_card = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("cpu", "card")
    )
    loss_mask = [name for name in on_cpu if "lora_B" in name]  # from zeros
    assert loss_mask and on_card.keys() == on_cpu.keys()
    wrong = sum(float((on_card[n] - on_cpu[n]).square().sum()) for n in loss_mask)
    assert (wrong / sum(float(on_cpu[n].square().sum()) for n in loss_mask)) ** 0.5 < 0.05


@needs_bitsandbytes
@pytest.mark.parametrize("stage", [0, 2])
def test_adam_of_8_bits_learns_nearly_what_adam_learns(
    stage: int, tied: Path, tmp_path: Path, card_rank: RankProcesses
) -> None:
    want = plain_run(plain_policy(tied), sft_loss, BATCHES, 1.0)
    setting = Setting(zero_stage(stage), optimizer="adamw_8bit")
    card_rank.run(train_sft, tied, setting, BATCHES, tmp_path)
    assert 1e-4 < whole_distance(saved_weights(tmp_path), want) < 0.1


def score_twice(place: Place, model: Path, zero: FrozenZeroConfig) -> list[Floats]:
    """A frozen role's log-probs of the first batch, two times; where it is offloaded whole, it is
    at home in pinned memory before and after."""
    worker = Worker(place)
    settings = Setting(ZeroConfig()).role(model).model
    worker.load_model("reference", FrozenRole(model=settings).with_engine(zero), 1.0)
    packs = own_packs(place, BATCHES[0], 31)
    first, again = (np.concatenate(worker.log_probs("reference", packs)) for _ in range(2))
    if zero == FrozenZeroConfig(stage=0, offload="cpu"):
        parameters = worker._engines["reference"].module.parameters()
        assert all(p.is_cpu and p.is_pinned() for p in parameters)
    return [first, again]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_a_frozen_role_scores_as_on_a_cpu(
    stage: Literal[0, 3],
    offload: Literal["none", "cpu"],
    tied: Path,
    one_rank: RankProcesses,
    card_rank: RankProcesses,
) -> None:
    ((want, _),) = one_rank.run(score_twice, tied, FrozenZeroConfig())
    ((found, again),) = card_rank.run(
        score_twice, tied, FrozenZeroConfig(stage=stage, offload=offload)
    )
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(again, found, rtol=1e-6, atol=1e-6)


def resume_and_send(
    place: Place, model: Path, setting: Setting, out: Path
) -> tuple[list[float], list[float], bool]:
    """Loss and gradient norm of the third step, and of the same after a resume from a checkpoint
    that is written meanwhile; and whether the buckets for engines hold what is saved."""
    worker, other = Worker(place), Worker(place)
    worker.load_model("actor", setting.role(model), 1.0)
    other.load_model("actor", setting.role(model), 1.0)
    for batch, rate in zip(BATCHES[:2], RATES[:2], strict=True):
        sft_step(worker, place, batch, 31, rate)
    worker.begin_checkpoint("actor", out / "checkpoint")
    third = [sft_step(worker, place, BATCHES[2], 31, RATES[2])]
    worker.finish_checkpoint("actor")
    other.load_checkpoint("actor", out / "checkpoint")
    third.append(sft_step(other, place, BATCHES[2], 31, RATES[2]))
    other.save_model("actor", out / "model")
    buckets = [gathered(other, planned) for planned in open_way(other, 100_000).buckets]
    sent = {n: t for b in buckets if b is not None for n, t in tensors_in(b).items()}
    saved = load_file(out / "model" / "model.safetensors")
    same = all(torch.equal(sent[name], tensor) for name, tensor in saved.items())
    whole, resumed = ([step.metrics["loss"], step.grad_norm] for step in third)
    return whole, resumed, same


@pytest.mark.parametrize("zero", ["zero-2", "zero-3", "zero-3-all-cpu"])
def test_a_resume_goes_on_and_engines_get_what_is_saved(
    zero: str, tied: Path, tmp_path: Path, card_rank: RankProcesses
) -> None:
    setting = replace(Setting(ZERO[zero]), dtype="bfloat16")
    ((whole, resumed, same),) = card_rank.run(resume_and_send, tied, setting, tmp_path)
    assert resumed == pytest.approx(whole, rel=1e-3)
    assert same


def read_twice(place: Place, model: Path) -> list[CardReading | None]:
    """After a step, and at once again."""
    worker = Worker(place)
    worker.load_model("actor", Setting(zero_stage(2)).role(model), 1.0)
    sft_step(worker, place, BATCHES[0], 31, RATES[0])
    return [worker.read_memory().card for _ in range(2)]


def test_readings_of_the_card(tied: Path, card_rank: RankProcesses) -> None:
    ((first, second),) = card_rank.run(read_twice, tied)
    assert first is not None and second is not None
    assert first.peak_allocated > second.peak_allocated >= second.allocated > 0
    assert second.reserved < second.used < second.capacity
    assert second.capacity == torch.cuda.mem_get_info()[1]


def read_busy(place: Place) -> list[float | None]:
    """After a second without work, and after one of products alone."""
    device, shares = place.torch_device, []
    read_card(device)
    for work in (False, True):
        end = time.monotonic() + 1.5
        square = torch.randn(4096, 4096, device=device)
        while time.monotonic() < end:
            if work:
                _ = square @ square
            else:
                time.sleep(0.1)
            torch.cuda.synchronize(device)
        shares.append(read_card(device).busy)
    return shares


def test_a_card_is_seen_to_be_busy(card_rank: RankProcesses) -> None:
    ((idle, busy),) = card_rank.run(read_busy)
    assert idle is not None and busy is not None
    assert 0 <= idle < busy <= 1 and busy > 0.5


def run_out(place: Place) -> Incident:
    with (
        pytest.raises(OutOfMemory) as raised,
        explain_shortage(place.torch_device, lambda: "actor"),
    ):
        torch.empty(2**50, dtype=torch.uint8, device=place.torch_device)
    return raised.value.incident


def test_a_card_that_has_no_more_is_told_from_the_host(card_rank: RankProcesses) -> None:
    (incident,) = card_rank.run(run_out)
    assert (incident.where, incident.role, incident.asked) == ("device", "actor", 2**50)
    assert incident.held is not None and incident.held.device is not None


@dataclass(frozen=True)
class Slept:
    """What a card held before, during and after a sleep; torch's allocated bytes.

    Attributes:
        states: Bytes of what the optimizer holds on the card.
        is_same: Whether weights and states are the same bits afterwards, and are trained on.
    """

    awake: int
    asleep: int
    again: int
    states: int
    is_same: bool


def sleep_on_the_card(
    place: Place, model: Path, setting: Setting, depth: RankSleep, out: Path
) -> Slept:
    """Train a step, sleep, save asleep, wake, and train another.

    What earlier calls left on the card does not count: DeepSpeed keeps weights of a dropped engine.
    """
    left = torch.cuda.memory_allocated()
    worker = Worker(place)
    worker.load_model("actor", setting.role(model), 1.0)
    sft_step(worker, place, BATCHES[0], 39, RATES[0])
    engine = worker._engines["actor"]
    assert isinstance(engine, ZeroEngine)
    held = states_of(engine.module, engine._engine.optimizer)
    states = [tensor for tensor in held if not tensor.is_meta]
    buckets = {tensor.untyped_storage()._cdata for tensor in buckets_of(engine._engine.optimizer)}
    kept = [tensor for tensor in states if tensor.untyped_storage()._cdata not in buckets]
    before = bits_of(engine, kept)
    worker.give_back()
    awake = torch.cuda.memory_allocated() - left
    worker.sleep(depth)
    asleep = torch.cuda.memory_allocated() - left
    worker.save_checkpoint("actor", out)
    worker.wake()
    again = torch.cuda.memory_allocated() - left
    is_same = all(map(torch.equal, before, bits_of(engine, kept)))
    result = sft_step(worker, place, BATCHES[1], 39, RATES[1])
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in states}
    is_same = is_same and bool(np.isfinite(result.grad_norm))
    return Slept(awake, asleep, again, sum(storages.values()), is_same)


def bits_of(engine: ZeroEngine, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of the undivided weights and of the states."""
    with engine.gather([name for name, _ in engine.module.named_parameters()]) as weights:
        return [tensor.detach().cpu().clone() for tensor in (*weights.values(), *states)]


@pytest.mark.parametrize("depth", ["states", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [name for name in ZERO if "cpu" not in name])
def test_a_rank_that_sleeps_leaves_the_card(
    zero: str,
    dtype: DecidedDtype,
    depth: RankSleep,
    tied: Path,
    tmp_path: Path,
    card_rank: RankProcesses,
) -> None:
    setting = Setting(ZERO[zero], dtype=dtype)
    [slept] = card_rank.run(sleep_on_the_card, tied, setting, depth, tmp_path)
    assert slept.is_same and slept.again <= 1.01 * slept.awake
    if depth == "all":
        assert slept.asleep < 0.05 * slept.awake
    else:
        assert slept.asleep < slept.awake - 0.9 * slept.states
