"""The command `plimsoll` for tests: a small task to run on, real processes, and what they leave."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from plimsoll.cli import main
from plimsoll.commands.demo import make_tokenizer
from plimsoll.jobs.which import load_any
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.run.json_lines import read_rows
from plimsoll.run.phases import VARIABLE

MARK = "PLIMSOLL_TEST_RUN"
"""The environment variable by which all processes of a run are found, whoever their parent is."""

SUPPORT = Path(__file__).parents[1] / "support"
"""With the package that injects faults."""
_PATIENCE = 600.0
_AFTER_ITS_END = 120.0
"""Seconds that anything may take: a bound on hanging, on a machine that others use too."""

_CLOCKED = re.compile(r"seconds/|sync/seconds|memory_bytes/|tokens_per_second")

SFT: dict[str, Any] = {
    "run": {"directory": "sft", "steps": 30, "save_every": 7, "eval_every": 15},
    "cluster": {"where": "local", "threads": 1},
    "data": {
        "train": {"path": "rows.jsonl", "prompt": "prompt", "response": "response"},
        "eval": {"path": "held_out.jsonl", "prompt": "prompt", "response": "response"},
        "chat_template": "none",
        "max_tokens": 16,
    },
    "batch": {"sequences": 7, "micro_batch_tokens": 40},
    "actor": {
        "model": {"path": "model", "dtype": "float32"},
        "optimizer": {"learning_rate": 0.01, "schedule": "cosine", "warmup_steps": 2},
    },
}

REHEARSED_ELSEWHERE = {"rehearse": False}
"""Of most runs here: a rehearsal takes 2 s, by vLLM on Ray 10, and has tests of its own."""
PPO: dict[str, Any] = {
    "run": {"directory": "ppo", "steps": 12, "save_every": 5, "eval_every": 6},
    "cluster": {"where": "local", "threads": 1},
    "data": {
        "train": {"path": "rows.jsonl", "prompt": "prompt", "reference": "answer"},
        "eval": {"path": "held_out.jsonl", "prompt": "prompt", "reference": "answer"},
        "chat_template": "none",
        "max_tokens": 8,
    },
    "batch": {"prompts": 6, "responses": 2, "micro_batch_tokens": 60},
    "actor": {"model": {"path": "model"}, "optimizer": {"learning_rate": 0.002}},
    "critic": {"model": {"path": "model"}, "optimizer": {"learning_rate": 0.002}},
    "rewards": {"answer": {"name": "exact_match"}, "length": {"name": "length", "weight": 0.1}},
    "rollout": {"transformers": {}, "sampling": {"max_new_tokens": 8}, "sync": REHEARSED_ELSEWHERE},
    "algorithm": {
        "mini_batches": 2,
        "epochs": 2,
        "kl": {"adaptive": {"target": 0.5, "horizon": 50}},
    },
}


GRPO: dict[str, Any] = {
    "cluster": {"where": "local", "threads": 1},
    "data": {
        "train": {"path": "rows.jsonl", "prompt": "prompt", "reference": "answer"},
        "chat_template": "none",
        "max_tokens": 8,
    },
    "actor": {
        "model": {"path": "model", "dtype": "float32"},
        "optimizer": {"learning_rate": 0.002},
    },
    "rollout": {"transformers": {}, "dtype": "float32", "sync": REHEARSED_ELSEWHERE},
}
"""Without run, batch and sampling, and what rewards."""
VLLM: dict[str, Any] = {"vllm": {"cpu_kv_cache_gib": 0.25}, "transformers": None}
"""Over the section `rollout` of such a config: the other engine, with a small cache."""


def write_task(home: Path, *, vocabulary: int = 32) -> None:
    """Sums of one digit, more rows than a step takes, and a random model with a tied head.

    vocabulary: of the model; the tokenizer knows the first 16, and token 15 ends a response.
    """
    config = tiny_config("qwen2", True, vocab=vocabulary, hidden=64, heads=2, feed_forward=96)
    write_tiny_model(home / "model", config, 0, make_tokenizer())
    sums = [(a, b) for a in range(4) for b in range(5)]
    rows = [{"prompt": f"{a}+{b}=", "response": f" #### {a + b}"} for a, b in sums]
    lines = [
        json.dumps(row | {"answer": str(a + b)}) for row, (a, b) in zip(rows, sums, strict=True)
    ]
    (home / "rows.jsonl").write_text("\n".join(lines[:16]) + "\n")
    (home / "held_out.jsonl").write_text("\n".join(lines[16:]) + "\n")


def write_config(home: Path, name: str, config: dict[str, Any]) -> Path:
    path = home / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@dataclass(frozen=True)
class Outcome:
    """code: the exit code; out, err: what was printed."""

    code: int
    out: str
    err: str


class Command:
    """`plimsoll WORDS...`, started in `home` with pipes instead of a terminal; environment: besides
    that of the tests; supervised: whether the run is a child process, which is started again."""

    def __init__(
        self,
        home: Path,
        *words: str,
        environment: dict[str, str] | None = None,
        supervised: bool = False,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self._errors = home / f"{self.mark}.err"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "plimsoll", *words],
                cwd=home,
                env=os.environ
                | {MARK: self.mark, "PYTHONPATH": f"{home}:{SUPPORT}", "OMP_NUM_THREADS": "1"}
                # Titles of Ray's and vLLM's processes are written over their environments, and the
                # mark with them if it comes early there (setproctitle).
                | {"SPT_NOENV": "1"}
                | ({} if supervised else {VARIABLE: str(home / f"{self.mark}.json")})
                | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._lines: list[str] = []
        _latest[:] = [self]

    def read_until(self, start: str) -> str:
        """Wait for a line of output that starts so; gives it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if line.startswith(start):
                return line
        raise AssertionError(f"ended without {start!r}: {self._errors.read_text()}")

    def finish(self, seconds: float = _PATIENCE) -> Outcome:
        """Wait for the end."""
        try:
            rest, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise
        return Outcome(self.process.returncode, "".join(self._lines) + rest, self.errors)

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def processes(self) -> list[psutil.Process]:
        """All of the run that live, also those whose parent is gone."""
        return [p for p in psutil.process_iter() if _mark_of(p) == self.mark]

    def find(self, text: str) -> list[psutil.Process]:
        """Return the processes whose title holds this text, the oldest first."""
        found = [p for p in self.processes() if text in title(p)]
        return sorted(found, key=lambda p: p.create_time())

    def kill_all(self) -> None:
        for process in self.processes():
            process.kill()


