"""Mixtures of experts on ZeRO: routers that are frozen stay as they are and cost no states, at each
stage; and stage 3 gathers as much of a layer's experts at once as the plan counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from choice import slow
from engine_cases import BATCHES, RATES, VOCAB, Setting, policy_step, sft_step, zero_stage
from ranks import RankProcesses
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig
from zero_cases import BYTES, bytes_since, live_storages

from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.engine import EmaConfig, TrainedRole
from plimsoll.jobs.roles import actor
from plimsoll.records import ExpertNumbers
from plimsoll.shapes.known_models import read_shape
from plimsoll.shapes.shape import MicroBatch
from plimsoll.trainer.price import RoleWork, trainer_price
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker
from plimsoll.trainer.zero.engine import ZeroEngine
from plimsoll.trainer.zero.settings import ZeroSizes, trained_counts, zero_settings
from plimsoll.trainer.zero.states import weights

SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 8},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 64, "initializer_range": 0.1},
}
ROUTERS = 2 * 8 * 256
STEPS = 2


def write_mixture(directory: Path) -> Path:
    """A layer has 262,144 weights in gate and up of its experts, and 131,072 in down."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, head_dim=64))
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


@dataclass(frozen=True)
class Frozen:
    """masters: elements that a rank's optimizer updates; held, priced: bytes between two steps."""

    masters: int
    held: int
    priced: int
    again: bool


def role_of(model: Path, setting: Setting) -> TrainedRole:
    return setting.role(model).model_copy(update={"freeze": "router"})


def train_frozen(place: Place, model: Path, setting: Setting, out: Path) -> Frozen:
    worker, role = Worker(place), role_of(model, setting)
    before = live_storages()
    worker.load_model("actor", role)
    for batch in BATCHES[:STEPS]:
        sft_step(worker, place, batch, 100, 4e-3)
    engine = worker._engine("actor")
    assert isinstance(engine, ZeroEngine)
    masters = sum(master.numel() for master in engine.masters())
    priced = price(role, model, place.ranks)
    held = bytes_since(before, priced)
    worker.save_checkpoint("actor", out / "checkpoint")
    third = sft_step(worker, place, BATCHES[2], 100, 4e-3)
    worker.save_model("actor", out / "model")
    worker.swap_average("actor")
    worker.save_model("actor", out / "average")
    worker.load_model("actor", role)
    worker.load_checkpoint("actor", out / "checkpoint")
    again = sft_step(worker, place, BATCHES[2], 100, 4e-3)
    return Frozen(masters, held, priced, again == third)


