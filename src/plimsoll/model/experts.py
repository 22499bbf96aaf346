"""Low-rank adapters of a mixture's stacked experts, computed by grouped matrix products.

A layer keeps the weights of all its experts in two tensors, `gate_up_proj` and `down_proj`. PEFT
(`target_parameters`) writes out W + s B A of every expert in each forward pass. Here the rows of
tokens are sorted by expert, and each expert's rows pass its own A and B: only products of the
adapter's rank are added. Files have PEFT's names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    _grouped_linear,
    grouped_mm_experts_forward,
)

STACKED = ("gate_up_proj", "down_proj")
"""The stacked weights of a layer's experts, in the order in which PEFT wraps them."""
PARAMETERS = tuple(f"experts.{name}" for name in STACKED)
"""The same weights as PEFT's `target_parameters`."""
_ADAPTED = "plimsoll_adapted"
_WRAPPED = {"gate_up_proj": ".base_layer", "down_proj": ""}
"""What PEFT puts behind the experts' name: the wrapper of the last weight has the first's inside.

Source: PEFT 0.21, tuners/tuners_utils.py, `_inject_parameters`."""


class ExpertPairs(nn.Module):
    """The matrices A and B of every expert beside one stacked weight.

    Attributes:
        a_ERI: A of each expert, [experts, rank, inputs].
        b_EOR: B of each expert, [experts, outputs, rank].
        scale: alpha / rank, or with rsLoRA alpha / sqrt(rank).
        is_transposed: whether the stacked weight is [experts, inputs, outputs].
        enabled: whether the experts use it.
    """

    def __init__(self, weight: Tensor, rank: int, scale: float, is_transposed: bool) -> None:
        super().__init__()
        experts, outputs, inputs = weight.mT.shape if is_transposed else weight.shape
        self.a_ERI = nn.Parameter(weight.new_empty(experts, rank, inputs))
        self.b_EOR = nn.Parameter(weight.new_zeros(experts, outputs, rank))
        nn.init.kaiming_uniform_(self.a_ERI.flatten(0, 1), a=5**0.5)  # as PEFT begins
        self.scale, self.is_transposed, self.enabled = scale, is_transposed, True

    def forward(self, rows_NI: Tensor, ends_E: Tensor) -> Tensor:
        """Return what is added to the experts' results, [N, outputs].

        Args:
            rows_NI: rows sorted by expert, [N, inputs].
            ends_E: one past the last row of each expert, int32.
        """
        inner_NR = self.scale * _grouped_linear(rows_NI, self.a_ERI, ends_E)
        added_NO: Tensor = _grouped_linear(inner_NR, self.b_EOR, ends_E)
        return added_NO

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the adapter on or off, as PEFT's layers do."""
        self.enabled = enabled

    def merge_into(self, weight: Tensor, experts: slice = slice(None)) -> Tensor:
        """Return W + s B A of some experts, computed in fp32 and rounded once to W's dtype.

        The fp32 copies are of one expert at a time.
        """
        base_EOI, merged = weight[experts], torch.empty_like(weight[experts])
        pairs = self.b_EOR.detach()[experts], self.a_ERI.detach()[experts]
        for place, base, up, down in zip(merged, base_EOI, *pairs, strict=True):
            left, right = (down.T, up.T) if self.is_transposed else (up, down)
            place.copy_(torch.addmm(base.float(), left.float(), right.float(), alpha=self.scale))
        return merged


def adapt_experts(lm: PreTrainedModel, rank: int, scale: float) -> None:
    """Add pairs of matrices to the stacked experts of a model, in place."""
    for experts in stacked_experts(lm):
        for name in STACKED:
            pairs = ExpertPairs(getattr(experts, name), rank, scale, experts.is_transposed)
            experts.add_module(f"lora_{name}", pairs)
    ALL_EXPERTS_FUNCTIONS.register(_ADAPTED, _forward)
    lm.set_experts_implementation(_ADAPTED)


