"""MLPs in tiles of tokens: the same outputs and gradients, and what is computed and kept."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decided import decided_model
from fused_cases import kept_by
from packed_cases import CPU, LENGTHS, VOCAB, alone, assert_same, samples_of, together
from packed_cases import write as write_sharp
from test_model_checkpointing import work_of, written
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Config
from transformers.models.llama.modeling_llama import LlamaMLP

from plimsoll.config.engine import AdapterConfig
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.model.adapters import add_adapter
from plimsoll.model.fused import FUSIONS, fuse
from plimsoll.model.load import load_policy
from plimsoll.model.tiling import tile_mlps, tiled_mlps
from plimsoll.model.tiny import Family, tiny_config

TILE = 5
SHAPE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 64},
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "phi3": lambda: Phi3Config(**SHAPE, num_key_value_heads=2),
    "phi": lambda: PhiConfig(**SHAPE, partial_rotary_factor=0.5),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SHAPE, **EXPERTS, num_key_value_heads=2, shared_expert_intermediate_size=16
    ),
}
_aten = torch.ops.aten


def tile(module: nn.Module, tokens: int | None) -> nn.Module:
    root: Any = nn.ModuleDict({"mlp": module})
    tile_mlps(root, SimpleNamespace(path="m", mlp_tile=tokens))  # type: ignore[arg-type]
    return module


def an_mlp(dtype: torch.dtype = torch.float32) -> LlamaMLP:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 2}
    return LlamaMLP(LlamaConfig(**shape)).to(dtype)


def passed(forward: Callable[[Tensor], Tensor], module: nn.Module, rows: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the trained weights."""
    module.zero_grad()
    leaf = rows.clone().requires_grad_()
    output = forward(leaf)
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=rows.dtype).view_as(output))
    gradients = [leaf.grad, *(p.grad for p in module.parameters())]
    return [output.detach(), *(g.clone() for g in gradients if g is not None)]


@pytest.mark.parametrize("kind", [False, True, "selective"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"])
def test_families_compute_what_transformers_does(
    family: Family, kind: bool | str, tmp_path: Path
) -> None:
    config = tiny_config(family, True, vocab=VOCAB, hidden=32, feed_forward=48, window=4)
    path, samples = write_sharp(tmp_path, config), samples_of(LENGTHS)
    found = together(path, samples, mlp_tile=TILE, gradient_checkpointing=kind)
    assert_same(found, alone(path, samples))


@pytest.mark.parametrize("family", OTHERS)
def test_mlps_of_other_forms(family: str, tmp_path: Path) -> None:
    """Gate and up in one, no gate, and a shared expert."""
    path, samples = write_sharp(tmp_path, OTHERS[family]()), samples_of(LENGTHS)
    found = together(path, samples, mlp_tile=TILE, gradient_checkpointing="selective")
    assert_same(found, alone(path, samples))


def test_gpt_2s_mlp() -> None:
    config = GPT2Config(n_embd=16, resid_pdrop=0)
    torch.manual_seed(0)
    mlp, rows = GPT2MLP(32, config), torch.randn(1, 13, 16)
    wanted = passed(mlp, mlp, rows)
    found = passed(tile(mlp, TILE), mlp, rows)
    assert len(found) == 6
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 13, 100])
def test_the_size_of_a_tile_does_not_matter(tokens: int, fused: bool) -> None:
    mlp, rows = an_mlp(), torch.randn(1, 13, 16)
    wanted = passed(mlp, mlp, rows)
    fuse(mlp, FUSIONS if fused else [])
    tiled = deepcopy(tile(mlp, tokens))
    found = passed(tiled, tiled, rows)
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one)
    with torch.no_grad():
        torch.testing.assert_close(tiled(rows), wanted[0])


def test_gradients_of_weights_are_rounded_once() -> None:
    """Summed in bfloat16, those of 256 tiles of a token would be 3 % off."""
    mlp, rows = an_mlp(torch.bfloat16), torch.randn(1, 256, 16).bfloat16()
    wide = deepcopy(mlp).float()
    wanted = passed(wide, wide, rows.float())
    found = passed(tile(mlp, 1), mlp, rows)
    for one, other in zip(wanted[2:], found[2:], strict=True):
        assert (other.float() - one).norm() < 0.01 * one.norm()


def test_only_the_input_is_kept() -> None:
    mlp = tile(an_mlp(), TILE)
    rows = torch.randn(1, 13, 16, requires_grad=True)
    [kept] = kept_by(lambda: mlp(rows))
    assert kept.data_ptr() == rows.data_ptr()


def test_a_checkpointed_layer_computes_its_mlp_no_third_time(tmp_path: Path) -> None:
    def products(path: Path, **settings: Any) -> int:
        work = work_of(path, **settings)
        return work[_aten.mm.default] + work[_aten.addmm.default]

    layers, whole, last = 3, 3, 1  # linears of an MLP, of which the last one is not recomputed
    for family, again in (("qwen2", last), ("gemma2", whole)):
        path = written(tmp_path / family, family)  # type: ignore[arg-type]
        full = {"gradient_checkpointing": True}
        more = products(path, mlp_tile=1000, **full) - products(path, **full)
        assert more == layers * again, family
        kept = products(path, gradient_checkpointing="selective", mlp_tile=1000) - products(path)
        assert kept == layers * (whole + (whole if family == "gemma2" else 0)), family


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("targets", [("all-linear",), ("down_proj",), ("q_proj",)])
def test_an_adapter_drops_the_same_in_both_passes(
    targets: tuple[str, ...], quantization: str, tmp_path: Path
) -> None:
    """The oracle is plain autograd over the same tiles: its masks are drawn in the same order."""
    path = written(tmp_path / "model", "qwen2")
    config = decided_model(
        path=str(path), dtype="float32", quantization=quantization, mlp_tile=TILE
    )
    model = load_policy(config, CPU)
    add_adapter(model, AdapterConfig(rank=4, dropout=0.3, targets=targets), str(path), seed=0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    mlp = next(tiled_mlps(model))
    forward = mlp.forward
    assert isinstance(forward, partial)
    whole, rows = forward.args[1], torch.randn(1, 13, 32)

    def tiles(rows: Tensor) -> Tensor:
        return torch.cat([whole(part) for part in rows.split(TILE, 1)], 1)

    results = []
    for compute in (tiles, mlp):
        torch.manual_seed(1)
        results.append(passed(compute, mlp, rows))
    assert len(results[1]) == 2 + 2 * {"all-linear": 3, "down_proj": 1, "q_proj": 0}[targets[0]]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def test_a_second_backward_pass_is_refused() -> None:
    output = tile(an_mlp(), TILE)(torch.randn(1, 13, 16)).sum()
    output.backward(retain_graph=True)
    with pytest.raises(PlimsollError, match="second backward pass"):
        output.backward()


def test_routed_experts_are_not_tiled(tmp_path: Path) -> None:
    config = MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=4)
    path = write_sharp(tmp_path / "mixtral", config)
    settings = decided_model(path=str(path), dtype="float32", mlp_tile=TILE)
    with pytest.raises(ConfigError, match="MixtralForCausalLM has no MLP that all tokens"):
        load_policy(settings, CPU)
    path = write_sharp(tmp_path / "shared", OTHERS["qwen2_moe"]())
    model = load_policy(settings.model_copy(update={"path": str(path)}), CPU)
    names = {name for name, part in model.named_modules() if part in {*tiled_mlps(model)}}
    assert names == {f"lm.model.layers.{i}.mlp.shared_expert" for i in range(2)}


def test_without_the_key_nothing_changes() -> None:
    assert "forward" not in vars(tile(an_mlp(), None))
