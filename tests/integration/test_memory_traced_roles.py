"""The formulas beside a forward and backward on fake tensors, for each role of a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import PPO, write_config
from traced_roles import trace_activations

from plimsoll.jobs.which import load_any


def test_every_role_is_traced_and_agrees(tmp_path: Path) -> None:
    """A shipped shape needs neither weights nor data."""
    model = {"model": {"path": "Qwen/Qwen2.5-0.5B"}}
    config = PPO | {"actor": model, "critic": model}
    config |= {"data": PPO["data"] | {"max_tokens": 248}}
    config |= {"batch": PPO["batch"] | {"micro_batch_tokens": 512}}
    write_config(tmp_path, "ppo", config)
    spec = load_any(str(tmp_path / "ppo.yaml"), ())
    traced = {role: trace_activations(spec, role) for role in spec.models}
    assert set(traced) == {"actor", "critic", "reference"}
    for role in traced.values():
        assert role.work.tokens == 512
        assert role.predicted_activations == pytest.approx(role.traced.activations, rel=0.05)
    assert traced["reference"].traced.gradients == 0 < traced["actor"].traced.gradients
