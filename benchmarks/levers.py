"""What each memory lever saves, by the plan, and what it costs: the tables of docs/levers.md.

    python benchmarks/levers.py

The first table has one config, and that config with one lever at a time; nothing runs: cards and
host are those of the plan's fullest moments. The second one has all levers that are offered.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.commands.planning import hardware_of
from plimsoll.config.flags import apply_flags, parse_flags
from plimsoll.config.load import validate
from plimsoll.config.run import JobConfig
from plimsoll.config.yaml_tree import Tree
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import spec_of
from plimsoll.memory.levers.catalogue import levers_by_rank
from plimsoll.memory.plan import make_plan
from plimsoll.memory.weigh import Ground

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
        keys = ", ".join(f"`{_SECTIONS[offered.turns]}{key}`" for key in offered.keys)
        learned = "the same" if offered.effect == "same" else offered.effect
        print(f"| {offered.words} | {keys} | {learned} | {offered.cost} |")


_SECTIONS = {"run": "", "trained": "actor.", "frozen": "reference."}


def measured(lever: Sequence[str]) -> tuple[int, int]:
    """Return the bytes of the fullest card and of the fullest host."""
    spec = spec_of(_config(lever))
    plan = make_plan(spec, Ground(hardware_of(spec.cluster)))
    card = max(store.peak.bytes for store in plan.devices)
    return card, max(store.peak.bytes for store in plan.hosts)


def _config(lever: Sequence[str]) -> JobConfig:
    keys = BASE | dict(flag.split("=") for flag in lever)
    flags = parse_flags([f"--{key}={value}" for key, value in keys.items()])
    config: JobConfig = validate(JOBS["sft"].config, apply_flags(Tree({}, {}), flags))
    return config


if __name__ == "__main__":
    main()
