"""Speed and memory on one card, of SFT, DPO and GRPO at 0.5B, 1.5B and 7B (LoRA), beside TRL.

    python -m pip install --no-deps --target DIR trl==1.16.0
    python benchmarks/on_card.py --out rows.jsonl --trl DIR            # as much as 4 minutes allow
    python benchmarks/on_card.py --out rows.jsonl --only grpo-0.5b     # these cases alone
    python benchmarks/on_card.py --device cpu --shrink [--trl DIR]     # try it without a card

Models have the shapes of Qwen2.5 and random weights, rows are random digits, so nothing is
downloaded. Each case is a run of its own, and TRL does the same with its fused kernels. This
process never opens the card, so that what is measured there is the run's alone. The cases that
matter most come first, the cheapest of them before the others, and Plimsoll's before TRL's. A case
that fails leaves a row with its error, and the next begins. Cases that are in the file of `--out`
already are left out, so a second call goes on where the first had to stop. Figures are medians over
steps, without the first, which compiles and warms up; a token is a token of a row, prompt included.
The share is that of the measured rate of a bfloat16 matrix product, with 2 FLOPs a parameter and
pass, as `mfu` has it. notes/performance.md says how to run it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from plimsoll.commands.planning import plan_job
from plimsoll.jobs.which import load_any
from plimsoll.machine.host import thread_wait_settings
from plimsoll.memory.plan import token_flops
from plimsoll.run.ledger import memory_use, read_ledger

HERE = Path(__file__).parent
SIZES: dict[str, dict[str, int]] = {
    "0.5b": {"hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "feed_forward": 4864},
    "1.5b": {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "feed_forward": 8960},
    "7b": {"hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "feed_forward": 18944},
}
SHRUNKEN = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "feed_forward": 384}
SIDES = ("Plimsoll", "TRL")
FIRST = ("sft-0.5b", "dpo-0.5b", "sft-1.5b", "grpo-0.5b")
"""Cases that all run before TRL does them, and before others: 4 minutes are to hold them."""
OTHERS = (
    *("dpo-1.5b", "grpo-1.5b", "sft-7b", "dpo-7b", "grpo-7b", "grpo-7b-merged"),
    "grpo-0.5b-compiled",
)
"""In the order of their worth: time may run out. `merged`: a sync sends all weights, with the
adapter added to them, and not the adapter alone; TRL has no such choice. `compiled`: the engine
compiles and captures graphs, which takes minutes; the others do neither."""
CASES = (*FIRST, *OTHERS)
Try = tuple[str, str]
"""A case, and the side that runs it."""
STEPS = {"sft": 4, "dpo": 4, "grpo": 3}
LEAST_SECONDS = {"sft": 15, "dpo": 15, "grpo": 45}
"""What a run needs at least, most of it for its start: with less left it is not begun."""
PROMPTS, RESPONSES, NEW_TOKENS = 32, 8, 128
LIMIT = 512
"""Tokens of a row, at most."""
MICRO_BATCH = 16_384
_ENDING_SECONDS = 10.0


@dataclass(frozen=True)
class Row:
    """What one run showed.

    Attributes:
        who: "Plimsoll" or "TRL".
        tokens_per_second: of whole steps.
        share: of the rate of matrix products.
        step_seconds: of a step.
        memory: GB by process, as [measured, predicted]; no prediction for TRL.
        phases: seconds of a step's phases; none for TRL.
        failed: the end of what a run wrote that failed; empty if it did not.
    """

    case: str
    who: str
    device: str
    tokens_per_second: float = 0.0
    share: float = 0.0
    step_seconds: float = 0.0
    memory: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    failed: str = ""

    def __str__(self) -> str:
        if self.failed:
            cut = f"{self.failed[:60]} ... {self.failed[-240:]}"
            return f"{self.case:<15}{self.who:<10}failed: {min(self.failed, cut, key=len)}"
        cells = [
            f"{name} {measured:.2f}" + ("" if plan is None else f" of {plan:.2f} GB planned")
            for name, (measured, plan) in self.memory.items()
        ]
        cells += [f"{name} {seconds:.2f}" for name, seconds in self.phases.items()]
        speed = f"{self.tokens_per_second:>10,.0f} tokens/s{self.share:>7.1%}"
        return (
            f"{self.case:<15}{self.who:<10}{speed}{self.step_seconds:>8.2f} s   {', '.join(cells)}"
        )


@dataclass(frozen=True)
class Bench:
    """What all runs share.

    Attributes:
        home: the directory of models, rows and runs.
        shrink: whether models and steps are tiny, for a try.
        name: the card's name, or "cpu".
        trl: the directory that TRL was installed into; None: it does not run.
        rate: FLOPs a second of a matrix product.
        until: the time, by `time.monotonic`, at which the last run must have ended.
    """

    home: Path
    device: str
    name: str
    shrink: bool
    trl: str | None
    rate: float
    until: float

    @property
    def rows(self) -> int:
        """The rows of a step of SFT; a quarter as many pairs make one of DPO."""
        return 8 if self.shrink else 256

    @property
    def prompts(self) -> int:
        """The prompts of a step of GRPO."""
        return 4 if self.shrink else PROMPTS


def main() -> int:
    """Run the cases in turn, print each and keep it."""
    options = _options()
    until = time.monotonic() + options.seconds
    card = make({"make": "rate", "device": options.device}, until)
    name, rate = card["name"], card["rate"]
    print(f"{name}: bfloat16 matrix product {rate / 1e12:,.2f} TFLOP/s", flush=True)
    done = _finished(options.out)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(options.folder or folder)
        home.mkdir(parents=True, exist_ok=True)
        bench = Bench(home, card["device"], name, options.shrink, options.trl, rate, until)
        wanted = [each for each in tries(options.only or CASES, bench) if each not in done]
        for row in run_all(wanted, bench, run_case):
            print(row, flush=True)
            if options.out:
                with open(options.out, "a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--trl", help="the directory that TRL was installed into; default: Plimsoll alone")
    add("--only", nargs="+", help="cases, or how they begin: " + ", ".join(CASES))
    add("--seconds", type=float, default=240, help="for all together (%(default)s)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda, where there is one")
    add("--shrink", action="store_true", help="tiny models and steps, for a try")
    add("--folder", help="keep models and runs here; default: nowhere")
    add("--out", help="a file of JSON lines; what it has is not run again")
    return parser.parse_args()


def _finished(out: str | None) -> set[Try]:
    if out is None or not Path(out).exists():
        return set()
    rows = map(json.loads, Path(out).read_text().splitlines())
    return {(row["case"], row["who"]) for row in rows if not row["failed"]}


def tries(beginnings: Sequence[str], bench: Bench) -> list[Try]:
    """Return what is to run, in its order: cases that begin like one of these, by each side."""
    first = [(case, who) for who in SIDES for case in FIRST]
    others = [(case, who) for case in OTHERS for who in SIDES]
    return [
        (case, who)
        for case, who in (*first, *others)
        if case.startswith(tuple(beginnings))
        and (who == "Plimsoll" or (bench.trl is not None and not case.endswith("merged")))
    ]


def run_all(
    wanted: Iterable[Try], bench: Bench, run: Callable[[str, str, Bench], Row]
) -> Iterator[Row]:
    """Yield the row of each try for which time is left; the row of one that fails has its error."""
    for case, who in wanted:
        if bench.until - time.monotonic() < LEAST_SECONDS[case.split("-")[0]]:
            print(f"{case}, {who}: too little time is left; call again", file=sys.stderr)
            continue
        try:
            row = run(case, who, bench)
        except Exception as error:  # noqa: BLE001  the next case may well run
            row = Row(case, who, bench.name, failed=f"{type(error).__name__}: {error}")
        yield row


def run_case(case: str, who: str, bench: Bench) -> Row:
    """Write what a case needs, and run it by one side."""
    job, size = case.split("-")[:2]
    model = make_model(size, bench)
    make_rows(bench)
    config = write_config(case, job, size, model, bench)
    run = run_plimsoll if who == "Plimsoll" else run_trl
    return run(case, job, config, bench)


def make_model(size: str, bench: Bench) -> Path:
    """Return the directory of a random model, written at its first use."""
    path = bench.home / f"model-{size}"
    if not path.exists():
        shape = SHRUNKEN if bench.shrink else SIZES[size]
        vocab = 8192 if bench.shrink else 151_936
        settings = {"tied": size != "7b", "shape": {"vocab": vocab, **shape}}
        partial = path.with_name(f"{path.name}.partial")
        make(
            {"make": "model", "path": str(partial), "device": bench.device, **settings}, bench.until
        )
        partial.rename(path)
    return path


def make(settings: Mapping[str, Any], until: float) -> Any:
    """Return what on_card_make.py prints for these settings, in a process of its own."""
    words = [sys.executable, str(HERE / "on_card_make.py"), json.dumps(settings)]
    return json.loads(_run(words, str(HERE), until).splitlines()[-1])


def make_rows(bench: Bench) -> None:
    """Write the rows of all jobs: digits, a token each, with lengths as of chats."""
    draw, path = random.Random(0), bench.home / "rows.jsonl"
    if path.exists():
        return

    def digits(least: int, most: int) -> str:
        length = int(draw.lognormvariate(5.2, 0.7))  # 181 at the median
        return "".join(draw.choices("0123456789", k=min(most, max(least, length))))

    lines = []
    for _ in range(max(STEPS.values()) * bench.rows):
        prompt, rest = digits(32, 160), LIMIT - 161
        lines.append({"prompt": prompt, "chosen": digits(32, rest), "rejected": digits(32, rest)})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_config(case: str, job: str, size: str, model: Path, bench: Bench) -> Path:
    """Write the config of Plimsoll's run; return its path."""
    columns = {
        "sft": {"prompt": "prompt", "response": "chosen"},
        "dpo": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        "grpo": {"prompt": "prompt"},
    }[job]
    actor: dict[str, Any] = {
        "model": {"path": str(model), "gradient_checkpointing": job != "sft" or size == "7b"},
        "optimizer": {"learning_rate": 1e-6},
        "zero": {"stage": 0},
    }
    if size == "7b":
        actor["adapter"] = {"rank": 16}
    tree: dict[str, Any] = {
        "run": {
            "directory": str(bench.home / f"run-{case}"),
            "steps": STEPS[job],
            "tensorboard": False,
            "keep_checkpoints": 0,
            "save_model": False,
        },
        "cluster": {"where": "local", "device": bench.device},
        "data": {
            "train": {"path": str(bench.home / "rows.jsonl"), **columns},
            "chat_template": "none",
            "max_tokens": LIMIT if job != "grpo" else 256,
        },
        "actor": actor,
    }
    batch: dict[str, dict[str, int]] = {
        "sft": {"sequences": bench.rows},
        "dpo": {"pairs": bench.rows // 4},
        "grpo": {"prompts": bench.prompts, "responses": RESPONSES},
    }
    tree["batch"] = {**batch[job], "micro_batch_tokens": 2048 if bench.shrink else MICRO_BATCH}
    tree |= _sampling(case, bench) if job == "grpo" else {}
    path = bench.home / f"{case}.yaml"
    path.write_text(f"# {job}\n{yaml.safe_dump(tree)}")
    return path


def _sampling(case: str, bench: Bench) -> dict[str, Any]:
    """Return the sections of a run that samples by an engine on the ranks' card, which sleeps."""
    separate = case == "grpo-7b"
    if bench.device == "cpu":
        vllm: dict[str, Any] = {"cpu_kv_cache_gib": 0.25}
    else:
        vllm = {"memory_share": 0.45, "sleep_level": 1 if separate else 2}
        vllm |= {"adapter": "separate"} if separate else {}
        vllm |= {} if is_compiled(case) else {"arguments": {"enforce_eager": True}}
    return {
        "cluster": {"where": "ray", "device": bench.device, "ranks": 1},
        "rewards": {"digits": {"name": "rl_rewards:digits"}},
        "rollout": {
            "sampling": {"max_new_tokens": 16 if bench.shrink else NEW_TOKENS},
            "vllm": vllm,
            **({"placement": "shared"} if bench.device == "cuda" else {}),
        },
    }


def is_compiled(case: str) -> bool:
    """Return whether the engine of a case compiles and captures graphs."""
    return case.endswith("compiled")


def run_plimsoll(case: str, job: str, config: Path, bench: Bench) -> Row:
    """Run a case by Plimsoll's command; return its figures."""
    directory = bench.home / f"run-{case}"
    shutil.rmtree(directory, ignore_errors=True)  # of an earlier call, in which it failed
    _run([sys.executable, "-m", "plimsoll", job, str(config), "--force"], str(HERE), bench.until)
    metrics = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    steps = [row for row in metrics if row.get("step", 0) > 1]
    if not steps:
        raise RuntimeError(f"{directory} has no step after the first")
    speed = statistics.median(row["tokens_per_second"] for row in steps)
    phases = {
        name.removeprefix("seconds/"): statistics.median(row[name] for row in steps)
        for name in steps[-1]
        if name.startswith(("seconds/", "sync/seconds/"))
    }
    used = memory_use(read_ledger(directory / "ledger.jsonl"))
    return Row(
        case,
        "Plimsoll",
        bench.name,
        speed,
        speed * token_flops(plan_job(load_any(str(config))).job) / bench.rate,
        statistics.median(row["tokens"] for row in steps) / speed,
        {
            name: (use.measured / 1e9, None if use.predicted is None else use.predicted / 1e9)
            for name, use in used.items()
            if name.startswith(("local", "rank", "engine"))
        },
        phases,
    )


def run_trl(case: str, job: str, config: Path, bench: Bench) -> Row:
    """Run a case by TRL with its fused kernels; return its figures."""
    assert bench.trl is not None
    settings = {
        "job": job,
        "model": yaml.safe_load(config.read_text())["actor"]["model"]["path"],
        "rows": str(bench.home / "rows.jsonl"),
        "batch": bench.prompts * RESPONSES if job == "grpo" else bench.rows,
        "steps": STEPS[job],
        "new_tokens": 16 if bench.shrink else NEW_TOKENS,
        "micro": 2 if bench.shrink else 32,
        "checkpointing": job != "sft" or "7b" in case,
        "lora": "7b" in case,
        "compiled": is_compiled(case),
        "cpu": bench.device == "cpu",
    }
    words = [sys.executable, str(HERE / "on_card_trl.py"), json.dumps(settings)]
    said = json.loads(_run(words, bench.trl, bench.until).splitlines()[-1])
    seconds = statistics.median(said["seconds"][1:])
    speed = said["tokens"] / seconds
    share = speed * token_flops(plan_job(load_any(str(config))).job) / bench.rate
    memory = {"process": (said["peak_bytes"] / 1e9, None)}
    return Row(case, "TRL", bench.name, speed, share, seconds, memory, {})


def _run(command: Sequence[str], path: str, until: float) -> str:
    """Return what a command printed; end it, with its processes, when time is over.

    Raises:
        RuntimeError: it failed, or took too long; with the end of what it wrote.
    """
    environment = os.environ | {"PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}
    environment |= thread_wait_settings()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            _end(process)
            status = None
        out.seek(0)
        said = out.read()
    if status != 0:
        why = "no time was left" if status is None else f"exit code {status}"
        raise RuntimeError(f"{why}: {said[-1500:]}")
    return said


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group; a Ray that it started has a while to end by request."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
