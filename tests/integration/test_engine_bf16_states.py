"""Masters and moments in bfloat16: they learn what float32 ones do, as far as 8 bits go, and a
checkpoint of them is gone on from bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from decided import decided_model, decided_role
from torch import Tensor, nn

from plimsoll.config.engine import TrainedRole
from plimsoll.engine.process_group import Place, free_port, join, leave
from plimsoll.engine.zero.engine import ZeroEngine

RATE = 1e-2
STEPS = 3


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    place = Place(0, 1, 0, "127.0.0.1", free_port(), "cpu", 1)
    join(place)
    yield place
    leave()


def engine(place: Place, stage: int, offload: str, states: str) -> ZeroEngine:
    zero = {"stage": stage, "optimizer_offload": offload, "state_dtype": states}
    model = decided_model("none", dtype="bfloat16")
    role = decided_role(TrainedRole.model_validate({"model": model, "zero": zero}))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    return ZeroEngine(module.bfloat16(), role, place)


def learn(trained: ZeroEngine, seed: int) -> list[Tensor]:
    """The masters after one step."""
    torch.manual_seed(seed)
    inputs = torch.randn(16, 64, dtype=torch.bfloat16)
    trained.backward(trained.forward(inputs).float().square().mean())
    trained.step(RATE)
    return [master.detach().clone().flatten() for master in trained.masters()]


@pytest.mark.parametrize(("stage", "offload"), [(2, "none"), (2, "cpu"), (3, "none")])
def test_they_learn_and_go_on_from_a_checkpoint(
    place: Place, stage: int, offload: str, tmp_path: Path
) -> None:
    narrow, wide = (engine(place, stage, offload, s) for s in ("bfloat16", "float32"))
    before = torch.cat([master.detach().flatten() for master in wide.masters()])
    for seed in range(STEPS):
        found, wanted = (torch.cat(learn(one, seed)) for one in (narrow, wide))
    assert (found.dtype, wanted.dtype) == (torch.bfloat16, torch.float32)
    assert float((wanted - before).abs().mean()) > RATE
    assert float((found.float() - wanted).abs().mean()) < RATE / 10

    narrow.save(tmp_path / "checkpoint")
    again = engine(place, stage, offload, "bfloat16")
    again.restore(tmp_path / "checkpoint")
    for one, other in zip(learn(narrow, STEPS), learn(again, STEPS), strict=True):
        assert torch.equal(one, other)
