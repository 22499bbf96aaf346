"""The settings by which a role needs less memory: keys within its section, and what they become.
Remedies name them, and a search for what fits tries them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plimsoll.config.engine import TrainedRole
from plimsoll.config.rollout import RolloutConfig
from plimsoll.engine.zero.config import ZeroConfig
from plimsoll.memory.remedies.changes import Move, Value, changes_between
from plimsoll.rollout.vllm.config import vllm_of
from plimsoll.rollout.vllm.sampler import keeps_weights, narrow_weights
from plimsoll.spec.decisions import fast_dtype
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import RunSpec

ADAPTER_RANK = 16

DIVIDED: Move = {"zero.stage": 3}
WEIGHTS_ON_HOST: Move = {"zero.parameter_offload": "cpu", **DIVIDED}
ALL_RECOMPUTED: Move = {"model.gradient_checkpointing": True}
EACH_LAYER_CHECKPOINTED: Move = {"model.checkpoint_every": 1}
INPUTS_ON_HOST: Move = {"model.activation_offload": "cpu"}
"""Of a role that learns."""

MODEL_ON_HOST: Move = {"zero.offload": "cpu"}
MODEL_OFF_HOST: Move = {"zero.offload": "none"}
MODEL_DIVIDED: Move = {"zero.stage": 3}
"""Of one that only scores."""

PRECOMPUTED: Move = {"reference_logprobs.precompute": True}
"""Of a run: its reference is loaded once, before it."""


def sleep(rollout: RolloutConfig) -> Move:
    """Return the sleep level for engines that are to sleep.

    Level 2 drops weights, and a sync brings all of them anyway: at level 1 they would cross to the
    host and back in each step, only to be overwritten. Level 1 is for weights that no sync brings.
    """
    return {"rollout.vllm.sleep_level": 1 if keeps_weights(vllm_of(rollout)) else 2}


def smaller_micro_batches(spec: RunSpec[Any]) -> Iterator[Move]:
    """Yield half the budget and so on, down to the longest sequence (or pair)."""
    tokens, least = spec.workload.budget, spec.workload.least_budget
    while tokens > least:
        tokens = max(tokens // 2, least)
        yield {"batch.micro_batch_tokens": tokens}


def narrow_engines(rollout: RolloutConfig, capability: tuple[int, int] | None) -> Move:
    """Return what gives vLLM's engines weights of 8 bits; nothing where they are quantised."""
    if "quantization" in vllm_of(rollout).arguments or rollout.dtype == "float32":
        return {}
    return {"rollout.vllm.arguments.quantization": narrow_weights(capability)}


def with_adapter(role: TrainedRole) -> Move:
    return {"adapter.rank": ADAPTER_RANK} if role.adapter is None else {}


def quantised(role: TrainedRole) -> Move:
    return {**with_adapter(role), "model.quantization": "nf4"}


def optimizer_on_host(role: TrainedRole) -> Move:
    return {
        "zero.optimizer_offload": "cpu",
        "zero.stage": max(1, role.settings_of(ZeroConfig).stage),
    }


def of_frozen(spec: RunSpec[Any], name: RoleName, values: Move) -> Move:
    """Dotted keys of a role that only scores; with what must stand beside them."""
    made = {f"{spec.roles[name].key}.{key}": value for key, value in values.items()}
    if name == "reference" and changes_between(spec, made):
        made |= _written_reference(spec)
    return made


def _written_reference(spec: RunSpec[Any]) -> Mapping[str, Value]:
    """The model of a reference that the config leaves to its default, the actor's: what must stand
    beside any other key of the reference."""
    if spec.roles["reference"].given:
        return {}
    own = {"gradient_checkpointing", "checkpoint_every", "activation_offload"}  # of what learns
    if spec.actor.model.dtype == fast_dtype(spec.cluster)[0]:  # as its own auto is
        own.add("dtype")
    fields = spec.actor.model.model_dump(exclude_defaults=True, exclude=own)
    return {f"reference.model.{key}": value for key, value in fields.items()}
