"""Gradient checkpointing of every kind: equal gradients, and the recomputed and kept tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decided import decided_model
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, Qwen2Config

from plimsoll.config.engine import AdapterConfig
from plimsoll.data.packing import pack_one
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.model.adapters import add_adapter
from plimsoll.model.checkpointing import checkpoint_layers, selective_contexts
from plimsoll.model.load import load_policy
from plimsoll.model.policy import PackTensors, PolicyModel
from plimsoll.model.tiny import Family, tiny_config, write_tiny_model
from plimsoll.records import Sample

CPU = torch.device("cpu")
LAYERS = 3
KINDS: dict[str, dict[str, Any]] = {
    "full": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": "selective"},
    "every second": {"gradient_checkpointing": True, "checkpoint_every": 2},
    "selective every second": {"gradient_checkpointing": "selective", "checkpoint_every": 2},
    "offloaded": {"gradient_checkpointing": True, "activation_offload": "cpu"},
}
_aten = torch.ops.aten


def written(directory: Path, family: Family) -> Path:
    config = tiny_config(family, True, vocab=60, hidden=32, feed_forward=48, window=4)
    config.num_hidden_layers, config.initializer_range = LAYERS, 0.25
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i % 2] for i in range(LAYERS)]
    write_tiny_model(directory, config, seed=3, tokenizer=None)
    return directory


def loaded(path: Path, device: torch.device = CPU, **settings: Any) -> PolicyModel:
    config = decided_model(path=str(path), dtype="float32", head_chunk=5, **settings)
    return load_policy(config, device).to(device)


def a_pack(device: torch.device = CPU) -> PackTensors:
    rng = np.random.default_rng(0)
    lengths = (7, 1, 12, 7, 3)
    samples = [Sample(rng.integers(0, 60, n), np.arange(n) > 0) for n in lengths]
    return PackTensors.from_pack(pack_one(samples, range(len(samples))), device)


def learn(model: PolicyModel) -> dict[str, Tensor]:
    """The gradients of a loss."""
    sum(part.sum() for part in model(a_pack(), True) if part is not None).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_gradients_are_those_without_bit_for_bit(kind: str, family: Family, tmp_path: Path) -> None:
    path = written(tmp_path / "model", family)
    wanted = learn(loaded(path))
    found = learn(loaded(path, **KINDS[kind]))
    assert wanted.keys() == found.keys() and wanted
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_an_adapter_with_dropout_drops_the_same_again(
    kind: str, quantization: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "model", "qwen2")

    def gradients(**settings: Any) -> dict[str, Tensor]:
        model = loaded(path, quantization=quantization, **settings)
        add_adapter(model, AdapterConfig(rank=4, dropout=0.2), str(path), seed=0)
        torch.manual_seed(0)
        return learn(model)

    wanted, found = gradients(), gradients(**KINDS[kind])
    assert wanted and all(torch.equal(found[name], wanted[name]) for name in wanted)


class Calls(TorchDispatchMode):
    """Counts the operations that are really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count[func] += 1
        return func(*args, **kwargs or {})


def work_of(path: Path, **settings: Any) -> Counter[Any]:
    model, calls = loaded(path, **settings), Calls()
    with calls:
        learn(model)
    return calls.count


def test_the_operations_that_are_recomputed(tmp_path: Path) -> None:
    path = written(tmp_path / "model", "qwen2")
    works = {kind: work_of(path, **settings) for kind, settings in KINDS.items()}
    plain = work_of(path)
    products = {k: w[_aten.mm.default] + w[_aten.addmm.default] for k, w in works.items()}
    once = plain[_aten.mm.default] + plain[_aten.addmm.default]
    again = 6  # of a layer's seven; the last one's result is not needed
    assert products["selective"] == products["selective every second"] == once
    assert products["full"] == products["offloaded"] == once + again * LAYERS
    assert products["every second"] == once + again * 2
    for kind, layers in (("full", 3), ("selective", 3), ("every second", 2)):
        assert works[kind][_aten.silu.default] == plain[_aten.silu.default] + layers, kind


