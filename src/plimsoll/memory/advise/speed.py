"""How long a step takes, to rank configs by: good for which is faster, not for how fast.

Every term is an amount of work over a rate, and the terms are added: nothing is overlapped, and
sequences are taken at their longest. So only ratios between configs of the same job say anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.model import ModelConfig
from plimsoll.engine.zero.config import FrozenZeroConfig, ZeroConfig
from plimsoll.machine.hardware import Node, known_card
from plimsoll.memory.contents.contents import Job
from plimsoll.model.price.parameters import adapter_parameters
from plimsoll.rollout.price import Sampler, rollout_price
from plimsoll.rollout.vllm.config import vllm_of
from plimsoll.rollout.vllm.sampler import vllm_sampler
from plimsoll.shapes.shape import ModelShape
from plimsoll.spec.roles import RoleName

UTILISATION = 0.4
"""Of a card's peak: 38 to 44 % were reached at 7B to 65B (PaLM, Chowdhery et al. 2022, table 3;
Llama, Touvron et al. 2023, section 2.4)."""
PCIE = 25e9
"""Bytes a second and card, one direction: what copies reach of PCIe 4.0 x16's 32 GB/s."""
HOST_MEMORY = 200e9
"""Bytes a second of a node: half of the peak of 16 channels of DDR4-3200 (two sockets)."""
NETWORK = 50e9
"""Bytes a second between nodes, of each: 400 Gb/s, as AWS gives p4d machines."""
CPU_FLOPS, CPU_MEMORY = 1e12, 50e9
"""Of a rank without a card: bf16 products on two cores with AMX, and two channels of memory."""


@dataclass(frozen=True)
class Rates:
    """What one rank can do in a second.

    flops: of matrix products, as they are reached. memory: bytes of the card's. link: bytes to the
    other ranks of its group. pcie: bytes to the host. host: bytes of its part of host memory.
    """

    flops: float
    memory: float
    link: float
    pcie: float
    host: float


