"""The routers of mixtures of experts: frozen, or made to take the experts that a sampler took.

Ma et al. 2025, https://arxiv.org/abs/2510.11370 (rollout routing replay): sampler and trainer round
otherwise, so their routers choose other experts for some tokens, and the log-probs of these tokens
differ by far more than rounding. With the sampler's experts the trainer computes what was sampled
from. Only the choice is taken: the weights of the experts are the live router's, renormalised as
the model does, so the router has its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from plimsoll.errors import ConfigError
from plimsoll.model.shards import PackShare
from plimsoll.records import unrouted_number
from plimsoll.shapes.families import ROUTED_FAMILIES

RouterOutput = tuple[Tensor, Tensor, Tensor]
"""What a router of transformers returns: logits [T, E], weights [T, k], experts [T, k]."""


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts that a sampler took for a pack's tokens, and what became of them.

    A layer reads its own part each time that it runs. So a recomputation in the backward pass takes
    the same experts, and counts them once.

    Attributes:
        experts_TLk: the experts' numbers, shape [T, layers, k]; see `records.Pack.routing_T`.
        rerouted: for each layer that ran, two counts of the tokens whose set of experts is not the
            sampler's: as computed, and as the live router alone would have computed; shape [2].
        share: the rank's share of the pack, if it has only a part of it.
    """

    experts_TLk: Tensor
    rerouted: dict[int, Tensor] = field(default_factory=dict)
    share: PackShare | None = None

    def divide(self, share: PackShare) -> Routing:
        """Return the routing of a rank's part of the pack, which counts into `rerouted`, too."""
        none = unrouted_number(self.experts_TLk.itemsize)
        return Routing(share.take(self.experts_TLk, none), self.rerouted, share)

    def add_up(self) -> None:
        """After a forward pass, add the counts of all ranks that share the pack."""
        if self.share is not None and self.rerouted:  # else `metrics` says why there are none
            total = self.share.shard.add(torch.stack([*self.rerouted.values()]))
            self.rerouted.update(zip(self.rerouted, total, strict=True))

    def metrics(self) -> Mapping[str, Tensor]:
        """Return the counts of (token, layer) pairs whose set of experts is not the sampler's.

        Raises ConfigError if the model took no notice of the experts.
        """
        if not self.rerouted:
            raise ConfigError(
                "rollout.routing is sampled, and the actor's layers do not take the experts of a "
                f"sampler. Write rollout.routing: live, or take a model of "
                f"{', '.join(ROUTED_FAMILIES)}."
            )
        computed, live = torch.stack([*self.rerouted.values()]).sum(0).unbind()
        return {"rollout/rerouted": computed, "rollout/rerouted_live": live}


def _softmax_first(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """Return weights as Mixtral, OLMoE and Qwen compute them: shares of the whole softmax."""
    weights = logits.softmax(-1, torch.float32).gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):  # Mixtral has no such setting
        weights = weights / weights.sum(-1, keepdim=True)
    return weights


def _softmax_last(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """Return weights as gpt-oss computes them: a softmax over the logits of the experts taken."""
    return logits.gather(-1, experts).softmax(-1)


_WEIGHTS: Mapping[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    name: _softmax_last if name == "gpt_oss" else _softmax_first for name in ROUTED_FAMILIES
}
"""How the experts of a token are weighted, by transformers' model_type."""


def routers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the routers in a model or layer, by the names of transformers' classes."""
    return (part for part in module.modules() if type(part).__name__.endswith("Router"))


def freeze_routers(module: nn.Module) -> None:
    """Keep routers as they are; call it before an optimizer is made.

    Raises ConfigError if there are none.
    """
    routers = [*routers_of(module)]
    if not routers:
        raise ConfigError(
            "`freeze: router` is set, and no module of the model is known as a router. Leave it "
            "out, or take a mixture of experts whose routers are modules of their own in "
            "transformers."
        )
    for router in routers:
        router.requires_grad_(False)


def follow_sampler(lm: PreTrainedModel) -> None:
    """Have a model's layers take the experts of the decoder's keyword `routing`, where it is given.

    A model whose family is not among `ROUTED_FAMILIES` is left as it is.
    """
    weights = _WEIGHTS.get(lm.config.model_type)
    for number, layer in enumerate(lm.get_decoder().layers if weights else ()):
        for router in routers_of(layer):
            assert weights is not None
            at = _Place(number, router, weights)
            layer.register_forward_pre_hook(at.begin, with_kwargs=True)
            layer.register_forward_hook(at.end, always_call=True)
            router.register_forward_hook(at.reroute)


@dataclass(eq=False)
class _Place:
    """A router in its layer, and while the layer runs, the experts that it is to take."""

    layer: int
    router: nn.Module
    weights: Callable[[nn.Module, Tensor, Tensor], Tensor]
    routing: Routing | None = None

    def begin(self, module: nn.Module, inputs: object, named: Mapping[str, Any]) -> None:
        """Take the layer's keyword; it is the same when the layer is recomputed."""
        self.routing = named.get("routing")

    def end(self, module: nn.Module, inputs: object, output: object) -> None:
        """Forget the experts."""
        self.routing = None

    def reroute(self, module: nn.Module, inputs: object, output: RouterOutput) -> object:
        """Return the router's output for the sampler's experts, where a token has any."""
        if self.routing is None:
            return None
        logits, live_weights, live = output
        given, known = self._given(self.routing.experts_TLk, live)
        experts = torch.where(known, given, live)
        counts = [_count_others(chosen, given, known) for chosen in (experts, live)]
        self.routing.rerouted[self.layer] = torch.stack(counts)
        weights = self.weights(self.router, logits, experts)
        return logits, weights.to(live_weights.dtype), experts

    def _given(self, experts_TLk: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's experts [T, k], and whether a token has any [T, 1]."""
        given, none = experts_TLk[:, self.layer].long(), unrouted_number(experts_TLk.itemsize)
        given = pad(given, (0, 0, 0, len(live) - len(given)), value=none)
        return given, given[:, :1] != none


def _count_others(chosen: Tensor, given: Tensor, known: Tensor) -> Tensor:
    """Return for how many tokens two sets of experts differ."""
    differ = chosen.sort(-1).values != given.sort(-1).values
    return (differ.any(-1, keepdim=True) & known).sum()
