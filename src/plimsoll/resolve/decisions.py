"""Decide every key that a config leaves to `auto`, each with a reason.

These are device, dtypes, attention, kernels, and the settings of trainer engines. Where models can
use PyTorch's varlen_attn (flash attention of packs) and Liger's kernels is also asked by rules, and
when a model is loaded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from plimsoll.config.base import AUTO, Settings
from plimsoll.config.cluster import RANK_NAMES, ClusterConfig, DecidedExchange, Device
from plimsoll.config.engine import DecidedDtype, DecidedKernels, ModelConfig, TrainedRole
from plimsoll.config.rollout import DecidedRoute, RolloutConfig
from plimsoll.errors import ConfigError
from plimsoll.machine.hardware import BFLOAT16_UNITS, Card, find_machine, parse_cluster
from plimsoll.machine.host import multiplies_bfloat16
from plimsoll.machine.versions import cards_have_liger, has_cuda_build
from plimsoll.resolve.engine_rules import trainer_rules
from plimsoll.resolve.job import ConfigT
from plimsoll.shapes.known_models import head_sizes

Capability = tuple[int, int]
"""A card's compute capability."""
WIDEST_HEAD = 256
"""The widest head of FlashAttention-2, in PyTorch's flash_attn/flash_api.cpp (`mha_varlen_fwd`)."""
_CARD_OVER_BUCKET, _LEAST_BUCKET, _MOST_BUCKET = 256, 2**26, 2**30
"""The memory of a card over that of a bucket of weights, and the bounds of the latter, bytes."""
_BUCKET_WITHOUT_CARDS = 2**28
_HEAD_STEP = 8
"""A head's width must be a multiple of this for varlen_attn; scaled_dot_product_attention pads."""


def choose_kernels(
    device: str, capability: Capability | None, has_liger: bool
) -> tuple[DecidedKernels, str]:
    """Return whose norms, gated MLPs and rotary embeddings to use, and the reason as a clause.

    `capability` is the card's, or the lowest of several; None if unknown.
    """
    if device == "cpu":
        return "own", "Liger's are for GPUs"
    if capability is not None and capability < BFLOAT16_UNITS:  # Triton has no bfloat16 for them
        return "own", "the cards are older than Liger's"
    if not has_liger:
        return "own", "liger-kernel is not here"
    return "liger", "liger-kernel has them for these GPUs"


def against_varlen(
    device: str, capability: Capability | None, dtype: str, softcapped: bool, head_dim: int
) -> Iterator[str]:
    """Yield every reason why varlen_attn cannot compute a model; nothing if it can.

    An unknown `capability` is None, an unknown `head_dim` 0. `softcapped` says whether the model
    bounds its attention scores.
    """
    if device != "cuda":
        yield f"it runs on CUDA, and this is {device}"
    elif capability is not None and capability < BFLOAT16_UNITS:
        yield "it needs compute capability 8.0, and the card has {}.{}".format(*capability)
    if dtype != "bfloat16":
        yield f"it computes in bfloat16, and model.dtype is {dtype}"
    if softcapped:
        yield "the model caps its attention scores (attn_logit_softcapping), which it cannot"
    if head_dim > WIDEST_HEAD:
        yield f"it has heads of at most {WIDEST_HEAD} dimensions, not {head_dim}"
    if head_dim % _HEAD_STEP:
        yield f"it has heads of a multiple of {_HEAD_STEP} dimensions, not {head_dim}"


@dataclass(frozen=True)
class Decision:
    """The value that was decided for a key that the config left to `auto`.

    Attributes:
        key: the last part of the key, such as "dtype".
        value: the value, as text.
        why: the reason, as a clause that follows "since".
    """

    key: str
    value: str
    why: str


