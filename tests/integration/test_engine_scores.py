"""Log-probs at the sampling temperature and at 1, and values, are those of plain transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from decided import decided_model
from engine_cases import (
    BATCHES,
    RATES,
    SEED,
    Setting,
    own_packs,
    sft_step,
    zero_stage,
)
from engine_reference import (
    distance,
    plain_critic,
    plain_logprobs,
    plain_policy,
    plain_run,
    plain_values,
    saved_weights,
    sft_loss,
)
from ranks import RankProcesses

from plimsoll.config.engine import FrozenRole
from plimsoll.records import Floats, Pack
from plimsoll.trainer.process_group import Place
from plimsoll.trainer.worker import Worker
from plimsoll.trainer.zero.config import FrozenZeroConfig

TEMPERATURE = 0.7
SAMPLES = BATCHES[0].samples


@dataclass(frozen=True)
class Scores:
    """One array per pack. reference: of a frozen role with the actor's first weights."""

    packs: list[Pack]
    logprobs: list[Floats]
    at_one: list[Floats]
    again: list[Floats]
    reference: list[Floats]
    values: list[Floats]
    nll: float


def score(place: Place, model: Path, stage: int, offload: str, out: Path) -> Scores:
    """Everything of the rank's packs, after steps of the actor with scoring before each; the
    actor that they made is in `out`."""
    setting = Setting(zero_stage(stage))
    role = setting.role(model)
    worker = Worker(place)
    worker.load_model("actor", role, TEMPERATURE)
    frozen = FrozenRole.model_validate(
        {"model": role.model, "zero": {"stage": 3 if stage == 3 else 0, "offload": offload}}
    )
    worker.load_model("reference", frozen, TEMPERATURE)
    worker.load_model("critic", role, seed=SEED, head="value")
    packs = own_packs(place, BATCHES[0], 31)
    for batch, rate in zip(BATCHES, RATES, strict=True):
        worker.log_probs("actor", packs)  # must leave nothing behind
        sft_step(worker, place, batch, 31, rate)
    scores = Scores(
        packs=packs,
        logprobs=worker.log_probs("actor", packs),
        at_one=worker.probe_log_probs("actor", packs),
        again=worker.log_probs("actor", packs),
        reference=worker.log_probs("reference", packs),
        values=worker.values("critic", packs),
        nll=worker.nll("actor", packs),
    )
    worker.save_model("actor", out)
    return scores


def check(packs: list[Pack], got: list[Floats], want: list[torch.Tensor]) -> None:
    """want: one tensor per sample."""
    for pack, array in zip(packs, got, strict=True):
        expected = torch.cat([want[sample] for sample in pack.samples_S])
        torch.testing.assert_close(torch.from_numpy(array), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("stage", "offload"), [(2, "cpu"), (3, "none")])
def test_scores_are_those_of_transformers(
    stage: int, offload: str, untied: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    ranks = two_ranks.run(score, untied, stage, offload, tmp_path / "actor")
    want = plain_run(plain_policy(untied), sft_loss, BATCHES, 1.0)  # imitation is at temperature 1
    actor, first = plain_policy(tmp_path / "actor"), plain_policy(untied)
    critic = plain_critic(untied)
    with torch.no_grad():
        warm = [plain_logprobs(actor, s, TEMPERATURE)[0] for s in SAMPLES]
        at_one = [plain_logprobs(actor, s)[0] for s in SAMPLES]
        reference = [plain_logprobs(first, s, TEMPERATURE)[0] for s in SAMPLES]
        values = [plain_values(critic, s) for s in SAMPLES]
    assert distance(saved_weights(tmp_path / "actor"), want) < 1e-4
    assert (warm[1] - at_one[1]).abs().max() > 0.1 and (warm[1] - reference[1]).abs().max() > 0.1
    seen: list[int] = []
    for scores in ranks:
        seen += [int(sample) for pack in scores.packs for sample in pack.samples_S]
        check(scores.packs, scores.logprobs, warm)
        check(scores.packs, scores.at_one, at_one)
        check(scores.packs, scores.again, warm)
        check(scores.packs, scores.reference, reference)
        check(scores.packs, scores.values, values)
    assert sorted(seen) == list(range(len(SAMPLES)))
    total = -sum(float(logprobs.sum()) for logprobs in warm)
    assert sum(scores.nll for scores in ranks) == pytest.approx(total, rel=1e-5)


def score_frozen(place: Place, model: Path, stage: Literal[0, 3]) -> list[bytes]:
    """Return what a frozen role in 4 bits gives for the whole first batch."""
    worker = Worker(place)
    settings = decided_model(str(model), dtype="bfloat16", quantization="nf4")
    role = FrozenRole(model=settings).with_engine(FrozenZeroConfig(stage=stage))
    worker.load_model("reference", role, 1.0)
    packs = own_packs(Place(0, 1, "", 0, "cpu", 1), BATCHES[0], 31)
    return [array.tobytes() for array in worker.log_probs("reference", packs)]


def test_a_frozen_role_in_4_bits_can_be_divided(untied: Path, two_ranks: RankProcesses) -> None:
    whole, also_whole = two_ranks.run(score_frozen, untied, 0)
    assert two_ranks.run(score_frozen, untied, 3) == [whole, also_whole] == [whole, whole]
