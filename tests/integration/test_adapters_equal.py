"""Adapters train as PEFT trains them in plain PyTorch, on one rank and two, at every ZeRO stage,
over a base of 16 or 32 bits and over one of 4; and the base stays as it is, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
import torch
import xxhash
from choice import pairwise_first, slow
from decided import decided_model
from engine_cases import BATCHES, RATES, SEED, Setting, own_packs, sft_step, zero_stage
from engine_reference import (
    PlainRun,
    distance,
    plain_policy,
    plain_run,
    sft_loss,
    worst_error,
)
from peft import PeftModel
from ranks import RankProcesses
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from plimsoll.config.engine import AdapterConfig, FrozenRole
from plimsoll.engine.process_group import Place
from plimsoll.engine.weights import hash_bytes
from plimsoll.engine.worker import UpdateResult, Worker
from plimsoll.engine.zero.config import FrozenZeroConfig, ZeroConfig

METRICS_BOUND = 1e-5
WEIGHTS_BOUND = 1e-4
"""Of the way that the weights went, as in test_engine_equal.py."""
LORA = AdapterConfig(rank=4, alpha=8.0)
RSLORA = AdapterConfig(rank=4, alpha=8.0, rslora=True, targets=("q_proj", "down_proj"))
DORA = AdapterConfig(rank=4, alpha=8.0, dora=True)
EMBEDDING = AdapterConfig(rank=4, alpha=8.0, targets=("embed_tokens", "v_proj"))
STAGES = {f"zero-{stage}": zero_stage(stage) for stage in (0, 2, 3)}
OFFLOADED = {
    "zero-2-cpu-adam": ZeroConfig(stage=2, optimizer_offload="cpu"),
    "zero-3-all-cpu": ZeroConfig(stage=3, optimizer_offload="cpu", parameter_offload="cpu"),
}
KINDS = {
    "lora": Setting(ZeroConfig(), adapter=LORA),
    "qlora": Setting(ZeroConfig(), adapter=LORA, quantization="nf4"),
}


def load_actor(place: Place, model: Path, setting: Setting) -> Worker:
    worker = Worker(place)
    worker.load_policy("actor", setting.role(model), 1.0, SEED)
    return worker


def base_hash(worker: Worker) -> str:
    """Of all that is frozen, as it is stored: codes of 4 bits, and their scales, included."""
    policy = worker._policy("actor")
    frozen = [name for name, p in policy.named_parameters() if not p.requires_grad]
    digest = xxhash.xxh3_64()
    with worker._engines["actor"].gather(frozen) as tensors:
        for name in frozen:
            digest.update(hash_bytes(tensors[name].contiguous()).encode())
            scales = getattr(policy.get_parameter(name), "quant_state", None)
            if scales is not None:
                digest.update(hash_bytes(scales.absmax).encode())
    return digest.hexdigest()


def train(place: Place, model: Path, setting: Setting, out: Path) -> list[UpdateResult]:
    """Three steps; the adapter before and after is saved, and the base looked at."""
    worker = load_actor(place, model, setting)
    worker.save_model("actor", out / "first")
    before = base_hash(worker)
    results = [
        sft_step(worker, place, batch, setting.micro_batch_tokens, rate)
        for batch, rate in zip(BATCHES, RATES, strict=True)
    ]
    for names in worker.weight_plan("actor", 100_000):
        worker.weight_bucket("actor", names, False)
    worker.save_model("actor", out / "last")
    assert base_hash(worker) == before
    return results


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return {n: t.float() for n, t in load_file(directory / "adapter_model.safetensors").items()}


def named_as_saved(run: PlainRun) -> PlainRun:
    def renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        short = {name.replace(".default", ""): tensor for name, tensor in weights.items()}
        return {n.replace("magnitude_vector.weight", "magnitude_vector"): short[n] for n in short}

    return replace(run, before=renamed(run.before), after=renamed(run.after))


def quantised_policy(model: Path) -> torch.nn.Module:
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, quantization_config=settings, attn_implementation="eager"
    )
    return loaded.train()  # in eval mode bitsandbytes lays the weights of a CPU out anew


def plain_adapted(model: Path, adapter: Path, *, quantised: bool) -> PeftModel:
    base = quantised_policy(model) if quantised else plain_policy(model)
    return PeftModel.from_pretrained(base, adapter, is_trainable=True)


@cache
def reference(model: Path, first: Path, quantised: bool) -> PlainRun:
    """PEFT on transformers, from the same first adapter, in plain PyTorch."""
    plain = plain_adapted(model, first, quantised=quantised).train()
    return named_as_saved(plain_run(plain, sft_loss, BATCHES, 1.0))


def check(
    ranks: RankProcesses, model: Path, setting: Setting, out: Path, first: Path | None = None
) -> None:
    """first: an adapter that must be the same as the one that the run started from."""
    results = ranks.run(train, model, setting, out)
    begun = saved(out / "first")
    if first is not None:
        given = saved(first)
        assert given.keys() == begun.keys()
        assert all(torch.equal(given[name], begun[name]) for name in given)
    want = reference(model, first or out / "first", setting.quantization == "nf4")
    assert worst_error(results, want) < METRICS_BOUND
    assert distance(saved(out / "last"), want) < WEIGHTS_BOUND


@pytest.fixture(scope="module")
def first(untied: Path, tmp_path_factory: pytest.TempPathFactory, one_rank: RankProcesses) -> Path:
    """The adapter that the seed gives: the same over any base, on any number of ranks."""
    out = tmp_path_factory.mktemp("first")
    one_rank.run(train, untied, KINDS["lora"], out)
    return out / "first"


@pytest.mark.parametrize(("kind", "zero", "ranks"), pairwise_first([*KINDS], [*STAGES], [1, 2]))
def test_training_is_that_of_plain_peft(
    kind: str, zero: str, ranks: int, untied: Path, first: Path, tmp_path: Path, pool: RankProcesses
) -> None:
    check(pool, untied, replace(KINDS[kind], zero=STAGES[zero]), tmp_path, first)


@pytest.mark.parametrize(
    ("kind", "zero"),
    [
        ("lora", "zero-3-all-cpu"),
        ("qlora", "zero-2-cpu-adam"),
        slow("lora", "zero-2-cpu-adam"),
        slow("qlora", "zero-3-all-cpu"),
    ],
)
def test_offloaded(
    kind: str, zero: str, untied: Path, first: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    check(two_ranks, untied, replace(KINDS[kind], zero=OFFLOADED[zero]), tmp_path, first)


@pytest.mark.parametrize("kind", [slow("lora"), "qlora"])
def test_gradient_checkpointing_over_a_frozen_embedding(
    kind: str, untied: Path, first: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    setting = replace(KINDS[kind], zero=ZeroConfig(stage=3), checkpointing=True)
    check(two_ranks, untied, setting, tmp_path, first)


@pytest.mark.parametrize(
    ("adapter", "quantization", "stage"),
    [(RSLORA, "nf4", 2), (DORA, "none", 3), (DORA, "nf4", 2), (EMBEDDING, "none", 3)],
    ids=["rslora-nf4", "dora-zero-3", "dora-nf4", "embedding-zero-3"],
)
def test_other_kinds_of_adapters(
    adapter: AdapterConfig,
    quantization: str,
    stage: int,
    untied: Path,
    tmp_path: Path,
    two_ranks: RankProcesses,
) -> None:
    quantised = replace(KINDS["qlora"] if quantization == "nf4" else KINDS["lora"], adapter=adapter)
    check(two_ranks, untied, replace(quantised, zero=zero_stage(stage)), tmp_path)


def score_frozen(place: Place, model: Path, stage: Literal[0, 3]) -> list[bytes]:
    """What a frozen role in 4 bits gives for the whole first batch."""
    worker = Worker(place)
    settings = decided_model(str(model), dtype="bfloat16", quantization="nf4")
    role = FrozenRole(model=settings).with_engine(FrozenZeroConfig(stage=stage))
    worker.load_policy("reference", role, 1.0)
    packs = own_packs(Place(0, 1, 0, "", 0, "cpu", 1), BATCHES[0], 31)
    return [array.tobytes() for array in worker.log_probs("reference", packs)]


def test_a_frozen_role_in_4_bits_can_be_divided(untied: Path, two_ranks: RankProcesses) -> None:
    whole, also_whole = two_ranks.run(score_frozen, untied, 0)
    assert two_ranks.run(score_frozen, untied, 3) == [whole, also_whole] == [whole, whole]


def test_the_bounds_see_what_they_should(untied: Path, first: Path) -> None:
    """Clipping is active; a quantised base is another model; and the adapters move."""
    plain, quantised = reference(untied, first, False), reference(untied, first, True)
    assert abs(plain.steps[0].metrics["loss"] - quantised.steps[0].metrics["loss"]) > 0.01
    assert distance(quantised.after, plain) > 100 * WEIGHTS_BOUND
    assert all("lora_" in name for name in plain.after)
    assert len(plain.after) == 2 * 2 * 7  # two matrices for each of seven linears, in two layers
