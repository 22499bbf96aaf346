"""What the engines that sample hold: vLLM on cards and on CPU, and the weight sync.

Read in vLLM 0.32 (v1/worker/gpu_worker.py, v1/worker/utils.py, utils/mem_utils.py): a worker makes
its CUDA context and communicators first, then asks for `gpu_memory_utilization` of the card's
*total* memory, which must be free at that moment; what weights, the peak of a profiled forward and
the CUDA graphs leave of it becomes the KV cache. So a worker takes its share whole, whatever the
model: only the KV cache says how well it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from plimsoll.config.model import ELEMENT_BYTES
from plimsoll.config.rollout import RolloutConfig
from plimsoll.memory.items import Held, Item, Moment, Where
from plimsoll.shapes.shape import ModelShape
from plimsoll.spec.run_spec import Phase

GIB = 2**30

ASLEEP: tuple[Phase, ...] = ("score", "train_critic", "train_actor")
"""The phases through which engines with a sleep level sleep; their KV cache comes back only when
the new weights are all there, and then a forward of the actor proves them beside it."""

STARTING = Moment("load", "start engines")
"""Engines take their share before the ranks read their models."""

_SENDING = Moment("sync", "gather")
_BATCHED_TOKENS = 2048  # vLLM: SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS
_BLOCK = 256
"""Tokens of the largest blocks that vLLM counts a KV cache in (vllm/platforms/cpu.py)."""
_OTHER = int(0.3 * GIB)
_GRAPHS = int(0.8 * GIB)
_RESIDUE, _RESIDUE_PARALLEL = int(0.8 * GIB), int(4.9 * GIB)


@dataclass(frozen=True)
class Sampler:
    """An engine's model and work. longest: tokens of the longest prompt with its response.
    sequences: that are sampled at once. adapter_rank: as of `EngineSpec`."""

    rollout: RolloutConfig
    shape: ModelShape
    longest: int
    sequences: int
    adapter_rank: int | None = None

    @property
    def element(self) -> int:
        """Bytes of a weight."""
        return ELEMENT_BYTES[self.rollout.dtype]

    @property
    def weights(self) -> int:
        """Bytes of the weights on each of the engine's cards; norms are on all of them."""
        whole = self.shape.other_parameters
        divided = self.shape.parameters - whole
        return self.element * (-(-divided // self.rollout.tensor_parallel) + whole)

    @property
    def kv_token(self) -> int:
        """Bytes of the KV cache of one token on each card."""
        heads = -(-self.shape.kv_heads // self.rollout.tensor_parallel)
        return 2 * self.shape.layers * heads * self.shape.head_dim * self.element

    @property
    def profile_peak(self) -> int:
        """Bytes of the profiled forward at its peak, on each card: the MLP of the largest batch of
        tokens, or the logits of as many sequences as may run, in 16 bits and three times in fp32.
        """
        shape, parallel = self.shape, self.rollout.tensor_parallel
        width = max(shape.intermediate, shape.experts_per_token * shape.expert_intermediate)
        tokens = max(_BATCHED_TOKENS, self.rollout.max_sequences)
        forward = tokens * self.element * (4 * shape.hidden + 3 * width // parallel)
        logits = self.rollout.max_sequences * shape.vocabulary * (self.element + 3 * 4)
        return max(forward, logits)

    @property
    def token_counts(self) -> int:
        """Bytes, on each card, in which vLLM counts what each sequence has of every token, whether
        penalties are asked for or not (v1/worker/gpu/sample/penalties.py): a count and a bit."""
        words = self.shape.vocabulary + -(-self.shape.vocabulary // 32)
        return 4 * self.rollout.max_sequences * words

    @property
    def adapter_room(self) -> int:
        """Bytes on each card of vLLM's matrices for one adapter: two around every linear layer,
        adapted or not, divided as that layer is on its wider side (vllm/lora/layers)."""
        parallel = self.rollout.tensor_parallel
        sides = 0
        for linear in self.shape.linears:
            whole, divided = linear.inputs, linear.outputs
            if linear.outputs == self.shape.hidden:  # by its inputs
                whole, divided = divided, whole
            sides += linear.count * (whole + -(-divided // parallel))
        return self.element * (self.adapter_rank or 0) * sides


@dataclass(frozen=True)
class CardShare:
    """How a vLLM worker divides what it asks for; bytes. kv_cache below 0: vLLM does not start."""

    asked: int
    weights: int
    profile_peak: int
    token_counts: int
    adapter_room: int
    other: int
    graphs: int

    @property
    def kv_cache(self) -> int:
        return self.asked - self.weights - self.fixed

    @property
    def fixed(self) -> int:
        """Bytes that are neither weights nor KV cache."""
        return self.profile_peak + self.token_counts + self.adapter_room + self.other + self.graphs


def card_share(sampler: Sampler, card_bytes: int) -> CardShare:
    """card_bytes: the card's whole memory, as CUDA reports it."""
    asked = int(card_bytes * sampler.rollout.memory_share)
    peak, counts, room = sampler.profile_peak, sampler.token_counts, sampler.adapter_room
    return CardShare(asked, sampler.weights, peak, counts, room, _OTHER, _GRAPHS)


def least_share(sampler: Sampler, card_bytes: int) -> float:
    """The share of a card, in hundredths rounded up, from which on vLLM starts: with a KV cache for
    one sequence at its longest."""
    share = card_share(sampler, card_bytes)
    needed = share.asked - share.kv_cache + sampler.kv_token * sampler.longest
    return ceil(100 * needed / card_bytes) / 100


def least_cpu_cache(sampler: Sampler) -> float:
    """The KV cache on CPU from which on vLLM starts: GiB, in hundredths rounded up."""
    return ceil(100 * sampler.kv_token * (sampler.longest + _BLOCK) / GIB) / 100


def card_items(
    sampler: Sampler, card_bytes: int, context: int, moments: frozenset[Moment]
) -> tuple[Held, ...]:
    """A vLLM worker on a card.

    context: bytes of its CUDA context, which is counted elsewhere and is part of what a sleeping
    engine leaves. moments: all of the job's.
    """
    awake = _awake(sampler.rollout, moments)
    asleep = moments - awake
    with_cache = awake - {_SENDING} if asleep else awake
    *others, cache = _share_items(sampler, card_share(sampler, card_bytes), card_bytes)
    held = [*(Held(item, awake) for item in others), Held(cache, with_cache)]
    if asleep:
        held.append(Held(_residue(sampler.rollout.tensor_parallel, context), asleep))
    return tuple(held)


def _awake(rollout: RolloutConfig, moments: frozenset[Moment]) -> frozenset[Moment]:
    if rollout.sleep_level == 0:
        return moments
    return frozenset(moment for moment in moments if moment.phase not in ASLEEP)


def _share_items(sampler: Sampler, share: CardShare, card_bytes: int) -> Iterator[Item]:
    rollout, shape = sampler.rollout, sampler.shape
    parallel = rollout.tensor_parallel
    yield _item(
        "vLLM weights",
        "device",
        min(share.weights, share.asked),
        f"{sampler.element} bytes x {shape.parameters:,} parameters / tensor parallel {parallel}",
    )
    rest = max(0, share.asked - share.weights)
    yield _item(
        "vLLM profile peak, graphs",
        "device",
        min(share.fixed, rest),
        f"{share.profile_peak:,} of a forward of the largest batch + {share.graphs:,} CUDA graphs "
        f"+ {share.token_counts:,} for counts of tokens + {share.adapter_room:,} for an adapter + "
        f"{share.other:,} besides torch",
    )
    yield _item(
        "KV cache",
        "device",
        max(0, rest - share.fixed),
        f"{rollout.memory_share:g} of the card's {card_bytes:,} bytes - weights - profile peak - "
        f"graphs; {sampler.kv_token:,} bytes a token",
    )


def _residue(parallel: int, context: int) -> Item:
    residue = _RESIDUE if parallel == 1 else _RESIDUE_PARALLEL
    return Item(
        role="rollout",
        name="sleep residue",
        where="device",
        level="process",
        bytes=max(0, residue - context),
        formula=f"{residue:,} bytes that a sleeping engine keeps at tensor parallel {parallel}, "
        "its CUDA context among them",
        source="users' measurements: 0.8 GiB at tensor parallel 1, 2.4 to 7.4 GiB at 2",
    )


def cpu_items(sampler: Sampler, moments: frozenset[Moment]) -> tuple[Held, ...]:
    """A vLLM worker on the host: linear layers are packed in place, but a tied head is packed
    beside the embedding."""
    rollout, shape = sampler.rollout, sampler.shape
    kv_cache = int(rollout.cpu_kv_cache_gib * GIB)
    weights = _item(
        "vLLM weights",
        "host",
        sampler.weights,
        f"{sampler.element} bytes x {shape.parameters:,} parameters / tensor parallel "
        f"{rollout.tensor_parallel}",
    )
    cache = _item("KV cache", "host", kv_cache, f"{rollout.cpu_kv_cache_gib:g} GiB asked for")
    peak = _item(
        "forward",
        "host",
        sampler.profile_peak,
        f"the largest batch: {rollout.max_sequences} sequences, or {_BATCHED_TOKENS} tokens",
    )
    held = [Held(weights, moments), Held(cache, moments)]
    if room := sampler.adapter_room:
        formula = f"{sampler.element} bytes x rank {sampler.adapter_rank} x inputs and outputs"
        held.append(Held(_item("room for an adapter", "host", room, formula), moments))
    held.append(Held(peak, frozenset(m for m in moments if m.phase in ("load", "rollout", "sync"))))
    if shape.tied:
        size = sampler.element * shape.embedding_parameters // rollout.tensor_parallel
        formula = f"{sampler.element} bytes x {shape.embedding_parameters:,} of the tied head"
        held.append(Held(_item("packed head", "host", size, formula), moments))
    return tuple(held)


def receiving_items(name: str, bucket: int, moments: frozenset[Moment]) -> tuple[Held, ...]:
    """A host copy of a bucket of new weights; bucket: its bytes."""
    item = Item(
        role="rollout",
        name=name,
        where="host",
        level="allocated",
        bytes=bucket,
        formula=f"{bucket:,} bytes of the largest bucket",
        source="rollout/vllm.py: receive; rollout/vllm_receiver.py",
    )
    return (Held(item, moments & {_SENDING}),)


def _item(name: str, where: Where, size: int, formula: str) -> Item:
    return Item(
        role="rollout",
        name=name,
        where=where,
        level="process" if where == "device" else "allocated",
        bytes=size,
        formula=formula,
        source="vLLM 0.32: gpu_worker.determine_available_memory",
    )
