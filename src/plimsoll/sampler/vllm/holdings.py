"""The memory of engines on vLLM: on cards and on CPU, awake, asleep and in a weight sync.

Read in vLLM 0.32 (v1/worker/gpu_worker.py, v1/worker/utils.py, utils/mem_utils.py): a worker first
makes its CUDA context and communicators. Then it asks for `gpu_memory_utilization` of the card's
*total* memory, which must be free at that moment. The KV cache gets what is left of this share
after the weights, the peak of a profiled forward and the CUDA graphs. So a worker takes its full
share with any model; only the size of the KV cache says how well the share is used.

Asleep at level 1, its weights are in pinned host memory: vLLM copies each segment of its allocator
by itself (device_allocator/cumem.py, `sleep`), and PyTorch makes every pinned block a power of two.
A segment (c10/core/AllocatorConfig.h) is one tensor from 10 MiB on, in full steps of 2 MiB; smaller
tensors share segments of 20 MiB, and tensors up to 1 MiB share segments of 2 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from plimsoll.config.cluster import Device
from plimsoll.model.price.layer import GATES, QUERIES, UPS
from plimsoll.resolve.run_spec import Phase
from plimsoll.run.numbers import plural
from plimsoll.sampler.price import samples_in
from plimsoll.sampler.vllm.sampler import VllmSampler, quantized_bytes
from plimsoll.shapes.shape import Linear, ModelShape, parameter_tensors
from plimsoll.timeline.items import (
    Allocation,
    Item,
    Level,
    Moment,
    Where,
    is_for_ranks,
    pinned_block,
)

GIB = 2**30

ASLEEP: tuple[Phase, ...] = ("score", "train_critic", "train_actor")
"""The phases through which engines with a sleep level sleep; their KV cache comes back only when
the new weights are all there, and then a forward of the actor proves them beside it."""

_SENDING = Moment("sync", "gather")
_BLOCK = 256
"""Tokens of the largest blocks that vLLM counts a KV cache in (vllm/platforms/cpu.py)."""
_OTHER = int(0.3 * GIB)
_GRAPHS = int(0.8 * GIB)
_RESIDUE, _RESIDUE_PARALLEL = int(0.8 * GIB), int(4.9 * GIB)
_MIB = 2**20
_STEP, _SHARED = 2 * _MIB, 20 * _MIB
_FEWEST_WORDS = "; as many tokens as in the stage that has room for the fewest"
_SOURCE = "vLLM 0.32: gpu_worker.determine_available_memory"


@dataclass(frozen=True)
class CardShare:
    """How a vLLM worker divides the memory that it asks for; bytes.

    Attributes:
        requested: the full share.
        weights: the weights.
        fixed: all that is neither weights nor KV cache.
    """

    requested: int
    weights: int
    fixed: int

    @property
    def kv_cache(self) -> int:
        """The bytes that are left for the KV cache; below 0 vLLM does not start."""
        return self.requested - self.weights - self.fixed


def card_share(sampler: VllmSampler, card_bytes: int) -> CardShare:
    """Return how the worker on a stage's card divides its share.

    Args:
        sampler: the stage.
        card_bytes: the card's total memory, as CUDA reports it.
    """
    fixed = sampler.profile_peak + sampler.token_counts + sampler.adapter_room
    fixed += sampler.draft_logits + sampler.handed_over + _OTHER + _graphs(sampler)
    return CardShare(int(card_bytes * sampler.vllm.memory_share), sampler.weights, fixed)


def _graphs(sampler: VllmSampler) -> int:
    """Return the bytes of the CUDA graphs; 0 with vLLM's `enforce_eager`."""
    return 0 if sampler.vllm.arguments.get("enforce_eager") is True else _GRAPHS


def card_cache(sampler: VllmSampler, card_bytes: int) -> int:
    """Return the bytes of the KV cache on a stage's card; below 0: vLLM does not start."""
    return _fewest_blocks(sampler, lambda stage: card_share(stage, card_bytes).kv_cache)


def cpu_cache(sampler: VllmSampler) -> int:
    """Return the bytes of the KV cache of a stage on CPU."""
    return _fewest_blocks(sampler, lambda _: int(sampler.vllm.cpu_kv_cache_gib * GIB))


