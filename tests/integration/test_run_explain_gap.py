"""The cause of a gap between trainer and engine is found by trying."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from commands import GRPO, run_here, write_config, write_task


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("gap")
    write_task(home)
    return home


def explained(home: Path, **rollout: Any) -> str:
    config = deepcopy(GRPO)
    config["rollout"] |= {"sampling": {"max_new_tokens": 8}, **rollout}
    config |= {"run": {"directory": "run", "steps": 1}, "rewards": {"answer": {"name": "length"}}}
    config["algorithm"] = {"advantage": {"name": "reinforce"}}
    write_config(home, "gap", config)
    done = run_here(home, "explain-gap", "gap.yaml")
    assert done.code == 0, done.err
    return done.out


def test_an_engine_in_a_coarser_dtype_is_found(home: Path) -> None:
    out = explained(home, dtype="bfloat16")
    gaps = {
        what: max(map(float, figures.split()[:2]))
        for what, figures in re.findall(r"^(\S.*?)  +([\d.e+-]+ +[\d.e+-]+ .*)$", out, re.MULTILINE)
    }
    assert gaps["engine in float32"] < 1e-5 < 1e-4 < gaps["as the config says"]
    assert "trainer in float32" not in gaps  # it is
    assert re.search(
        r"closes the gap.*\n  (both|engine) in float32 leaves .* --rollout\.dtype", out
    )


def test_no_gap_is_called_none(home: Path) -> None:
    assert "no larger than what rounding does" in explained(home)
