"""Every preset of `plimsoll rl` on the demo's task: held-out exact match, time and memory.

    python benchmarks/rl_methods.py --out DIR [--seeds 0 1 2] [--methods grpo rloo] [--steps 40]

The task and the model are those of `plimsoll demo` (sums of two numbers, 0.6M parameters), from the
same weights after SFT for each seed. All methods see 256 responses a step in two mini-batches, with
one learning rate, in one process with two threads; the reward is exact match. Time is that of the
steps; memory is the largest resident set of the process. Prints the table of notes/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from plimsoll.commands.demo import prepare
from plimsoll.run.ledger import memory_use, read_ledger

ALONE = {"batch": {"prompts": 256, "responses": 1}}
GROUPS = {"batch": {"prompts": 32, "responses": 8}}
CRITIC = {
    "critic": {"model": {"path": "{home}/sft/model"}, "optimizer": {"learning_rate": 0.001}},
    "algorithm": {
        "advantage": {"name": "gae", "options": {"gamma": 1.0, "gae_lambda": 1.0}},
        "critic_warmup_steps": 2,
    },
}
BASELINE = {"algorithm": {"advantage": {"name": "reinforce_pp_baseline"}}}


@dataclass(frozen=True)
class Method:
    """command: the preset. own: what the config says beside what all say."""

    command: str
    own: Sequence[dict[str, Any]]


METHODS = {
    "ppo": Method("ppo", (ALONE, CRITIC, {"algorithm": {"kl": {"coefficient": 0.005}}})),
    "grpo": Method("grpo", (GROUPS,)),
    "dr_grpo": Method("dr_grpo", (GROUPS,)),
    "rloo": Method("rloo", (GROUPS,)),
    "reinforce_pp": Method("reinforce_pp", (ALONE, {"algorithm": {"kl": {"coefficient": 0.001}}})),
    "reinforce_pp, group baseline": Method("grpo", (GROUPS, BASELINE)),
    "gspo": Method("gspo", (GROUPS,)),
    "cispo": Method("cispo", (GROUPS,)),
    "dapo": Method("dapo", (GROUPS,)),
}


@dataclass(frozen=True)
class Result:
    """before, after: held-out exact match, from 0 to 1. seconds: of all steps. memory: bytes."""

    before: float
    after: float
    seconds: float
    memory: int


def main() -> None:
    """Run all and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    print("| method | before | after, each seed | seconds | peak memory, MB |")
    print("| --- | --- | --- | --- | --- |")
    for name in options.methods:
        found = [run(name, seed, options.out, options.steps) for seed in options.seeds]
        print(row(name, found), flush=True)


def row(name: str, found: Sequence[Result]) -> str:
    """A line of the table."""
    after = ", ".join(f"{100 * one.after:.1f}" for one in found)
    before = 100 * statistics.fmean(one.before for one in found)
    seconds = statistics.median(one.seconds for one in found)
    memory = max(one.memory for one in found) / 1e6
    return f"| {name} | {before:.1f} % | {after} % | {seconds:.0f} | {memory:,.0f} |"


def run(name: str, seed: int, out: Path, steps: int) -> Result:
    """One method from one seed's weights; what is there already is not run again."""
    home = out / f"seed-{seed}"
    if not (home / "sft" / "model").exists():
        prepare(home, seed)
        plimsoll("sft", home / "sft.yaml")
    directory = home / name.replace(", ", "-").replace(" ", "-")
    method = METHODS[name]
    config = directory.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(merged(home, seed, steps, directory, method)))
    plimsoll(method.command, config)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return Result(
        rows[0]["eval/correct"],
        rows[-1]["eval/correct"],
        sum(step_seconds(rows)),
        memory_use(read_ledger(directory / "ledger.jsonl"))["local"].measured,
    )


def step_seconds(rows: Sequence[dict[str, Any]]) -> Iterator[float]:
    """Of each step, without evaluation."""
    for one in rows:
        phases = [v for k, v in one.items() if k.startswith("seconds/") and k != "seconds/eval"]
        yield sum(phases) if one["step"] else 0.0


def merged(home: Path, seed: int, steps: int, directory: Path, method: Method) -> dict[str, Any]:
    """The config of a run."""
    columns = {"prompt": "prompt", "reference": "answer"}
    config: dict[str, Any] = {
        "run": {
            "directory": str(directory),
            "seed": seed,
            "steps": steps,
            "eval_every": steps,
            "resume": "auto",
        },
        "cluster": {"where": "local", "device": "cpu", "threads": 2},
        "data": {
            "train": {"path": f"{home}/train.jsonl", **columns},
            "eval": {"path": f"{home}/test.jsonl", **columns},
            "chat_template": "none",
            "max_tokens": 16,
        },
        "batch": {"micro_batch_tokens": 4096},
        "actor": {
            "model": {"path": f"{home}/sft/model"},
            "optimizer": {"learning_rate": 1e-4},
        },
        "rewards": {"correct": {"name": "exact_match"}},
        "rollout": {"transformers": {}, "sampling": {"max_new_tokens": 32}},
        "algorithm": {"mini_batches": 2},
    }
    for part in method.own:
        config = laid_over(config, part, home)
    return config


def laid_over(base: dict[str, Any], part: dict[str, Any], home: Path) -> dict[str, Any]:
    """Nested values over others; paths begin at home."""
    found = dict(base)
    for key, value in part.items():
        if isinstance(value, dict):
            found[key] = laid_over(found.get(key, {}), value, home)
        else:
            found[key] = value.format(home=home) if isinstance(value, str) else value
    return found


def plimsoll(command: str, config: Path) -> None:
    """Run a command; its errors end this script."""
    words = [sys.executable, "-m", "plimsoll", command, str(config)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
