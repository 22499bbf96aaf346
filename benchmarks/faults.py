"""Random faults in PPO, GRPO and DPO: do runs end right, and equal to undisturbed ones?

    python benchmarks/faults.py --directory /tmp/faults --minutes 20    # again, until all are done

Each case is a short run of a tiny model: `local` in one process with transformers, `ray` with two
ranks and vLLM. Every fault has a run of its own (disturb.py), the kinds take turns. A call
goes on where the last one stopped, and prints the tables of all faults so far.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import yaml

from chaos import TRIALS, ChaosRequest, run_chaos
from chaos.draw import RANDOM_KINDS
from chaos.table import TrialRow, differences, summary_text
from plimsoll.commands.demo import prepare

Tree = dict[str, Any]

STEPS = 6
PATIENCE = {"local": 90.0, "ray": 300.0}
"""Seconds without a step after which a run counts as hung: more than a start takes."""
NEVER_IN_DPO = ("network",)
"""Kinds that happen only where something is sampled or scored."""


def case_config(job: str, where: str, home: Path) -> Tree:
    """Return the config of a case, on the data and the model of `plimsoll demo`."""
    run = {"directory": "unused", "steps": STEPS, "save_every": 1, "tensorboard": False}
    model = {"model": {"path": str(home / "model"), "dtype": "float32"}}
    learning = {**model, "optimizer": {"learning_rate": 0.001}}
    cluster: Tree = {"where": where, "device": "cpu", "threads": 1, "hang_timeout": 20}
    if where == "ray":
        cluster["ranks"] = 2
    config: Tree = {"run": run, "cluster": cluster, "actor": learning}
    if job == "dpo":
        pairs = {"path": str(home / "pairs.jsonl"), "limit": 64, "prompt": "prompt"}
        pairs |= {"chosen": "careful", "rejected": "careless"}
        config["data"] = {"train": pairs, "chat_template": "none", "max_tokens": 64}
        return config | {"batch": {"pairs": 8, "micro_batch_tokens": 512}}
    prompts = {"path": str(home / "train.jsonl"), "limit": 64, "prompt": "prompt"}
    prompts |= {"reference": "answer"}
    engine: Tree = {"vllm": {"cpu_kv_cache_gib": 0.25}} if where == "ray" else {"transformers": {}}
    config |= {
        "data": {"train": prompts, "chat_template": "none", "max_tokens": 16},
        "batch": {"prompts": 4, "responses": 4, "micro_batch_tokens": 256},
        "rewards": {
            "correct": {"name": "exact_match"},
            "length": {"name": "length", "weight": 0.1},
        },
        "rollout": {**engine, "dtype": "float32", "sampling": {"max_new_tokens": 12}},
    }
    return config | ({"critic": learning} if job == "ppo" else {})


def requests(directory: Path, faults: int, seed: int, places: list[str]) -> list[ChaosRequest]:
    """Return the request of each case; together they have at least `faults` faults."""
    home = directory / "task"
    if not (home / "model" / "config.json").exists():
        prepare(home, 0)
    cases = [(job, where) for job in ("ppo", "grpo", "dpo") for where in places]
    made = []
    for number, (job, where) in enumerate(cases):
        path = directory / f"{job}-{where}.yaml"
        path.write_text(yaml.safe_dump(case_config(job, where, home)))
        made.append(
            ChaosRequest(
                [job, str(path)],
                directory / f"{job}-{where}",
                -(-faults // len(cases)),
                seed=1000 * seed + number,  # so that each case has faults of its own
                kinds=[k for k in RANDOM_KINDS if job != "dpo" or k not in NEVER_IN_DPO],
                patience=PATIENCE[where],
            )
        )
    return made


def rows_of(request: ChaosRequest) -> list[TrialRow]:
    path = request.directory / TRIALS
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines]


def go_on(cases: list[ChaosRequest], minutes: float) -> None:
    """Disturb the cases in turn, one fault each, until all are done or the time is over."""
    deadline = time.monotonic() + 60 * minutes
    for case in cycle(cases):
        if all(len(rows_of(c)) >= c.faults for c in cases) or time.monotonic() > deadline:
            return
        done = len(rows_of(case))
        if done < case.faults:
            next_fault = {**vars(case), "faults": done + 1}
            run_chaos(ChaosRequest(**next_fault), print)


def report(cases: list[ChaosRequest]) -> None:
    """Print a table of the kinds and one of the cases, then what did not go well."""
    rows: Mapping[str, list[TrialRow]] = {case.directory.name: rows_of(case) for case in cases}
    every = [row for of_case in rows.values() for row in of_case]
    print(f"\n{summary_text(every)}\n")
    for name, of_case in rows.items():
        right = sum(row["code"] == 0 for row in of_case)
        equal = sum(row["code"] == 0 and not differences(row) for row in of_case)
        samples = sum(bool(row["differs"]["samples"]) for row in of_case)
        print(
            f"{name}: {len(of_case)} runs, {right} ended right, {equal} equal to the undisturbed "
            f"one, {samples} with samples lost or repeated"
        )
    for name, of_case in rows.items():
        for row in of_case:
            if row["code"] != 0 or differences(row):
                print(f"{name} {row['number']}: {row['faults']}: {row['code']} {differences(row)}")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--faults", type=int, default=210)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--where", default="local,ray")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    cases = requests(options.directory, options.faults, options.seed, options.where.split(","))
    go_on(cases, options.minutes)
    report(cases)


if __name__ == "__main__":
    main()
