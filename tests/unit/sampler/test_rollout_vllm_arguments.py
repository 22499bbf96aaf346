"""What vLLM's engine is started with, on cards and on the CPU, and how its tokens get versions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.rollout import RolloutConfig
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.sampler.protocol import EngineSpec
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.sampler.vllm.engine import _arguments, _label_tokens
from plimsoll.sampler.vllm.rules import check_arguments


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "model"
    config = tiny_config("qwen2", True, vocab=4096, hidden=64, heads=2, feed_forward=96)
    write_tiny_model(path, config, 0, make_tokenizer())
    return str(path)


def arguments(model: str, device: str, vllm: VllmConfig) -> dict[str, object]:
    rollout = RolloutConfig(dtype="bfloat16").with_engine(vllm)
    return _arguments(EngineSpec(0, model, 64, 1, device, rollout))


def test_a_card_compiles_and_captures_graphs_and_reads_large_batches(model: str) -> None:
    """256 sequences have logits of 256 x 4,096 x 14 bytes; a token of the MLP takes 2 x (4 x 64 +
    3 x 96): 13,495 of them would take as much, and 8,192 are the most."""
    found = arguments(model, "cuda", VllmConfig())
    assert found["enforce_eager"] is False and found["enable_prefix_caching"] is True
    assert found["max_num_batched_tokens"] == 8192
    own = VllmConfig(arguments={"max_num_batched_tokens": 640, "enforce_eager": True})
    found = arguments(model, "cuda", own)
    assert found["max_num_batched_tokens"] == 640 and found["enforce_eager"] is True


@pytest.mark.parametrize(("device", "asked"), [("cuda", True), ("cpu", None)])
def test_a_card_is_asked_for_the_experts_that_it_takes(
    model: str, device: str, asked: bool | None
) -> None:
    """On the CPU they are recorded beside vLLM (sampler/vllm/routing.py)."""
    rollout = RolloutConfig(dtype="bfloat16", routing="sampled").with_engine(VllmConfig())
    found = _arguments(EngineSpec(0, model, 64, 1, device, rollout))
    assert found.get("enable_return_routed_experts") is asked
    assert "enable_return_routed_experts" not in arguments(model, device, VllmConfig())


def test_a_cpu_is_left_its_own_batches(model: str) -> None:
    found = arguments(model, "cpu", VllmConfig())
    assert "max_num_batched_tokens" not in found and found["enforce_eager"] is True


@pytest.mark.parametrize(
    ("vllm", "tokens"),
    [
        (VllmConfig(max_sequences=96), 4096),  # 5,060 would take as much
        (VllmConfig(max_sequences=8), 2048),
        (VllmConfig(max_sequences=256, pipeline_parallel=2), 2048),
        (VllmConfig(max_sequences=3000, pipeline_parallel=2), 3000),
    ],
)
def test_a_batch_costs_no_more_than_logits_do(model: str, vllm: VllmConfig, tokens: int) -> None:
    assert arguments(model, "cuda", vllm)["max_num_batched_tokens"] == tokens


def test_tokens_have_the_labels_of_their_spans_where_vllm_gives_some() -> None:
    begun = np.full(5, 3)
    spans = [
        SimpleNamespace(start=0, end=2, version="default"),
        SimpleNamespace(start=2, end=5, version="4"),
    ]
    labelled = SimpleNamespace(token_ids=[], weight_versions=spans)
    assert _label_tokens(labelled, begun).tolist() == [3, 3, 4, 4, 4]
    assert _label_tokens(SimpleNamespace(weight_versions=None), begun).tolist() == [3] * 5
    of_vllm_026 = SimpleNamespace(token_ids=[])  # its completions have no such attribute
    assert _label_tokens(of_vllm_026, begun).tolist() == [3] * 5


def test_weights_come_from_safetensors_alone_and_nobody_says_otherwise(model: str) -> None:
    """vLLM would read `*.bin` where no `*.safetensors` lies beside the index that names them."""
    assert arguments(model, "cpu", VllmConfig())["load_format"] == "safetensors"
    (problem,) = check_arguments(VllmConfig(arguments={"load_format": "auto"}))
    assert problem.key == "rollout.vllm.arguments.load_format" and "pickles" in problem.why