def run(
    home: Path, *words: str, environment: dict[str, str] | None = None, supervised: bool = False
) -> Outcome:
    """Run the command to its end."""
    return Command(home, *words, environment=environment, supervised=supervised).finish()


def run_here(home: Path, *words: str) -> Outcome:
    """The same in this process, which spares the seconds that a new one imports for; so `err` may
    hold what libraries say."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(home), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return Outcome(code, out.getvalue(), err.getvalue())


def cut_off(whole: Path, copy: Path, step: int) -> None:
    """Copy a run as it was when it had saved that step: without what it saved later."""
    shutil.copytree(whole, copy)
    shutil.rmtree(copy / "model")
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)


_latest: list[Command] = []
"""The command that was started last, until its failure is noted."""


def wait_for(condition: Callable[[], object], what: str, seconds: float = _PATIENCE) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        if _latest and _latest[0].process.poll():  # it failed: what it leaves is soon done
            deadline = min(deadline, time.monotonic() + _AFTER_ITS_END)
            what = f"{what} of a command that ended with: {_latest[0].errors}"
            _latest.clear()
        time.sleep(0.1)


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics, without what the clock and the machine decide."""
    rows = read_rows(directory / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not _CLOCKED.match(k)} for row in rows]


def assert_reported(directory: Path) -> None:
    """The evaluations of a run report what a config is checked against."""
    known = load_any(str(directory / "config.yaml")).evaluation.written_names
    seen = {name for row in metrics(directory) for name in row if name.startswith("eval/")}
    assert seen == set(known)


def column(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _mark_of(process: psutil.Process) -> str | None:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        mark: str | None = process.environ().get(MARK)
    except psutil.Error:
        return None
    return mark


def main_lines(out: str) -> list[str]:
    """Return what a run printed, without warnings, waits, and the phases of its beginning."""
    beside = re.compile(r"warning: |waiting for |\w+: \w+ begins(?::|$)")
    return [line for line in out.splitlines() if not beside.match(line)]


def title(process: psutil.Process) -> str:
    """Return the title of a process, or its command line; nothing for a process that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
