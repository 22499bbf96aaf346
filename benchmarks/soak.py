"""Hours of GRPO with a fault every five minutes: is memory flat, is anything left over?

    python benchmarks/soak.py --directory /tmp/soak --hours 2 --every 300         # with faults
    python benchmarks/soak.py --directory /tmp/soak --steps 2000 --every 0        # undisturbed
    python benchmarks/soak.py --directory /tmp/soak --report

The run has a rank and a vLLM engine of its own under Ray, and a checkpoint every ten steps. Nobody
helps it: the command starts once. Faults are drawn by a seed, their kinds take turns, and each
happens when a process reaches its point after the fault's time. A full disk is left out: it stops
the run with all that is saved. After `--hours` the run is asked to stop (SIGINT).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

import psutil
import yaml
from fault_injection.points import POINTS

from chaos.draw import RANDOM_KINDS
from chaos.trial import read_fired, rest_of_run
from plimsoll.commands.demo import prepare
from plimsoll.machine.faults import DIRECTORY, FAULTS
from plimsoll.run.directory import RunDirectory
from plimsoll.run.json_lines import read_rows

Row = dict[str, Any]

ONLY_AT_STARTS = (
    *("controller.start", "controller.data", "controller.precompute", "controller.load"),
    *("rank.start", "engine.start", "rows.read"),
)
NOT_IN_THIS_RUN = (
    *("controller.train_critic", "controller.eval", "environment.call"),
    *("notify.send", "page.answer"),
)
SECONDS = 10.0
"""Between two samples of memory."""
MIB = 2**20
WINDOW = 200
"""Steps over which rewards are averaged."""


def prepare_task(home: Path) -> None:
    """Write the data and the model of `plimsoll demo`, teach it sums, and write a slow judge."""
    if not (home / "sft" / "model").exists():
        prepare(home, 0)
        words = [sys.executable, "-m", "plimsoll", "sft", str(home / "sft.yaml")]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    (home / "judge.py").write_text(
        "import time\n\n\ndef ponder(trajectory):\n    time.sleep(0.004)\n    return 0.0\n"
    )


def config_of(home: Path, directory: Path, steps: int) -> Row:
    """Return the run's config."""
    run = {"directory": str(directory), "steps": steps, "save_every": 10, "restarts": 30}
    prompts = {"path": str(home / "train.jsonl"), "prompt": "prompt", "reference": "answer"}
    return {
        "run": {**run, "tensorboard": False},
        "cluster": {"where": "ray", "device": "cpu", "threads": 1, "hang_timeout": 20},
        "actor": {
            "model": {"path": str(home / "sft" / "model"), "dtype": "float32"},
            "optimizer": {"learning_rate": 0.0001},
        },
        "data": {"train": prompts, "chat_template": "none", "max_tokens": 16},
        "batch": {"prompts": 32, "responses": 8, "micro_batch_tokens": 4096},
        "algorithm": {"mini_batches": 2},
        "rewards": {
            "correct": {"name": "exact_match"},
            "judge": {"name": f"{home / 'judge.py'}:ponder"},
        },
        "rollout": {
            "vllm": {"cpu_kv_cache_gib": 0.25},
            "dtype": "float32",
            "sampling": {"max_new_tokens": 32},
        },
    }


def faults_at(begin: float, every: float, number: int, seed: int) -> Iterator[str]:
    """Yield faults, one `every` seconds."""
    draw, kinds = random.Random(seed), [kind for kind in RANDOM_KINDS if kind != "full"]
    points = [p for p in POINTS.values() if p.name not in ONLY_AT_STARTS + NOT_IN_THIS_RUN]
    for index in range(number):
        kind = kinds[index % len(kinds)]
        can = [p for p in points if kind in p.kinds]
        at = int(begin + every * (index + 1))
        yield f"{draw.choice(can).name}:{kind}:after={at}+once"


def role_of(process: psutil.Process) -> str:
    """Return what a process is for, by the first word of its command."""
    words = process.cmdline() or [process.name()]
    name = Path(words[0]).name.partition(".")[0].partition("(")[0].strip()
    return "plimsoll" if name.startswith("python") and "plimsoll" in words else name


def watch(process: subprocess.Popen[bytes], directory: Path, record: Path, seconds: float) -> None:
    """Append a sample of the run's processes to samples.jsonl, until its command ends.

    After `seconds` the command is asked to end.
    """
    run, end = RunDirectory(directory), time.monotonic() + seconds
    with (record / "samples.jsonl").open("a") as out:
        while process.poll() is None:
            if time.monotonic() > end:
                process.send_signal(signal.SIGINT)
                end = math.inf
            memory: dict[str, float] = defaultdict(float)
            handles = 0
            for each in rest_of_run(process.pid, record):
                with suppress(psutil.Error):
                    role = "supervisor" if each.pid == process.pid else role_of(each)
                    memory[role] += each.memory_full_info().uss / MIB
                    handles += each.num_fds()
            steps = len(read_rows(run.metrics_path)) if run.metrics_path.is_file() else 0
            row = {"time": time.time(), "steps": steps, "handles": handles, "mib": memory}
            row["shared"] = len(os.listdir("/dev/shm"))
            out.write(json.dumps(row) + "\n")
            out.flush()
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS)


