"""What each memory lever saves, by the plan, and what it costs: the tables of docs/levers.md.

    python benchmarks/levers.py

The first table has one config, and that config with one lever at a time; nothing runs: cards and
host are those of the plan's fullest moments. The second one has all levers that are offered. The
third has GRPO on four cards that ranks and engines share, with the largest share for vLLM that
fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from plimsoll.commands.planning import hardware_of
from plimsoll.config.cluster import RankSleep
from plimsoll.config.flags import apply_flags, parse_flags
from plimsoll.config.load import validate
from plimsoll.config.run import JobConfig
from plimsoll.config.yaml_tree import Tree
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import spec_of
from plimsoll.memory.levers.levers import levers_by_rank
from plimsoll.memory.plan import make_plan
from plimsoll.memory.weigh import Ground, Plan

BASE = {
    "run.directory": "out",
    "run.steps": "100",
    "data.train.path": "rows.jsonl",
    "data.train.prompt": "question",
    "data.train.response": "answer",
    "data.max_tokens": "16384",
    "batch.sequences": "64",
    "batch.micro_batch_tokens": "32768",
    "cluster.ranks": "16",
    "cluster.nodes": "2",
    "cluster.hardware": "8xA100-80GB",
    "cluster.host_memory": "1TB",
    "actor.model.path": "Qwen/Qwen2.5-7B",
    "actor.model.gradient_checkpointing": "true",
    "actor.optimizer.learning_rate": "1e-4",
}

_MODEL, _ZERO = "actor.model", "actor.zero"
LEVERS: Sequence[tuple[str, ...]] = (
    (),
    (f"{_MODEL}.gradient_checkpointing=false",),
    (f"{_MODEL}.checkpoint_every=2",),
    (f"{_MODEL}.gradient_checkpointing=selective",),
    (f"{_MODEL}.activation_offload=cpu",),
    (f"{_MODEL}.mlp_tile=4096",),
    (f"{_MODEL}.gradient_checkpointing=selective", f"{_MODEL}.mlp_tile=4096"),
    ("batch.micro_batch_tokens=16384",),
    (f"{_ZERO}.stage=0",),
    (f"{_ZERO}.stage=3",),
    (f"{_ZERO}.stage=3", f"{_ZERO}.hpz_partition_size=8"),
    (f"{_ZERO}.stage=3", f"{_ZERO}.quantized_weights=true", f"{_ZERO}.quantized_gradients=true"),
    (f"{_ZERO}.stage=3", f"{_ZERO}.parameter_offload=cpu"),
    (f"{_ZERO}.optimizer_offload=cpu",),
    (f"{_ZERO}.gradient_dtype=bfloat16",),
    (f"{_ZERO}.state_dtype=bfloat16",),
    ("actor.optimizer.kind=adamw_8bit",),
    ("actor.adapter.rank=16",),
    ("actor.adapter.rank=16", f"{_MODEL}.quantization=nf4"),
)

SHARED = {
    "run.directory": "out",
    "run.steps": "100",
    "data.train.path": "rows.jsonl",
    "data.train.prompt": "question",
    "data.train.reference": "answer",
    "data.max_tokens": "1024",
    "batch.prompts": "128",
    "batch.responses": "8",
    "batch.micro_batch_tokens": "16384",
    "cluster.ranks": "4",
    "cluster.hardware": "4xA100-80GB",
    "cluster.host_memory": "1TB",
    "actor.model.path": "Qwen/Qwen2.5-7B-Instruct",
    "actor.model.gradient_checkpointing": "true",
    "actor.zero.stage": "3",
    "algorithm.kl.coefficient": "0.001",
    "reference.model.path": "Qwen/Qwen2.5-7B-Instruct",
    "reference.zero.stage": "3",
    "rewards.right.name": "math_answer",
    "rollout.placement": "shared",
    "rollout.engines": "4",
    "rollout.vllm.sleep_level": "2",
    "rollout.sampling.max_new_tokens": "1024",
}
_SHARE = "rollout.vllm.memory_share"
_HUNDREDTHS = range(95, 5, -1)
"""Shares of a card that are tried, the largest first."""


def main() -> None:
    """Print the tables."""
    print("| lever | card, GB | host, GB |")
    print("| --- | --- | --- |")
    for lever in LEVERS:
        card, host = measured(lever)
        name = ", ".join(f"`{flag.replace('=', ': ')}`" for flag in lever) or "as it is"
        print(f"| {name} | {card / 1e9:.1f} | {host / 1e9:.0f} |")
    print()
    print("| lever | keys | what is learned | what it costs |")
    print("| --- | --- | --- | --- |")
    for offered in levers_by_rank():
        keys = ", ".join(f"`{_SECTIONS[offered.scope]}{key}`" for key in offered.keys)
        learned = "the same" if offered.effect == "same" else offered.effect
        print(f"| {offered.words} | {keys} | {learned} | {offered.cost} |")
    print()
    print(f"| `cluster.rank_sleep` | `{_SHARE}` | KV cache | rollout | sync | training | host |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for depth in get_args(RankSleep):
        share, plan = largest_share(f"cluster.rank_sleep={depth}")
        cards, hosts = plan.devices[0], plan.hosts[0]
        cache = next(held.item.bytes for held in cards.held if held.item.cache)
        peaks = {use.moment.phase: use.bytes for use in cards.phases}
        sizes = (cache, peaks["rollout"], peaks["sync"], peaks["train_actor"], hosts.peak.bytes)
        print(f"| `{depth}` | {share} |", " | ".join(f"{size / 1e9:.1f}" for size in sizes), "|")


_SECTIONS = {"run": "", "trained": "actor.", "frozen": "reference."}


def measured(lever: Sequence[str]) -> tuple[int, int]:
    """Return the bytes of the fullest card and of the fullest host."""
    plan = _plan("sft", BASE, lever)
    card = max(store.peak.bytes for store in plan.devices)
    return card, max(store.peak.bytes for store in plan.hosts)


def largest_share(lever: str) -> tuple[float, Plan]:
    """Return the largest share of a card for vLLM with which GRPO fits, and its plan."""
    shares = (hundredths / 100 for hundredths in _HUNDREDTHS)
    plans = ((share, _plan("grpo", SHARED, [lever, f"{_SHARE}={share}"])) for share in shares)
    return next((share, plan) for share, plan in plans if plan.verdict == "fits")


def _plan(job: str, base: Mapping[str, str], lever: Sequence[str]) -> Plan:
    keys = dict(base) | dict(flag.split("=") for flag in lever)
    flags = parse_flags([f"--{key}={value}" for key, value in keys.items()])
    config: JobConfig = validate(JOBS[job].config, apply_flags(Tree({}, {}), flags))
    spec = spec_of(config)
    return make_plan(spec, Ground(hardware_of(spec.cluster)))


if __name__ == "__main__":
    main()
