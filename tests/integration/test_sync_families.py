"""A weight sync of weights that have not changed leaves everything of a vLLM engine's model as it
was, whichever family it is of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from decided import decided_model, decided_role
from test_run_sync import BOUND, Pair
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from vllm_cases import started

from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.engine import TrainedRole
from plimsoll.config.rollout import RolloutConfig
from plimsoll.machine.host import free_port
from plimsoll.model.tiny import Family, tiny_config
from plimsoll.sampler.protocol import EngineSpec
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.shapes.families import FAMILIES
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker

pytestmark = pytest.mark.engine

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def family(name: Family, tied: bool, window: int | None = None) -> Callable[[], PreTrainedConfig]:
    sizes = {"vocab": 64, "hidden": 64, "heads": 2, "feed_forward": 96, "max_positions": 256}
    return lambda: tiny_config(name, tied, window=window, **sizes)


MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": family("qwen2", True),
    "gemma3": family("gemma3", True, window=16),
    "llama": family("llama", False),
    "qwen3": family("qwen3", True),
    "mistral": family("mistral", False, window=16),
    "gemma": family("gemma", True),
    "gemma2": family("gemma2", True, window=16),
    "gpt_oss": family("gpt_oss", False, window=16),
    "phi3": lambda: Phi3Config(**SIZES),
    "phi": lambda: PhiConfig(**SIZES),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "glm4_moe": lambda: Glm4MoeConfig(
        **SIZES,
        head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
}
LATENT: dict[str, Any] = {
    **SIZES,
    **{"q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"topk_group": 1, "moe_intermediate_size": 32, "n_shared_experts": 1},
    "first_k_dense_replace": 1,
}
MODELS |= {
    "deepseek_v2": lambda: DeepseekV2Config(**LATENT),
    "deepseek_v3": lambda: DeepseekV3Config(**LATENT, topk_method="noaux_tc"),
}
AT_ONCE = ("qwen2", "gemma3")


def test_every_family_that_the_plan_knows_has_its_case() -> None:
    """Only the first Qwen has none, as transformers has no code for it."""
    cased = {make().model_type for make in MODELS.values()}
    assert set(FAMILIES) - cased == {"qwen"}


def write_model(path: Path, config: PreTrainedConfig) -> None:
    """Write the model as transformers does: experts by the names of the model's own files."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    make_tokenizer().save_pretrained(path)


@pytest.mark.parametrize(
    "name", [n if n in AT_ONCE else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_unchanged_weights_change_nothing(name: str, tmp_path: Path) -> None:
    with paired(tmp_path, MODELS[name]()) as pair:
        [before] = states_of(pair)
        assert len(before) > 10
        assert pair.sync(1).gap < BOUND
        [after] = states_of(pair)
        for part in ("self_attn", "mlp", "input_layernorm"):
            learn_alone(pair.worker, part)
            assert replace(pair, only_trained=True).sync(2).gap < BOUND
            [partly] = states_of(pair)
            assert partly == before, part
    assert after == before


@pytest.mark.parametrize(
    "division",
    [{"tensor_parallel": 2}, pytest.param({"pipeline_parallel": 2}, marks=pytest.mark.slow)],
)
def test_an_engine_in_two_processes_takes_its_share_of_each_weight(
    division: dict[str, Any], tmp_path: Path
) -> None:
    with paired(tmp_path, MODELS["qwen2"](), **division) as pair:
        before = states_of(pair)
        assert len(before) == 2 and before[0] != before[1]
        assert pair.sync(1).gap < BOUND
        assert states_of(pair) == before


@contextmanager
def paired(path: Path, model: PreTrainedConfig, **division: Any) -> Iterator[Pair]:
    """A trainer of new weights, and an engine, perhaps divided among processes, that read them."""
    write_model(path, model)
    worker = Worker(Place(0, 1, "127.0.0.1", free_port(), "cpu", 1))
    role = TrainedRole(model=decided_model(path=str(path), dtype="bfloat16"))
    worker.load_model("actor", decided_role(role), 1.0)
    rollout = RolloutConfig(dtype="bfloat16").with_engine(
        VllmConfig(cpu_kv_cache_gib=0.25, **division)
    )
    with started(EngineSpec(0, str(path), 64, 1, "cpu", rollout)) as (engine, loop):
        yield Pair(worker, engine, loop)
    worker.stop()


def states_of(pair: Pair) -> list[Any]:
    """The checksums of all tensors in each of the engine's processes."""
    return pair.loop.run(pair.engine._llm.collective_rpc(states))


def learn_alone(worker: Worker, part: str) -> None:
    """Freeze all weights but those of a part of the last layer, or what is sent with it."""
    module = worker._engine("actor").module
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(f"layers.1.{part}" in name)
    plan = worker.weight_plan("actor", 2**20, True, True)
    assert plan.names and all(".layers.1." in name for name in plan.names)


def states(worker: Any) -> dict[str, str]:
    """A hash of each parameter and buffer of a vLLM worker's model, and of each other tensor that
    one of its modules has, but for the KV cache."""
    found: dict[str, str] = {}
    for path, module in worker.model_runner.get_model().named_modules():
        others = {name: value for name, value in vars(module).items() if torch.is_tensor(value)}
        for name, tensor in (module._parameters | module._buffers | others).items():
            if name == "cos_sin_cache":  # gpt-oss's is fp32, and vLLM rounds it as it is first used
                tensor = tensor.bfloat16()
            if tensor is not None and name != "kv_cache":
                flat = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
                about = f"{tuple(tensor.shape)} {tensor.dtype}"
                found[f"{path}.{name}"] = f"{about} {xxhash.xxh3_64_hexdigest(flat)}"
    return found