def stacked_experts(lm: nn.Module) -> Iterator[Any]:
    """Yield the modules of a model that keep a layer's experts in the tensors of `STACKED`."""
    for module in list(lm.modules()):
        weights = [getattr(module, name, None) for name in STACKED]
        if all(isinstance(each, nn.Parameter) and each.dim() == 3 for each in weights):
            yield module


def _forward(experts: Any, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the weighted sum of what its experts give for each token, [T, H].

    Without the pairs it is transformers' `grouped_mm_experts_forward`, which also computes it where
    the adapter is off.

    Args:
        experts: a layer's experts.
        hidden_TH: the hidden states of the tokens.
        chosen_TK: the experts of each token, int64.
        weights_TK: the weights of their results.
    """
    if not experts.lora_down_proj.enabled:
        plain_TH: Tensor = grouped_mm_experts_forward(experts, hidden_TH, chosen_TK, weights_TK)
        return plain_TH
    each = chosen_TK.shape[1]
    expert_N, order_N = chosen_TK.flatten().sort()
    places_E = torch.arange(experts.num_experts, device=expert_N.device)
    ends_E = torch.searchsorted(expert_N, places_E, right=True, out_int32=True)

    def product(name: str, rows_NI: Tensor) -> Tensor:
        bias_EO = getattr(experts, f"{name}_bias") if experts.has_bias else None
        bias_NO = None if bias_EO is None else bias_EO[expert_N]
        weight, is_transposed = getattr(experts, name), experts.is_transposed
        result_NO: Tensor = _grouped_linear(rows_NI, weight, ends_E, bias_NO, is_transposed)
        return result_NO.add_(getattr(experts, f"lora_{name}")(rows_NI, ends_E))

    inner_NI = experts._apply_gate(product("gate_up_proj", hidden_TH[order_N // each]))
    results_NH = product("down_proj", inner_NI) * weights_TK.flatten()[order_N, None]
    back_N = torch.empty_like(order_N)
    back_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    summed_TH = results_NH[back_N].view(*chosen_TK.shape, -1).sum(1)
    return summed_TH.to(hidden_TH.dtype)


def saved_name(name: str) -> str:
    """Return PEFT's name in files for a parameter of `ExpertPairs`; another name stays as it is."""
    experts, _, leaf = name.rpartition(".lora_")
    weight, _, matrix = leaf.rpartition(".")
    if weight not in STACKED:
        return name
    return f"{experts}{_WRAPPED[weight]}.lora_{matrix[0].upper()}.weight"


def to_saved(name: str, tensor: Tensor) -> Tensor:
    """Return a parameter of `ExpertPairs` as PEFT stores it, or another tensor as it is.

    A is [experts * rank, inputs]; B is [outputs, rank * experts], with the experts last.
    """
    if name.endswith(".a_ERI"):
        return tensor.flatten(0, 1)
    return tensor.permute(1, 2, 0).flatten(1) if name.endswith(".b_EOR") else tensor


def from_saved(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    """Return the inverse of `to_saved`, for a parameter of the shape of `like`."""
    if name.endswith(".a_ERI"):
        return tensor.view(like.shape)
    if name.endswith(".b_EOR"):
        experts, outputs, rank = like.shape
        return tensor.view(outputs, rank, experts).permute(2, 0, 1).contiguous()
    return tensor


def stacked_matrices(state: Mapping[str, Tensor], matrix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name of the stacked weight, A or B beside it) of `ExpertPairs` among parameters.

    A of the joined gate and up is there for both, one below the other.
    """
    for name, tensor in state.items():
        pairs, _, leaf = name.rpartition(".")
        weight = pairs.replace(".lora_", ".")
        if leaf == "b_EOR" and matrix == "B":
            yield weight, tensor
        elif leaf == "a_ERI" and matrix == "A":
            yield weight, torch.cat([tensor, tensor], 1) if weight.endswith(STACKED[0]) else tensor
