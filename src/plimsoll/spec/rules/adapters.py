"""What must agree about adapters and quantised models."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.config.problems import Problem, Section
from plimsoll.config.rl import RlConfig
from plimsoll.spec.run_spec import VLLM_RANKS


def adapted(name: str, role: TrainedRole) -> Iterator[Problem]:
    """A trained role's adapter and quantisation."""
    at = Section(name, role)
    if role.model.quantization == "nf4" and role.adapter is None:
        why = "Weights of 4 bits cannot be trained, and there is no adapter to train instead."
        fix = f"an adapter, such as {name}.adapter.rank: 16, or {name}.model.quantization: none"
        yield at.conflict("model.quantization", why, fix, "four-bit-training")
    if role.adapter is None:
        return
    if not role.adapter.targets:
        why = "No layer would get an adapter, so nothing would be trained."
        fix = "[all-linear], or the names of some layers"
        yield at.invalid("adapter.targets", why, fix, "adapter-targets")
    if role.adapter.dora and role.model.quantization == "nf4" and role.zero.stage == 3:
        why = "DoRA reads the base's weights outside of their layers, where ZeRO stage 3 has taken "
        why += "4-bit weights apart."
        fix = f"{name}.zero.stage: 2, or {name}.model.quantization: none, or {name}.adapter.dora: "
        fix += "false"
        yield at.conflict("adapter.dora", why, fix, "four-bit-dora")


def steady(name: str, role: TrainedRole) -> Iterator[Problem]:
    """An adapter whose log-probs are compared with earlier ones of its own."""
    if role.adapter is not None and role.adapter.dropout > 0:
        why = "Each forward pass would drop other inputs, so the ratio of new to old probabilities "
        why += "would be noise."
        fix = f"{name}.adapter.dropout: 0; dropout is for sft and dpo"
        yield Section(name, role).conflict("adapter.dropout", why, fix, "adapter-dropout")


def frozen(name: str, role: FrozenRole) -> Iterator[Problem]:
    """A frozen role's quantisation."""
    if role.model.quantization == "nf4" and role.offload == "cpu":
        why = "The scales of 4-bit weights stay on the device, so the weights cannot leave it."
        fix = f"{name}.offload: none (4 bits are a quarter of bfloat16), or "
        fix += f"{name}.model.quantization: none"
        yield Section(name, role).conflict("offload", why, fix, "four-bit-offload")


def separate(config: RlConfig) -> Iterator[Problem]:
    """An adapter that goes to the engines alone."""
    if config.rollout.sync.adapter == "merged":
        return
    for obstacle, instead in _against_separate(config):
        fix = f"rollout.sync.adapter: merged, or {instead}"
        at = Section("rollout", config.rollout)
        yield at.conflict("sync.adapter", obstacle, fix, "adapter-separate")


def _against_separate(config: RlConfig) -> Iterator[tuple[str, str]]:
    """(why not, what else to change)"""
    adapter, rollout = config.actor.adapter, config.rollout
    if adapter is None:
        yield "The actor trains all its weights: it has no adapter.", "actor.adapter.rank: 16"
    elif adapter.dora:
        yield "vLLM computes no DoRA.", "actor.adapter.dora: false"
    elif adapter.rank > VLLM_RANKS[-1]:
        yield (
            f"vLLM takes adapters of rank {VLLM_RANKS[-1]} at most, and actor.adapter.rank is "
            f"{adapter.rank}.",
            f"actor.adapter.rank: {VLLM_RANKS[-1]}",
        )
    if config.actor.model.quantization == "nf4":
        yield (
            "The engines would put it over the 16-bit model, and it was trained over 4 bits.",
            "actor.model.quantization: none",
        )
    if rollout.engine == "transformers":
        yield "Only vLLM engines take adapters beside a model.", "rollout.engine: vllm"
    if rollout.sleep_level == 2:
        yield (
            "rollout.sleep_level: 2 drops the engines' weights, and only the adapter would come "
            "back.",
            "rollout.sleep_level: 1",
        )