def rates_of(node: Node, ranks: int, nodes: int) -> Rates:
    """ranks: of a group. nodes: that it is spread over."""
    sharing = max(1, ranks // nodes)
    host = HOST_MEMORY / sharing
    if not node.cards:
        return Rates(CPU_FLOPS, CPU_MEMORY / sharing, CPU_MEMORY / sharing, host, host)
    card = node.cards[0]
    link = card.link_bandwidth if nodes == 1 else min(card.link_bandwidth, NETWORK)
    return Rates(UTILISATION * card.bf16_flops, card.memory_bandwidth, link, PCIE, host)


_ADAM_BYTES = 30.0
"""Of memory that a parameter's step touches: fp32 master, gradient and two moments read (16),
master and moments written (12), the 16-bit weight written (2)."""
_NF4 = 0.52
_ATTENTION = 2
"""FLOPs of a token, a position before it on average half of them seen, a layer and a dimension:
2 products of 2 FLOPs (FlashAttention-2, Dao 2023, section 4.1, causal)."""


@dataclass(frozen=True)
class Pass:
    """A role's work in a step, on one rank. tokens: in all. micro_batches: the forwards that they
    come in. updates: optimizer steps. element: bytes of a weight that is not in 4 bits."""

    shape: ModelShape
    tokens: float
    longest: int
    micro_batches: int
    updates: int
    ranks: int
    element: int


def forward_seconds(work: Pass, rates: Rates) -> float:
    """2 FLOPs a parameter and token (Kaplan et al. 2020, section 2.1), and attention's."""
    width = work.shape.heads * work.shape.head_dim  # of all heads together
    attention = _ATTENTION * work.shape.layers * work.longest * width
    return work.tokens * (2 * work.shape.active_parameters + attention) / rates.flops


def passes(role: TrainedRole) -> float:
    """What training costs in forwards: one forward; a backward of one for the inputs' gradients and
    one for the weights', which a frozen base has not; one more with checkpointing."""
    backward = 2.0 if role.adapter is None else 1.0
    return 1.0 + backward + recomputed(role.model)


def inputs_offload_seconds(role: TrainedRole, work: Pass, rates: Rates) -> float:
    """The inputs of checkpointed layers cross PCIe to the host and back."""
    if role.model.activation_offload == "none":
        return 0.0
    layers = ceil(work.shape.layers / role.model.checkpoint_every)
    return 2 * work.element * work.tokens * work.shape.hidden * layers / rates.pcie


def dequantise_seconds(work: Pass, visits: float, rates: Rates) -> float:
    """4-bit weights are read, and written and read again in 16 bits, at each visit of a layer
    (QLoRA, Dettmers et al. 2023, section 3)."""
    moved = (_NF4 + 2 * work.element) * work.shape.linear_parameters
    return work.micro_batches * visits * moved / rates.memory


def exchange_seconds(role: TrainedRole, work: Pass, rates: Rates) -> float:
    """Between ranks. Stage 3 gathers the weights for the forward and for the backward of each
    micro-batch, and scatters the gradients; below, gradients are reduced and weights gathered anew
    (ZeRO, Rajbhandari et al. 2020, section 7). ZeRO++ sends 8 bits of a weight and 4 of a gradient;
    what its second copy spares is not reckoned."""
    if work.ranks == 1:
        return 0.0
    trained = work.element * trained_parameters(role, work.shape)
    reductions = work.micro_batches if role.settings_of(ZeroConfig).stage >= 2 else work.updates
    moved = (
        reductions
        * trained
        * (0.5 / work.element if role.settings_of(ZeroConfig).quantized_gradients else 1.0)
    )
    if role.settings_of(ZeroConfig).stage == 3:
        narrowed = 1 / work.element if role.settings_of(ZeroConfig).quantized_weights else 1.0
        moved += 2 * work.micro_batches * weight_bytes(role, work) * narrowed
    else:
        moved += work.updates * trained
    return moved * (work.ranks - 1) / work.ranks / rates.link


def adam_seconds(role: TrainedRole, work: Pass, rates: Rates) -> float:
    """The optimizer's step on a rank's share. On the host at its memory's speed, with each
    micro-batch's gradients and the new weights crossing PCIe (ZeRO-Offload, Ren et al. 2021)."""
    share = trained_parameters(role, work.shape) / (
        work.ranks if role.settings_of(ZeroConfig).stage else 1
    )
    if role.settings_of(ZeroConfig).optimizer_offload == "none":
        return work.updates * share * _ADAM_BYTES / rates.memory
    crossing = (work.micro_batches + work.updates) * work.element * share / rates.pcie
    return crossing + work.updates * share * _ADAM_BYTES / rates.host


def weights_offload_seconds(role: TrainedRole, work: Pass, rates: Rates) -> float:
    """A rank's share of the weights crosses PCIe for each forward and each backward."""
    if role.settings_of(ZeroConfig).parameter_offload == "none":
        return 0.0
    return 2 * work.micro_batches * weight_bytes(role, work) / work.ranks / rates.pcie


def trained_parameters(role: TrainedRole, shape: ModelShape) -> int:
    """Of the whole model, or of its adapter."""
    if role.adapter is None:
        return shape.parameters
    return adapter_parameters(shape, role.adapter)


def weight_bytes(role: TrainedRole | FrozenRole, work: Pass) -> float:
    """Of the whole model."""
    linear = work.shape.linear_parameters if role.model.quantization == "nf4" else 0
    return _NF4 * linear + work.element * (work.shape.parameters - linear)


def training_seconds(role: TrainedRole, work: Pass, rates: Rates) -> float:
    """Forwards, backwards and optimizer steps of a trained role."""
    visits = 2.0 + bool(role.model.gradient_checkpointing) / role.model.checkpoint_every
    quantised = role.model.quantization == "nf4"
    return (
        passes(role) * forward_seconds(work, rates)
        + (dequantise_seconds(work, visits, rates) if quantised else 0.0)
        + exchange_seconds(role, work, rates)
        + adam_seconds(role, work, rates)
        + weights_offload_seconds(role, work, rates)
        + inputs_offload_seconds(role, work, rates)
    )


def scoring_seconds(role: TrainedRole | FrozenRole, work: Pass, rates: Rates) -> float:
    """A forward without gradients; divided weights are gathered for each micro-batch, offloaded
    ones cross PCIe: a share for each micro-batch at stage 3, else all of them once."""
    divided = (
        role.settings_of(FrozenZeroConfig).stage
        if isinstance(role, FrozenRole)
        else role.settings_of(ZeroConfig).stage
    ) == 3
    offload = (
        role.settings_of(FrozenZeroConfig).offload
        if isinstance(role, FrozenRole)
        else role.settings_of(ZeroConfig).parameter_offload
    )
    weights = weight_bytes(role, work)
    seconds = forward_seconds(work, rates)
    if role.model.quantization == "nf4":
        seconds += dequantise_seconds(work, 1.0, rates)
    if divided and work.ranks > 1:
        seconds += work.micro_batches * weights * (work.ranks - 1) / work.ranks / rates.link
    if offload == "cpu":
        share = work.micro_batches / work.ranks if divided else 1.0
        seconds += share * weights / rates.pcie
    return seconds


def tokens_at_peak(job: Job) -> float | None:
    """Return how many tokens a second a run would work on if its cards multiplied at their bf16
    peak all the time; None without cards, or where the speed of one is not known.

    A token takes 2 FLOPs a parameter in each forward and each product of a backward. What is
    computed again, and attention over other tokens, is left out: so the share of the peak that a
    run reaches is a lower bound where sequences are long.
    """
    slots = {process.slot for process in job.layout.processes}
    cards = [card for slot in slots if (card := job.card(slot)) is not None]
    if job.device != "cuda" or not cards or not all(known_card(card.name) for card in cards):
        return None
    return sum(card.bf16_flops for card in cards) / _token_flops(job)


def _token_flops(job: Job) -> float:
    """Return the FLOPs of a step for each of its tokens, in all roles and in engines."""
    spec, found = job.spec, 0.0
    for name, trained in spec.trained.items():
        forwards = spec.workload.epochs * (passes(trained) - recomputed(trained.model))
        found += 2 * job.shapes[name].active_parameters * (forwards + spec.roles[name].scores)
    for name in spec.frozen:
        found += 2 * job.shapes[name].active_parameters
    return found + (2 * job.policy.active_parameters if job.sampler is not None else 0)


def step_seconds(job: Job) -> float:
    """Of one step of a run: everything above, one after another as the jobs do it."""
    return sum(_role_seconds(job)) + _rollout_seconds(job)


def _role_seconds(job: Job) -> Iterator[float]:
    for name, trained in job.spec.trained.items():
        rates = _rates(job, job.spec.ranks_of(name))
        yield training_seconds(trained, _work(job, name, job.spec.workload.epochs), rates)
        if job.spec.roles[name].scores:  # values, old log-probs; KTO's KL
            yield scoring_seconds(trained, _work(job, name, 1), rates)
    for name, frozen in job.spec.frozen.items():
        yield scoring_seconds(frozen, _work(job, name, 1), _rates(job, job.spec.ranks_of(name)))


def _work(job: Job, name: RoleName, epochs: int) -> Pass:
    work, ranks = job.spec.workload, job.spec.ranks_of(name)
    updates = epochs * work.mini_batches
    own = ceil(work.sequences / ranks) * work.longest  # of one update
    return Pass(
        shape=job.shapes[name],
        tokens=updates * own,
        longest=work.longest,
        micro_batches=updates * ceil(own / work.budget),
        updates=updates,
        ranks=ranks,
        element=job.spec.models[name].element,
    )


def _rates(job: Job, ranks: int) -> Rates:
    node = job.hardware.nodes[0]
    cards = len(node.cards) if job.device == "cuda" else 0
    nodes = ceil(ranks / cards) if cards else min(len(job.hardware.nodes), ranks)
    return rates_of(node if cards else Node((), node.host_bytes), ranks, nodes)


def _rollout_seconds(job: Job) -> float:
    sampler, sampling = job.sampler, job.spec.sampling
    if sampler is None or sampling is None:
        return 0.0
    rates = _rates(job, 1)
    sequences = ceil(sampling.sequences / sampler.rollout.engines)
    cards = job.hardware.nodes[0].cards if job.device == "cuda" else ()
    price = rollout_price(sampler.rollout)
    cache = price.kv_cache(sampler, cards[0].usable_bytes if cards else None)
    at_once = sequences_at_once(sampler, cache, sequences)
    shape, actor = job.policy, job.spec.actor
    separate = job.spec.sends_adapter_alone
    sent = 2 * (trained_parameters(actor, shape) if separate else shape.parameters)
    sent *= "sync" in job.spec.phases
    return (
        sampling_seconds(sampler, at_once, sequences, rates)
        + waking_seconds(sampler, rates)
        + sync_seconds(sent, rates)
    )


def sampling_seconds(sampler: Sampler, at_once: int, sequences: int, rates: Rates) -> float:
    """An engine's responses. Each token of `at_once` sequences reads all weights and their KV
    cache (Pope et al. 2022, section 2); prompts are a forward. The parts of a divided engine add
    their results up twice in each layer (Shoeybi et al. 2019, section 3). Stages work side
    by side, each on another part of the sequences: all weights are read for each part."""
    waves = ceil(sequences / at_once)
    new = sampler.rollout.sampling.max_new_tokens
    token = rollout_price(sampler.rollout).kv_token(sampler)
    cache = at_once * token * (sampler.longest - new / 2)
    degrees = sampler.rollout.engine.degrees
    parallel, stages = degrees.get("tensor_parallel", 1), degrees.get("pipeline_parallel", 1)
    decode = waves * new * (_weights(sampler) + cache / stages) / rates.memory
    prompts = sequences * (sampler.longest - new)
    summed = 2 * sampler.shape.layers * sampler.shape.hidden * sampler.element
    crossing = 2 * (parallel - 1) / parallel * summed / rates.link  # of a token
    decode += sequences * sampler.longest * crossing / stages
    prefill = 2 * sampler.shape.active_parameters * prompts / sampler.rollout.parts / rates.flops
    return decode + prefill


def sequences_at_once(sampler: Sampler, cache: float, sequences: int) -> int:
    """That an engine's KV cache (bytes of a card) has room for; with less than one sequence's vLLM
    does not start, and is taken to have as much as it needs: what is compared with a config that
    does not fit is compared with it as it would be with room."""
    token = rollout_price(sampler.rollout).kv_token(sampler)
    room = int(cache // (token * sampler.longest))
    wanted = min(sampler.rollout.max_sequences, sequences)
    return min(wanted, room) if room >= 1 else wanted


def waking_seconds(sampler: Sampler, rates: Rates) -> float:
    """At sleep level 1 weights go to the host and come back; at level 2 the sync brings them."""
    if not sampler.rollout.engine.sleeps or vllm_of(sampler.rollout).sleep_level != 1:
        return 0.0
    return 2 * max(stage.weights for stage in vllm_sampler(sampler).stages) / rates.pcie


def _weights(sampler: Sampler) -> int:
    if sampler.rollout.engine_name == "vllm":
        return vllm_sampler(sampler).weights
    return sampler.element * sampler.shape.parameters


def sync_seconds(sent: float, rates: Rates) -> float:
    """New weights leave one rank's card, pass through host memory, and reach each engine's card
    (rollout/vllm/engine.py); sent: bytes."""
    return sent * (2 / rates.pcie + 2 / rates.host)


ELEMENTWISE = 0.2
"""Of a forward's time, its norms, rotary embeddings and activation functions: an estimate. Of
forward and backward together, recomputing attention alone costs 2 to 4 %, and all of it 30 to 40 %
(Korthikanti et al. 2022, table 4)."""


def recomputed(model: ModelConfig) -> float:
    """What is computed again, in forwards."""
    share = {False: 0.0, "selective": ELEMENTWISE, True: 1.0}[model.gradient_checkpointing]
    return share / model.checkpoint_every
