"""Routers that take a sampler's experts: the choice alone, in every pass of a layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packed_cases import CPU, settings_for, write
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from plimsoll.data.packing import pack_one
from plimsoll.errors import ConfigError
from plimsoll.model.load import load_policy
from plimsoll.model.policy import PackTensors
from plimsoll.model.routers import Routing, follow_sampler, freeze_routers, routers_of
from plimsoll.model.tiny import tiny_config
from plimsoll.records import Sample, unrouted_number
from plimsoll.shapes.families import ROUTED_FAMILIES

torch.set_num_threads(1)
TOKENS, EXPERTS, CHOSEN, HIDDEN = 6, 5, 2, 8
COMMON: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN}
ROUTERS: dict[str, tuple[PreTrainedConfig, Any]] = {
    "mixtral": (MixtralConfig(**COMMON, num_local_experts=EXPERTS), MixtralTopKRouter),
    "olmoe": (OlmoeConfig(**COMMON, num_experts=EXPERTS, norm_topk_prob=False), OlmoeTopKRouter),
    "qwen2_moe": (
        Qwen2MoeConfig(**COMMON, num_experts=EXPERTS, norm_topk_prob=False),
        Qwen2MoeTopKRouter,
    ),
    "qwen3_moe": (
        Qwen3MoeConfig(**COMMON, num_experts=EXPERTS, norm_topk_prob=True),
        Qwen3MoeTopKRouter,
    ),
    "gpt_oss": (GptOssConfig(**COMMON, num_local_experts=EXPERTS), GptOssTopKRouter),
}


class Layer(nn.Module):
    """A layer that is a router alone."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router

    def forward(self, hidden: Tensor, **_: object) -> Any:
        return self.router(hidden)


def followed(family: str) -> tuple[Layer, Tensor]:
    """A layer whose router takes a sampler's experts, and its input."""
    torch.manual_seed(0)
    config, router_class = ROUTERS[family]
    layer, hidden = Layer(router_class(config)), torch.randn(TOKENS, HIDDEN)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    decoder: Any = SimpleNamespace(layers=[layer])
    follow_sampler(SimpleNamespace(config=config, get_decoder=lambda: decoder))
    return layer, hidden


def routing(experts: Any, dtype: torch.dtype = torch.uint8) -> Routing:
    return Routing(torch.as_tensor(experts).to(dtype)[:, None])


def test_all_families_have_a_case() -> None:
    assert set(ROUTERS) == set(ROUTED_FAMILIES)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
@pytest.mark.parametrize("family", ROUTED_FAMILIES)
def test_the_live_routers_own_experts_change_nothing(family: str, dtype: torch.dtype) -> None:
    layer, hidden = followed(family)
    logits, weights, experts = layer(hidden)
    given = routing(experts, dtype)
    again = layer(hidden, routing=given)
    assert all(map(torch.equal, again, (logits, weights, experts)))
    assert {name: int(count) for name, count in given.metrics().items()} == {
        "rollout/rerouted": 0,
        "rollout/rerouted_live": 0,
    }


@pytest.mark.parametrize("family", ROUTED_FAMILIES)
def test_other_experts_get_the_weights_that_the_model_would_give_them(family: str) -> None:
    """Renormalised: a softmax over the logits of the experts taken; else shares of the whole."""
    layer, hidden = followed(family)
    logits, _, live = layer(hidden)
    others = (live + 1) % EXPERTS  # for some tokens the same set in another order
    given = routing(others)
    _, weights, experts = layer(hidden, routing=given)
    chosen = logits.gather(1, others)
    expected = chosen.softmax(1) if family in ("mixtral", "qwen3_moe", "gpt_oss") else None
    if expected is None:
        expected = logits.softmax(1).gather(1, others)
    assert torch.equal(experts, others)
    torch.testing.assert_close(weights, expected)
    [parameter, *_] = layer.parameters()
    want = torch.autograd.grad(expected[:, 0].sum(), parameter, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(weights[:, 0].sum(), parameter), want)
    differ = sum(
        {*row} != {*other} for row, other in zip(live.tolist(), others.tolist(), strict=True)
    )
    counts = given.metrics()
    assert [int(count) for count in counts.values()] == [0, differ]
    assert differ > 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_tokens_without_experts_take_the_live_routers(dtype: torch.dtype) -> None:
    """The third token has none, and the last two belong to no sequence."""
    layer, hidden = followed("qwen3_moe")
    _, live_weights, live = layer(hidden)
    rows = ((live + 1) % EXPERTS)[: TOKENS - 2]
    rows[2] = unrouted_number(dtype.itemsize)
    given = routing(rows, dtype)
    _, weights, experts = layer(hidden, routing=given)
    for token in (2, TOKENS - 2, TOKENS - 1):
        assert torch.equal(experts[token], live[token])
        assert torch.equal(weights[token], live_weights[token])
    assert torch.equal(experts[:2], rows[:2].long())
    assert int(given.metrics()["rollout/rerouted"]) == 0


