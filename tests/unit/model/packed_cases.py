"""A pack through PolicyModel, and every sequence of it alone through plain transformers, eager."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decided import decided_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from plimsoll.config.engine import ModelConfig
from plimsoll.data.packing import pack_one
from plimsoll.model.files import hf_state_names
from plimsoll.model.load import load_policy
from plimsoll.model.policy import PackTensors
from plimsoll.model.tiny import write_tiny_model
from plimsoll.records import Sample

torch.set_num_threads(1)

CPU = torch.device("cpu")
VOCAB = 60
LENGTHS = (7, 1, 12, 7, 3)
SMALL: dict[str, Any] = {"vocab": VOCAB, "hidden": 32, "feed_forward": 48}


def samples_of(lengths: Sequence[int], seed: int = 0) -> list[Sample]:
    """Random tokens; about two thirds of them learned, in scattered places."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        loss_mask = rng.random(length) < 0.66
        loss_mask[0] = False
        samples.append(Sample(rng.integers(0, VOCAB, length), loss_mask))
    return samples


def packed(samples: Sequence[Sample], shared: Sequence[int] | None = None) -> PackTensors:
    """One pack; shared: as in `Pack.shared_S`."""
    shared_S = None if shared is None else np.array(shared)
    return PackTensors.from_pack(pack_one(samples, range(len(samples)), shared_S), CPU)


def write(directory: Path, config: PreTrainedConfig) -> Path:
    """Weights large enough that attention is sharp and softcaps bend."""
    config.initializer_range = 0.25
    write_tiny_model(directory, config, seed=3, tokenizer=None)
    return directory


def settings_for(path: Path, **changes: Any) -> ModelConfig:
    return decided_model(path=str(path), dtype="float32", head_chunk=5).model_copy(update=changes)


@dataclass(frozen=True)
class Outcome:
    logprobs: Tensor
    entropy: Tensor
    gradients: dict[str, Tensor]


def loss_of(logprobs: Tensor, entropy: Tensor) -> Tensor:
    weights = torch.arange(1.0, len(logprobs) + 1, device=logprobs.device).cos()
    return (weights * logprobs).sum() + 0.3 * (weights.flip(0) * entropy).sum()


def outcome(logprobs: Tensor, entropy: Tensor, model: torch.nn.Module) -> Outcome:
    loss_of(logprobs, entropy).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Outcome(logprobs.detach(), entropy.detach(), gradients)


def alone(path: Path, samples: Sequence[Sample], temperature: float = 1.0) -> Outcome:
    """Every sequence by itself, all logits in fp32, attention as transformers defines it."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).train()
    logprobs, entropies = [], []
    for sample in samples:
        tokens = torch.tensor(sample.tokens)
        logits = model(tokens[None], use_cache=False).logits[0, :-1].float() / temperature
        logp = torch.log_softmax(logits, dim=-1)
        loss_mask = torch.tensor(sample.loss_mask[1:])
        logprobs.append(logp.gather(1, tokens[1:, None])[:, 0][loss_mask])
        entropies.append(-(logp.exp() * logp).sum(-1)[loss_mask])
    return outcome(torch.cat(logprobs), torch.cat(entropies), model)


def together(
    path: Path,
    samples: Sequence[Sample],
    temperature: float = 1.0,
    shared: Sequence[int] | None = None,
    **changes: Any,
) -> Outcome:
    """All sequences in one pack, through PolicyModel."""
    model = load_policy(settings_for(path, **changes), CPU, temperature)
    result = model(packed(samples, shared), entropy="loss")
    found = outcome(result.logprobs_L, result.entropy_L, model)
    names = hf_state_names(model)
    return replace(found, gradients={names[n]: g for n, g in found.gradients.items()})


def assert_same(got: Outcome, want: Outcome) -> None:
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.entropy, want.entropy, rtol=1e-5, atol=1e-5)
    assert got.gradients.keys() == want.gradients.keys()
    for name, gradient in want.gradients.items():
        # Gradients add over tokens and layers: 1e-5 of the tensor's largest entry.
        largest = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(
            got.gradients[name], gradient, rtol=1e-5, atol=1e-5 * largest, msg=f"{name} differs"
        )
