"""Adapters on disk and on their way to engines: PEFT's directories, merged weights, and what the
model computes with its adapter switched off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from buckets import gathered, open_way, tensors_in
from engine_cases import (
    BATCHES,
    RATES,
    SEED,
    Setting,
    load_both,
    own_packs,
    save_both,
    sft_step,
    value_step,
    zero_stage,
)
from engine_reference import (
    plain_adapted,
    plain_critic,
    plain_logprobs,
    plain_policy,
    plain_values,
    saved_weights,
)
from peft import PeftModel
from ranks import RankProcesses
from safetensors.torch import load_file
from zero_cases import FORMS

from plimsoll.commands.export import merge_adapter
from plimsoll.records import Floats, from_packed
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import UpdateResult, Worker
from plimsoll.trainer.zero.config import ZeroConfig

LORA = Setting(ZeroConfig(), adapter=FORMS["lora"])
ADAPTERS = {
    "lora": LORA,
    "qlora": replace(LORA, quantization="nf4"),
    "dora": replace(LORA, adapter=FORMS["dora"]),
    "embedding": replace(LORA, adapter=FORMS["embedding"]),
    "whole": replace(LORA, adapter=FORMS["whole"]),
}
ONE = Place(0, 1, "", 0, "cpu", 1)


@dataclass(frozen=True)
class Scored:
    """Scores of the whole first batch, the same on every rank; one array per sample."""

    logprobs: list[Floats]
    values: list[Floats]
    sent: dict[str, torch.Tensor]


def train_save_score(place: Place, model: Path, setting: Setting, out: Path) -> Scored:
    """Two steps of each role; the weights as engines get them."""
    worker = load_both(place, model, setting)
    for batch, rate in zip(BATCHES[:2], RATES[:2], strict=True):
        sft_step(worker, place, batch, 31, rate)
        value_step(worker, place, batch, 31, rate)
    save_both(worker, out)
    packs = own_packs(ONE, BATCHES[0], 31)
    return Scored(
        from_packed(packs, worker.log_probs("actor", packs)),
        from_packed(packs, worker.values("critic", packs)),
        sent_weights(worker),
    )


def sent_weights(worker: Worker) -> dict[str, torch.Tensor]:
    """All tensors that rank 0 sends; each announced name once. Nothing on other ranks."""
    sent: dict[str, torch.Tensor] = {}
    plan = open_way(worker, 500_000)
    for planned in plan.buckets:
        bucket = gathered(worker, planned)
        if bucket is not None:
            sent |= tensors_in(bucket)
    assert not sent or sent.keys() == set(plan.names)
    return sent


def worst_gap(got: Sequence[Floats], want: Sequence[torch.Tensor]) -> float:
    return max(float((torch.from_numpy(a) - b).abs().max()) for a, b in zip(got, want, strict=True))


def logprobs_of(model: torch.nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [plain_logprobs(model, sample)[0] for sample in BATCHES[0].samples]


def values_of(model: torch.nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [plain_values(model, sample) for sample in BATCHES[0].samples]


@pytest.mark.parametrize("kind", ADAPTERS)
def test_peft_and_merged_models_compute_what_the_trainer_computes(
    kind: str, untied: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    """The merged weights are also those of PEFT's own merging, under the base's own names."""
    stage = 2 if kind == "dora" else 3
    setting = replace(ADAPTERS[kind], zero=zero_stage(stage))
    quantised = setting.quantization == "nf4"
    scored, other = two_ranks.run(train_save_score, untied, setting, tmp_path)
    assert not other.sent

    adapted = plain_adapted(plain_policy(untied, quantised=quantised), tmp_path / "actor")
    assert worst_gap(scored.logprobs, logprobs_of(adapted)) < 1e-4
    assert worst_gap(scored.logprobs, logprobs_of(plain_policy(untied))) > 1e-2

    merge_adapter(
        tmp_path / "actor",
        tmp_path / "merged",
        None,
        dtype="float32",
        quantization=setting.quantization,
    )
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == scored.sent.keys() == load_file(untied / "model.safetensors").keys()
    assert all(torch.equal(merged[name], scored.sent[name]) for name in merged)
    assert worst_gap(scored.logprobs, logprobs_of(plain_policy(tmp_path / "merged"))) < 1e-4
    if not quantised:  # into 4 bits PEFT merges by quantising anew
        whole = adapted.merge_and_unload().state_dict()
        assert all((merged[name] - whole[name]).abs().max() < 1e-5 for name in merged)
    if kind in ("lora", "qlora"):
        check_critic(scored, setting, untied, tmp_path)


def check_critic(scored: Scored, setting: Setting, model: Path, home: Path) -> None:
    """A critic is saved with its head, and merged with it."""
    state = saved_weights(home / "critic")
    fresh = plain_critic(model)
    assert not torch.equal(state["base_model.model.score.weight"], fresh.score.weight)
    quantization = setting.quantization
    merge_adapter(
        home / "critic", home / "merged-critic", None, dtype="float32", quantization=quantization
    )
    weights = load_file(home / "merged-critic" / "model.safetensors")
    assert torch.equal(weights["score.weight"], state["base_model.model.score.weight"])
    fresh.load_state_dict(weights)
    assert worst_gap(scored.values, values_of(fresh)) < 1e-4
    if quantization == "none":
        peft = PeftModel.from_pretrained(plain_critic(model), home / "critic")
        head = peft.base_model.model.score.modules_to_save["default"]
        assert torch.equal(head.weight, state["base_model.model.score.weight"])


@dataclass(frozen=True)
class OffAndOn:
    """Log-probs before training, as the reference, and after training; then the last step's."""

    first: list[bytes]
    reference: list[bytes]
    trained: list[bytes]
    step: UpdateResult