def test_without_experts_a_router_is_as_it_was() -> None:
    layer, hidden = followed("olmoe")
    layer(hidden, routing=routing(torch.zeros(TOKENS, CHOSEN)))
    before = layer(hidden)
    assert not torch.equal(before[2], torch.zeros(TOKENS, CHOSEN))


def test_a_model_that_takes_no_notice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.routing"):
        routing([[0, 1]]).metrics()


MIXTURE = Qwen3MoeConfig(
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 8},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.2},
)


@pytest.mark.parametrize(
    "device",
    [
        CPU,
        pytest.param(
            torch.device("cuda"),
            marks=[
                pytest.mark.gpu,
                pytest.mark.kernels,  # the grouped products of cards count in whole numbers
                pytest.mark.skipif(
                    not torch.cuda.is_available(),
                    reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`",
                ),
            ],
        ),
    ],
    ids=str,
)
def test_recomputed_layers_take_the_same_experts(device: torch.device, tmp_path: Any) -> None:
    """Loss and gradients are equal whatever is recomputed, on CPU bit for bit, and not the live
    ones."""
    write(tmp_path, MIXTURE)
    rng = np.random.default_rng(0)
    taken = np.stack([rng.permutation(8)[:2] for _ in range(2 * 9)]).reshape(9, 2, 2)
    tokens = rng.integers(0, 64, 10)
    sample = Sample(tokens, np.arange(10) > 0, taken.astype(np.uint8))
    found: list[tuple[Tensor, ...]] = []
    for kept in (None, False, True, "selective"):
        settings = settings_for(tmp_path, gradient_checkpointing=kept or False)
        policy = load_policy(settings, device).to(device)
        follow_sampler(policy.lm)
        given = sample if kept is not None else Sample(tokens, np.arange(10) > 0)
        pack = PackTensors.from_pack(pack_one([given], [0]), device)
        loss = -policy(pack)[0].sum()
        loss.backward()
        gradients = [p.grad for p in policy.parameters()]
        assert all(gradient is not None for gradient in gradients)
        found.append((loss.detach(), *gradients))  # type: ignore[arg-type]
        if pack.routing is not None:
            counts = pack.routing.metrics()
            assert counts["rollout/rerouted"] == 0 and 9 < counts["rollout/rerouted_live"] <= 18
    live, whole, *recomputed = found
    assert not torch.equal(live[0], whole[0])
    for other in recomputed:
        if device == CPU:
            assert all(map(torch.equal, whole, other))
        torch.testing.assert_close(other, whole)


def test_routers_are_frozen_and_nothing_else() -> None:
    lm = AutoModelForCausalLM.from_config(MIXTURE)
    assert len([*routers_of(lm)]) == 2
    freeze_routers(lm)
    frozen = {name for name, p in lm.named_parameters() if not p.requires_grad}
    assert frozen == {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}


def test_a_dense_model_has_no_router_to_freeze() -> None:
    dense = AutoModelForCausalLM.from_config(tiny_config("llama", True))
    with pytest.raises(ConfigError, match="freeze: router"):
        freeze_routers(dense)


def test_experts_are_grouped_products(tmp_path: Any) -> None:
    """As transformers chooses by itself; on a card below compute capability 8.0 product by
    product, within the same function."""
    write(tmp_path, MIXTURE)
    policy = load_policy(settings_for(tmp_path), CPU)
    assert policy.lm.config._experts_implementation == "grouped_mm"
