"""Where the card of host memory cannot be had, a process says why."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASK = "from fakecard.library import load_library, why_not; print(load_library(), why_not())"
TORCH = "import sys; from types import SimpleNamespace as S; sys.modules['torch'] = S(_C=1); "


@pytest.mark.parametrize(
    ("path", "script", "reason"),
    [("", ASK, "g++"), (os.environ["PATH"], TORCH + ASK, "before torch is imported")],
    ids=["no compiler", "torch is there"],
)
def test_a_process_without_the_card_says_why(path: str, script: str, reason: str) -> None:
    words = [sys.executable, "-c", script]
    done = subprocess.run(
        words, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("False") and reason in done.stdout
