"""An Adam for the CPU that cannot be compiled or loaded is explained."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_OFFLOADED = """
import torch
from plimsoll.config.engine import TrainedRole
from plimsoll.config.engine import ModelConfig
from plimsoll.trainer.zero.config import ZeroConfig
from plimsoll.trainer.zero.optimizer import make_optimizer
from plimsoll.errors import PlimsollError

zero = ZeroConfig(stage=2, optimizer_offload="cpu")
try:
    model = ModelConfig(path="any", dtype="bfloat16")
    make_optimizer(torch.nn.Linear(2, 2), TrainedRole(model=model).with_engine(zero))
except PlimsollError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("CXX", "/no-compiler", r"cannot be compiled or loaded: \S+ 1: /no-compiler: not found\n"),
        ("CXX", "{folder}/empty", r"/cpu_adam.so: file too short\n"),  # or of another machine
        ("TORCH_EXTENSIONS_DIR", "/proc/nobody", r"No such file or directory: '/proc/nobody"),
    ],
    ids=["compiler", "library", "directory"],
)
def test_an_adam_that_cannot_be_compiled_is_explained(
    variable: str, value: str, told: str, tmp_path: Path
) -> None:
    """In a process of its own: one that has loaded it once compiles nothing."""
    settings = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    compiler = tmp_path / "empty"
    compiler.write_text(
        '#!/bin/sh\nwhile [ $# -gt 1 ]; do case $1 in -o|-MF) : > "$2";; esac; shift; done\n'
    )
    compiler.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", _OFFLOADED],
        env=settings | {variable: value.format(folder=tmp_path)},
        capture_output=True,
        text=True,
    )
    assert re.search(rf"Adam for the CPU .*{told}", done.stdout, re.DOTALL), done.stderr
