"""What a change costs, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from plimsoll.memory.advise.effects import effect_words
from plimsoll.memory.advise.speed import trained_parameters
from plimsoll.memory.remedies.changes import Change
from plimsoll.shapes.known_models import read_shape
from plimsoll.spec.run_spec import RunSpec

_ABOUT_THE_SAME = 1.05

_COSTS: dict[str, str] = {
    "micro_batch_tokens": "the step comes in other pieces: the same gradient",
    "zero.stage": "stage 3 gathers weights for each micro-batch, stages below it do not",
    "gradient_checkpointing": "with true each layer is computed twice; with selective, only what "
    "is element by element",
    "checkpoint_every": "layers that are not checkpointed are computed once",
    "head_chunk": "logits come in smaller pieces: the same loss",
    "activation_offload": "offloaded layer inputs cross PCIe in each forward and backward",
    "state_dtype": "updates below 1/512 of a weight are rounded away",
    "optimizer_offload": "on the CPU, Adam is bound by host memory and PCIe",
    "parameter_offload": "offloaded weights cross PCIe in each forward and backward",
    "gradient_dtype": "sums in bfloat16 lose small gradients over many micro-batches",
    "kind": "moments in 8 bits are rounded to 256 values in each block",
    "vllm.arguments.quantization": "engines sample from weights rounded to 8 bits: "
    "algorithm.correction weighs the difference",
    "quantization": "a base in 4 bits answers a little differently, and is unpacked at each use",
    "offload": "an offloaded model's weights cross PCIe when it scores",
    "stage": "a divided model is gathered for each micro-batch",
    "precompute": "the reference scores every row before the first step",
    "tensor_parallel": "the parts of an engine exchange activations in every layer",
    "max_sequences": "fewer sequences are sampled at once",
    "engines": "fewer engines share the prompts",
    "bucket_bytes": "weights are sent in smaller buckets",
    "keep_checkpoints": "only the last checkpoint is there to go back to",
    "where": "Ray starts a process for each rank",
    "memory_share": "the KV cache has what the share leaves: fewer or more sequences at once",
    "cpu_kv_cache_gib": "with a smaller cache fewer sequences are sampled at once",
    "sleep_level": "a sleeping engine wakes for each rollout",
    "placement": "engines on cards of their own are idle while ranks train",
    "critic_ranks": "the critic's cards are idle while the actor trains, and the other way round",
    "nodes": "other machines; between them the network is slower than the cards' link",
}
"""By the end of a key; the first that matches."""
COSTLESS = ("none", "shared", "auto", 0, False)
"""What is switched off costs nothing more."""


def speed_words(relative: float) -> str:
    """relative: seconds of a step, over those as the config is written."""
    if relative > _ABOUT_THE_SAME:
        return f"about {relative:.1f} x slower per step"
    if relative < 1 / _ABOUT_THE_SAME:
        return f"about {1 / relative:.1f} x faster per step"
    return "about as fast per step"


def costs_of(changed: RunSpec[Any], changes: Sequence[Change], relative: float) -> tuple[str, ...]:
    """What becomes of what is learned, speed, and what else changes. changed: the config after
    the changes."""
    found = (_cost(change.key) for change in changes if change.after not in COSTLESS)
    others = (cost for cost in found if cost is not None)
    further = dict.fromkeys([*_adapter_costs(changed, changes), *others])
    return (effect_words(changes), speed_words(relative), *further)


def shorter_costs(changes: Sequence[Change]) -> tuple[str, ...]:
    """Of shorter sequences, whose steps have less to do."""
    what = "rows are refused, or cut with data.over_long: truncate"
    if any(change.key.endswith("max_new_tokens") for change in changes):
        what = "responses are cut off"
    return (effect_words(changes), f"longer {what}")


def _cost(key: str) -> str | None:
    return next((cost for end, cost in _COSTS.items() if key.endswith(f".{end}")), None)


def _adapter_costs(changed: RunSpec[Any], changes: Sequence[Change]) -> Iterator[str]:
    keys, shares = {change.key for change in changes}, dict[str, list[str]]()
    for name, role in changed.trained.items():
        if f"{name}.adapter.rank" in keys:
            shape = read_shape(role.model.path)
            share = f"{trained_parameters(role, shape) / shape.parameters:.2%}"
            shares.setdefault(share, []).append(f"the {name}'s")
    for share, names in shares.items():
        yield f"an adapter trains {share} of {' and '.join(names)} parameters, and may learn less"
