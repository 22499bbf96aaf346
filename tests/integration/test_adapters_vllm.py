"""Adapters and a real vLLM engine: merged from disk, merged by weight sync over bases of 16 and of
4 bits, and beside the engine's own weights.
"""

from __future__ import annotations

from asyncio import Runner
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from decided import decided_model, decided_role
from test_run_sync import PROBE, TEMPERATURE, Pair, packs_of, train
from vllm_cases import started

from plimsoll.commands.demo import make_tokenizer
from plimsoll.commands.export import merge_adapter
from plimsoll.config.engine import AdapterConfig, OptimizerConfig, TrainedRole
from plimsoll.config.rollout import RolloutConfig, SamplingConfig, SyncConfig
from plimsoll.errors import WeightSyncError
from plimsoll.machine.host import free_port
from plimsoll.model.disturbance import Disturbance
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import Floats, Ints, Prompt, Trajectory, from_packed
from plimsoll.sampler.protocol import EngineSpec, Request
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.sampler.vllm.engine import VllmEngine
from plimsoll.sync.proof import Rehearsal, WeightSync, prepare_sync, prove, sync_weights
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker

pytestmark = pytest.mark.engine

RNG = np.random.default_rng(1)
ROUNDING = 0.02
"""Nats: what bfloat16 may differ by."""


