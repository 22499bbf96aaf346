"""Problems of vLLM with a model on the hardware of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor

from plimsoll.config.problems import Problem, find
from plimsoll.machine.hardware import BFLOAT16_UNITS
from plimsoll.resolve.choices import needs_sampler
from plimsoll.run.numbers import gigabytes, plural
from plimsoll.sampler.price import EngineSite
from plimsoll.sampler.vllm.config import VllmConfig, vllm_of
from plimsoll.sampler.vllm.holdings import card_cache, cpu_cache
from plimsoll.sampler.vllm.rules import CPU_HEAD_SIZES, OTHER_ENGINE, against_cpu_heads
from plimsoll.sampler.vllm.sampler import (
    KEPT_ASLEEP,
    against_quantization,
    has_dropped_draft,
    quantized_bytes,
    unpriced,
    vllm_sampler,
)
from plimsoll.sampler.vllm.speculation import is_exact, proposer
from plimsoll.shapes.shape import ModelShape

_PADDING = 64
"""vLLM pads a vocabulary to a multiple of this many rows: DEFAULT_VOCAB_PADDING_SIZE,
vllm/model_executor/layers/vocab_parallel_embedding.py."""
_MOST_PARALLEL = 64
_FEW = 8
"""Sequences at once below which a card that decodes is mostly waiting for its memory."""


def against_parallel(shape: ModelShape, parallel: int) -> Iterator[str]:
    """Yield the parts of a model that vLLM cannot divide over `parallel` cards.

    Read in vLLM 0.32 (config/model.py, model_executor/models/qwen2.py, layers/linear.py,
    layers/vocab_parallel_embedding.py). If there are fewer key-value heads than cards, every card
    has a copy of one head.
    """
    kv = shape.kv_heads
    if shape.heads % parallel:
        yield f"{shape.heads} attention heads"
    if max(kv, parallel) % min(kv, parallel):
        yield f"{kv} key-value heads"
    widths = (shape.intermediate, shape.expert_intermediate, shape.shared_intermediate)
    yield from (f"an MLP of {width:,}" for width in dict.fromkeys(widths) if width % parallel)
    rows = -(-shape.vocabulary // _PADDING) * _PADDING
    if rows % parallel:
        yield f"a vocabulary of {rows:,} (padded)"


def division(site: EngineSite) -> Iterator[Problem]:
    """Refuse a model that an engine's cards, or its stages, cannot divide."""
    vllm, shape = _settings(site), site.sampler.shape
    parallel = vllm.tensor_parallel
    obstacles = list(against_parallel(shape, parallel))
    if obstacles:
        can = [n for n in range(1, _MOST_PARALLEL + 1) if not list(against_parallel(shape, n))]
        what = f"rollout.vllm.tensor_parallel: {parallel} does not divide {shape.name}"
        why = f"each card of an engine takes an equal part, and {parallel} does not go into "
        why += ", ".join(obstacles)
        fix = "rollout.vllm.tensor_parallel: 1"
        if len(can) > 1:
            fix = f"rollout.vllm.tensor_parallel: {', '.join(map(str, can[:-1]))} or {can[-1]}"
        yield Problem("tensor-parallel", "error", what, why, fix)
    if vllm.pipeline_parallel > shape.layers:
        what = f"rollout.vllm.pipeline_parallel: {vllm.pipeline_parallel}, and {shape.name} has "
        what += plural(shape.layers, "layer")
        why = "each stage of an engine has at least one of them"
        fix = f"rollout.vllm.pipeline_parallel: at most {shape.layers}"
        yield Problem("pipeline-parallel", "error", what, why, fix)


def one_node(site: EngineSite) -> Iterator[Problem]:
    """Refuse an engine over more cards than a node has."""
    vllm, most = _settings(site), len(site.hardware.node.cards)
    if site.device == "cuda" and vllm.parts > most:
        keys, given = "rollout.vllm.tensor_parallel", f"{vllm.tensor_parallel}"
        if vllm.pipeline_parallel > 1:
            keys += " x rollout.vllm.pipeline_parallel"
            given += f" x {vllm.pipeline_parallel}"
        what = f"{keys}: {given}, and a node has {plural(most, 'card')}"
        why = "the cards of an engine are of one node: its parts exchange activations in every "
        why += "layer"
        fix = f"{keys}: at most {most}, and more rollout.engines"
        yield Problem("tensor-parallel-node", "error", what, why, fix)