def _fewest_blocks(sampler: VllmSampler, room: Callable[[VllmSampler], int]) -> int:
    """Return the bytes of a stage's KV cache; all stages have the same number of blocks.

    The number is that of the stage with room for the fewest. Source: v1/core/kv_cache_utils.py,
    `get_kv_cache_configs`.

    Args:
        sampler: the stage whose blocks are counted.
        room: returns the bytes that a stage has for its KV cache.
    """
    token_bytes, stages = sampler.kv_token, sampler.stages
    return min(room(stage) * token_bytes // stage.kv_token for stage in stages if stage.kv_token)


def least_share(sampler: VllmSampler, card_bytes: int) -> float:
    """Return the least share of a card with which vLLM starts, in hundredths rounded up.

    With it every stage has room for the KV cache of one sequence at its longest.
    """
    stage = tightest_stage(sampler, card_bytes)
    share = card_share(stage, card_bytes)
    needed = share.weights + share.fixed + stage.kv_token * stage.longest
    return ceil(100 * needed / card_bytes) / 100


def tightest_stage(sampler: VllmSampler, card_bytes: int) -> VllmSampler:
    """Return the stage whose card has the least left beside the KV cache of one sequence."""

    def left(stage: VllmSampler) -> int:
        return card_share(stage, card_bytes).kv_cache - stage.kv_token * stage.longest

    return min(sampler.stages, key=left)


def least_cpu_cache(sampler: VllmSampler) -> float:
    """Return the least KV cache on CPU with which vLLM starts: GiB, in hundredths rounded up."""
    token = max(stage.kv_token for stage in sampler.stages)
    return ceil(100 * token * (sampler.longest + _BLOCK) / GIB) / 100


def card_items(
    sampler: VllmSampler, card_bytes: int, context: int, moments: frozenset[Moment]
) -> tuple[Allocation, ...]:
    """Return the memory of a vLLM worker on a card: items, and the moments of each.

    Args:
        sampler: the stage.
        card_bytes: the card's total memory.
        context: bytes of the worker's CUDA context, which is counted elsewhere and is part of what
            a sleeping engine leaves.
        moments: all moments of the job.
    """
    asleep = frozenset(m for m in moments if _is_asleep(sampler, m))
    awake = moments - asleep
    with_cache = awake - {_SENDING} if asleep else awake
    *others, cache = _share_items(sampler, card_share(sampler, card_bytes), card_bytes)
    held = [*(Allocation(item, awake) for item in others), Allocation(cache, with_cache)]
    if sampler.verifying:  # vLLM holds the logits of proposed tokens in addition to its share
        sequences, tokens = sampler.vllm.max_sequences, sampler.speculation.tokens
        words = f"logits of {sequences} sequences x (1 + {tokens}) tokens, at most "
        words += f"{sampler.batched_tokens:,}, in {sampler.element} bytes and up to a GiB in fp32 "
        words += f"- the profile peak of {sampler.profile_peak:,}"
        source = "vLLM 0.32: v1/worker/gpu/spec_decode/rejection_sampler.py"
        name = "vLLM logits of proposed tokens"
        logits = _item(name, "device", sampler.verifying, words, source)
        held.append(Allocation(logits, frozenset(m for m in with_cache if m.phase != "load")))
    if asleep:
        cards = sampler.vllm.parts
        residue = _RESIDUE if cards == 1 else _RESIDUE_PARALLEL
        words = f"{residue:,} bytes that a sleeping engine of {plural(cards, 'card')} keeps on "
        words += "each, its CUDA context among them"
        source = "users' measurements: 0.8 GiB at tensor parallel 1, 2.4 to 7.4 GiB at 2"
        left = _item("sleep residue", "device", max(0, residue - context), words, source)
        held.append(Allocation(left, asleep))
    return tuple(held)


def _is_asleep(sampler: VllmSampler, moment: Moment) -> bool:
    """Return whether an engine sleeps: while ranks work, and longer if they sleep in their turn."""
    for_ranks = sampler.ranks_sleep and is_for_ranks(moment)
    return sampler.vllm.sleeps and (moment.phase in ASLEEP or for_ranks)


def _share_items(sampler: VllmSampler, share: CardShare, card_bytes: int) -> Iterator[Item]:
    weights, rest = min(share.weights, share.requested), max(0, share.requested - share.weights)
    counts, room = sampler.token_counts, sampler.adapter_room
    words = f"{sampler.profile_peak:,} of a forward of the largest batch + {_graphs(sampler):,} "
    words += f"CUDA graphs + {counts:,} for counts of tokens + {room:,} for an adapter + "
    words += f"{_OTHER:,} besides torch"
    if kept := sampler.draft_logits:
        words += f" + {kept:,} of a draft's logits"
    words += f" + {sampler.handed_over:,} for what the stage before gives" * _has_stages(sampler)
    yield _item("vLLM weights", "device", weights, _weights_words(sampler))
    yield _item("vLLM profile peak, graphs", "device", min(share.fixed, rest), words)
    words = f"{sampler.vllm.memory_share:g} of the card's {card_bytes:,} bytes - weights - profile "
    words += f"peak - graphs; {sampler.kv_token:,} bytes a token"
    words += _FEWEST_WORDS * _has_stages(sampler)
    yield _cache("device", max(0, card_cache(sampler, card_bytes)), words)


def _has_stages(sampler: VllmSampler) -> bool:
    return sampler.vllm.pipeline_parallel > 1


def _weights_words(sampler: VllmSampler) -> str:
    parameters = " + ".join(f"{shape.parameters:,}" for shape in sampler.models)
    parallel = sampler.vllm.tensor_parallel
    words = f"{sampler.element} bytes x {parameters} parameters / tensor parallel {parallel}"
    if (narrow := quantized_bytes(sampler.vllm)) is not None:
        words += f", linear layers in {narrow:g} bytes a weight"
    return words + f", in a stage of {sampler.stage_shape.layers} layers" * _has_stages(sampler)


def cpu_items(sampler: VllmSampler, moments: frozenset[Moment]) -> Iterator[Allocation]:
    """Yield the memory of a vLLM worker on the host: items, and the moments of each.

    Linear layers are packed in place, but a tied head is packed beside the embedding.
    """
    vllm, shape, element = sampler.vllm, sampler.shape, sampler.element

    def held(name: str, size: int, words: str) -> Allocation:
        return Allocation(_item(name, "host", size, words), moments)

    gib = vllm.cpu_kv_cache_gib
    yield held("vLLM weights", sampler.weights, _weights_words(sampler))
    words = f"{gib:g} GiB asked for" + _FEWEST_WORDS * _has_stages(sampler)
    yield Allocation(_cache("host", cpu_cache(sampler), words), moments)
    if room := sampler.adapter_room:
        words = f"{element} bytes x rank {sampler.adapter_rank} x inputs and outputs"
        yield held("room for an adapter", room, words)
    words = f"the logits of {vllm.max_sequences} sequences, or the MLP of the largest batch"
    computing = frozenset(
        m for m in moments if m.phase in ("load", "sync") or samples_in(sampler.rollout, m.phase)
    )
    yield replace(held("forward", sampler.profile_peak, words), moments=computing)
    if handed := sampler.handed_over:
        yield held("from the stage before", handed, "hidden states and residuals of that batch")
    if shape.tied and sampler.samples:
        size = element * shape.embedding_parameters // vllm.tensor_parallel
        words = f"{element} bytes x {shape.embedding_parameters:,} of the tied head"
        yield held("packed head", size, words)


def reload_items(
    sampler: VllmSampler, where: Where, free: int, moments: frozenset[Moment]
) -> Iterator[Allocation]:
    """Yield what a worker keeps of new weights beyond a bucket: the experts of one layer.

    vLLM handles the experts of a layer as one layer. Each worker holds their undivided tensors
    until the last has come, and then makes its part of them. `free` are the bytes of the largest
    forward's room that are free meanwhile; other layers are smaller than this room.
    """
    shape, parallel = sampler.shape, sampler.vllm.tensor_parallel
    if not shape.experts:
        return
    experts = [linear for linear in shape.linears if linear.stacked > 1]
    layer = sampler.element * sum(
        linear.parameters * shape.experts // linear.count for linear in experts
    )
    part = -(-layer // parallel)
    words = f"{layer:,} bytes of a layer's experts + / tensor parallel {parallel} - {free:,} there"
    source = "vLLM 0.32: model_loader/reload/layerwise.py"
    item = _item("experts until whole", where, max(0, layer + part - free), words, source)
    yield Allocation(item, moments & {_SENDING})


def routing_items(
    sampler: VllmSampler, device: Device, card_bytes: int, moments: frozenset[Moment]
) -> Iterator[Allocation]:
    """Yield the experts of tokens that a worker keeps, to return them with a response.

    vLLM writes those of a batch to a buffer on the card, and keeps those of all cached tokens on
    the host. On the CPU a worker keeps those of the sequences that run (sampler/vllm/routing.py).
    """
    shape = sampler.shape
    if sampler.rollout.routing == "live":
        return
    if device == "cpu":
        each, tokens = 2 * shape.layers * shape.experts_per_token, sampler.longest
        tokens, source = tokens * sampler.vllm.max_sequences, "sampler/vllm/routing.py"
    else:
        source = "vLLM 0.32: fused_moe/routed_experts_capturer.py, aux_output_connector/worker.py"
        each, tokens = 4 * shape.layers * shape.experts_per_token, sampler.batched_tokens
        words = f"{each:,} bytes x {tokens:,} tokens of the largest batch"
        yield Allocation(_item("experts taken", "device", each * tokens, words, source), moments)
        each, tokens = shape.routing_bytes, card_cache(sampler, card_bytes) // sampler.kv_token
    words = f"{each:,} bytes x {tokens:,} tokens"
    kept = _item("experts of cached tokens", "host", max(0, each * tokens), words, source)
    yield Allocation(kept, moments)


def sleep_items(sampler: VllmSampler, moments: frozenset[Moment]) -> Iterator[Allocation]:
    """Yield the host copy of a worker's weights at sleep level 1.

    Its pinned blocks go back to torch's cache when the engine wakes, not to the system, so they
    stay.
    """
    if sampler.vllm.sleep_level == 1:
        words = f"{sampler.weights:,} bytes of weights ({_weights_words(sampler)}), each pinned "
        words += "block a power of two"
        source = "vLLM 0.32: device_allocator/cumem.py; ATen/core/CachingHostAllocator.h"
        name = "weights of a sleeping engine"
        item = _item(name, "host", pinned_copy(sampler), words, source)
        slept = (m for m in moments if m.phase != "load" or _is_asleep(sampler, m))
        yield Allocation(item, frozenset(slept))


def _item(name: str, where: Where, size: int, formula: str, source: str = _SOURCE) -> Item:
    level: Level = "process" if where == "device" else "allocated"
    return Item("rollout", "rollout engines", name, where, level, size, formula, source)


def _cache(where: Where, size: int, formula: str) -> Item:
    return replace(_item("KV cache", where, size, formula), cache=True)


def pinned_copy(sampler: VllmSampler) -> int:
    """Return the bytes of all pinned blocks that hold a sleeping worker's weights."""
    model, *drafts = sampler.models
    narrow = quantized_bytes(sampler.vllm) or sampler.element
    tensors = list(_tensors(model, sampler, narrow))
    tensors += [tensor for draft in drafts for tensor in _tensors(draft, sampler, sampler.element)]
    small = sum(size * number for size, number in tensors if size <= _MIB)
    return _whole(small, _STEP) + sum(_blocks(*tensor) for tensor in tensors if tensor[0] > _MIB)


def _tensors(shape: ModelShape, sampler: VllmSampler, narrow: float) -> Iterator[tuple[int, int]]:
    """Yield (bytes, number) of a model's tensors on each card.

    Args:
        shape: the model.
        sampler: the stage that holds it.
        narrow: bytes of a linear layer's weight.
    """
    parallel = sampler.vllm.tensor_parallel
    merged = replace(shape, linears=tuple(_merge(shape.linears)), other_tensors=())
    matrices = {tensor.inputs * tensor.outputs * tensor.stacked for tensor in merged.linears}
    for tensor in parameter_tensors(merged):
        if tensor.elements:  # 0 in a stage without a table
            element = narrow if tensor.elements in matrices else sampler.element
            size = int(element * -(-tensor.elements // parallel))
            yield size, tensor.parameters // tensor.elements
    for tensor in shape.other_tensors:
        yield tensor.elements * sampler.element, tensor.parameters // tensor.elements


def _blocks(size: int, number: int) -> int:
    """Return the bytes of the pinned blocks for `number` tensors of `size` bytes, over 1 MiB."""
    if size < _SHARED // 2:
        return -(-number // (_SHARED // size)) * pinned_block(_SHARED)
    return number * pinned_block(_whole(size, _STEP))


def _whole(size: int, step: int) -> int:
    return -(-size // step) * step


def _merge(linears: Sequence[Linear]) -> Iterator[Linear]:
    """Yield linear layers, merged as vLLM merges them: queries, keys and values; gate and up."""
    parts: dict[tuple[object, ...], Linear] = {}
    for place, linear in enumerate(linears):
        together = linear.stacked == 1 and linear.name in (*QUERIES, *GATES, *UPS)
        reads = linear.name in QUERIES, linear.inputs, linear.count
        key = reads if together else (place,)
        outputs = linear.outputs + (parts[key].outputs if key in parts else 0)
        parts[key] = replace(linear, outputs=outputs)
    yield from parts.values()
