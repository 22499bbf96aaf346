"""A model's weights as its files have them, which others load: transformers, vLLM, llama.cpp.

In memory transformers keeps the experts of a mixture stacked, under names of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from plimsoll.model.policy import plain_name

_LAYER = re.compile(r".*?\.layers\.\d+\.")


def published(lm: PreTrainedModel, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Weights by the names and in the pieces of the model's files; some share their memory.

    weights: whole, by Hugging Face name; taken out layer by layer, as other pieces are copies.
    """
    for names in _by_layer(weights):
        layer = {name: weights.pop(name) for name in names}
        yield from revert_weight_conversion(lm, layer).items()


def written(lm: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with memory of its own for each piece, as files need it."""
    whole = set(weights)
    return {n: t if n in whole else t.clone() for n, t in published(lm, weights)}


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """What the files of a PolicyModel or ValueModel hold besides parameters, by Hugging Face name:
    a router's biases, say, which no gradient moves."""
    buffers = dict(module.named_buffers())
    return {plain_name(name): buffers[name] for name in module.state_dict() if name in buffers}


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        groups.setdefault(layer[0] if layer else "", []).append(name)
    return list(groups.values())
