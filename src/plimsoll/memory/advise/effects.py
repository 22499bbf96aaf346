"""What a change does to what is learned."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, get_args

from plimsoll.memory.advise.changes import Change

Effect = Literal["none", "rounding", "machines", "method"]
"""none: the same result on the same machines. rounding: the same training with coarser numbers.
machines: the same result, on more machines or cards. method: other training, or
of shorter sequences."""

EFFECTS: tuple[Effect, ...] = get_args(Effect)
"""The least first: the order in which changes are advised."""

_TRAINED = ("actor.", "critic.")
_ROUNDING = ("zero.state_dtype", "zero.gradient_dtype", "optimizer.kind")
_METHOD = ("adapter.rank", "model.quantization")
_LENGTHS = (".max_tokens", ".max_new_tokens")


def effect_of(changes: Iterable[Change]) -> Effect:
    """Of all of them together: the largest of any."""
    return max(map(_effect, changes), key=EFFECTS.index, default="none")


def effect_words(changes: Collection[Change]) -> str:
    """What is to be said of all of them together."""
    effects = set(map(_effect, changes))
    if "method" in effects:
        return "what is learned changes"
    rounded = " but for rounding" if "rounding" in effects else ""
    return f"what is learned stays the same{rounded}{_where(changes)}"


def _where(changes: Iterable[Change]) -> str:
    grown = {change.key for change in changes if _effect(change) == "machines"}
    if "cluster.nodes" in grown:
        return ", on more machines"
    return ", on more cards" if grown else ""


def _effect(change: Change) -> Effect:
    learns = change.key.startswith(_TRAINED)
    if (learns and change.key.endswith(_METHOD)) or change.key.endswith(_LENGTHS):
        return "method"
    if learns and change.key.endswith(_ROUNDING):
        return "rounding"
    if change.key in ("cluster.nodes", "cluster.ranks") and _grows(change):
        return "machines"
    return "none"


def _grows(change: Change) -> bool:
    assert isinstance(change.before, int) and isinstance(change.after, int), change
    return change.after > change.before
