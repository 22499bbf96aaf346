"""A step on the card of host memory is the step on a CPU, for every job and ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import RankProcesses
from zero_cases import Case, train_and_weigh


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("job", ["sft", "policy", "value", "dpo", "kto", "rm", "prm", "distill"])
def test_a_job_learns_on_a_card_what_it_learns_on_a_cpu(
    job: str,
    stage: int,
    tied: Path,
    untied: Path,
    tmp_path: Path,
    one_rank: RankProcesses,
    card_rank: RankProcesses,
) -> None:
    case = Case(job, "full", stage, sleeps="states")
    [wanted] = one_rank.run(train_and_weigh, case, tied, untied, tmp_path / "cpu")
    [found] = card_rank.run(train_and_weigh, case, tied, untied, tmp_path / "card")
    assert found.is_same and len(found.steps) == len(wanted.steps)
    for on_card, on_cpu in zip(found.steps, wanted.steps, strict=True):
        assert on_card.grad_norm == pytest.approx(on_cpu.grad_norm, rel=1e-3, abs=1e-6)
        assert on_card.metrics == pytest.approx(on_cpu.metrics, rel=1e-3, abs=1e-5)
