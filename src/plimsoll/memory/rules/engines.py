"""Rules about the vLLM engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor

from plimsoll.config.problems import Problem
from plimsoll.environment.price import episodes_at_once
from plimsoll.machine.hardware import BFLOAT16_UNITS
from plimsoll.memory.contents.contents import Job
from plimsoll.memory.contents.stores import Store
from plimsoll.rollout.price import (
    KEPT_ASLEEP,
    against_quantization,
    has_dropped_draft,
    unpriced,
)
from plimsoll.rollout.speculation import proposer
from plimsoll.rollout.vllm_levers import against_parallel
from plimsoll.run.counting import counted, gigabytes
from plimsoll.spec.model_files import CPU_HEAD_SIZES, against_cpu_heads

_MOST_PARALLEL = 64


def divided(job: Job) -> Iterator[Problem]:
    """The actor's model over the cards of an engine, and its layers over the stages."""
    if job.spec.vllm is None:
        return
    parallel, shape = job.spec.vllm.tensor_parallel, job.policy
    obstacles = list(against_parallel(shape, parallel))
    if obstacles:
        can = [n for n in range(1, _MOST_PARALLEL + 1) if not list(against_parallel(shape, n))]
        what = f"rollout.tensor_parallel: {parallel} does not divide {shape.name}"
        why = f"each card of an engine takes an equal part, and {parallel} does not go into "
        why += ", ".join(obstacles)
        fix = "rollout.tensor_parallel: 1"
        if len(can) > 1:
            fix = f"rollout.tensor_parallel: {', '.join(map(str, can[:-1]))} or {can[-1]}"
        yield Problem("tensor-parallel", "error", what, why, fix)
    if job.spec.vllm.pipeline_parallel > shape.layers:
        what = (
            f"rollout.pipeline_parallel: {job.spec.vllm.pipeline_parallel}, and {shape.name} has "
        )
        what += counted(shape.layers, "layer")
        why = "each stage of an engine has at least one of them"
        fix = f"rollout.pipeline_parallel: at most {shape.layers}"
        yield Problem("pipeline-parallel", "error", what, why, fix)


def one_node(job: Job) -> Iterator[Problem]:
    """An engine's cards."""
    vllm, most = job.spec.vllm, job.hardware.cards_of_node
    if vllm is not None and job.device == "cuda" and vllm.parts > most:
        keys, given = "rollout.tensor_parallel", f"{vllm.tensor_parallel}"
        if vllm.pipeline_parallel > 1:
            keys += " x rollout.pipeline_parallel"
            given += f" x {vllm.pipeline_parallel}"
        what = f"{keys}: {given}, and a node has {counted(most, 'card')}"
        why = "the cards of an engine are of one node: its parts exchange activations in every "
        why += "layer"
        fix = f"{keys}: at most {most}, and more rollout.engines"
        yield Problem("tensor-parallel-node", "error", what, why, fix)


def engine_dtype(job: Job) -> Iterator[Problem]:
    """bfloat16 on old cards."""
    vllm, capability = job.spec.vllm, job.capability
    narrow = vllm is not None and vllm.dtype == "bfloat16" and job.device == "cuda"
    if narrow and capability is not None and capability < BFLOAT16_UNITS:
        what = "rollout.dtype is bfloat16, and a card has compute capability "
        what += "{}.{}".format(*capability)
        why = "vLLM does not start: it has bfloat16 from 8.0 on (platforms/cuda.py)"
        fix = "rollout.dtype: float32, rollout.engine: transformers, or cards from A100 on"
        yield Problem("bfloat16-card", "error", what, why, fix)


def not_counted(job: Job) -> Iterator[Problem]:
    """What `rollout.vllm` asks for that the plan has no price of."""
    for name in unpriced(job.spec.vllm) if job.spec.vllm else ():
        what = f"rollout.vllm.{name} changes what vLLM holds, and is not in the plan"
        why = "the plan counts what vLLM would hold without it"
        fix = "leave room for it, and compare with the ledger (`plimsoll report`) after a few steps"
        yield Problem("vllm-not-in-plan", "warning", what, why, fix)


def quantised(job: Job) -> Iterator[Problem]:
    """Engines whose weights vLLM quantises, where it would not start."""
    vllm = job.spec.vllm
    found = None if vllm is None else against_quantization(vllm, job.device, job.capability)
    if vllm is not None and found is not None:
        why, fix = found
        what = f"rollout.vllm.quantization is {vllm.vllm['quantization']}"
        yield Problem("vllm-argument", "error", what, why, fix)


