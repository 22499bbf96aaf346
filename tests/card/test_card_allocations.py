"""A step in which an allocation fails is given up whole, and taken again as if it had not been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import BATCHES, OBJECTIVE, Setting, cut_for, own_packs, policy_columns, zero_stage
from fakecard.control import fail_at
from ranks import RankProcesses

from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Abandoned, Worker

FAILURES = (5, 25, 60, 90, 120)
"""Numbers of allocations of a step; the step has more."""


def train_through(place: Place, model: Path, stage: int) -> tuple[list[str], list[float]]:
    """Take a step undisturbed, and one with each of the failures; return what came of them.

    The gradients' norms are those of steps that went through, at once or the second time.
    """
    outcomes, norms = [], []
    for failure in (-1, *FAILURES):
        torch.manual_seed(0)
        worker = Worker(place)
        worker.load_model("actor", Setting(zero_stage(stage)).role(model), 1.0)
        packs = own_packs(place, BATCHES[0], 31)
        columns = cut_for(packs, policy_columns(BATCHES[0]))
        step = "actor", packs, columns, BATCHES[0].counts, OBJECTIVE, 1e-3
        fail_at(failure)
        outcome = worker.try_to_train(*step)
        fail_at(-1)
        outcomes.append(type(outcome).__name__)
        if isinstance(outcome, Abandoned):
            outcome = worker.try_to_train(*step)
        assert not isinstance(outcome, Abandoned)
        norms.append(outcome.grad_norm)
    return outcomes, norms


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_full_card_costs_no_gradient(stage: int, tied: Path, card_rank: RankProcesses) -> None:
    [(outcomes, norms)] = card_rank.run(train_through, tied, stage)
    assert outcomes[0] != "Abandoned" and outcomes.count("Abandoned") >= 3
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)
