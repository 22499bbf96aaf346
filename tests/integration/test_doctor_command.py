"""`plimsoll doctor` on this machine, with the real libraries and with a driver made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

ENGINES = ("torch", "ray", "deepspeed", "vllm", "transformers")


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which must import no engine."""
    script = (
        "import sys, plimsoll.cli as cli\n"
        f"code = cli.main(['doctor', *{list(words)!r}])\n"
        f"assert not [name for name in {ENGINES!r} if name in sys.modules]\n"
        "sys.exit(code)"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)


def test_the_findings_of_this_machine_are_printed_as_json() -> None:
    done = doctor("--json")
    told = json.loads(done.stdout)
    states = {finding["name"]: finding["state"] for finding in told["findings"]}
    assert told["wrong"] == list(states.values()).count("wrong")
    assert done.returncode == (1 if told["wrong"] else 0), done.stderr
    assert {states[name] for name in ("python", "torch", "transformers", "deepspeed")} == {"ok"}
    assert "ray import" not in states  # it works here: the tests need it


def test_a_busy_card_and_a_lost_cluster_end_with_code_1(tell_cards: Callable[..., None]) -> None:
    busy = {"processes": [(4242, "python", 20900)]}
    tell_cards(("0, GPU-a, NVIDIA A10, 23028, 400, 21000, 8.6, 570.1, [N/A]", busy))
    done = doctor("--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert "kill 4242" in done.stdout and "127.0.0.1:1: no answer" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if "/" not in line) <= 80  # but paths
    assert done.stderr.startswith("error: ") and "gpu 0" in done.stderr
    assert "Traceback" not in done.stderr