@dataclass(frozen=True)
class Separate:
    """The route of an adapter alone, between a trainer and an engine in this process."""

    pair: Pair
    name: str = "adapter"

    def renew(self) -> None:
        """It opens no way."""

    def rehearsals(self) -> Sequence[Rehearsal]:
        return ()

    def transfer(self, bucket_bytes: int, version: int, rehearsal: Rehearsal | None = None) -> int:
        files = self.pair.worker.adapter_files("actor", version)
        assert files is not None
        return self.pair.loop.run(self.pair.engine.take_adapter(files))

    def trainer_log_probs(
        self, sequences: Sequence[Ints], disturbance: Disturbance | None = None
    ) -> list[Floats]:
        return self.pair.trainer_log_probs(sequences, disturbance)

    def engine_log_probs(self, sequences: Sequence[Ints]) -> list[list[Floats]]:
        return self.pair.engine_log_probs(sequences)

    def engine_answers(self, prompts: Sequence[Ints]) -> list[list[Trajectory]]:
        return self.pair.engine_answers(prompts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vllm") / "model"
    config = tiny_config("llama", True, vocab=64, hidden=64, heads=2, feed_forward=96)
    config.initializer_range = 0.1
    write_tiny_model(path, config, 0, make_tokenizer())
    return path


@contextmanager
def engine_on(model: Path, adapter_rank: int | None = None) -> Iterator[tuple[VllmEngine, Runner]]:
    rollout = RolloutConfig(dtype="bfloat16").with_engine(VllmConfig(cpu_kv_cache_gib=0.25))
    spec = EngineSpec(0, str(model), 64, 1, "cpu", rollout, adapter_rank=adapter_rank)
    with started(spec) as both:
        yield both


def trainer(model: Path, adapter: AdapterConfig, quantization: str = "none") -> Worker:
    role = decided_role(
        TrainedRole(
            model=decided_model(str(model), dtype="bfloat16", quantization=quantization),
            adapter=adapter,
            optimizer=OptimizerConfig(max_grad_norm=0),
        )
    )
    worker = Worker(Place(0, 1, "127.0.0.1", free_port(), "cpu", 1))
    worker.load_model("actor", role, TEMPERATURE, seed=1)
    return worker


def within(pair: Pair | Separate, bound: float = ROUNDING) -> WeightSync:
    return WeightSync(pair, 20_000, PROBE, "bfloat16", 4.0, most=bound)


@pytest.fixture(scope="module")
def merged(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A LoRA trainer, and an engine that loaded its adapter merged by `plimsoll merge`."""
    home = tmp_path_factory.mktemp("merged")
    worker = trainer(model, AdapterConfig(rank=4, alpha=8.0))
    train(worker, rng=RNG)
    worker.save_model("actor", home / "adapter")
    merge_adapter(home / "adapter", home / "merged", None)
    with engine_on(home / "merged") as (engine, loop):
        yield Pair(worker, engine, loop)


@pytest.mark.slow
def test_a_merged_adapter_in_vllm_gives_the_trainers_log_probs(merged: Pair) -> None:
    assert prove(within(merged), 0).gap < ROUNDING


@pytest.mark.parametrize(
    ("adapter", "quantization"),
    [
        (AdapterConfig(rank=4, alpha=8.0), "none"),
        (AdapterConfig(rank=4, dora=True, rslora=True), "none"),
        (AdapterConfig(rank=4, targets=("q_proj", "down_proj")), "nf4"),
    ],
    ids=["lora", "rslora-dora", "qlora"],
)
def test_merged_weights_arrive_in_an_engine_of_16_bits(
    adapter: AdapterConfig, quantization: str, model: Path, merged: Pair
) -> None:
    worker = trainer(model, adapter, quantization)
    pair = Pair(worker, merged.engine, merged.loop)
    with pytest.raises(WeightSyncError):
        prove(within(pair), 0)  # the engine has the weights of another trainer
    assert sync_weights(within(pair), 1).gap < ROUNDING
    train(worker, rng=RNG)
    with pytest.raises(WeightSyncError):
        prove(within(pair), 1)
    assert sync_weights(within(pair), 2).gap < ROUNDING


def test_a_4_bit_trainers_first_weights_are_sent_before_they_are_compared(
    model: Path, merged: Pair
) -> None:
    pair = Pair(trainer(model, AdapterConfig(rank=4), "nf4"), merged.engine, merged.loop)
    sync_weights(within(Pair(trainer(model, AdapterConfig(rank=4)), pair.engine, pair.loop)), 0)
    with pytest.raises(WeightSyncError):
        prove(within(pair), 0)  # 16 bits against 4
    prepare_sync(pair, SyncConfig(bucket_bytes=2**28), PROBE, "bfloat16", send_first=True)


@pytest.fixture(scope="module")
def beside(model: Path) -> Iterator[Pair]:
    """An engine with room for adapters of rank 8, the least that vLLM has for one of 4."""
    worker = trainer(model, AdapterConfig(rank=4, rslora=True))
    with engine_on(model, adapter_rank=8) as (engine, loop):
        yield Pair(worker, engine, loop)


def test_an_adapter_beside_the_engines_own_weights(beside: Pair) -> None:
    """Each version replaces the one before."""
    route = Separate(beside)
    assert prove(within(route), 0).gap < ROUNDING
    for version in (0, 1, 5):
        train(beside.worker, rng=RNG)
        with pytest.raises(WeightSyncError):
            prove(within(route), version)
        assert sync_weights(within(route), version).gap < ROUNDING


def test_an_adapter_beside_the_engines_own_weights_is_sampled_from(beside: Pair) -> None:
    train(beside.worker, rng=RNG)
    sync_weights(within(Separate(beside)), 7)
    prompts = tuple(Prompt(i, np.arange(1, 5 + i), "") for i in range(4))
    sampling = SamplingConfig(max_new_tokens=20, temperature=TEMPERATURE)
    found = beside.loop.run(beside.engine.generate(Request(prompts, 2, sampling, seed=1)))
    assert {v for t in found for v in t.weight_versions} == {7}
    packs = packs_of(found)
    expected = from_packed(packs, beside.worker.log_probs("actor", packs))
    sampled = np.concatenate([t.sampler_logprobs for t in found])
    assert np.abs(sampled - np.concatenate(expected)).mean() < ROUNDING


def test_an_adapter_that_vllm_cannot_take_is_told(model: Path, beside: Pair) -> None:
    files = trainer(model, AdapterConfig(rank=16)).adapter_files("actor", 9)
    assert files is not None
    with pytest.raises(WeightSyncError, match=r"rollout engine 0: .*rank"):
        beside.loop.run(beside.engine.take_adapter(files))