def decide(config: ConfigT) -> tuple[ConfigT, tuple[Decision, ...]]:
    """Return the config with a value for every `auto`, and the distinct decisions.

    Raises:
        ConfigError: `cluster.hardware` names unknown cards.
        PlimsollError: NVIDIA's driver is installed and fails.
    """
    ground = _Ground(config.cluster)
    decisions: dict[Decision, None] = {}

    def change(settings: Settings) -> Settings:
        made: dict[str, tuple[str, str]]
        match settings:
            case ClusterConfig(device="auto"):
                made = {"device": (ground.device, ground.why_device)}
            case ModelConfig():
                made = _decide_model(settings, ground)
            case TrainedRole(engine_names=(_,)):  # the rules refuse several
                return settings.with_engine(trainer_rules(settings).decide(settings))
            case _:
                return settings
        decisions.update({Decision(key, *chosen): None for key, chosen in made.items()})
        values = {key: value for key, (value, _) in made.items()}
        return settings.model_copy(update=values) if made else settings

    decided: ConfigT = _change_each(config, change)
    cluster = decided.cluster
    if cluster.sequence_exchange == AUTO:
        exchange, why = _exchange(decided)
        if max(map(cluster.shards_of, cluster.rank_counts)) > 1:
            decisions[Decision("sequence_exchange", exchange, why)] = None
        cluster = cluster.model_copy(update={"sequence_exchange": exchange})
        decided = decided.model_copy(update={"cluster": cluster})
    rollout = getattr(decided, "rollout", None)
    if not isinstance(rollout, RolloutConfig):
        return decided, tuple(decisions)
    if rollout.dtype == AUTO:  # the actor's, whose weights it uses
        rollout = rollout.model_copy(update={"dtype": decided.actor.model.dtype})
    if rollout.sync.route == AUTO:
        route, why = sync_route(decided.cluster, rollout)
        decisions[Decision("sync.route", route, why)] = None
        sync = rollout.sync.model_copy(update={"route": route})
        rollout = rollout.model_copy(update={"sync": sync})
    if rollout.sync.bucket_bytes == AUTO:
        size, why = _bucket(ground)
        decisions[Decision("sync.bucket_bytes", f"{size >> 20} MiB", why)] = None
        sync = rollout.sync.model_copy(update={"bucket_bytes": size})
        rollout = rollout.model_copy(update={"sync": sync})
    return decided.model_copy(update={"rollout": rollout}), tuple(decisions)


def _exchange(config: ConfigT) -> tuple[DecidedExchange, str]:
    """Return what ranks that share a pack exchange, and the reason."""
    paths = list[str]()

    def note(settings: Settings) -> Settings:
        if isinstance(settings, ModelConfig) and settings.path not in paths:
            paths.append(settings.path)
        return settings

    _change_each(config, note)
    for shards in sorted({*map(config.cluster.shards_of, config.cluster.rank_counts)}):
        for path in paths:
            if why := against_heads(path, shards):
                return "keys", why
    return "heads", "the heads of every model divide, and each rank computes as much"


def against_heads(path: str, shards: int) -> str:
    """Return why so many ranks cannot exchange a model's heads, as a clause; "" if they can."""
    counts = head_sizes(path).counts
    if counts is None:
        return "" if shards == 1 else f"the number of heads of {path} is not known here"
    heads, kv_heads = counts
    if heads % shards or (kv_heads % shards and shards % kv_heads):
        return f"{heads} heads and {kv_heads} key heads of {path} do not divide by {shards}"
    return ""


def sync_route(cluster: ClusterConfig, rollout: RolloutConfig) -> tuple[DecidedRoute, str]:
    """Return the fastest way of weights from ranks to engines, and the reason."""
    if cluster.where == "local":
        return "host", "ranks and engines are one process"
    if cluster.device == "cpu":
        return "host", "ranks and engines compute on CPUs"
    if rollout.placement == "shared" and cluster.own_ranks:
        others = " and ".join(f"{RANK_NAMES[kind]}s" for kind in cluster.own_ranks)
        return "host", f"engines share the cards of {others}, too, which do not send"
    if rollout.placement == "shared":
        return "ipc", "engines share the ranks' cards"
    return "nccl", "engines have cards of their own"


