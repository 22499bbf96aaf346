"""Estimate the shape of a model whose family no entry of families.json describes.

transformers builds such a model without weights if it knows the family. Its tensors are counted,
and its norms are traced. Otherwise the shape is guessed: a Llama with the sizes in config.json.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from plimsoll.errors import ConfigError
from plimsoll.shapes.families import FAMILIES, SIZES, shape_from_config
from plimsoll.shapes.shape import Linear, ModelShape, ParameterTensors, Traits


def estimate_shape(config: Mapping[str, object], name: str) -> ModelShape:
    """Return the shape that a config.json describes, counted or guessed for an unknown family.

    `ModelShape.origin` says which. Raises ConfigError as `shape_from_config` does, also if the
    sizes of an unknown family are missing, or it has experts that nobody can count.
    """
    text = config.get("text_config")
    fields = text if isinstance(text, Mapping) else config
    family = fields.get("model_type")
    if isinstance(family, str) and family not in FAMILIES:
        if counted := _count_shape(json.dumps(fields, sort_keys=True, default=str), name):
            return counted
        if not any("expert" in field for field in fields):
            with suppress(ConfigError):
                guess = shape_from_config({**fields, "model_type": "llama"}, name)
                return replace(guess, family=family, origin="guessed")
    return shape_from_config(config, name)


@lru_cache  # a search for settings makes hundreds of plans
def _count_shape(fields: str, name: str) -> ModelShape | None:
    """Return the shape of the model that transformers builds from the fields of a config.json.

    Return None if torch or transformers is not installed, or cannot build the model.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = AutoConfig.for_model(**json.loads(fields))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
        return _shape_of(model, settings, name)
    except Exception:  # noqa: BLE001 - any family's code, with fields that nobody checked
        return None


def _shape_of(model: Any, settings: Any, name: str) -> ModelShape:
    """Return the shape of a model on the meta device.

    What its layers compute is taken for what the known families with the same traits compute.
    `settings` is the model's config, in which transformers gives fields their usual names.
    """
    layers, hidden = settings.num_hidden_layers, settings.hidden_size
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    modules = {path: module for path, module in model.named_modules() if module is not head}
    others = _other_tensors(modules, hidden)
    others.subtract([table.numel()])
    linears = tuple(_linears(modules, hidden))
    routed = [linear for linear in linears if linear.stacked > 1]
    dense = {path: matrix for path, m in modules.items() if (matrix := _matrix(m))}
    downs = {p: m[0] for p, m in dense.items() if m[1] == hidden and not _is_attention(p)}
    width = max(downs.values(), default=settings.intermediate_size)
    ups = [m[1] for p, m in dense.items() if m[0] == hidden and m[1] in (width, 2 * width)]
    values = settings.to_dict() | {size: getattr(settings, size, None) for size in SIZES}
    values |= {"intermediate_size": width, "vocab_size": table.shape[0], "mlp_bias": False}
    kinds = values.get("layer_types") or ()
    sliding = kinds.count("sliding_attention") if values.get("sliding_window") else 0
    return replace(
        shape_from_config({**values, "attention_bias": False, "model_type": "llama"}, name),
        family=settings.model_type,
        tied=head.weight is table,
        gated=not downs or sum(ups) > list(downs.values()).count(width) * width,
        experts=max((linear.stacked for linear in routed), default=0),
        experts_per_token=getattr(settings, "num_experts_per_tok", 1) if routed else 0,
        expert_intermediate=min(
            (n for x in routed for n in (x.inputs, x.outputs) if n != hidden),
            default=hidden if routed else 0,
        ),
        shared_intermediate=max((n for path, n in downs.items() if "shared" in path), default=0),
        sliding_window=values["sliding_window"] if sliding else None,
        sliding_layers=sliding,
        linears=linears,
        other_tensors=tuple(ParameterTensors(n, n * count) for n, count in others.items() if count),
        head_bias=head.bias is not None,
        traits=_traits(modules, layers, hidden),
        origin="counted",
    )


def _is_attention(path: str) -> bool:
    """Return whether a module is a part of an attention module."""
    parent = path.rpartition(".")[0]
    return "attn" in parent or "attention" in parent


def _linears(modules: Mapping[str, Any], hidden: int) -> Iterator[Linear]:
    """Yield the kinds of linears of a model, and the weights in which a layer stacks experts."""
    kinds: Counter[tuple[str, int, int, bool, int]] = Counter()
    for path, module in modules.items():
        if matrix := _matrix(module):
            kinds[path.rpartition(".")[2], *matrix, module.bias is not None, 1] += 1
        for name, weight in module.named_parameters(recurse=False):
            if _is_stack(weight, hidden):
                experts, outputs, inputs = weight.shape
                kinds[name, inputs, outputs, False, experts] += experts
    for (name, inputs, outputs, bias, stacked), count in kinds.items():
        yield Linear(name, inputs, outputs, bias, count, stacked)


def _matrix(module: Any) -> tuple[int, int] | None:
    """Return the inputs and outputs of a linear module; None for any other module."""
    from torch import nn

    linear = isinstance(module, nn.Linear)
    return (module.in_features, module.out_features) if linear else None


def _is_stack(weight: Any, hidden: int) -> bool:
    return weight.ndim == 3 and hidden in weight.shape[1:]


def _other_tensors(modules: Mapping[str, Any], hidden: int) -> Counter[int]:
    """Count the tensors of each size that `_linears` leaves out; the embedding is one of them."""
    return Counter(
        weight.numel()
        for module in modules.values()
        for weight in module.parameters(recurse=False)
        if _matrix(module) is None and not _is_stack(weight, hidden)
    )


def _traits(modules: Mapping[str, Any], layers: int, hidden: int) -> Traits:
    """Return what a model's norms say of its code; those before the head count for no layer."""
    norms = {path: m for path, m in modules.items() if "norm" in type(m).__name__.lower()}
    of_blocks = [norm for path, norm in norms.items() if not _is_attention(path)]
    per_layer = (len(of_blocks) - 1) // layers
    return Traits(
        norms=_norm_kind(of_blocks[-1], hidden),
        query_norms=len(of_blocks) < len(norms),
        post_norms=per_layer > 3,
        parallel=per_layer < 2,
    )


def _norm_kind(norm: Any, hidden: int) -> Literal["rms", "rms_fp32", "layer"]:
    """Return the kind of a norm by the bytes that it saves for each element in bfloat16."""
    import torch

    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.numel() > hidden:  # no weight
            saved[storage._cdata] = storage.nbytes()
        return tensor

    rows = 64
    row = torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = norm(row * 1)
    each = sum(saved.values()) / (rows * hidden)
    assert output.shape == row.shape
    return "layer" if each < 4 else "rms" if each < 7 else "rms_fp32"
