"""A reference that has scored everything leaves nothing behind when it is released."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from engine_cases import BATCHES, Setting, own_packs, zero_stage
from ranks import RankProcesses

from plimsoll.config.engine import FrozenRole
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker
from plimsoll.trainer.zero.config import FrozenZeroConfig


def left_behind(
    place: Place, model: Path, stage: Literal[0, 3], offload: Literal["none", "cpu"]
) -> tuple[int, int]:
    """Bytes of a reference's weights on the rank: once it has scored; and when it was released, and
    an actor was loaded and has scored too."""
    setting = Setting(zero_stage(3))
    worker = Worker(place)
    role = FrozenRole(model=setting.role(model).model).with_engine(
        FrozenZeroConfig(stage=stage, offload=offload)
    )
    worker.load_model("reference", role, 1.0)
    packs = own_packs(place, BATCHES[0], 31)
    scored = worker.sequence_log_probs("reference", packs)
    parameters = [weakref.ref(p) for p in worker._engines["reference"].module.parameters()]
    before = held(parameters)
    worker.release("reference")
    worker.load_model("actor", setting.role(model), 1.0)
    again = worker.sequence_log_probs("actor", packs)
    assert all((a == b).all() for a, b in zip(scored, again, strict=True))
    return before, held(parameters)


def held(parameters: Sequence[Callable[[], Any]]) -> int:
    """By those that are alive: whole, or this rank's part."""
    alive = [parameter for one in parameters if (parameter := one()) is not None]
    parts = [p.ds_tensor.data for p in alive if hasattr(p, "ds_tensor")]
    return sum(int(tensor.nbytes) for tensor in [*parts, *(p.data for p in alive)])


@pytest.mark.parametrize(("stage", "offload"), [(0, "cpu"), (3, "none")])
def test_nothing_is_left(
    stage: Literal[0, 3], offload: Literal["none", "cpu"], tied: Path, one_rank: RankProcesses
) -> None:
    [(before, after)] = one_rank.run(left_behind, tied, stage, offload)
    assert before > 10**6 and after == 0
