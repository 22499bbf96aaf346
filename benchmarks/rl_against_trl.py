"""Plimsoll and TRL in turn: GRPO, samples a second and peak memory.

    python -m pip install --no-deps --target DIR trl==1.16.0
    python examples/gsm8k/prepare.py --data GSM8K --out runs/gsm8k
    python benchmarks/rl_against_trl.py --trl DIR --gsm8k runs/gsm8k [--steps 6] [--tokens 64]

Both train the same model (27M parameters, Qwen2-shaped, bfloat16; or --model and --dtype) with 16
prompts of GSM8K a step, 8 responses each, of at most 64 tokens, by the same reward and sampler
settings, each in a run of its own. The first step, which compiles and warms up, is left out. Time
is that of whole steps: rollout, reward, training, weight sync. Threads spin on a quiet machine only
(waiting_threads.py). Memory is the largest sum over all processes of a run, looked at ten times a
second; what several share is divided among them (PSS).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from plimsoll.run.json_lines import read_rows
from waiting_threads import choose_waiting, measure_busy_cores

HERE = Path(__file__).parent
PROMPTS, RESPONSES = 16, 8
PROMPT_TOKENS = 192
TRL = {
    f"batches of {size}": {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": PROMPTS * RESPONSES // size,
    }
    for size in (16, 32, 128)
}
PLIMSOLL: dict[str, dict[str, Any]] = {
    "local, transformers": {
        "cluster": {"where": "local", "device": "cpu"},
        "rollout": {"transformers": {}},
    },
    "Ray, vLLM": {
        "cluster": {"where": "ray", "device": "cpu", "ranks": 1},
        "rollout": {"vllm": {"cpu_kv_cache_gib": 0.25}},
    },
}


@dataclass(frozen=True)
class Found:
    """One run. seconds: of a step, the median. rewards: of each step. phases: seconds of the parts
    of Plimsoll's step."""

    who: str
    seconds: float
    peak_bytes: int
    rewards: tuple[float, ...]
    phases: Mapping[str, float]

    def __str__(self) -> str:
        rate = PROMPTS * RESPONSES / self.seconds
        parts = ", ".join(f"{name} {s:.2f}" for name, s in self.phases.items())
        peak = f"{self.peak_bytes / 1e9:.2f} GB"
        curve = f"reward {self.rewards[0]:.3f} to {self.rewards[-1]:.3f}"
        return f"{self.who:<32}{rate:>7.1f} samples/s{peak:>10}   {curve}   {parts}"


def main() -> None:
    """Run all in turn, and print each and the comparison."""
    options = _options()
    waiting = choose_waiting(measure_busy_cores())
    print(waiting, flush=True)
    os.environ |= waiting.environment
    with tempfile.TemporaryDirectory() as folder:
        home = Path(options.folder or folder)
        home.mkdir(parents=True, exist_ok=True)
        found = []
        for one in itertools.chain(_plimsoll(options, home), _trl(options, home)):
            print(one, flush=True)
            found.append(one)
    theirs = min(
        (x for x in found if x.who.startswith("TRL")), key=lambda x: x.seconds, default=None
    )
    for one in found:
        if theirs and not one.who.startswith("TRL"):
            print(
                f"{one.who}: {theirs.seconds / one.seconds:.2f} x the speed and "
                f"{one.peak_bytes / theirs.peak_bytes:.2f} x the memory of {theirs.who}"
            )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trl", required=True, help="the directory that TRL was installed into")
    add("--gsm8k", required=True, type=Path, help="what examples/gsm8k/prepare.py wrote")
    add("--model", type=Path, help="another model, such as SmolLM2 (default: that of the rows)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(%(default)s)")
    add("--threads", type=int, help="of each process; 1 beside other work (default: all cores)")
    add("--steps", type=int, default=6)
    add("--tokens", type=int, default=64, help="of a response, at most (%(default)s)")
    add("--only", help="part of the names of those to run")
    add("--folder", help="keep runs here; default: nowhere")
    options = parser.parse_args()
    options.model = options.model or options.gsm8k / "model"
    return options


def _chosen(names: Sequence[str], options: argparse.Namespace, who: str) -> list[str]:
    return [name for name in names if options.only is None or options.only in f"{who}, {name}"]


