"""Put low-rank adapters into a model, switch them off and merge them; by PEFT.

PEFT wraps each layer that gets an adapter: `q_proj` then holds the frozen `q_proj.base_layer` and
trained parameters whose names begin with `lora_`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plimsoll.config.engine import AdapterConfig
from plimsoll.errors import ConfigError
from plimsoll.model.policy import PolicyModel, is_of_adapter
from plimsoll.model.quantization import dequantise
from plimsoll.model.value import ValueModel

ADAPTER = "default"
"""PEFT's name for a model's only adapter."""
_BASE = ".base_layer"
_ALL_LINEAR = "all-linear"


def add_adapter(
    module: PolicyModel | ValueModel, config: AdapterConfig, base: str, seed: int
) -> None:
    """Put an adapter into the model, in place, and freeze everything else but a value head.

    `base` is the model's path or name, for the saved adapter; `seed` draws the first weights.
    Raises ConfigError if a target is no layer of the model.
    """
    from peft import LoraConfig

    is_value = isinstance(module, ValueModel)
    inject(
        module,
        LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=_targets(module.lm, config.targets),
            use_rslora=config.rslora,
            use_dora=config.dora,
            task_type="SEQ_CLS" if is_value else "CAUSAL_LM",
            base_model_name_or_path=str(Path(base).absolute()) if Path(base).is_dir() else base,
        ),
        seed,
    )


def inject(module: PolicyModel | ValueModel, peft_config: Any, seed: int = 0) -> None:
    """Put an adapter with PEFT's own config into the model, as `add_adapter` does."""
    from peft import inject_adapter_in_model

    dtype = module.lm.dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(peft_config, module.lm, ADAPTER)
    if stacked := peft_config.target_parameters:
        raise ConfigError(
            f"adapter.targets: PEFT takes names of this model's MLPs ({type(module.lm).__name__}) "
            f"for its stacked experts ({', '.join(sorted(stacked))}), and would compute the whole "
            "update of each expert in every forward pass. Write names of attention's layers "
            "alone, such as q_proj, k_proj, v_proj, o_proj."
        )
    for name, parameter in module.named_parameters():
        if is_of_adapter(name):
            parameter.data = parameter.data.to(dtype)  # PEFT makes them fp32
    if isinstance(module, ValueModel):
        module.lm.score.requires_grad_(True)


def _targets(lm: PreTrainedModel, names: tuple[str, ...]) -> list[str]:
    kinds = {
        name.rpartition(".")[2]: type(layer)
        for name, layer in lm.get_decoder().named_modules()
        if isinstance(layer, nn.Linear | nn.Embedding)
    }
    linears = sorted(name for name, kind in kinds.items() if issubclass(kind, nn.Linear))
    unknown = [name for name in names if name not in kinds and name != _ALL_LINEAR]
    if unknown or not names or not linears:
        raise ConfigError(
            f"adapter.targets: {', '.join(unknown) or 'none'} {'are' if len(unknown) > 1 else 'is'}"
            f" no layer of {type(lm).__name__}. Its linear layers are {', '.join(linears)}; write "
            f"some of them, or `{_ALL_LINEAR}`."
        )
    embeddings = [name for name in names if name != _ALL_LINEAR and name not in linears]
    if embeddings and lm.config.tie_word_embeddings:
        raise ConfigError(
            f"adapter.targets: {', '.join(embeddings)} is also the output head of this model "
            "(tie_word_embeddings), which would have to change with it. Leave it out."
        )
    return sorted({*names, *(linears if _ALL_LINEAR in names else ())} - {_ALL_LINEAR})


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """Compute without the adapter inside the block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def parts_of_weight(module: nn.Module, name: str) -> tuple[str, ...]:
    """Return the names of the parameters that `plain_weight` is computed from."""
    layer, base, leaf = name.rpartition(f"{_BASE}.")
    if not base or leaf != "weight":
        return (name,)
    parts = (n for n, _ in module.get_submodule(layer).named_parameters())
    return (name, *(f"{layer}.{n}" for n in parts if n.startswith("lora_")))


def plain_weight(module: nn.Module, name: str) -> Tensor:
    """Return a parameter as a model without adapters and quantisation has it.

    The tensor is new if the parameter is quantised or has an adapter, else the parameter's own.
    """
    weight = dequantise(module.get_parameter(name))
    layer, base, leaf = name.rpartition(f"{_BASE}.")
    if not base or leaf != "weight":
        return weight
    return _merge_into(module.get_submodule(layer), weight)


def _merge_into(layer: Any, weight: Tensor) -> Tensor:
    """Return W + s B A, Hu et al. 2021, eq. 3, computed in fp32 and rounded once to W's dtype.

    With DoRA each row is scaled to its learned magnitude, Liu et al. 2024, eq. 5.
    """
    up, down = _factors(layer)
    whole = torch.addmm(weight.float(), up.float(), down.float(), alpha=layer.scaling[ADAPTER])
    if ADAPTER in layer.lora_magnitude_vector:
        magnitude = layer.lora_magnitude_vector[ADAPTER].weight.float()
        whole *= (magnitude / whole.norm(dim=1))[:, None]
    return whole.to(weight.dtype)


def _factors(layer: Any) -> tuple[Tensor, Tensor]:
    """Return B [outputs, rank] and A [rank, inputs]; an embedding's are stored transposed."""
    if ADAPTER in layer.lora_embedding_A:
        up, down = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
        return up.detach().T, down.detach().T
    return layer.lora_B[ADAPTER].weight.detach(), layer.lora_A[ADAPTER].weight.detach()
