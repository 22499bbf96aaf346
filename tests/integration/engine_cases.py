"""What the tests of the engine train on, and what they make every rank do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import numpy as np
import torch
from decided import decided_model, decided_role
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from plimsoll.algorithm.policy_objective import PolicyTerms
from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.base import Choice
from plimsoll.config.cluster import Device
from plimsoll.config.engine import (
    AdapterConfig,
    EmaConfig,
    OptimizerConfig,
    TrainedRole,
)
from plimsoll.data.packing import pack
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import (
    ADVANTAGES,
    REFERENCE_LOGPROBS,
    RETURNS,
    SAMPLER_LOGPROBS,
    TRAINER_LOGPROBS,
    VALUES,
    BatchColumns,
    BatchCounts,
    Floats,
    Pack,
    PackColumns,
    Sample,
    cut,
)
from plimsoll.trainer.objectives import NllObjective, PolicyObjective, ValueObjective
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import UpdateResult, Worker
from plimsoll.trainer.zero.config import ZeroConfig
from plimsoll.trainer.zero.settings import zero_settings

VOCAB = 320
SEED = 5
"""Of the critic's new head."""
CLIP_VALUE = 0.2
DECAY = 0.23
"""What stays of a moving average at each step, after the first."""
OBJECTIVE = PolicyObjective(
    Choice(name="clip", options={"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.5}),
    terms=PolicyTerms(kl_estimator="k3", kl_coefficient=0.1, entropy_bonus=0.05),
)
RATES = (4e-3, 1e-3, 2e-3)
"""The learning rate of each step: all different, so that it matters that each is used."""


@dataclass(frozen=True)
class Batch:
    """What one optimizer step learns from; the streams hold one array per sample."""

    samples: tuple[Sample, ...]
    advantages: tuple[Floats, ...]
    old_logprobs: tuple[Floats, ...]
    reference_logprobs: tuple[Floats, ...]
    returns: tuple[Floats, ...]
    old_values: tuple[Floats, ...]

    @property
    def counts(self) -> BatchCounts:
        return BatchCounts(sum(int(s.loss_mask.sum()) for s in self.samples), len(self.samples))


def make_batch(
    lengths: Sequence[int], seed: int, unlearned: Sequence[int] = (), shared: int = 0
) -> Batch:
    """Random tokens, about two thirds of them learned; in the samples `unlearned`, none.

    The first `shared` tokens are the same in all samples, and not learned.

    Log-probs of a model that knows nothing are about -log(VOCAB), so the old policy's are drawn
    around that: ratios fall on both sides of every clip.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for i, length in enumerate(lengths):
        loss_mask = (rng.random(length) < 0.66) & (i not in unlearned)
        loss_mask[: max(1, shared)] = False
        tokens = rng.integers(0, VOCAB, length)
        tokens[:shared] = np.arange(shared)
        samples.append(Sample(tokens, loss_mask))

    def stream(mean: float, spread: float) -> tuple[Floats, ...]:
        drawn = (rng.normal(mean, spread, int(s.loss_mask.sum())) for s in samples)
        return tuple(array.astype(np.float32) for array in drawn)

    guess = -float(np.log(VOCAB))
    return Batch(
        tuple(samples),
        stream(0, 1),
        stream(guess, 1),
        stream(guess, 0.5),
        stream(0, 1),
        stream(0, 1),
    )


BATCHES = tuple(make_batch((9, 30, 14, 2, 22, 5, 17), seed) for seed in (1, 2, 3))

SPARSE = (
    make_batch((12,), 4),
    make_batch((5, 9, 30), 5, unlearned=(2,)),
    make_batch((6, 4, 8), 6, unlearned=(0, 1)),
)
"""Fewer sequences than ranks; then, with a small budget, packs without a learned token."""


@dataclass(frozen=True)
class Setting:
    """How a role is trained, apart from the model."""

    zero: ZeroConfig
    dtype: Literal["bfloat16", "float32"] = "float32"
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 31
    checkpointing: bool | Literal["selective"] = False
    mlp_tile: int | None = None
    adapter: AdapterConfig | None = None
    quantization: Literal["none", "nf4"] = "none"
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    ema: EmaConfig | None = None
    max_skipped_steps: int = 0

    def role(self, model: Path) -> TrainedRole:
        # A large epsilon: Adam divides by the gradient's size, and where that is nothing but
        # rounding the sign of the update would be as well.
        role = TrainedRole(
            model=decided_model(
                path=str(model),
                dtype=self.dtype,
                head_chunk=16,
                gradient_checkpointing=self.checkpointing,
                mlp_tile=self.mlp_tile,
                quantization=self.quantization,
            ),
            adapter=self.adapter,
            optimizer=OptimizerConfig(
                kind=self.optimizer,
                eps=1e-4,
                weight_decay=0.1,
                max_grad_norm=self.max_grad_norm,
                learning_rate=1.0,
                max_skipped_steps=self.max_skipped_steps,
            ),
            ema=self.ema,
        )
        return decided_role(role.with_engine(self.zero))


def zero_stage(stage: int, **settings: int | str) -> ZeroConfig:
    """Return `ZeroConfig(stage=...)` for any number."""
    return ZeroConfig.model_validate({"stage": stage, **settings})


def write_model(directory: Path, *, tied: bool) -> Path:
    """Two layers; half of the matrices are over ZeRO-3's persistence threshold, half under."""
    config = tiny_config(
        "qwen2", tied, vocab=VOCAB, hidden=320, feed_forward=352, heads=4, kv_heads=2
    )
    config.initializer_range = 0.05
    write_tiny_model(directory, config, seed=0, tokenizer=make_tokenizer())
    return directory


def write_mixture(directory: Path) -> Path:
    """Two layers of four experts, whose stacked weights are over that threshold.

    It is written as transformers does: experts by the names of the family's own files.
    """
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=160, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=40, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=160, initializer_range=0.08,
        max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def own_packs(place: Place, batch: Batch, budget: int) -> list[Pack]:
    """The rank's micro-batches."""
    streams = place.ranks // place.shards
    return pack(batch.samples, streams, place.shards * budget)[place.rank // place.shards]


def policy_columns(batch: Batch) -> BatchColumns:
    """Return what sampled responses carry."""
    return {
        ADVANTAGES: batch.advantages,
        SAMPLER_LOGPROBS: batch.old_logprobs,  # without a correction only measured
        TRAINER_LOGPROBS: batch.old_logprobs,
        REFERENCE_LOGPROBS: batch.reference_logprobs,
    }


def value_columns(batch: Batch) -> BatchColumns:
    """Return what a critic learns from."""
    return {RETURNS: batch.returns, VALUES: batch.old_values}


def cut_for(packs: Sequence[Pack], columns: BatchColumns) -> list[PackColumns]:
    """Return the columns of each pack."""
    return [cut(columns, pack) for pack in packs]


def sft_step(worker: Worker, place: Place, batch: Batch, budget: int, rate: float) -> UpdateResult:
    packs = own_packs(place, batch, budget)
    return worker.train("actor", packs, cut_for(packs, {}), batch.counts, NllObjective(), rate)


def policy_step(
    worker: Worker, place: Place, batch: Batch, budget: int, rate: float
) -> UpdateResult:
    packs = own_packs(place, batch, budget)
    columns = cut_for(packs, policy_columns(batch))
    return worker.train("actor", packs, columns, batch.counts, OBJECTIVE, rate)


def value_step(
    worker: Worker, place: Place, batch: Batch, budget: int, rate: float
) -> UpdateResult:
    packs = own_packs(place, batch, budget)
    columns = cut_for(packs, value_columns(batch))
    return worker.train("critic", packs, columns, batch.counts, ValueObjective(CLIP_VALUE), rate)


def train_sft(
    place: Place, model: Path, setting: Setting, batches: Sequence[Batch], out: Path
) -> list[UpdateResult]:
    """Train on the batches, one step each, and save the model."""
    worker = Worker(place)
    worker.load_model("actor", setting.role(model), temperature=1.0)
    results = [
        sft_step(worker, place, batch, setting.micro_batch_tokens, rate)
        for batch, rate in zip(batches, RATES, strict=True)
    ]
    worker.save_model("actor", out)
    return results


def train_sft_with_dry_step(
    place: Place, model: Path, setting: Setting, batches: Sequence[Batch], out: Path
) -> list[UpdateResult]:
    """Train as `train_sft` does, with an engine that does not forget DeepSpeed's dry step."""
    with patch("plimsoll.trainer.zero.engine.forget_dry_step", lambda optimizer: None):
        return train_sft(place, model, setting, batches, out)


def train_sft_gathering(
    place: Place, model: Path, setting: Setting, batches: Sequence[Batch], out: Path
) -> list[UpdateResult]:
    """Train as `train_sft` does; at ZeRO stage 3 no weight stays gathered after its use, as in a
    large model."""
    few = {
        "stage3_max_live_parameters": 1,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
    }

    def settings(zero: ZeroConfig, device: Device, ranks: int) -> dict[str, object]:
        return zero_settings(zero, device, ranks) | few

    with patch("plimsoll.trainer.zero.settings.zero_settings", settings):
        return train_sft(place, model, setting, batches, out)


def load_both(place: Place, model: Path, setting: Setting) -> Worker:
    """A rank with an actor and a critic in one process."""
    worker = Worker(place)
    worker.load_model("actor", setting.role(model), temperature=1.0)
    if setting.adapter is not None:  # a critic's head is not the language model's
        adapter = setting.adapter.model_copy(update={"modules_to_save": ()})
        setting = replace(setting, adapter=adapter)
    worker.load_model("critic", setting.role(model), seed=SEED, head="value")
    return worker


def save_both(worker: Worker, out: Path) -> None:
    """The models, as out/actor and out/critic."""
    worker.save_model("actor", out / "actor")
    worker.save_model("critic", out / "critic")


def train_ppo(
    place: Place, model: Path, setting: Setting, batches: Sequence[Batch], out: Path
) -> tuple[list[UpdateResult], list[UpdateResult]]:
    """Train an actor and a critic in turns and save them."""
    worker = load_both(place, model, setting)
    budget = setting.micro_batch_tokens
    actor, critic = [], []
    for batch, rate in zip(batches, RATES, strict=True):
        critic.append(value_step(worker, place, batch, budget, rate))
        actor.append(policy_step(worker, place, batch, budget, rate))
    save_both(worker, out)
    return actor, critic