def _prompts(options: argparse.Namespace) -> Iterator[str]:
    """Those that are short enough in tokens, of which each is a character or more."""
    for line in (options.gsm8k / "train.jsonl").read_text().rstrip("\n").split("\n"):
        text = json.loads(line)["question"]
        if len(text) <= PROMPT_TOKENS:
            yield text


def _plimsoll(options: argparse.Namespace, home: Path) -> Iterator[Found]:
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in _prompts(options))
    (home / "rows.jsonl").write_text(rows)
    for number, name in enumerate(_chosen([*PLIMSOLL], options, "Plimsoll")):
        directory, config = home / f"plimsoll-{number}", home / f"plimsoll-{number}.yaml"
        config.write_text(yaml.safe_dump(_config(options, directory, PLIMSOLL[name])))
        words = [sys.executable, "-m", "plimsoll", "grpo", str(config)]
        _, peak = _run(words, {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"})
        rows_of_steps = read_rows(directory / "metrics.jsonl")
        steps = [_phases(row) for row in rows_of_steps if row["step"] > 1]
        phases = {name: statistics.median(s[name] for s in steps) for name in steps[0]}
        seconds = statistics.median(sum(step.values()) for step in steps)
        rewards = tuple(row["reward"] for row in rows_of_steps)
        yield Found(f"Plimsoll, {name}", seconds, peak, rewards, phases)


def _phases(row: Mapping[str, Any]) -> dict[str, float]:
    return {k.removeprefix("seconds/"): v for k, v in row.items() if k.startswith("seconds/")}


def _config(options: argparse.Namespace, directory: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    rollout = {**own["rollout"], "sampling": {"max_new_tokens": options.tokens}}
    return {
        "run": {"directory": str(directory), "steps": options.steps, "tensorboard": False},
        "cluster": own["cluster"] | {"threads": options.threads},
        "data": {
            "train": {"path": str(directory.parent / "rows.jsonl"), "prompt": "prompt"},
            "chat_template": "none",
            "max_tokens": PROMPT_TOKENS,
        },
        "batch": {"prompts": PROMPTS, "responses": RESPONSES, "micro_batch_tokens": 4096},
        "actor": {
            "model": {"path": str(options.model), "dtype": options.dtype},
            "optimizer": {"learning_rate": 1e-5},
            "zero": {"stage": 0},
        },
        "rewards": {"digits": {"name": "rl_rewards:digits"}},
        "rollout": rollout,
    }


def _trl(options: argparse.Namespace, home: Path) -> Iterator[Found]:
    rows = home / "rows.json"
    rows.write_text(json.dumps([{"prompt": text} for text in _prompts(options)]))
    for name in _chosen([*TRL], options, "TRL"):
        settings = {
            **TRL[name],
            "bf16": options.dtype == "bfloat16",
            "model_init_kwargs": {"dtype": options.dtype},
            "max_steps": options.steps,
            "max_completion_length": options.tokens,
        }
        words = [sys.executable, str(HERE / "trl_rl_side.py")]
        words += [str(options.model), str(rows), json.dumps(settings)]
        environment = {"PYTHONPATH": options.trl}
        if options.threads is not None:
            environment["OMP_NUM_THREADS"] = str(options.threads)
        said, peak = _run(words, environment)
        told = json.loads(said.splitlines()[-1])
        seconds = statistics.median(told["seconds"][1:])
        yield Found(f"TRL, {name}", seconds, peak, tuple(told["rewards"]), {})


def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, int]:
    """What the command printed, and the largest sum of its processes' resident sets, in bytes."""
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=out, stderr=errors, text=True
        ) as process,
    ):
        peaks = [0]
        watching = threading.Thread(target=_watch, args=(process.pid, peaks))
        watching.start()
        if process.wait():
            errors.seek(0)
            raise RuntimeError(errors.read()[-2000:])
        watching.join()
        out.seek(0)
        return out.read(), max(peaks)


def _watch(pid: int, peaks: list[int]) -> None:
    """Note the processes' memory until the first of them has ended."""
    try:
        first = psutil.Process(pid)
        while first.status() != psutil.STATUS_ZOMBIE:
            peaks.append(sum(map(_proportional, [first, *first.children(recursive=True)])))
            time.sleep(0.1)
    except psutil.NoSuchProcess:
        return


def _proportional(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ended meanwhile
        return 0


if __name__ == "__main__":
    main()