def adapter_alone(site: EngineSite) -> Iterator[Problem]:
    """Refuse an adapter beside a mixture of experts on the CPU."""
    shape, rank = site.sampler.shape, site.sampler.adapter_rank
    if rank is not None and shape.experts and site.device == "cpu":
        what = f"rollout.vllm.adapter: separate, and {shape.name} has experts"
        why = (
            "with room for an adapter, on whichever layers, vLLM 0.32 computes experts by Triton's "
        )
        why += "kernels alone (fused_moe/oracle/unquantized.py), which it has not on the CPU"
        yield Problem("adapter-separate", "error", what, why, "rollout.vllm.adapter: merged")


def engine_dtype(site: EngineSite) -> Iterator[Problem]:
    """Refuse bfloat16 on old cards."""
    capability = site.capability
    narrow = site.sampler.rollout.dtype == "bfloat16" and site.device == "cuda"
    if narrow and capability is not None and capability < BFLOAT16_UNITS:
        what = "rollout.dtype is bfloat16, and a card has compute capability "
        what += "{}.{}".format(*capability)
        why = "vLLM does not start: it has bfloat16 from 8.0 on (platforms/cuda.py)"
        fix = f"rollout.dtype: float32, {OTHER_ENGINE}, or cards from A100 on"
        yield Problem("bfloat16-card", "error", what, why, fix)


def unpriced_arguments(site: EngineSite) -> Iterator[Problem]:
    """Warn of `rollout.vllm.arguments` that change vLLM's memory and are not in the plan."""
    for name in unpriced(_settings(site)):
        what = f"rollout.vllm.arguments.{name} changes what vLLM holds, and is not in the plan"
        why = "the plan counts what vLLM would hold without it"
        fix = "leave room for it, and compare with the ledger (`plimsoll report`) after a few steps"
        yield Problem("vllm-not-in-plan", "warning", what, why, fix)


def quantization(site: EngineSite) -> Iterator[Problem]:
    """Refuse engines whose weights vLLM quantises, if it would not start."""
    obstacle = against_quantization(site.sampler.rollout, site.device, site.capability)
    if obstacle is not None:
        why, fix = obstacle
        what = f"rollout.vllm.arguments.quantization is {_settings(site).arguments['quantization']}"
        yield Problem("vllm-argument", "error", what, why, fix)


def uncorrected(site: EngineSite) -> Iterator[Problem]:
    """Warn of engines that sample from rounded weights while nothing corrects the difference."""
    algorithm = site.spec.config.algorithm
    rounds = quantized_bytes(_settings(site)) is not None
    if rounds and algorithm.correction is None and not needs_sampler(algorithm.policy_loss):
        what = "algorithm.correction is null, and rollout.vllm.arguments.quantization is "
        what += f"{_settings(site).arguments['quantization']}"
        why = "responses are sampled from rounded weights, and learned from as if they were the "
        why += "trainer's own: the gradient is of another policy (mismatch/abs shows by how much)"
        fix = "algorithm.correction.name: truncate"
        yield Problem("rounded-uncorrected", "warning", what, why, fix)


def speculation(site: EngineSite) -> Iterator[Problem]:
    """Refuse speculative decoding that is not exact, or whose draft model sleep level 2 drops."""
    vllm = _settings(site)
    method = proposer(vllm)
    if method is None:
        return
    if site.device == "cpu":
        what = f"rollout.vllm.arguments asks for speculative decoding ({method}), and the run is "
        what += "on the CPU"
        why = "there vLLM verifies proposed tokens at temperatures that it never sets "
        why += "(utils/cpu_triton_utils.py), so neither responses nor log-probs are the policy's"
        yield Problem("vllm-argument", "error", what, why, "leave it out of rollout.vllm.arguments")
    elif not is_exact(vllm):
        key, setting = "rollout.vllm.arguments.speculative_config", "rejection_sample_method"
        why = "it accepts proposed tokens at given rates, whatever the policy says of them: "
        why += "neither responses nor log-probs would be the policy's"
        what, fix = f"{setting} in {key} is synthetic", f"{setting}: standard, or block"
        yield Problem("vllm-argument", "error", what, why, fix)
    elif vllm.sleep_level == 2 and has_dropped_draft(vllm):
        what = f"rollout.vllm.sleep_level is 2, and a model proposes tokens ({method})"
        why = "its weights are dropped with the first sleep, and a sync brings only the policy's"
        fix = f'rollout.vllm.sleep_level: 1, or rollout.vllm.arguments.{KEPT_ASLEEP}: ["draft.*"]'
        yield Problem("vllm-argument", "error", what, why, fix)