def soak(at: argparse.Namespace) -> None:
    """Run once, with faults or without, and watch."""
    home, name = at.directory / "task", "disturbed" if at.every else "undisturbed"
    prepare_task(home)
    record, run = at.directory / f"{name}-record", at.directory / name
    record.mkdir()
    path = at.directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config_of(home, run, at.steps)))
    environment = {**os.environ, DIRECTORY: str(record.absolute()), "SPT_NOENV": "1"}
    if at.every:
        faults = faults_at(time.time(), at.every, at.faults, at.seed)
        environment[FAULTS] = ",".join(faults)
    before = sorted(os.listdir("/dev/shm"))
    with (record / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "plimsoll", "grpo", str(path)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    watch(process, run, record, 3600 * at.hours)
    time.sleep(30)
    left = [each.name() for each in rest_of_run(process.pid, record)]
    files = sorted(set(os.listdir("/dev/shm")) - set(before))
    end = {"code": process.returncode, "processes left": left, "shared memory left": files}
    (record / "end.json").write_text(json.dumps(end))
    print(end)


def windows(samples: Sequence[Row], minutes: float) -> Iterator[list[Row]]:
    """Yield the samples of each window of time."""
    begin = samples[0]["time"]
    for _, rows in groupby(samples, lambda row: (row["time"] - begin) // (60 * minutes)):
        yield [*rows]


def report(directory: Path, between: Sequence[float]) -> None:
    """Print memory by window, the slopes, the faults, and what differs from the undisturbed run."""
    record = directory / "disturbed-record"
    samples = [json.loads(line) for line in (record / "samples.jsonl").read_text().splitlines()]
    seen = Counter(role for row in samples for role in row["mib"])
    roles = sorted(role for role, times in seen.items() if times > len(samples) / 2)
    print("| minutes | steps | all MiB | supervisor MiB | handles | processes' shared files |")
    print("| --- | --- | --- | --- | --- | --- |")
    begin = samples[0]["time"]
    for kept in windows(samples, 10):
        total = median(sum(row["mib"].values()) for row in kept)
        own = median(row["mib"].get("supervisor", 0.0) for row in kept)
        handles, shared = (median(row[name] for row in kept) for name in ("handles", "shared"))
        at, steps = round((kept[-1]["time"] - begin) / 60), kept[-1]["steps"]
        print(f"| {at} | {steps} | {total:.0f} | {own:.1f} | {handles:.0f} | {shared:.0f} |")
    low, high = between
    warm = [row for row in samples if low <= (row["time"] - begin) / 60 < high]
    by_window = [*windows([row for row in warm if {*roles} <= row["mib"].keys()], 10)]
    hours = [(rows[0]["time"] - begin) / 3600 for rows in by_window]
    print(f"\nMiB an hour, minutes {low:g} to {high:g}: a line through the medians of ten minutes")
    for name, parts in {**{role: [role] for role in roles}, "all": roles}.items():
        mib = [median(sum(row["mib"][part] for part in parts) for row in w) for w in by_window]
        line = linear_regression(hours, mib)
        print(f"  {name}: {line.slope:+.1f} ({line.intercept:.0f} at the begin)")
    print((record / "end.json").read_text())
    rows = metrics_of(directory / "disturbed")
    fired = read_fired(record)
    print(f"{len(fired)} faults, {len(rows)} steps")
    for row in fired:
        print(f"  {row['fault']} in {row['process']}")
    others = metrics_of(directory / "undisturbed")
    last = min(len(rows), len(others)) // WINDOW * WINDOW
    print(f"| mean reward of the {WINDOW} steps up to | disturbed | undisturbed |")
    print("| --- | --- | --- |")
    for end in range(WINDOW, last + 1, WINDOW):
        ours, undisturbed = (reward_of(each[end - WINDOW : end]) for each in (rows, others))
        print(f"| {end} | {ours:.3f} | {undisturbed:.3f} |")


def metrics_of(directory: Path) -> list[Row]:
    """Return the rows of a run's metrics.jsonl; none if there is no run."""
    path = RunDirectory(directory).metrics_path
    return read_rows(path) if path.is_file() else []


def reward_of(rows: Sequence[Row]) -> float:
    """Return the mean reward of steps; the steps that were left out do not count."""
    return fmean(row["reward"] for row in rows if row["reward"] is not None)


def main() -> None:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--hours", type=float, default=math.inf)
    parser.add_argument("--every", type=float, default=300.0, help="seconds; 0: no faults")
    parser.add_argument("--faults", type=int, default=23)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--between", type=float, nargs=2, default=(10, math.inf), help="minutes")
    at = parser.parse_args()
    at.directory.mkdir(parents=True, exist_ok=True)
    report(at.directory, at.between) if at.report else soak(at)


if __name__ == "__main__":
    main()