def test_a_bias_that_is_added_to_a_kept_product_in_place_is_added_once() -> None:
    """DeepSpeed's linear adds its bias so at ZeRO stage 3."""
    torch.manual_seed(0)
    inputs, weight, bias = (torch.randn(*n, requires_grad=True) for n in ((1, 5, 4), (6, 4), (6,)))

    def layer(x: Tensor) -> Tensor:
        linear: Callable[..., Tensor] = LinearFunctionForZeroStage3.apply
        return nn.functional.silu(linear(x, weight, bias))

    def gradients(output: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(output.square().sum(), (inputs, weight, bias))

    contexts = partial(selective_contexts, 2)
    found = gradients(checkpoint(layer, inputs, use_reentrant=False, context_fn=contexts))
    for one, other in zip(gradients(layer(inputs)), found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("thin", "again"), [(2, 0), (4, 1)])
def test_a_thin_product_is_computed_again(thin: int, again: int) -> None:
    """An adapter's second matrix is thin: its inner dimension is its rank, here 2."""
    inputs, first, second = (
        torch.randn(5, 8, requires_grad=True),
        torch.randn(8, 2),
        torch.randn(2, 8),
    )

    def layer(x: Tensor) -> Tensor:
        return nn.functional.silu(x @ first @ second)

    contexts = partial(selective_contexts, thin)
    with Calls() as calls:
        checkpoint(layer, inputs, use_reentrant=False, context_fn=contexts).sum().backward()
    assert calls.count[_aten.mm.default] == 2 + again + 2  # forward, again, backward


def test_weights_may_be_gathered_the_second_time_only() -> None:
    """ZeRO stage 3 has operations that run in one forward and not in the other."""
    inputs, weight = torch.randn(5, 8, requires_grad=True), torch.randn(8, 8)
    times: list[int] = []

    def layer(x: Tensor) -> Tensor:
        times.append(1)
        gathered = torch.cat([weight[:4], weight[4:]]) if len(times) == 2 else weight
        return nn.functional.silu(x @ gathered)

    contexts = partial(selective_contexts, 2)
    output = checkpoint(layer, inputs, use_reentrant=False, context_fn=contexts)
    (found,) = torch.autograd.grad(output.sum(), inputs)
    (wanted,) = torch.autograd.grad(nn.functional.silu(inputs @ weight).sum(), inputs)
    assert len(times) == 2 and torch.equal(found, wanted)


def test_a_second_backward_pass_is_refused() -> None:
    inputs, weight = torch.randn(5, 8, requires_grad=True), torch.randn(8, 8)

    def layer(x: Tensor) -> Tensor:
        return nn.functional.silu(x @ weight)

    contexts = partial(selective_contexts, 2)
    output = checkpoint(layer, inputs, use_reentrant=False, context_fn=contexts).sum()
    output.backward(retain_graph=True)
    with pytest.raises(PlimsollError, match="second backward pass"):
        output.backward()


class Stack(PreTrainedModel):  # type: ignore[misc] # transformers is untyped
    """A model whose layers are not transformers' checkpointing layers."""

    config_class = Qwen2Config
    supports_gradient_checkpointing = True

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def get_input_embeddings(self) -> nn.Module:
        return self.layers[0]


def test_layers_that_cannot_be_set_one_by_one_are_refused() -> None:
    lm = Stack(Qwen2Config(hidden_size=4))
    config = decided_model(
        path="stack", gradient_checkpointing=True, checkpoint_every=2, dtype="bfloat16"
    )
    with pytest.raises(ConfigError, match=r"stack: model\.checkpoint_every is 2 .* Stack "):
        checkpoint_layers(lm, config)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
)
def test_layer_inputs_leave_the_card(tmp_path: Path) -> None:
    """After the forward pass the card holds less by the inputs of all layers but one at most."""
    path = written(tmp_path / "model", "qwen2")
    card = torch.device("cuda")
    held = {}
    for offload in ("none", "none", "cpu"):  # the first time libraries take their workspaces
        model = loaded(path, card, gradient_checkpointing=True, activation_offload=offload)
        pack = a_pack(card)
        before = torch.cuda.memory_allocated()
        outputs = model(pack, False)
        held[offload] = torch.cuda.memory_allocated() - before
        sum(part.sum() for part in outputs if part is not None).backward()
        assert all(p.grad is not None for p in model.parameters())
    stream = 4 * 30 * 32  # fp32, 30 tokens
    assert held["none"] - held["cpu"] >= (LAYERS - 1) * stream