def speculation(job: Job) -> Iterator[Problem]:
    """Speculative decoding, where vLLM 0.32 would not sample what it should."""
    vllm = job.spec.vllm
    method = None if vllm is None else proposer(vllm)
    if vllm is None or method is None:
        return
    if job.device == "cpu":
        what = f"rollout.vllm asks for speculative decoding ({method}), and the run is on the CPU"
        why = "there vLLM verifies proposed tokens at temperatures that it never sets "
        why += "(utils/cpu_triton_utils.py), so neither responses nor log-probs are the policy's"
        yield Problem("vllm-argument", "error", what, why, "leave it out of rollout.vllm")
    elif vllm.sleep_level == 2 and has_dropped_draft(vllm):
        what = f"rollout.sleep_level is 2, and a model proposes tokens ({method})"
        why = "its weights are dropped with the first sleep, and a sync brings only the policy's"
        fix = f'rollout.sleep_level: 1, or rollout.vllm.{KEPT_ASLEEP}: ["draft.*"]'
        yield Problem("vllm-argument", "error", what, why, fix)


def episodes_in_cache(job: Job) -> Iterator[Problem]:
    """Episodes in flight whose earlier turns the KV cache has no room for."""
    sampler, sampling = job.sampler, job.spec.sampling
    if job.spec.vllm is None or sampler is None or sampling is None or not sampling.environments:
        return
    at_once = episodes_at_once(sampling.environments, sampler.rollout, job.hardware.nodes[0].cores)
    engines = sampler.rollout.engines
    flying = ceil(min(at_once, sampling.sequences) / engines)
    room = int(job.kv_cache // (sampler.kv_token * sampler.longest / 2))
    if room >= flying:
        return
    what = f"the KV cache of an engine has room for {counted(room, 'episode')} at half their "
    what += f"longest ({sampler.longest:,} tokens), and {flying} are in flight on each"
    why = "episodes hold half of their longest on the average of their time; what is pushed out of "
    why += "the cache is computed again at the next turn, from the beginning of its episode"
    key = f"environments.{next(iter(sampling.environments))}.at_once"
    fix = f"{key}: {max(1, room * engines)}, a larger "
    fix += "rollout.cpu_kv_cache_gib" if job.device == "cpu" else "rollout.memory_share"
    fix += ", or shorter episodes (max_tokens)"
    yield Problem("environment-cache", "warning", what, why, fix)


def cpu_heads(job: Job) -> Iterator[Problem]:
    """Attention heads of an engine on the CPU."""
    shape = job.policy
    on_cpu = job.spec.vllm is not None and job.device == "cpu"
    if on_cpu and shape.head_dim not in CPU_HEAD_SIZES:
        what = f"{shape.name} has attention heads of {shape.head_dim}"
        fix = "rollout.engine: transformers, or a model with other heads"
        yield Problem("vllm-head-size", "error", what, against_cpu_heads(), fix)


def free_share(job: Job, free_bytes: Sequence[int]) -> Iterator[Problem]:
    """Where other processes hold what vLLM asks for at its start, before the ranks load.

    free_bytes: of the cards of this machine, which is the run's first node.
    """
    if job.sampler is None:
        return
    share = job.sampler.rollout.memory_share
    slots = [p.slot for p in job.layout.processes if p.kind == "engine worker"]
    for slot in sorted({slot for slot in slots if slot.node == 0}):
        if slot.card is None or slot.card >= len(free_bytes):
            continue
        card, free = job.hardware.nodes[0].cards[slot.card], free_bytes[slot.card]
        if share * card.usable_bytes > free:
            what = f"card {slot.card} ({card.name}) has {gigabytes(free)} GB free, and vLLM asks "
            what += f"for {gigabytes(int(share * card.usable_bytes))} GB "
            what += f"(rollout.memory_share {share:g} of {gigabytes(card.usable_bytes)} GB)"
            why = "its share is one of the whole card and must be free when it starts; other "
            why += "processes hold the rest"
            fix = "end them (`plimsoll doctor` names them), leave the card out by "
            fix += "CUDA_VISIBLE_DEVICES, or rollout.memory_share: "
            fix += f"{floor(100 * free / card.usable_bytes) / 100:.2f}"
            yield Problem("vllm-share-not-free", "error", what, why, fix)


def beside_training(job: Job, store: Store) -> Problem | None:
    """Return the error of an overfull card on which vLLM's share and the ranks are too much
    together; None if it is another."""
    sampler = job.sampler
    if sampler is None or store.where != "device" or store.capacity is None:
        return None
    rollout = sampler.rollout
    ranks = store.without_engines
    shares = rollout.engine == "vllm" and rollout.placement == "shared" and bool(ranks.held)
    if not shares or ranks.peak.bytes > store.capacity:
        return None
    peak = store.peak
    beside = sum(item.bytes for item in peak.items if item.role != "rollout")
    return Problem(
        "vllm-share-beside-training",
        "error",
        f"{store.name} would hold {gigabytes(peak.bytes)} GB in {peak.moment}, "
        f"{gigabytes(peak.bytes - store.capacity)} GB more than it has: "
        f"{gigabytes(beside)} GB of the ranks beside vLLM's "
        f"{gigabytes(peak.bytes - beside)} GB (rollout.memory_share {rollout.memory_share:g})",
        "it breaks on the rollout engines: without them the rest fits. vLLM takes its share of the "
        "whole card, whatever the ranks hold there",
    )
