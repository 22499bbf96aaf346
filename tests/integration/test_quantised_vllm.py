"""A vLLM engine whose weights are of 8 bits: it takes whole new weights, which it rounds anew, and
an adapter by itself, and both are proved.
"""

from __future__ import annotations

from asyncio import Runner
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_adapters_vllm import RNG, Separate, trainer, within
from test_run_sync import Pair, train
from vllm_cases import started

from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.engine import AdapterConfig
from plimsoll.config.rollout import RolloutConfig
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.sampler.price import Sampler
from plimsoll.sampler.protocol import EngineSpec
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.sampler.vllm.engine import VllmEngine
from plimsoll.sampler.vllm.sampler import vllm_sampler
from plimsoll.shapes.known_models import read_shape
from plimsoll.sync.proof import prove, sync_weights

pytestmark = pytest.mark.engine

FP8 = "fp8_per_channel"
ROUNDED = 0.1
"""Nats: what weights and inputs of 8 bits may differ by, in this small random model."""
LORA = AdapterConfig(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vllm") / "model"
    config = tiny_config("qwen2", True, vocab=64, hidden=64, heads=2, feed_forward=96)
    config.initializer_range = 0.1
    write_tiny_model(path, config, 0, make_tokenizer())
    return path


def rollout_of(quantization: str) -> RolloutConfig:
    return RolloutConfig(dtype="bfloat16").with_engine(
        VllmConfig(cpu_kv_cache_gib=0.25, arguments={"quantization": quantization})
    )


@contextmanager
def engine_of(model: Path, adapter_rank: int | None) -> Iterator[tuple[VllmEngine, Runner]]:
    spec = EngineSpec(0, str(model), 64, 1, "cpu", rollout_of(FP8), adapter_rank=adapter_rank)
    with started(spec) as both:
        yield both


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[tuple[VllmEngine, Runner]]:
    with engine_of(model, adapter_rank=None) as both:
        yield both


def weight_bytes(worker: Any) -> int:
    """Bytes of weights, but for scales; in vLLM's worker."""
    model = worker.model_runner.get_model()
    return sum(p.nbytes for name, p in model.named_parameters() if "scale" not in name)


@pytest.mark.slow
def test_it_holds_what_the_price_says(model: Path, engine: tuple[VllmEngine, Runner]) -> None:
    made, loop = engine
    [held] = loop.run(made._llm.collective_rpc(weight_bytes))
    base = Sampler(rollout_of(FP8), read_shape(str(model)), 64, 1)
    assert held == vllm_sampler(base).weights


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_whole_new_weights_are_rounded_anew(
    quantization: str, model: Path, engine: tuple[VllmEngine, Runner]
) -> None:
    """An adapter merged into its base: of 16 bits, and of 4."""
    pair = Pair(trainer(model, LORA, quantization), *engine)
    sync_weights(within(pair, ROUNDED), 1)
    for version in (2, 3):
        train(pair.worker, rng=RNG)
        stale = prove(within(pair, 100.0), version).gap
        assert stale > 2 * ROUNDED
        assert sync_weights(within(pair, ROUNDED), version).gap < ROUNDED


def test_an_adapter_comes_by_itself_and_the_base_is_never_sent_again(model: Path) -> None:
    with engine_of(model, adapter_rank=8) as both:
        pair = Pair(trainer(model, LORA), *both)
        route = Separate(pair)
        assert prove(within(route, ROUNDED), 0).gap > 0  # rounded
        for version in (1, 2):
            train(pair.worker, rng=RNG)
            assert prove(within(route, 100.0), version).gap > 2 * ROUNDED
            report = sync_weights(within(route, ROUNDED), version)
            files = pair.worker.adapter_files("actor", version)
            assert files is not None and report.bytes == len(files.weights)
