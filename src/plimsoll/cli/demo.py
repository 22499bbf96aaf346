"""Run the stages of `plimsoll demo` in turn, each as a command with a process of its own.

So each job's memory is its own, as the plan of the job counts it. Each is supervised as a run is:
Ctrl-C saves and stops it, and a fault starts it again. The process of the demo loads nothing and
starts no threads, since each thread of its own could take the signals that it waits for.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from plimsoll.cli.supervisor import supervise
from plimsoll.errors import Interrupted, StageFailed
from plimsoll.run.output import silence

_TITLES = {
    "sft": "1. supervised fine-tuning",
    "ppo": "2. from there, PPO on Ray, DeepSpeed and vLLM",
    "grpo": "3. from there, GRPO in one process",
}
"""The titles of the jobs, in their order."""


def run_stages(directory: str, seed: int) -> None:
    """Run the demo in a directory: make the files, run the jobs, print the results.

    Raises:
        StageFailed: a stage ended with an error, which its process has printed.
        Interrupted: a stage was asked to stop, and has saved what it had.
    """
    own = ("demo", "--directory", directory, "--seed", str(seed))
    began = time.monotonic()
    _run("preparation", [*own, "--begin"])
    for job, title in _TITLES.items():
        _print_title(title)
        _run(job, [job, f"{directory}/{job}.yaml"])
    _print_title("4. what came of it")
    _run("results", [*own, "--end", f"{time.monotonic() - began:.0f}"])


def _run(stage: str, words: Sequence[str]) -> None:
    code = supervise(words)
    if code == Interrupted.exit_code:
        raise Interrupted("The demo is stopped. The same command goes on from there.")
    if code:
        raise StageFailed(
            f"the demo ended in its stage {stage}, with exit code {code}. After a remedy the same "
            "command goes on from there.",
            code,
        )


def _print_title(title: str) -> None:
    """Print a title; go on if the output has no reader, as a run does."""
    try:
        print(f"\n{f' {title} ':─^80}", flush=True)
    except BrokenPipeError:
        silence(sys.stdout.fileno())
