"""What a change does to what is learned."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, get_args

from plimsoll.memory.remedies.changes import Change

Effect = Literal["none", "rounding", "cards", "method", "machines", "method and machines"]
"""none: the same result on the same cards. rounding: the same training with coarser numbers. cards:
the same result, with ranks on more cards of the same machines. method: other training, or of
shorter sequences. machines: the same result, on more of them. method and machines: both."""

EFFECTS: tuple[Effect, ...] = get_args(Effect)
"""The least first: the order in which changes are advised."""
ON_MORE_MACHINES: tuple[Effect, ...] = ("machines", "method and machines")

Kind = Literal["same learning", "rounding", "adapters", "shorter sequences"]
"""What an answer on the machines given is like: offload, placement, ranks and whatever else leaves
what is learned as it is; coarser numbers; training of adapters alone; less of each sequence."""
KINDS: tuple[Kind, ...] = get_args(Kind)

_TRAINED = ("actor.", "critic.")
_ROUNDING = ("zero.state_dtype", "zero.gradient_dtype", "optimizer.kind")
_OF_ENGINES = ("rollout.vllm.arguments.quantization",)
_METHOD = ("adapter.rank", "model.quantization")
_LENGTHS = (".max_tokens", ".max_new_tokens")
_PLACES: Mapping[str, Effect] = {"cluster.ranks": "cards", "cluster.nodes": "machines"}


def effect_of(changes: Iterable[Change]) -> Effect:
    """Of all of them together: the largest of any, or both of the largest."""
    found = set(map(_effect, changes))
    if found >= {"method", "machines"}:
        return "method and machines"
    return max(found, key=EFFECTS.index, default="none")


def kind_of(changes: Iterable[Change]) -> Kind | None:
    """None for changes that take more machines."""
    made = tuple(changes)
    effect = effect_of(made)
    if effect == "method":
        shorter = any(change.key.endswith(_LENGTHS) for change in made)
        return "shorter sequences" if shorter else "adapters"
    if effect == "rounding":
        return "rounding"
    return None if effect in ON_MORE_MACHINES else "same learning"


def learned_effect(changes: Iterable[Change]) -> Effect:
    """Of all of them, wherever they make it run: none, rounding or method."""
    return effect_of(change for change in changes if change.key not in _PLACES)


def within(effect: Effect, most: Effect) -> bool:
    """Whether changes of one effect are among those that may be tried for another."""
    if most == "machines" and effect == "method":
        return False
    return EFFECTS.index(effect) <= EFFECTS.index(most)


def effect_words(changes: Collection[Change]) -> str:
    """What is to be said of all of them together."""
    effects = set(map(_effect, changes))
    rounded = " but for rounding" if "rounding" in effects else ""
    learned = "changes" if "method" in effects else f"stays the same{rounded}"
    where = ", on more machines" if "machines" in effects else ""
    where = where or (", on more cards" if "cards" in effects else "")
    return f"what is learned {learned}{where}"


def _effect(change: Change) -> Effect:
    learns = change.key.startswith(_TRAINED)
    if (learns and change.key.endswith(_METHOD)) or change.key.endswith(_LENGTHS):
        return "method"
    if (learns and change.key.endswith(_ROUNDING)) or change.key in _OF_ENGINES:
        return "rounding"
    if change.key in _PLACES and _grows(change):
        return _PLACES[change.key]
    return "none"


def _grows(change: Change) -> bool:
    assert isinstance(change.before, int) and isinstance(change.after, int), change
    return change.after > change.before