def switch_off(place: Place, model: Path, setting: Setting, look: bool) -> OffAndOn:
    """Two steps; between them the reference scores, if it is to be looked at."""
    worker = Worker(place)
    worker.load_model("actor", setting.role(model), 1.0, SEED)
    worker.score_without_adapter("actor", "reference")
    packs = own_packs(place, BATCHES[0], 31)

    def scores(role: str) -> list[bytes]:
        return [array.tobytes() for array in worker.log_probs(role, packs)]

    first = scores("actor")
    sft_step(worker, place, BATCHES[0], 31, RATES[0])
    reference = scores("reference") if look else []
    trained = scores("actor")
    step = sft_step(worker, place, BATCHES[1], 31, RATES[1])
    return OffAndOn(first, reference, trained, step)


@pytest.mark.parametrize(("kind", "stage"), [("lora", 3), ("qlora", 2)])
def test_with_its_adapter_off_the_actor_is_its_first_self_and_learns_on(
    kind: str, stage: int, untied: Path, two_ranks: RankProcesses
) -> None:
    setting = replace(ADAPTERS[kind], zero=zero_stage(stage))
    looked = two_ranks.run(switch_off, untied, setting, True)
    blind = two_ranks.run(switch_off, untied, setting, False)
    for saw, did_not in zip(looked, blind, strict=True):
        assert saw.reference == saw.first != saw.trained
        assert (saw.trained, saw.step) == (did_not.trained, did_not.step)


def save_first(place: Place, model: Path, setting: Setting, out: Path) -> None:
    worker = Worker(place)
    worker.load_model("actor", setting.role(model), 1.0, SEED)
    worker.save_model("actor", out)


def test_an_adapter_begins_alike_over_any_base_on_any_ranks(
    untied: Path, tmp_path: Path, one_rank: RankProcesses, two_ranks: RankProcesses
) -> None:
    divided = replace(ADAPTERS["qlora"], zero=zero_stage(3))
    one_rank.run(save_first, untied, replace(LORA, zero=zero_stage(0)), tmp_path / "one")
    two_ranks.run(save_first, untied, divided, tmp_path / "two")
    one, two = saved_weights(tmp_path / "one"), saved_weights(tmp_path / "two")
    assert one.keys() == two.keys() and len(one) == 2 * 2 * 7  # seven linears, in two layers
    assert all(torch.equal(one[name], two[name]) for name in one)
