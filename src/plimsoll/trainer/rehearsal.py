"""Choose the layers whose weights are sent scaled before a run, to see that engines use them."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.model.disturbance import Scaled, scalable_layers
from plimsoll.model.policy import PolicyModel
from plimsoll.trainer.protocol import Engine
from plimsoll.trainer.weights import learns


@dataclass(frozen=True)
class Rehearsal:
    """The layers of a policy that are sent to engines at once.

    Attributes:
        scaled: the layers whose weights are sent scaled.
        restored: the layers that the rehearsal before scaled, by their names in the policy; their
            weights are sent as they are.
    """

    scaled: Scaled
    restored: tuple[str, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers that are sent."""
        return self.scaled.layers + self.restored


def plan_rehearsals(engine: Engine) -> tuple[Rehearsal, ...]:
    """Return the rehearsals before a run; the last one leaves engines with the right weights."""
    groups = (*_groups(engine), ())
    pairs = zip(groups, ((), *groups), strict=False)
    return tuple(Rehearsal(Scaled(now), before) for now, before in pairs if now or before)


def _groups(engine: Engine) -> tuple[tuple[str, ...], ...]:
    """Return groups of layers of a policy; those of one group are scaled together.

    There is one layer of each kind, such as `mlp.up_proj`, of those that training changes. Kinds
    within the decoder's layers share a group as far as each finds a decoder layer of its own: two
    factors of one product, such as queries and keys, could cancel. The middle layers are
    taken if they suffice, because rounding grows most behind the first. Embedding and head, of
    which each alone changes every log-prob, have groups of their own.
    """
    policy = engine.module
    assert isinstance(policy, PolicyModel)
    learned = [
        kept
        for layers in scalable_layers(policy).values()
        if (kept := [name for name in layers if _is_learned(policy, name)])
    ]
    inner = [layers for layers in learned if len(layers) > 1]
    groups: list[tuple[str, ...]] = [(layers[0],) for layers in learned if len(layers) == 1]
    depth = max(map(len, inner), default=0)
    room = depth // 2 if depth // 2 >= len(inner) else depth
    wide = min(len(inner), room)
    for start in range(0, len(inner), wide or 1):
        places = range((depth - room) // 2, depth, room // wide)
        pairs = zip(inner[start : start + wide], places, strict=False)
        groups.append(tuple(layers[place * len(layers) // depth] for layers, place in pairs))
    return tuple(groups)


def _is_learned(policy: PolicyModel, layer: str) -> bool:
    module = policy.get_submodule(layer)
    inner = ".base_layer" if hasattr(module, "base_layer") else ""
    return learns(policy, f"{layer}{inner}.weight")
