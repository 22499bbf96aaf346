"""How long an engine samples, wakes and is given new weights; parts of a step's time (speed.py)."""

from __future__ import annotations

from math import ceil

from plimsoll.memory.advise.rates import Rates
from plimsoll.rollout.price import Sampler


def sampling_seconds(sampler: Sampler, at_once: int, sequences: int, rates: Rates) -> float:
    """An engine's responses. Each token of `at_once` sequences reads all weights and their KV
    cache (Pope et al. 2022, section 2); prompts are a forward. The parts of a divided engine add
    their results up twice in each layer (Shoeybi et al. 2019, section 3)."""
    waves = ceil(sequences / at_once)
    new = sampler.rollout.sampling.max_new_tokens
    cache = at_once * sampler.kv_token * (sampler.longest - new / 2)
    decode = waves * new * (sampler.weights + cache) / rates.memory
    prompts = sequences * (sampler.longest - new)
    parallel = sampler.rollout.tensor_parallel
    summed = 2 * sampler.shape.layers * sampler.shape.hidden * sampler.element
    crossing = 2 * (parallel - 1) / parallel * summed / rates.link  # of a token
    decode += sequences * sampler.longest * crossing
    return decode + 2 * sampler.shape.active_parameters * prompts / parallel / rates.flops


def sequences_at_once(sampler: Sampler, cache: float, sequences: int) -> int:
    """That an engine's KV cache (bytes of a card) has room for; with less than one sequence's vLLM
    does not start, and is taken to have as much as it needs: what is compared with a config that
    does not fit is compared with it as it would be with room."""
    room = int(cache // (sampler.kv_token * sampler.longest))
    wanted = min(sampler.rollout.max_sequences, sequences)
    return min(wanted, room) if room >= 1 else wanted


def waking_seconds(sampler: Sampler, rates: Rates) -> float:
    """At sleep level 1 weights go to the host and come back; at level 2 the sync brings them."""
    return (2 * sampler.weights if sampler.rollout.sleep_level == 1 else 0) / rates.pcie


def sync_seconds(sent: float, rates: Rates) -> float:
    """New weights leave one rank's card, pass through host memory, and reach each engine's card
    (rollout/vllm.py); sent: bytes."""
    return sent * (2 / rates.pcie + 2 / rates.host)