def price(role: TrainedRole, model: Path, ranks: int) -> int:
    """The plan's bytes of the role on one rank, between two steps."""
    shape, work = read_shape(str(model)), MicroBatch(100, 7, 30, 60)
    whole = RoleWork(actor(role, "policy"), shape, work, ranks, "cpu", moments=frozenset())
    tensors = trainer_price(role).trained(role, whole, None).tensors
    return sum(one.bytes for one in tensors if one.life in ("always", "built", "stepped"))


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(0, "float32"), (1, "bfloat16"), (2, "float32"), (3, "bfloat16")]
    + [slow(*case) for case in ((0, "bfloat16"), (1, "float32"), (2, "bfloat16"), (3, "float32"))],
)
def test_routers_that_are_frozen(
    stage: int, dtype: Any, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    model = write_mixture(tmp_path / "mixture")
    setting = Setting(
        zero_stage(stage, bucket_elements=1000), dtype=dtype, ema=EmaConfig(decay=0.5)
    )
    ranks = two_ranks.run(train_frozen, model, setting, tmp_path)
    first = load_file(model / "model.safetensors")
    whole = sum(tensor.numel() for tensor in first.values())
    masters = ranks[0].masters if stage == 0 else sum(rank.masters for rank in ranks)
    assert whole - ROUTERS <= masters < whole - ROUTERS + 100  # the last ones may be padding
    for rank in ranks:
        assert rank.again
        assert abs(rank.held - rank.priced) < BYTES * rank.priced
    for name in ("model", "average"):
        last = load_file(tmp_path / name / "model.safetensors")
        kept = {key for key, tensor in last.items() if torch.equal(tensor, first[key].to(tensor))}
        assert kept == {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}


def gathered_elements(place: Place, model: Path, live: int) -> tuple[int, int]:
    """The most elements that were gathered while experts computed, and those of the plan."""
    few = {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": 0}
    few |= {"stage3_param_persistence_threshold": 3000, "stage3_prefetch_bucket_size": 0}
    setting, worker = Setting(zero_stage(3), checkpointing=True), Worker(place)
    with patch("plimsoll.trainer.zero.settings.zero_settings", lambda *a: zero_settings(*a) | few):
        worker.load_model("actor", setting.role(model))
    module, most = worker._engine("actor").module, [0]
    parameters: list[Any] = list(module.parameters())

    def look(*_: object) -> None:
        present = [p for p in parameters if p.ds_status.name == "AVAILABLE"]
        most.append(sum(p.ds_numel for p in present if not p.ds_persist))

    for part in module.modules():
        if type(part).__name__.endswith(("Experts", "MoeMLP")):
            part.register_forward_pre_hook(look)
            part.register_full_backward_hook(look)
    sft_step(worker, place, BATCHES[0], 100, 4e-3)
    sizes = ZeroSizes(3, place.ranks, 4, 1000, live=live, persistence=3000)
    counts = trained_counts(setting.role(model), read_shape(str(model)), "policy", sizes)
    priced = next(t for t in weights(counts, sizes) if t.name == "live parameters")
    return max(most), priced.elements


@pytest.mark.parametrize("shared", [False, True])
def test_stage_3_gathers_a_layers_experts_at_once(
    shared: bool, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    """More than one tensor, whatever the limit is; DeepSpeed takes these blocks for leaves."""
    if shared:
        torch.manual_seed(0)
        config = Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=96)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mixture")
        make_tokenizer().save_pretrained(tmp_path / "mixture")
    else:
        write_mixture(tmp_path / "mixture")
    for gathered, priced in two_ranks.run(gathered_elements, tmp_path / "mixture", 1000):
        assert gathered == priced


def train_routed(place: Place, model: Path, setting: Setting) -> list[dict[str, float]]:
    """This rank's metrics of each step on responses that have a sampler's experts."""
    worker = Worker(place)
    worker.load_model("actor", setting.role(model))
    rng, found = np.random.default_rng(0), []
    for batch, rate in zip(BATCHES[:STEPS], RATES, strict=False):
        routed = tuple(
            replace(sample, routing=random_experts(rng, len(sample.tokens) - 1))
            for sample in batch.samples
        )
        found.append(policy_step(worker, place, replace(batch, samples=routed), 40, rate).metrics)
    return found


def random_experts(rng: np.random.Generator, tokens: int) -> ExpertNumbers:
    return rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (tokens, 2, 1)), axis=2)[:, :, :2]


@pytest.mark.parametrize("checkpointing", [True, slow("selective")])
def test_experts_are_taken_on_divided_weights(
    checkpointing: Any, tmp_path: Path, one_rank: RankProcesses, two_ranks: RankProcesses
) -> None:
    """As on one rank, where nothing is recomputed."""
    model = write_mixture(tmp_path / "mixture")
    [whole] = one_rank.run(train_routed, model, Setting(zero_stage(0)))
    divided = Setting(zero_stage(3), checkpointing=checkpointing)
    ranks = two_ranks.run(train_routed, model, divided)
    for step, want in enumerate(whole):
        assert want["rollout/rerouted"] == 0 < want["rollout/rerouted_live"]
        for name, value in want.items():
            found = sum(rank[step][name] for rank in ranks)
            assert found == pytest.approx(value, rel=1e-4, abs=1e-6), name
