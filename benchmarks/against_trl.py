"""Plimsoll and TRL in turn: tokens a second and peak memory of SFT, DPO and reward models.

    python -m pip install --no-deps --target DIR trl==1.16.0
    python examples/gsm8k/prepare.py --data GSM8K --out runs/gsm8k
    python examples/dpo/prepare_pairs.py --data FILE.jsonl.gz --out runs/pairs
    python benchmarks/against_trl.py --trl DIR --gsm8k runs/gsm8k --pairs runs/pairs

Both train the same model (27M parameters, Qwen2-shaped, bfloat16) on the same rows, one epoch over
the first of them, in a process of its own each, and in the same number of optimizer steps. A token
is a token of a row, prompt included: padding counts nothing, and a prompt that a pair shares counts
twice. Time is that of the optimizer steps alone; memory is the largest resident set of the process,
by the kernel, and for Plimsoll by its ledger too.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerBase

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
    """A job on its rows. fields: which of a row's texts make a sequence each; tokens: of all."""

    job: str
    model: Path
    rows: tuple[dict[str, str], ...]
    tokens: int


@dataclass(frozen=True)
class Found:
    """What a run took."""

    job: str
    who: str
    tokens_per_second: float
    peak_bytes: int

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
            for one in run(case, home, options.trl):
                print(one, flush=True)
                found.append(one)
    print("\n".join(summary(found)))
    print(f"bfloat16 matrix product here: {matrix_rate() / 1e9:,.0f} GFLOP/s")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trl", required=True, help="the directory that TRL was installed into")
    add("--gsm8k", help="what examples/gsm8k/prepare.py wrote: SFT")
    add("--pairs", help="what examples/dpo/prepare_pairs.py wrote: DPO and reward models")
    add("--rows", type=int, default=640, help="of SFT; a third as many pairs (%(default)s)")
    add("--only", help="a job: sft, dpo or rm")
    add("--folder", help="keep runs here; default: nowhere")
    return parser.parse_args()


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The jobs whose data are given."""
    for job in STEP:
        source = options.gsm8k if job == "sft" else options.pairs
        if source is None or options.only not in (None, job):
            continue
        rows = options.rows if job == "sft" else options.rows // 3
        yield make_case(job, Path(source), rows)


def make_case(job: str, source: Path, rows: int) -> Case:
    """The first rows that are short enough, in a whole number of steps."""
    tokenizer = AutoTokenizer.from_pretrained(source / "model")
    chosen: list[dict[str, str]] = []
    tokens = 0
    for line in (source / "train.jsonl").read_text().rstrip("\n").split("\n"):
        row = _texts(job, json.loads(line))
        lengths = _lengths(row, tokenizer)
        if max(lengths) <= LIMIT and len(chosen) < rows // STEP[job] * STEP[job]:
            chosen.append(row)
            tokens += sum(lengths)
    return Case(job, source / "model", tuple(chosen), tokens)


def _texts(job: str, row: dict[str, str]) -> dict[str, str]:
    if job == "sft":
        return {"prompt": row["question"], "completion": row["response"]}
    return {name: row[name] for name in ("prompt", "chosen", "rejected")}


def _lengths(row: dict[str, str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of the row's sequences, each with the token that ends it."""
    prompt, *responses = (len(tokenizer(text)["input_ids"]) for text in row.values())
    return [prompt + response + 1 for response in responses]


def run(case: Case, home: Path, trl: str) -> Iterator[Found]:
    """Both, in turn."""
    yield from run_plimsoll(case, home)
    yield from run_trl(case, home, trl)


def run_plimsoll(case: Case, home: Path) -> Iterator[Found]:
    """By the command itself, in each of the ways that are compared."""
    rows = home / f"{case.job}.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    for number, (name, settings) in enumerate(PLIMSOLL[case.job].items()):
        directory = home / f"plimsoll-{case.job}-{number}"
        config = home / f"{case.job}.yaml"
        config.write_text(yaml.safe_dump(_config(case, rows, directory) | settings))
        _, peak = _run([sys.executable, "-m", "plimsoll", case.job, str(config)], {})
        seconds = sum(_step_seconds(directory / "metrics.jsonl"))
        peak = max(peak, _ledger_peak(directory / "ledger.jsonl"))
        yield Found(case.job, f"Plimsoll{name}", case.tokens / seconds, peak)


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
        "cluster": {"where": "local"},
        "data": {
            "train": {"path": str(rows), **columns},
            "chat_template": "none",
            "max_tokens": LIMIT,
        },
        "batch": {**size, "micro_batch_tokens": 4096},
        "actor": {
            "model": {"path": str(case.model)},
            "optimizer": {"learning_rate": 1e-4},
            "zero": {"stage": 0},  # one rank has nobody to divide with
        },
    }


def _step_seconds(metrics: Path) -> list[float]:
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        sum(value for name, value in step.items() if name in _TRAINING_SECONDS) for step in steps
    ]


_TRAINING_SECONDS = ("seconds/score", "seconds/train_actor")


def run_trl(case: Case, home: Path, trl: str) -> Iterator[Found]:
    """In each of the ways that TRL has; one that fails is told, and left out."""
    rows = home / f"{case.job}.json"
    rows.write_text(json.dumps(case.rows))
    for name, settings in TRL[case.job].items():
        words = [case.job, str(case.model), str(rows), json.dumps(settings)]
        try:
            said, peak = _run(
                [sys.executable, str(HERE / "trl_side.py"), *words], {"PYTHONPATH": trl}
            )
        except RuntimeError as error:
            print(f"TRL, {name}: {error}", file=sys.stderr)
            continue
        seconds = json.loads(said.splitlines()[-1])["seconds"]
        yield Found(case.job, f"TRL, {name}", case.tokens / seconds, peak)


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


def matrix_rate() -> float:
    """Floating-point operations a second of a large bfloat16 matrix product."""
    a = torch.randn(2048, 2048, dtype=torch.bfloat16)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * 2048**3 / statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
