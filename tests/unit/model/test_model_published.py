"""Names and pieces of written weights, and of those sent to vLLM: those of the model's files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from buckets import Memory, tensors_in
from packed_cases import settings_for
from safetensors.torch import load_file
from test_model_families import FAMILIES, GROUPED, SHAPE
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    LlamaConfig,
    PreTrainedConfig,
)

from plimsoll.commands.demo import make_tokenizer
from plimsoll.commands.export import write_plain
from plimsoll.model.files import companions, hf_state_names, published_weights, saved_buffers
from plimsoll.model.load import load_policy
from plimsoll.trainer.protocol import Engine
from plimsoll.trainer.weights import WeightSender, plan_weights

CPU = torch.device("cpu")
WITH_BUFFERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "glm4_moe": lambda: Glm4MoeConfig(
        **GROUPED, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, first_k_dense_replace=1, head_dim=8,
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **GROUPED, head_dim=8, global_head_dim=8, hidden_size_per_layer_input=0
    ),
}  # fmt: skip
EVERY = FAMILIES | WITH_BUFFERS | {"llama": lambda: LlamaConfig(**SHAPE)}


@pytest.fixture(params=EVERY)
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model as transformers publishes it, whose buffers are not what a new one has."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(EVERY[request.param]())
    persistent = model.state_dict().keys() & dict(model.named_buffers()).keys()
    for name in persistent:
        model.get_buffer(name).normal_()
    assert bool(persistent) == (request.param in [*WITH_BUFFERS, "deepseek_v3"])
    model.save_pretrained(tmp_path / "first")
    make_tokenizer().save_pretrained(tmp_path / "first")
    return tmp_path


def test_written_files_equal_the_files_that_were_read(home: Path) -> None:
    policy = load_policy(settings_for(home / "first"), CPU)
    beside = companions(policy.lm, make_tokenizer(), "none")
    write_plain(policy, torch.float32, beside, home / "again")
    first, again = (load_file(home / name / "model.safetensors") for name in ("first", "again"))
    assert again.keys() == first.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=0)
    load_policy(settings_for(home / "again"), CPU)


def test_engines_get_the_names_of_the_weights_they_get(home: Path) -> None:
    policy = load_policy(settings_for(home / "first"), CPU)
    names = hf_state_names(policy)
    for as_published in (False, True):
        weights: dict[str, torch.Tensor] = {
            hf_name: policy.get_parameter(name) for name, hf_name in names.items()
        }
        weights |= {name: weights[of] for name, of in policy.tied_names.items()}
        sent = dict(published_weights(policy.lm, weights)) if as_published else weights
        plan = plan_weights(
            cast(Engine, SimpleNamespace(module=policy)), 2**20, as_published, False
        )
        assert set(plan.names) == sent.keys()
    files = load_file(home / "first" / "model.safetensors").keys()
    assert sent.keys() - policy.tied_names.keys() == files - saved_buffers(policy).keys()


def test_buckets_of_any_size_hold_the_files_weights(home: Path) -> None:
    """What stacks experts is cut, too, but where files have the stack as one tensor."""
    policy = load_policy(settings_for(home / "first"), CPU)
    engine: Any = SimpleNamespace(module=policy, gather=lambda names: nullcontext())
    files = load_file(home / "first" / "model.safetensors")
    stacked = any(".experts.0." in name for name in files)
    for size in (100, 4096, 10**6):
        plan, sender = plan_weights(engine, size, True, False), WeightSender()
        sent: dict[str, torch.Tensor] = {}
        for planned, packed in zip(plan.buckets, plan.sizes, strict=True):
            bucket = sender.ship(engine, planned, True, Memory())
            assert bucket is not None and bucket.bytes == packed
            if planned.experts is not None:
                first, end = planned.experts
                assert packed <= size or end - first == 1
            sent |= tensors_in(bucket)
        assert plan.names == tuple(sent)
        assert any(b.experts for b in plan.buckets) == (stacked and size < 10**6)
        for name in sent.keys() - policy.tied_names.keys():
            assert torch.equal(sent[name], files[name].to(sent[name].dtype))
