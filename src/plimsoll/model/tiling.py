"""MLPs that are computed a tile of tokens at a time, forward and backward.

Only a tile's inner activations exist at once. Forward keeps the MLP's input; backward computes each
tile again. Source: ALST, Bekman et al. 2025, https://arxiv.org/abs/2506.13996.

A checkpointed layer computes its MLP no third time: the layer's recomputation ends where its last
tensor is kept (torch's early stop), and `_Kept` keeps the input before the MLP is computed. Only
where a norm follows the MLP, as in Gemma 2, does that norm keep the MLP's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from plimsoll.config.engine import ModelConfig
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.model.checkpointing import keep_no_products
from plimsoll.model.price.layer import DOWN, GATES, UPS

_IN = {*GATES, *UPS, "c_fc"}
_OUT = {*DOWN}


def tile_mlps(lm: PreTrainedModel, config: ModelConfig) -> None:
    """Have the model's MLPs compute `mlp_tile` tokens at once, in place; None changes nothing.

    A shared expert is such an MLP; routed experts stay as they are. Raises ConfigError if the model
    has no MLP that can be tiled.
    """
    if config.mlp_tile is None:
        return
    mlps = [part for name, part in lm.named_modules() if _is_mlp(part) and ".experts." not in name]
    if not mlps:
        raise ConfigError(
            f"{config.path}: model.mlp_tile is {config.mlp_tile}, but {type(lm).__name__} has no "
            "MLP that all tokens pass through. Routed experts are not tiled. Leave the key out."
        )
    for mlp in mlps:
        mlp.forward = partial(_forward, mlp, mlp.forward, config.mlp_tile)
        mlp.register_forward_pre_hook(_require_gradient)


def tiled_mlps(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the MLPs that `tile_mlps` has changed."""
    for part in module.modules():
        if getattr(vars(part).get("forward"), "func", None) is _forward:
            yield part


def _is_mlp(module: nn.Module) -> bool:
    """Return whether a module itself has linears from and to the hidden states."""
    linears = {n for n, part in module.named_children() if isinstance(part, nn.Linear | Conv1D)}
    is_layer = isinstance(module, GradientCheckpointingLayer)  # OPT's has its MLP's linears itself
    return not is_layer and bool(linears & _IN and linears & _OUT)


def _require_gradient(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Return an MLP's input so that it requires a gradient, if gradients are computed at all.

    The first layer's input may require none, if only MLPs have adapters. ZeRO stage 3 reduces the
    gradients of an MLP's weights when the input's gradient is there.
    """
    (input_XH,) = inputs
    if torch.is_grad_enabled() and not input_XH.requires_grad:
        return (input_XH.detach().requires_grad_(),)
    return inputs


@dataclass(frozen=True, eq=False)
class _Pass:
    """One forward pass of an MLP.

    Attributes:
        whole: computes the MLP's output for any number of tokens.
        tile: the tokens that are computed at once.
        weights: the parameters that are trained.
        seeds: the state of the host's random numbers at the beginning.
        card_seeds: the cards, and the states of their random numbers.
    """

    whole: Callable[[Tensor], Tensor]
    tile: int
    weights: tuple[nn.Parameter, ...]
    seeds: Tensor
    card_seeds: tuple[list[int], list[Tensor]]

    @contextmanager
    def same_random_numbers(self) -> Iterator[None]:
        """During the block, draw the pass's random numbers again, for an adapter's dropout."""
        cards, states = self.card_seeds
        with torch.random.fork_rng(cards):
            torch.set_rng_state(self.seeds)
            set_device_states(cards, states)
            yield


def _forward(mlp: nn.Module, whole: Callable[[Tensor], Tensor], tile: int, input_XH: Tensor) -> Any:
    """Return `whole(input_XH)`, computed in tiles; the last dimension but one counts tokens."""
    if not torch.is_grad_enabled():
        return _in_tiles(whole, tile, input_XH)
    # Neither the weights nor anything else is saved by autograd: see `_Kept`.
    weights = tuple(weight for weight in mlp.parameters() if weight.requires_grad)
    seeds = torch.get_rng_state(), get_device_states(input_XH)
    kept = _Kept.apply(input_XH).grad_fn
    return _Tiles.apply(_Pass(whole, tile, weights, *seeds), kept, input_XH, *weights)


def _in_tiles(whole: Callable[[Tensor], Tensor], tile: int, input_XH: Tensor) -> Tensor:
    output_XH = torch.empty_like(input_XH)
    parts = (x.split(tile, -2) for x in (input_XH, output_XH))
    for input_NH, output_NH in zip(*parts, strict=True):
        output_NH.copy_(whole(input_NH))
    return output_XH


class _Kept(torch.autograd.Function):
    """Has autograd save a tensor at once; its backward pass never runs.

    What a function of autograd saves is saved after its forward, which would be too late.
    """

    @staticmethod
    def forward(ctx: Any, input_XH: Tensor) -> Tensor:
        ctx.save_for_backward(input_XH)
        return input_XH.new_empty(0)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, each: _Pass, kept: Any, input_XH: Tensor, *weights: Tensor) -> Tensor:
        ctx.each, ctx.kept = each, kept
        with keep_no_products():
            return _in_tiles(each.whole, each.tile, input_XH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_XH: Tensor) -> tuple[Tensor | None, ...]:
        each, kept, ctx.kept = ctx.each, ctx.kept, None
        if kept is None:
            raise PlimsollError(
                "A second backward pass went through an MLP whose mlp_tile is set. The first pass "
                "released the MLP's input. Leave mlp_tile out."
            )
        (input_XH,) = kept.saved_tensors
        return None, None, *_gradients(each, input_XH, grad_XH)


def _gradients(each: _Pass, input_XH: Tensor, grad_XH: Tensor) -> Iterator[Tensor]:
    """Yield the gradients of an MLP's input and trained weights, given that of its output.

    The weights' are added up over the tiles in fp32, and rounded once.
    """
    made_XH = torch.empty_like(input_XH)
    sums = [torch.zeros_like(w, dtype=_wide(w)) for w in each.weights]
    hooks = [w.register_hook(partial(_add, s)) for w, s in zip(each.weights, sums, strict=True)]
    parts = (x.split(each.tile, -2) for x in (input_XH, grad_XH, made_XH))
    with each.same_random_numbers():
        for input_NH, grad_NH, made_NH in zip(*parts, strict=True):
            leaf_NH = input_NH.detach().requires_grad_()
            with torch.enable_grad():
                output_NH = each.whole(leaf_NH)
            of = (leaf_NH, *each.weights)
            made_NH.copy_(torch.autograd.grad(output_NH, of, grad_NH, allow_unused=True)[0])
    for hook in hooks:
        hook.remove()
    yield made_XH
    for weight in each.weights:
        yield sums.pop(0).to(weight.dtype)  # one at a time in both dtypes


def _wide(weight: Tensor) -> torch.dtype:
    return torch.promote_types(weight.dtype, torch.float32)


def _add(total: Tensor, gradient: Tensor) -> Tensor:
    """Add a weight's gradient of a tile; return zeros that need no memory in its place."""
    total += gradient
    return gradient.new_zeros(()).expand_as(gradient)
