"""Learning from pairs gives the same training on one rank and two, at every ZeRO stage, however it
is split into micro-batches: that of plain PyTorch, unpacked and with whole logits.

Metrics, gradient norms and the weights after three steps are compared.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from choice import slow
from engine_cases import Setting, zero_stage
from engine_reference import PlainRun, distance, plain_policy, plain_run, saved_weights, worst_error
from pair_cases import (
    DPO,
    ONE_PAIR,
    PAIR_BATCHES,
    SIMPO,
    Case,
    PlainDpo,
    own_pair_packs,
    plain_simpo,
    train_pairs,
)
from ranks import RankProcesses

from plimsoll.engine.process_group import Place

TIGHT = 39
"""A budget that just holds the longest pair."""
METRICS_BOUND = 1e-5
WEIGHTS_BOUND = 5e-5
"""Of the way that the weights went; see `distance`."""


@cache
def plain_dpo(model: Path, reference: Path, one_pair: bool = False) -> PlainRun:
    batches = ONE_PAIR if one_pair else PAIR_BATCHES
    return plain_run(plain_policy(model), PlainDpo(reference), batches, 1.0)


def test_the_splits_are_what_they_should_be() -> None:
    """Several packs on each rank, and a rank without a pair."""
    ranks = [Place(rank, 2, 0, "", 0, "cpu", 1) for rank in (0, 1)]
    for share, packs in ((True, 2), (False, 3)):
        own = [own_pair_packs(place, PAIR_BATCHES[0], TIGHT, share=share) for place in ranks]
        assert [len(of_rank) for of_rank in own] == [packs, packs]
    lone = [own_pair_packs(place, ONE_PAIR[0], TIGHT, share=True) for place in ranks]
    assert [[p.samples_S.tolist() for p in own] for own in lone] == [[[0, 1]], [[-1]]]


@pytest.mark.parametrize(
    ("stage", "budget", "share", "ranks"),
    [
        (0, TIGHT, True, 2),
        (2, TIGHT, False, 2),
        (2, 60, True, 1),
        (2, 1000, True, 2),
        (3, TIGHT, True, 1),
        slow(0, TIGHT, True, 1),
        slow(2, TIGHT, False, 1),
        slow(2, 60, True, 2),
        slow(2, 1000, True, 1),
        slow(3, TIGHT, True, 2),
    ],
)
def test_dpo_is_that_of_plain_pytorch(
    stage: int,
    budget: int,
    share: bool,
    ranks: int,
    tied: Path,
    untied: Path,
    tmp_path: Path,
    pool: RankProcesses,
) -> None:
    """With a reference of its own, label smoothing and an NLL term; layers are checkpointed where
    stage 3 gathers them."""
    want = plain_dpo(tied, untied)
    setting = Setting(zero_stage(stage), micro_batch_tokens=budget, checkpointing=stage == 3)
    case = Case(setting, DPO, untied, stage=3 if stage == 3 else 0, share=share)
    results = pool.run(train_pairs, tied, case, PAIR_BATCHES, tmp_path)
    assert worst_error(results, want) < METRICS_BOUND
    assert distance(saved_weights(tmp_path), want) < WEIGHTS_BOUND


@pytest.mark.parametrize("ranks", [slow(1), 2])
def test_simpo_is_that_of_plain_pytorch_and_needs_no_reference(
    ranks: int, tied: Path, tmp_path: Path, pool: RankProcesses
) -> None:
    want = plain_run(plain_policy(tied), plain_simpo, PAIR_BATCHES, 1.0)
    case = Case(Setting(zero_stage(2), micro_batch_tokens=TIGHT), SIMPO, None)
    results = pool.run(train_pairs, tied, case, PAIR_BATCHES, tmp_path)
    assert worst_error(results, want) < METRICS_BOUND
    assert distance(saved_weights(tmp_path), want) < WEIGHTS_BOUND


@pytest.mark.parametrize("stage", [slow(0), slow(2), 3])
def test_a_rank_without_a_pair_changes_nothing(
    stage: int, tied: Path, untied: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    want = plain_dpo(tied, untied, one_pair=True)
    case = Case(Setting(zero_stage(stage)), DPO, untied)
    results = two_ranks.run(train_pairs, tied, case, ONE_PAIR, tmp_path)
    assert worst_error(results, want) < METRICS_BOUND
    assert distance(saved_weights(tmp_path), want) < WEIGHTS_BOUND


def test_the_bounds_see_another_reference(tied: Path, untied: Path) -> None:
    """A run against the actor's own first weights is far outside of them."""
    assert distance(plain_dpo(tied, tied).after, plain_dpo(tied, untied)) > 1000 * WEIGHTS_BOUND
