"""Names and pieces of written weights, and of those sent to vLLM: those of the model's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
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
from plimsoll.trainer.weights import plan_weights

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