def episodes_in_cache(site: EngineSite) -> Iterator[Problem]:
    """Warn if the KV cache has no room for the earlier turns of all episodes in flight."""
    sampler, sampling = site.sampler, site.spec.sampling
    if sampling is None or site.episodes is None:
        return
    engines = sampler.rollout.engines
    flying = ceil(min(site.episodes, sampling.sequences) / engines)
    engine = vllm_sampler(sampler)
    room = int(_kv_cache(site) // (engine.kv_token * sampler.longest / 2))
    if room >= flying:
        return
    what = f"the KV cache of an engine has room for {plural(room, 'episode')} at half their "
    what += f"longest ({sampler.longest:,} tokens), and {flying} are in flight on each"
    why = "episodes hold half of their longest on the average of their time; what is pushed out of "
    why += "the cache is computed again at the next turn, from the beginning of its episode"
    key = f"environments.{next(iter(sampling.environments))}.at_once"
    fix = f"{key}: {max(1, room * engines)}, a larger "
    fix += "rollout.vllm.cpu_kv_cache_gib" if site.device == "cpu" else "rollout.vllm.memory_share"
    fix += ", or shorter episodes (max_tokens)"
    yield Problem("environment-cache", "warning", what, why, fix)


def few_at_once(site: EngineSite) -> Iterator[Problem]:
    """Warn if the KV cache has room for only a few of a step's sequences at their full length."""
    sampler, sampling = site.sampler, site.spec.sampling
    if sampling is None:
        return
    engine, key = vllm_sampler(sampler), sampling.longest_key
    longest = site.spec.data.max_tokens + sampling.longest_responses[key]
    room = _kv_cache(site) // (engine.kv_token * longest)
    asked = ceil(sampling.sequences / sampler.rollout.engines)
    if not 1 <= room < min(_FEW, asked):  # with room for none, vLLM does not start
        return
    on_cpu = site.device == "cpu"
    what = f"the KV cache of an engine has room for {plural(room, 'sequence')} of "
    what += f"{longest:,} tokens, and a step asks each for {asked}"
    why = "the others wait, and decoding a few at a time takes nearly as long as decoding many"
    fix = f"a larger rollout.vllm.{'cpu_kv_cache_gib' if on_cpu else 'memory_share'}, or a shorter "
    fix += key
    yield Problem("few-at-once", "warning", what, why, fix)


def cpu_heads(site: EngineSite) -> Iterator[Problem]:
    """Refuse attention heads that vLLM has no kernel for on the CPU."""
    shape = site.sampler.shape
    if site.device == "cpu" and shape.head_dim not in CPU_HEAD_SIZES:
        what = f"{shape.name} has attention heads of {shape.head_dim}"
        fix = f"{OTHER_ENGINE}, or a model with other heads"
        yield Problem("vllm-head-size", "error", what, against_cpu_heads(), fix)


def free_share(
    site: EngineSite, cards: Sequence[int], free_bytes: Sequence[int]
) -> Iterator[Problem]:
    """Refuse engines if the memory that vLLM takes at its start, before ranks load, is not free.

    Args:
        site: the engines and their hardware.
        cards: the numbers of the cards of this machine, the run's first node, that engines use.
        free_bytes: bytes that are free on each card of this machine.
    """
    share = _settings(site).memory_share
    for number in cards:
        if number >= len(free_bytes):
            continue
        card, free = site.hardware.node.cards[number], free_bytes[number]
        if share * card.usable_bytes > free:
            what = f"card {number} ({card.name}) has {gigabytes(free)} GB free, and vLLM asks "
            what += f"for {gigabytes(int(share * card.usable_bytes))} GB "
            what += f"(rollout.vllm.memory_share {share:g} of {gigabytes(card.usable_bytes)} GB)"
            why = "its share is one of the whole card and must be free when it starts; other "
            why += "processes hold the rest"
            fix = "end them (`plimsoll doctor` names them), leave the card out by "
            fix += "CUDA_VISIBLE_DEVICES, or rollout.vllm.memory_share: "
            fix += f"{floor(100 * free / card.usable_bytes) / 100:.2f}"
            yield Problem("vllm-share-not-free", "error", what, why, fix)


def _settings(site: EngineSite) -> VllmConfig:
    return vllm_of(site.sampler.rollout)


def _kv_cache(site: EngineSite) -> int:
    """Return the bytes of an engine's KV cache, on each of its cards or on the CPU."""
    cards = site.hardware.node.cards if site.device == "cuda" else ()
    engine = vllm_sampler(site.sampler)
    return card_cache(engine, cards[0].usable_bytes) if cards else cpu_cache(engine)


_RULES = (
    *(division, one_node, adapter_alone, engine_dtype, cpu_heads, episodes_in_cache, few_at_once),
    *(unpriced_arguments, quantization, uncorrected, speculation),
)


def plan_problems(site: EngineSite) -> Iterator[Problem]:
    """Yield the problems of vLLM with this model on this hardware."""
    return find(_RULES, site)