def _bucket(ground: _Ground) -> tuple[int, str]:
    """Return the bytes of a bucket of weights, a power of two, and the reason."""
    if not ground.cards:
        return (
            _BUCKET_WITHOUT_CARDS,
            "no card is known",
        )
    memory = min(card.nominal_bytes for card in ground.cards)
    share = min(max(memory // _CARD_OVER_BUCKET, _LEAST_BUCKET), _MOST_BUCKET)
    return 1 << (share.bit_length() - 1), f"a card has {memory >> 30} GiB"


def _decide_model(model: ModelConfig, ground: _Ground) -> dict[str, tuple[str, str]]:
    """Return (value, reason) for each key of the model that is `auto`."""
    made: dict[str, tuple[str, str]] = {}
    if model.dtype == AUTO:
        made["dtype"] = ground.dtype
    if model.kernels == AUTO:
        made["kernels"] = ground.kernels
    if model.attention == AUTO:
        dtype = made["dtype"][0] if "dtype" in made else model.dtype
        made["attention"] = _attention(model.path, dtype, ground)
    return made


def _attention(path: str, dtype: str, ground: _Ground) -> tuple[str, str]:
    if ground.device == "cpu":
        return "sdpa", "varlen_attn is for GPUs"
    heads = head_sizes(path)
    obstacles = [
        *against_varlen(ground.device, ground.capability, dtype, heads.softcapped, heads.keys or 0)
    ]
    if heads.values not in (None, heads.keys):
        obstacles.append("the model's keys and values are not as wide as one another")
    if obstacles:
        return "sdpa", f"varlen_attn cannot compute the model: {obstacles[0]}"
    return "varlen", "one kernel computes a whole pack"


class _Ground:
    """The hardware of a run, as far as this machine can tell. Each property is read when used."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._cluster = cluster

    @cached_property
    def cards(self) -> tuple[Card, ...] | None:
        """The cards of one machine of the run.

        () if the run computes on CPUs; None if it uses cards that this machine cannot see.
        """
        cluster = self._cluster
        if cluster.device == "cpu":
            return ()
        if cluster.hardware is not None:
            return parse_cluster(cluster.hardware, cluster.nodes, None).node.cards
        if cluster.address is not None:  # on machines without GPUs torch has no CUDA build
            return None if cluster.device == "cuda" or has_cuda_build() else ()
        if cards := _cards_here():
            return cards
        if cluster.device == "cuda":
            return None
        _refuse_hidden_cards()
        return ()

    @property
    def device(self) -> Device:
        """The device that the run computes on."""
        return "cpu" if self.cards == () else "cuda"

    @property
    def why_device(self) -> str:
        """The reason for `device`, as a clause."""
        cluster, cards = self._cluster, self.cards
        if cluster.hardware is not None:
            return f"cluster.hardware is {cluster.hardware}"
        if cluster.address is not None:
            built = "" if cards is None else " not"
            return f"torch is{built} built for CUDA, and the run joins a Ray cluster"
        return f"this machine has {cards[0].name}" if cards else "this machine has no NVIDIA GPU"

    @cached_property
    def capability(self) -> Capability | None:
        """The lowest compute capability of the cards; None if unknown."""
        known = [c.compute_capability for c in self.cards or () if c.compute_capability]
        return min(known, default=None)

    @cached_property
    def dtype(self) -> tuple[DecidedDtype, str]:
        """The dtype in which the hardware is fast, and the reason."""
        cards = self.cards
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

    @cached_property
    def kernels(self) -> tuple[DecidedKernels, str]:
        """The kernels of models ("own" or "liger"), and the reason."""
        return choose_kernels(self.device, self.capability, cards_have_liger())


def fast_dtype(cluster: ClusterConfig) -> tuple[DecidedDtype, str]:
    """Return the dtype in which the run's hardware is fast, and the reason.

    Raises the errors of `decide`.
    """
    return _Ground(cluster).dtype


@cache  # advice asks hundreds of times, and each look asks the driver
def _cards_here() -> tuple[Card, ...]:
    return find_machine().cards


def _refuse_hidden_cards() -> None:
    """Raise ConfigError if this machine has a GPU that the plan cannot see."""
    devices = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if devices and not hidden and shutil.which("nvidia-smi") is None:
        raise ConfigError(
            "cluster.device: auto: this machine has an NVIDIA GPU, and nvidia-smi, by which it is "
            "seen, is not there. In a container its driver's tools come with "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility. Or write cluster.device: cpu"
        )


def _change_each(value: Any, change: Callable[[Settings], Settings]) -> Any:
    """Return settings with `change` applied to every section, inner sections first.

    The same object is returned if nothing changed.
    """
    if isinstance(value, Settings):
        old = {name: getattr(value, name) for name in type(value).model_fields}
    elif isinstance(value, dict):
        old = value
    else:
        return value
    new = {name: _change_each(inner, change) for name, inner in old.items()}
    new = {name: inner for name, inner in new.items() if inner is not old[name]}
    if isinstance(value, dict):
        return {**value, **new} if new else value
    return change(value.model_copy(update=new) if new else value)
