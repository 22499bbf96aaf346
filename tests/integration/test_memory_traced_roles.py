"""`plimsoll plan --trace`: the formulas beside a forward and backward on fake tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import PPO, run_here, write_config

ON_A10 = "plan", "ppo.yaml", "--cluster", "A10", "--trace"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a config of a shipped shape: neither weights nor data are needed."""
    model = {"model": {"path": "Qwen/Qwen2.5-0.5B"}}
    config = PPO | {"actor": model, "critic": model}
    config |= {"data": PPO["data"] | {"max_tokens": 248}}
    config |= {"batch": PPO["batch"] | {"micro_batch_tokens": 512}}
    write_config(tmp_path, "ppo", config)
    return tmp_path


def test_every_role_is_traced_and_agrees(home: Path) -> None:
    found = run_here(home, *ON_A10, "--json")
    assert found.code == 0, found.err
    traced = {one["role"]: one for one in json.loads(found.out)["traced"]}
    assert set(traced) == {"actor", "critic", "reference"}
    for one in traced.values():
        assert one["tokens"] == 512
        predicted, seen = one["predicted_activation_bytes"], one["activation_bytes"]
        assert predicted == pytest.approx(seen, rel=0.05)
    assert traced["reference"]["gradient_bytes"] == 0 < traced["actor"]["gradient_bytes"]


def test_the_table_names_roles_and_errors(home: Path) -> None:
    found = run_here(home, *ON_A10)
    lines = found.out.splitlines()
    start = lines.index("activations of one micro-batch, traced on fake tensors")
    rows = [line.split() for line in lines[start + 2 :] if line]
    assert [row[0] for row in rows] == ["actor", "critic", "reference"]
    assert all(row[-1].endswith("%") for row in rows)
    assert all(len(line) <= 80 for line in lines)
