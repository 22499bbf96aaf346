"""Plimsoll and TRL in turn: tokens a second and peak memory of SFT, DPO and reward models.

    python -m pip install --no-deps --target DIR trl==1.16.0
    python examples/gsm8k/prepare.py --data GSM8K --out runs/gsm8k
    python examples/dpo/prepare_pairs.py --data FILE.jsonl.gz --out runs/pairs
    python benchmarks/against_trl.py --trl DIR --gsm8k runs/gsm8k --pairs runs/pairs

Both train the same model (27M parameters, Qwen2-shaped, bfloat16; or --model and --dtype) on the
same rows, one epoch over the first of them in their order, in a process of its own each, and in the
same number of optimizer steps. A token is a token of a row, prompt included: padding counts
nothing, and a prompt that a pair shares counts twice. Time is that of the optimizer steps alone;
memory is the largest resident set of the process, by the kernel, and for Plimsoll by its ledger,
too.
Before the first run it looks whether the machine is quiet, and says so: only then threads spin.
TRL runs padded, padded and grouped by length, packed, and without padding, where it has these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from plimsoll.run.json_lines import JsonRow, read_rows
from plimsoll.run.ledger import memory_use, read_ledger
from waiting_threads import choose_waiting, measure_busy_cores

HERE = Path(__file__).parent
STEP = {"sft": 32, "dpo": 16, "rm": 16}
"""Rows of one optimizer step."""
LIMIT = 512
"""Tokens of a sequence; longer rows are left out."""
FIRST = ", reference first"
"""The reference's log-probs are computed before the time of steps begins."""
TRL: dict[str, dict[str, dict[str, object]]] = {
    "sft": {
        "padded": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
        "padded, by length": {
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 4,
            "train_sampling_strategy": "group_by_length",
        },
        "packed": {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 3,
            "packing": True,
            "max_length": LIMIT,
        },
        "without padding": {
            "per_device_train_batch_size": 8,
            "gradient_accumulation_steps": 4,
            "padding_free": True,
            "max_length": None,
        },
    },
    "dpo": {
        "padded": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
        f"padded{FIRST}": {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "precompute_ref_log_probs": True,
        },
    },
    "rm": {"padded": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}},
}
PLIMSOLL: dict[str, dict[str, dict[str, object]]] = {
    "sft": {"": {}},
    "dpo": {"": {}, FIRST: {"reference_logprobs": {"precompute": True}}},
    "rm": {"": {}},
}
"""What each of its runs sets besides `_config`."""


@dataclass(frozen=True)
class Case:
    """A job on its rows. tokens: of all rows."""

    job: str
    model: Path
    dtype: str
    learning_rate: float
    threads: int | None
    rows: tuple[dict[str, str], ...]
    tokens: int


@dataclass(frozen=True)
class Found:
    """What a run took. losses: of its optimizer steps."""

    job: str
    who: str
    tokens_per_second: float
    peak_bytes: int
    losses: tuple[float, ...]

    def __str__(self) -> str:
        peak = f"{self.peak_bytes / 1e9:.2f} GB"
        return f"{self.job:<6}{self.who:<34}{self.tokens_per_second:>9,.0f} tokens/s{peak:>10}"


