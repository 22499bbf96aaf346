"""The demo on a card, where vLLM's build for GPUs is installed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from commands import Command, wait_for

from plimsoll.machine.versions import installed_version
from plimsoll.run.ledger import read_ledger

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
    ),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray"),
    pytest.mark.skipif(installed_version("vllm") is None, reason="needs vLLM's build for GPUs"),
]


def test_the_demo_learns_on_the_card(tmp_path: Path) -> None:
    command = Command(tmp_path, "demo")
    outcome = command.finish(540)
    assert outcome.code == 0, outcome.err
    wait_for(lambda: not command.processes(), "the end of all processes of the demo")
    told = (tmp_path / "runs" / "demo" / "report.txt").read_text()
    sft, ppo, grpo = (float(x) for x in re.findall(r"^(?:exact|after).*: (0\.\d+)$", told, re.M))
    assert sft < 0.6 < min(ppo, grpo)
    for run in ("sft", "ppo", "grpo"):
        rows = read_ledger(tmp_path / "runs" / "demo" / run / "ledger.jsonl")
        assert any(row.measured.allocated for row in rows), run
