"""Disturb a policy's forward pass on purpose: as a dtype rounds, or as scaled weights do.

The proof of a weight sync compares log-probs of two programs that round in different places. The
size of such a difference depends on the model, on its weights and on the dtype. So the trainer
measures it by rounding in yet another place. The output of a linear layer scales with its weights,
so the trainer can also say what an engine computes that got these weights scaled, without changing
a weight of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from plimsoll.model.policy import PolicyModel, TokenLogprobHead

ROUNDING = {"float4": 2.0**-2, "float8": 2.0**-4, "bfloat16": 2.0**-8, "float32": 2.0**-21}
"""The relative error of a layer's output in another program, by the format of numbers there. Up to
16 bits it is one rounding, of weights or output, since sums are added up in fp32. In fp32 it is 8
roundings, since the sums themselves have another order; measured, see notes/performance.md."""
_NUMBER = re.compile(r"\.\d+\.")
_PIECE = 2**20
"""Elements that get their noise at once, so that no second copy of an output is made."""


@dataclass(frozen=True)
class Scaled:
    """Layers of a policy whose weights are multiplied by a factor.

    Attributes:
        layers: their names in the policy.
        factor: a power of two or its negative, so that no bit of a weight is lost.
    """

    layers: tuple[str, ...] = ()
    factor: float = -1.0


UNSCALED = Scaled()
"""No layer."""


@dataclass(frozen=True)
class Disturbance:
    """What is disturbed in a forward pass.

    Attributes:
        rounded_as: a key of `ROUNDING`, whose noise is added; None: no noise.
        scaled: layers whose output is scaled, as their weights would scale it.
    """

    rounded_as: str | None = None
    scaled: Scaled = UNSCALED


@contextmanager
def disturb(policy: PolicyModel, disturbance: Disturbance) -> Iterator[None]:
    """Disturb the policy's forward passes during the block, which keeps no gradients.

    The same disturbance adds the same noise in every block.
    """
    with ExitStack() as hooks:
        for layer in _with_tied(policy, disturbance.scaled.layers):
            hooks.enter_context(_scale(layer, disturbance.scaled.factor))
        if disturbance.rounded_as is not None:
            size = ROUNDING[disturbance.rounded_as]
            generators: dict[torch.device, torch.Generator] = {}
            for layer in policy.lm.modules():
                if next(layer.parameters(recurse=False), None) is not None:
                    hooks.callback(_round(layer, size, generators).remove)
        yield


@contextmanager
def _scale(layer: nn.Module, factor: float) -> Iterator[None]:
    """Scale the product that the layer computes, during the block."""
    if isinstance(layer, TokenLogprobHead):  # it returns log-probs of the product
        form, logits = layer.form, layer.form.logits
        softcap = None if logits.softcap is None else logits.softcap / factor
        scaled = replace(logits, scale=logits.scale * factor, softcap=softcap)
        layer.form = replace(form, logits=scaled)
        yield
        layer.form = form
    else:
        hook = layer.register_forward_hook(lambda *call: factor * call[2])
        yield
        hook.remove()


def _round(
    layer: nn.Module, size: float, generators: dict[torch.device, torch.Generator]
) -> torch.utils.hooks.RemovableHandle:
    """Add noise to what the layer computes, of at most `size` times each element."""

    def add_noise(module: nn.Module, inputs: object, output: object) -> None:
        if not isinstance(output, Tensor):
            return
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(0)
        # Along the longest dimension, since an output may be transposed.
        longest = max(range(output.dim()), key=output.size)
        rows = max(1, _PIECE * output.size(longest) // max(1, output.numel()))
        for piece in output.split(rows, longest):
            noise = torch.empty_like(piece)
            noise.uniform_(-size, size, generator=generators[output.device])
            piece.addcmul_(piece, noise)

    return layer.register_forward_hook(add_noise)


def scalable_layers(policy: PolicyModel) -> dict[str, list[str]]:
    """Return the layers whose output scales with their weights, by kind.

    The keys are names without the numbers of layers; the values are the names in the policy, in its
    order. Norms and stacked experts are no such layers. A tied head is left out: it is scaled with
    its embedding.
    """
    kinds: dict[str, list[str]] = {}
    weights: set[int] = set()
    for name, layer in policy.named_modules():
        inner = getattr(layer, "base_layer", layer)  # of a layer with an adapter
        is_part = ".lora_" in name or name.endswith(".base_layer")
        if is_part or not isinstance(inner, nn.Linear | nn.Embedding | TokenLogprobHead):
            continue
        if id(inner.weight) not in weights:
            weights.add(id(inner.weight))
            kinds.setdefault(_NUMBER.sub(".", name), []).append(name)
    return kinds


def _with_tied(policy: PolicyModel, names: tuple[str, ...]) -> list[nn.Module]:
    """Return the layers of these names, and the head if its weight is one of theirs."""
    layers = [policy.get_submodule(name) for name in names]
    head = policy.lm.get_output_embeddings()
    is_tied = any(getattr(layer, "weight", None) is head.weight for layer in layers)
    return [*layers, head] if is_tied and head not in layers else layers