def main() -> int:
    options = _options()
    waiting = choose_waiting(measure_busy_cores())
    print(waiting, flush=True)
    os.environ |= waiting.environment
    with tempfile.TemporaryDirectory() as folder:
        home = Path(options.folder or folder)
        home.mkdir(parents=True, exist_ok=True)
        found = []
        for case in cases(options):
            print(f"{case.job}: {len(case.rows)} rows, {case.tokens:,} tokens", flush=True)
            for one in run(case, home, options):
                print(one, flush=True)
                found.append(one)
    print("\n".join([*summary(found), *compare_losses(found)]))
    print(f"{options.dtype} matrix product here: {matrix_rate(options.dtype) / 1e9:,.0f} GFLOP/s")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trl", required=True, help="the directory that TRL was installed into")
    add("--gsm8k", help="what examples/gsm8k/prepare.py wrote: SFT")
    add("--pairs", help="what examples/dpo/prepare_pairs.py wrote: DPO and reward models")
    add("--model", type=Path, help="another model, such as SmolLM2 (default: that of the rows)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(%(default)s)")
    add("--learning-rate", type=float, default=1e-4, help="(%(default)s)")
    add("--rows", type=int, default=640, help="of SFT; a third as many pairs (%(default)s)")
    add("--limit", type=int, default=LIMIT, help="tokens of a sequence, at most (%(default)s)")
    add("--threads", type=int, help="of each process; 1 beside other work (default: all cores)")
    add("--only", help="a job: sft, dpo or rm")
    add("--way", default="", help="only runs of TRL whose names begin so, such as padded")
    add("--folder", help="keep runs here; default: nowhere")
    return parser.parse_args()


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The jobs whose data are given."""
    for job in STEP:
        source = options.gsm8k if job == "sft" else options.pairs
        if source is None or options.only not in (None, job):
            continue
        rows = options.rows if job == "sft" else options.rows // 3
        yield make_case(job, Path(source), rows, options)


def make_case(job: str, source: Path, rows: int, options: argparse.Namespace) -> Case:
    """The first rows that are short enough, in a whole number of steps."""
    model = options.model or source / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    chosen: list[dict[str, str]] = []
    tokens = 0
    for line in (source / "train.jsonl").read_text().rstrip("\n").split("\n"):
        row = _texts(job, json.loads(line))
        lengths = _lengths(row, tokenizer)
        if max(lengths) <= options.limit and len(chosen) < rows // STEP[job] * STEP[job]:
            chosen.append(row)
            tokens += sum(lengths)
    settings = (options.dtype, options.learning_rate, options.threads)
    return Case(job, model, *settings, tuple(chosen), tokens)


def _texts(job: str, row: dict[str, str]) -> dict[str, str]:
    if job == "sft":
        return {"prompt": row["question"], "completion": row["response"]}
    return {name: row[name] for name in ("prompt", "chosen", "rejected")}


def _lengths(row: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of the row's sequences, each with the token that ends it."""
    prompt, *responses = (len(tokenizer(text)["input_ids"]) for text in row.values())
    return [prompt + response + 1 for response in responses]


def run(case: Case, home: Path, options: argparse.Namespace) -> Iterator[Found]:
    """Both, in turn."""
    yield from run_plimsoll(case, home)
    yield from run_trl(case, home, options.trl, options.way)


def run_plimsoll(case: Case, home: Path) -> Iterator[Found]:
    """By the command itself, in each of the ways that are compared."""
    rows = home / f"{case.job}.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    for number, (name, settings) in enumerate(PLIMSOLL[case.job].items()):
        directory = home / f"plimsoll-{case.job}-{number}"
        config = home / f"{case.job}.yaml"
        config.write_text(yaml.safe_dump(_config(case, rows, directory) | settings))
        _, peak = _run([sys.executable, "-m", "plimsoll", case.job, str(config)], {})
        steps = read_rows(directory / "metrics.jsonl")
        seconds = sum(_step_seconds(steps))
        peak = max(peak, _ledger_peak(directory / "ledger.jsonl"))
        losses = tuple(step["loss"] for step in steps)
        yield Found(case.job, f"Plimsoll{name}", case.tokens / seconds, peak, losses)


def _ledger_peak(ledger: Path) -> int:
    """A run resets the kernel's mark in every phase, so that the process's last one is of the end
    alone; its ledger has them all."""
    return memory_use(read_ledger(ledger))["local"].measured


def _config(case: Case, rows: Path, directory: Path) -> dict[str, Any]:
    columns = {"prompt": "prompt"} | (
        {"response": "completion"}
        if case.job == "sft"
        else {"chosen": "chosen", "rejected": "rejected"}
    )
    size = {"sequences" if case.job == "sft" else "pairs": STEP[case.job]}
    return {
        "run": {
            "directory": str(directory),
            "steps": len(case.rows) // STEP[case.job],
            "tensorboard": False,
        },
        "cluster": {"where": "local", "threads": case.threads},
        "data": {
            "train": {"path": str(rows), **columns},
            "chat_template": "none",
            "max_tokens": LIMIT,
            "shuffle": False,
        },
        "batch": {**size, "micro_batch_tokens": 4096},
        "actor": {
            "model": {"path": str(case.model), "dtype": case.dtype},
            "optimizer": {"learning_rate": case.learning_rate, "beta2": 0.999},  # as in TRL
            "zero": {"stage": 0},  # one rank has nobody to divide with
        },
    }


