"""Disturbed forward passes, against models whose weights were really changed."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decided import decided_model
from torch import Tensor

from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.engine import AdapterConfig
from plimsoll.data.packing import pack
from plimsoll.model.adapters import add_adapter, plain_weight
from plimsoll.model.disturbance import Disturbance, Scaled, disturb, scalable_layers
from plimsoll.model.load import load_policy
from plimsoll.model.policy import PackTensors, PolicyModel
from plimsoll.model.tiny import Family, tiny_config, write_tiny_model
from plimsoll.records import Sample
from plimsoll.trainer.weights import learns, plan_rehearsals

RNG = np.random.default_rng(0)
ROWS = [Sample(RNG.integers(0, 15, n), np.arange(n) >= 1) for n in (9, 17, 5)]
FAMILIES: tuple[tuple[Family, bool], ...] = (("qwen2", True), ("llama", False), ("gemma3", True))


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda pair: pair[0])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    family, tied = request.param
    path = tmp_path_factory.mktemp("disturbance") / family
    config = tiny_config(family, tied, vocab=64, hidden=64, heads=2, feed_forward=96)
    config.initializer_range = 0.3
    write_tiny_model(path, config, 0, make_tokenizer())
    return load(path)


def load(path: Path) -> PolicyModel:
    return load_policy(decided_model(str(path), dtype="float32"), torch.device("cpu"), 1.0)


@torch.no_grad()
def log_probs(policy: PolicyModel, disturbance: Disturbance | None = None) -> Tensor:
    [[whole]] = pack(ROWS, 1, 256)
    with disturb(policy, disturbance or Disturbance()):
        output: Any = policy(PackTensors.from_pack(whole, torch.device("cpu")))
    found: Tensor = output.logprobs_L
    return found


def scaled_for_real(policy: PolicyModel, scaled: Scaled) -> PolicyModel:
    changed = deepcopy(policy)
    for name in scaled.layers:
        for parameter in changed.get_submodule(name).parameters(recurse=False):
            parameter.data.mul_(scaled.factor)
    return changed


@pytest.mark.parametrize("factor", [-1.0, -8.0])
def test_a_scaled_layer_is_a_layer_with_scaled_weights(policy: PolicyModel, factor: float) -> None:
    plain = log_probs(policy)
    for names in scalable_layers(policy).values():
        scaled = Scaled((names[-1],), factor)
        found = log_probs(policy, Disturbance(scaled=scaled))
        torch.testing.assert_close(found, log_probs(scaled_for_real(policy, scaled)))
        assert (found - plain).abs().max() > 1e-3, names[-1]
    assert torch.equal(log_probs(policy), plain)


def test_every_matrix_is_of_a_kind_and_a_tied_head_of_none(policy: PolicyModel) -> None:
    kinds = scalable_layers(policy)
    found = {f"{name}.weight" for names in kinds.values() for name in names}
    matrices = {name for name, p in policy.named_parameters() if p.ndim == 2}
    assert found == matrices
    assert len(kinds) == 8 + (not policy.lm.config.tie_word_embeddings)


def test_noise_is_of_the_size_of_a_format_and_the_same_each_time(policy: PolicyModel) -> None:
    plain = log_probs(policy)
    sizes = {}
    for name in ("float32", "bfloat16", "float8"):
        noisy = log_probs(policy, Disturbance(name))
        assert torch.equal(noisy, log_probs(policy, Disturbance(name)))
        sizes[name] = float((noisy - plain).abs().mean())
    assert 0 < sizes["float32"] < 1e-4
    ratio = 2**21 / 2**8
    assert ratio / 4 < sizes["bfloat16"] / sizes["float32"] < 4 * ratio
    assert 4 < sizes["float8"] / sizes["bfloat16"] < 64


def test_the_noise_of_bfloat16_is_about_the_rounding_of_bfloat16(policy: PolicyModel) -> None:
    rounded = deepcopy(policy).to(torch.bfloat16)
    gap = float((log_probs(rounded) - log_probs(policy)).abs().mean())
    noise = float((log_probs(policy, Disturbance("bfloat16")) - log_probs(policy)).abs().mean())
    assert gap / 3 < noise < 3 * gap


def test_an_adapted_layer_is_scaled_whole(policy: PolicyModel) -> None:
    """What is sent is the base with the adapter merged into it."""
    adapted = deepcopy(policy)
    add_adapter(adapted, AdapterConfig(rank=4, targets=("q_proj", "down_proj")), "base", 0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    [layer] = [
        n for n in scalable_layers(adapted)["lm.model.layers.self_attn.q_proj"] if ".1." in n
    ]
    found = log_probs(adapted, Disturbance(scaled=Scaled((layer,), -1.0)))
    merged = deepcopy(policy)
    for name, _ in adapted.named_parameters():
        if name.endswith("base_layer.weight"):
            plain = name.replace(".base_layer", "")
            sign = -1.0 if plain == f"{layer}.weight" else 1.0
            merged.get_parameter(plain).data = sign * plain_weight(adapted, name).detach()
        if name == f"{layer}.base_layer.bias":
            merged.get_parameter(f"{layer}.bias").data.neg_()
    torch.testing.assert_close(found, log_probs(merged), atol=1e-4, rtol=1e-4)


class Holder:
    """What a plan of rehearsals asks an engine for."""

    def __init__(self, module: PolicyModel) -> None:
        self.module = module


def test_a_layer_of_each_learned_kind_is_rehearsed_once(policy: PolicyModel) -> None:
    rehearsals = plan_rehearsals(Holder(policy))  # type: ignore[arg-type]
    rehearsed = [layer for r in rehearsals for layer in r.scaled.layers]
    kinds = scalable_layers(policy)
    assert len(rehearsed) == len(set(rehearsed)) == len(kinds)
    assert all(any(layer in names for layer in rehearsed) for names in kinds.values())
    for before, after in pairwise(rehearsals):
        assert after.restored == before.scaled.layers
        numbers = [layer.split(".layers.")[-1].split(".")[0] for layer in before.scaled.layers]
        assert len(numbers) == len(set(numbers))
    assert rehearsals[-1].scaled.layers == ()


def test_what_does_not_learn_is_not_rehearsed(policy: PolicyModel) -> None:
    adapted = deepcopy(policy)
    add_adapter(adapted, AdapterConfig(rank=4, targets=("q_proj",)), "base", 0)
    rehearsals = plan_rehearsals(Holder(adapted))  # type: ignore[arg-type]
    [layer] = [layer for r in rehearsals for layer in r.scaled.layers]
    assert layer.endswith("q_proj") and learns(adapted, f"{layer}.base_layer.weight")
