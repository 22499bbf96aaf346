"""The formulas of activations against real tensors: what fake ones cannot show, 4-bit weights and
tokens that choose their experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decided import decided_model
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from traced_roles import MicroBatchStep, TraceForm
from transformers import AutoModelForCausalLM, MixtralConfig

from plimsoll.config.engine import AdapterConfig
from plimsoll.model.adapters import add_adapter
from plimsoll.model.attention import SDPA, register_packed_attention
from plimsoll.model.load import load_policy, prepare_layers
from plimsoll.model.policy import HeadForm, PolicyModel
from plimsoll.model.price.activations import activation_items
from plimsoll.model.price.form import activation_form
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.shapes.known_models import read_shape
from plimsoll.shapes.shape import MicroBatch
from traced_bytes import measure

torch.set_num_threads(1)

UNDER, OVER = 0.94, 1.08
WORK = MicroBatch(tokens=384, sequences=2, longest=192, loss_tokens=16)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that a weight is much beside a micro-batch."""
    path = tmp_path_factory.mktemp("models") / "dense"
    config = tiny_config("llama", False, hidden=384, feed_forward=1024, heads=6, layers=2)
    write_tiny_model(path, config, seed=0, tokenizer=None, dtype=torch.bfloat16)
    return path


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its config.json alone."""
    path = tmp_path_factory.mktemp("models") / "routed"
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    config.save_pretrained(path)
    return path


def compare(form: TraceForm, module: PolicyModel) -> tuple[int, int]:
    """Bytes of activations: of the formulas, and measured."""
    shape = read_shape(form.model.path)
    reckoned = activation_form(
        form.model, form.adapter, shape, form.head, "cpu", form.entropy, False
    )
    items = activation_items("real", shape, WORK, reckoned, "train_actor")
    real = measure(MicroBatchStep(module, WORK, form))
    return sum(held.item.bytes for held in items), real.activations


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize(
    "adapter",
    [{}, {"dropout": 0.1}, {"dora": True}, {"dora": True, "dropout": 0.1}],
    ids=lambda options: "-".join(options) or "lora",
)
def test_an_adapter_on_weights_of_4_bits(
    adapter: dict[str, float | bool], checkpointed: bool, dense: Path
) -> None:
    config = AdapterConfig.model_validate({"rank": 8, **adapter})
    model = decided_model(
        path=str(dense),
        dtype="bfloat16",
        quantization="nf4",
        head_chunk=16,
        gradient_checkpointing=checkpointed,
    )
    module = load_policy(model, torch.device("cpu"))
    add_adapter(module, config, str(dense), seed=0)
    predicted, measured = compare(TraceForm(model, config, "policy", trained=True), module)
    assert UNDER * measured < predicted < OVER * measured


def _tokens_differ(gate: Tensor) -> None:
    torch.nn.init.normal_(gate)


def _all_tokens_choose_alike(gate: Tensor) -> None:
    torch.nn.init.zeros_(gate)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("routing", [_tokens_differ, _all_tokens_choose_alike])
def test_experts_cost_the_same_whichever_are_chosen(
    routing: Callable[[Tensor], None], checkpointed: bool, routed: Path
) -> None:
    model = decided_model(
        path=str(routed), head_chunk=16, gradient_checkpointing=checkpointed, dtype="bfloat16"
    )
    register_packed_attention()
    config = MixtralConfig.from_pretrained(routed)
    lm = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=SDPA
    ).train()
    for layer in lm.model.layers:
        routing(layer.mlp.gate.weight)
    prepare_layers(lm, model, torch.device("cpu"))
    module = PolicyModel(lm, HeadForm(model.head_chunk))
    predicted, measured = compare(TraceForm(model, None, "policy", trained=True), module)
    assert UNDER * measured < predicted < OVER * measured


def test_what_attention_without_a_kernel_saves_is_what_pytorch_saves() -> None:
    heads, tokens, width = 4, 64, 16
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    query, key, value = (
        torch.randn(1, heads, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    with saved_tensors_hooks(keep, lambda x: x), sdpa_kernel(SDPBackend.MATH):
        kept = scaled_dot_product_attention(query, key, value, is_causal=True)
    assert kept.dtype == torch.bfloat16
    assert sum(saved.values()) == 4 * heads * tokens**2 + 3 * 4 * heads * tokens * width