def _step_seconds(steps: Sequence[JsonRow]) -> list[float]:
    return [
        sum(value for name, value in step.items() if name in _TRAINING_SECONDS) for step in steps
    ]


_TRAINING_SECONDS = ("seconds/score", "seconds/train_actor")


def run_trl(case: Case, home: Path, trl: str, way: str) -> Iterator[Found]:
    """In each of the ways that TRL has; one that fails is told, and left out."""
    rows = home / f"{case.job}.json"
    rows.write_text(json.dumps(case.rows))
    for name, own in TRL[case.job].items():
        if not name.startswith(way):
            continue
        settings = {
            "learning_rate": case.learning_rate,
            "bf16": case.dtype == "bfloat16",
            "model_init_kwargs": {"dtype": case.dtype},
            "train_sampling_strategy": "sequential",  # the rows in the order of Plimsoll's
        } | own
        words = [case.job, str(case.model), str(rows), json.dumps(settings)]
        environment = {"PYTHONPATH": trl}
        if case.threads is not None:
            environment["OMP_NUM_THREADS"] = str(case.threads)
        try:
            said, peak = _run([sys.executable, str(HERE / "trl_side.py"), *words], environment)
        except RuntimeError as error:
            print(f"TRL, {name}: {error}", file=sys.stderr)
            continue
        told = json.loads(said.splitlines()[-1])
        speed = case.tokens / told["seconds"]
        yield Found(case.job, f"TRL, {name}", speed, peak, tuple(told["losses"]))


def _run(command: Sequence[str], environment: dict[str, str]) -> tuple[str, int]:
    """What the command printed, and its largest resident set in bytes."""
    with (
        tempfile.TemporaryFile("w+") as out,
        subprocess.Popen(
            command, env=os.environ | environment, stdout=out, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(errors[-2000:])
        out.seek(0)
        return out.read(), usage.ru_maxrss * 1024


def summary(found: Sequence[Found]) -> Iterator[str]:
    """Each of Plimsoll's runs beside TRL's fastest of its job, of those that do the same work."""
    for one in found:
        theirs = [
            other
            for other in found
            if other.job == one.job
            and other.who.startswith("TRL")
            and other.who.endswith(FIRST) == one.who.endswith(FIRST)
        ]
        if theirs and one not in theirs:
            best = max(theirs, key=lambda other: other.tokens_per_second)
            yield (
                f"{one.job}, {one.who}: {one.tokens_per_second / best.tokens_per_second:.2f} x the "
                f"speed and {one.peak_bytes / best.peak_bytes:.2f} x the memory of {best.who}"
            )


def compare_losses(found: Sequence[Found]) -> Iterator[str]:
    """How far the losses of all runs of a job that saw the same rows in a step are apart."""
    for job in STEP:
        runs = [one for one in found if one.job == job and "length" not in one.who]
        steps = Counter(len(one.losses) for one in runs).most_common(1)[0][0] if runs else 0
        curves = [one.losses for one in runs if len(one.losses) == steps]
        if len(curves) > 1:
            apart = [max(step) - min(step) for step in zip(*curves, strict=True)]
            ends = ", ".join(f"{curve[0]:.4f} to {curve[-1]:.4f}" for curve in curves)
            yield (
                f"{job}: losses of {steps} steps, {ends}; apart by {statistics.fmean(apart):.2g} "
                f"in the mean, by {max(apart):.2g} at most"
            )


def matrix_rate(dtype: str) -> float:
    """Floating-point operations a second of a large matrix product."""
    a = torch.randn(2048, 2048, dtype=getattr(torch, dtype))
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * 2048**3 / statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
