"""Decide `dtype: auto`: bfloat16 on hardware that multiplies bfloat16, float32 elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from plimsoll.config.base import Settings
from plimsoll.config.cluster import ClusterConfig
from plimsoll.config.model import DecidedDtype, ModelConfig
from plimsoll.config.rollout import RolloutConfig
from plimsoll.machine.cpu import multiplies_bfloat16
from plimsoll.machine.hardware import BFLOAT16_UNITS, Card, find_machine, parse_cluster
from plimsoll.machine.versions import has_cuda_build
from plimsoll.spec.job import ConfigT


def decide_dtypes(config: ConfigT) -> ConfigT:
    """Return the config with a dtype in the place of every `auto`.

    A model gets `fast_dtype` of the run's hardware; engines get the dtype of the actor, since they
    sample with its weights. The hardware is looked at only if a model asks for it.

    Raises:
        ConfigError: `cluster.hardware` names unknown cards.
        PlimsollError: NVIDIA's driver is installed and fails.
    """

    @cache
    def fast() -> DecidedDtype:
        return fast_dtype(config.cluster)[0]

    def decide(settings: Settings) -> Settings:
        if not isinstance(settings, ModelConfig | RolloutConfig) or settings.dtype != "auto":
            return settings
        actor = config.actor.model.dtype
        follows = isinstance(settings, RolloutConfig) and actor != "auto"
        return settings.model_copy(update={"dtype": actor if follows else fast()})

    decided: ConfigT = _change_each(config, decide)
    return decided


def fast_dtype(cluster: ClusterConfig) -> tuple[DecidedDtype, str]:
    """Return the dtype that the hardware of a run computes fast in, and why it is that one.

    Raises as `decide_dtypes`.
    """
    cards = _cards(cluster)
    if cards is None:
        return "bfloat16", "GPUs from compute capability 8.0 on multiply it"
    if not cards:
        if multiplies_bfloat16():
            return "bfloat16", "the CPU multiplies it"
        return "float32", "the CPU has no instructions for bfloat16 (AMX, AVX-512 BF16)"
    for card in cards:
        if card.compute_capability and card.compute_capability < BFLOAT16_UNITS:
            return "float32", f"{card.name} has no units for bfloat16"
    return "bfloat16", f"{cards[0].name} multiplies it"


def _cards(cluster: ClusterConfig) -> tuple[Card, ...] | None:
    """Return the cards of one machine of the run: () if the run computes on CPUs, None if it
    computes on cards that cannot be seen from here."""
    if cluster.device == "cpu":
        return ()
    if cluster.hardware is not None:
        return parse_cluster(cluster.hardware, cluster.nodes, None).nodes[0].cards
    if cluster.address is not None:  # where all machines have CPUs alone, torch has no CUDA build
        return None if cluster.device == "cuda" or has_cuda_build() else ()
    return _cards_here() or (None if cluster.device == "cuda" else ())


@cache  # a search for what fits asks hundreds of times, and each look asks the driver
def _cards_here() -> tuple[Card, ...]:
    return find_machine().cards


def _change_each(value: Any, change: Callable[[Settings], Settings]) -> Any:
    """Return settings with `change` applied to every section, the innermost first; the same object
    if nothing changed."""
    if isinstance(value, Settings):
        fields = _changed({name: getattr(value, name) for name in type(value).model_fields}, change)
        return change(value.model_copy(update=fields) if fields else value)
    if isinstance(value, dict):
        entries = _changed(value, change)
        return {**value, **entries} if entries else value
    return value


def _changed(values: Mapping[str, Any], change: Callable[[Settings], Settings]) -> dict[str, Any]:
    made = {name: _change_each(value, change) for name, value in values.items()}
    return {name: value for name, value in made.items() if value is not values[name]}
