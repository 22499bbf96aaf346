"""Every job learns on the card of host memory, at three ZeRO stages, what it learns on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from ranks import RankProcesses
from zero_cases import Case, train_and_weigh

from plimsoll.trainer.worker import UpdateResult

JOBS = ("sft", "policy", "value", "dpo", "kto", "rm", "prm", "distill")


@dataclass(frozen=True)
class OnCpu:
    """A job's steps on a CPU without ZeRO."""

    job: str
    steps: list[UpdateResult]


@pytest.fixture(scope="module", params=JOBS)
def on_cpu(
    request: pytest.FixtureRequest,
    tied: Path,
    untied: Path,
    tmp_path_factory: pytest.TempPathFactory,
    one_rank: RankProcesses,
) -> OnCpu:
    case = Case(request.param, "full", 0, resumes=False)
    [seen] = one_rank.run(train_and_weigh, case, tied, untied, tmp_path_factory.mktemp("cpu"))
    return OnCpu(request.param, seen.steps)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_job_learns_on_a_card_what_it_learns_on_a_cpu(
    stage: int, on_cpu: OnCpu, tied: Path, untied: Path, tmp_path: Path, card_rank: RankProcesses
) -> None:
    """States sleep after the first steps; the last step of SFT is resumed."""
    case = Case(on_cpu.job, "full", stage, sleeps="states", resumes=on_cpu.job == "sft")
    [seen] = card_rank.run(train_and_weigh, case, tied, untied, tmp_path)
    assert seen.is_same
    for found, wanted in zip(seen.steps, on_cpu.steps, strict=True):
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-3, abs=1e-6)
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-3, abs=1e-5)
