"""Adapters of a mixture's experts and a real vLLM engine: merged by weight sync, and in the form in
which vLLM takes them beside its own weights, which its CPU build reads but cannot compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from choice import slow
from decided import decided_model, decided_role
from test_run_sync import PROBE, Pair, train
from test_sync_families import MODELS, write_model
from vllm_cases import started

from plimsoll.config.engine import AdapterConfig, OptimizerConfig, TrainedRole
from plimsoll.config.rollout import RolloutConfig
from plimsoll.errors import WeightSyncError
from plimsoll.machine.host import free_port
from plimsoll.model.experts import ExpertPairs
from plimsoll.sampler.protocol import EngineSpec
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.sampler.vllm.engine import VllmEngine
from plimsoll.sync.proof import WeightSync, prove, sync_weights
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker

pytestmark = pytest.mark.engine

RNG = np.random.default_rng(1)
ROUNDING = 0.02
"""Nats: what bfloat16 may differ by."""
TARGETS = ("q_proj", "v_proj", "experts")


@pytest.fixture(params=["qwen3_moe", slow("mixtral")])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = MODELS[request.param]()
    config.initializer_range = 0.1
    write_model(tmp_path / "model", config)
    return tmp_path / "model"


@pytest.fixture
def worker(model: Path) -> Iterator[Worker]:
    role = TrainedRole(
        model=decided_model(str(model), dtype="bfloat16"),
        adapter=AdapterConfig(rank=8, alpha=16.0, targets=TARGETS),
        optimizer=OptimizerConfig(max_grad_norm=0),
    )
    trainer = Worker(Place(0, 1, "127.0.0.1", free_port(), "cpu", 1))
    trainer.load_model("actor", decided_role(role), 0.7, seed=1)
    yield trainer
    trainer.stop()


def spec(model: Path, **adapter: Any) -> EngineSpec:
    rollout = RolloutConfig(dtype="bfloat16").with_engine(VllmConfig(cpu_kv_cache_gib=0.25))
    return EngineSpec(0, str(model), 64, 1, "cpu", rollout, **adapter)


def test_experts_arrive_merged(model: Path, worker: Worker) -> None:
    """What learns alone is sent, as weights of files, and proved by log-probs after each sync."""
    with started(spec(model)) as (engine, loop):
        pair = Pair(worker, engine, loop, only_trained=True)
        sync = WeightSync(pair, 20_000, PROBE, "bfloat16", 4.0, most=ROUNDING)
        assert prove(sync, 0).gap < ROUNDING
        for version in (1, 2):
            train(worker, rng=RNG)
            with pytest.raises(WeightSyncError):
                prove(sync, version)
            assert sync_weights(sync, version).gap < ROUNDING


def test_vllm_reads_each_experts_own_matrices(model: Path, worker: Worker) -> None:
    """vLLM holds A and B of gate, down and up apart, [adapters, experts, ...]."""
    train(worker, rng=RNG)
    files = worker.adapter_files("actor", 3)
    assert files is not None
    with started(spec(model, adapter_rank=8, adapter_targets=TARGETS)) as (engine, loop):
        loop.run(engine.take_adapter(files))
        found = loop.run(ask(engine, stacks))
    experts = worker._engine("actor").module.get_submodule("lm.model.layers.1.mlp.experts")
    up_down = experts.get_submodule("lora_gate_up_proj"), experts.get_submodule("lora_down_proj")
    (first, second) = up_down
    assert isinstance(first, ExpertPairs) and isinstance(second, ExpertPairs)
    gate, up = first.b_EOR.detach().chunk(2, 1)
    scale = first.scale
    expected = {
        "w13_lora_a_stacked": (first.a_ERI, first.a_ERI),
        "w13_lora_b_stacked": (scale * gate, scale * up),
        "w2_lora_a_stacked": (second.a_ERI,),
        "w2_lora_b_stacked": (scale * second.b_EOR.detach(),),
    }
    assert found.keys() == expected.keys()
    for name, tensors in expected.items():
        for got, want in zip(found[name], tensors, strict=True):
            assert torch.equal(torch.tensor(got[0]), want.detach().float()), name


async def ask(engine: VllmEngine, question: Callable[[Any], Any]) -> Any:
    [answer] = await engine._llm.collective_rpc(question)
    return answer


def stacks(worker: Any) -> dict[str, list[Any]]:
    """The numbers in the matrices of the last layer's experts in a vLLM worker's model."""
    every = dict(worker.model_runner.get_model().named_modules())
    names = [name for name, layer in every.items() if type(layer).__name__ == "FusedMoEWithLoRA"]
    held = vars(every[max(names)])
    ours = [name for name in held if name.startswith(("w13_lora_", "w2_lora_"))]
    return {name: [tensor.float().tolist() for tensor in held[name]] for name in ours}
