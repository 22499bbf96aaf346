"""A gradient that is not a number ends the step with an error, and leaves the weights alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_cases import BATCHES, RATES, Setting, make_batch, own_packs, zero_stage
from ranks import RankProcesses

from plimsoll.config.base import Choice
from plimsoll.engine.policy import PolicyObjective
from plimsoll.engine.process_group import Place
from plimsoll.engine.streams import PolicyStream
from plimsoll.engine.worker import Worker
from plimsoll.errors import PlimsollError
from plimsoll.records import to_packed


def step_on_nan(place: Place, model: Path, setting: Setting) -> tuple[str, bool]:
    """What a step with NaN advantages says, and whether the weights are as they were."""
    worker = Worker(place)
    worker.load_policy("actor", setting.role(model), temperature=1.0)
    batch = make_batch((9, 12), seed=3)
    packs = own_packs(place, batch, 64)
    advantages = [np.full_like(a, np.nan) for a in batch.advantages]
    streams = [PolicyStream(to_packed(p, advantages), None, None) for p in packs]
    before = [worker.log_probs("actor", own_packs(place, BATCHES[0], 64))]
    said = ""
    try:
        worker.train_policy(
            packs,
            streams,
            batch.counts,
            PolicyObjective(Choice(name="clip"), "k3", 0.0, 0.0),
            RATES[0],
        )
    except PlimsollError as error:
        said = str(error)
    after = [worker.log_probs("actor", own_packs(place, BATCHES[0], 64))]
    same = all(np.array_equal(x, y) for x, y in zip(before[0], after[0], strict=True))
    return said, same


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (0, "bfloat16"), (2, "float32"), (3, "bfloat16")]
)
def test_a_gradient_that_is_not_finite_is_an_error(
    one_rank: RankProcesses, tied: Path, stage: int, dtype: str
) -> None:
    setting = Setting(zero_stage(stage), dtype="bfloat16" if dtype == "bfloat16" else "float32")
    [(said, same)] = one_rank.run(step_on_nan, tied, setting)
    assert "the gradient norm is" in said and "not finite" in said
    assert same
