"""The same batch gives the same training on one rank and two, at every ZeRO stage, with and
without offload, however it is split into micro-batches: that of plain PyTorch.

Metrics, gradient norms and the weights after three steps are compared, so Adam's moments and the
fp32 masters are right too.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from choice import slow
from engine_cases import (
    BATCHES,
    SPARSE,
    Setting,
    own_packs,
    train_ppo,
    train_sft,
    train_sft_gathering,
    train_sft_with_dry_step,
    zero_stage,
)
from engine_reference import (
    PlainRun,
    distance,
    plain_critic,
    plain_policy,
    plain_run,
    policy_loss,
    saved_weights,
    sft_loss,
    value_loss,
    whole_distance,
    worst_error,
)
from ranks import RankProcesses

from plimsoll.engine.process_group import Place
from plimsoll.engine.zero.config import ZeroConfig

PLAIN = {f"zero-{stage}": zero_stage(stage) for stage in (0, 1, 2, 3)}
OFFLOADED = {
    "zero-1-cpu-adam": ZeroConfig(stage=1, optimizer_offload="cpu"),
    "zero-2-cpu-adam": ZeroConfig(stage=2, optimizer_offload="cpu"),
    "zero-3-cpu-adam": ZeroConfig(stage=3, optimizer_offload="cpu"),
    "zero-3-all-cpu": ZeroConfig(stage=3, optimizer_offload="cpu", parameter_offload="cpu"),
    "zero-3-weights-cpu": ZeroConfig(stage=3, parameter_offload="cpu"),
}
ALL = PLAIN | OFFLOADED
BUCKETS = {
    f"zero-{stage}-small-buckets": zero_stage(stage, bucket_elements=150_000) for stage in (1, 2, 3)
}
BF16_GRADIENTS = {
    f"zero-{stage}-bf16-gradients": zero_stage(stage, gradient_dtype="bfloat16")
    for stage in (0, 1, 2, 3)
} | {
    "zero-3-all-cpu-bf16-gradients": zero_stage(
        3, gradient_dtype="bfloat16", optimizer_offload="cpu", parameter_offload="cpu"
    )
}
ONE_PACK = 100_000
"""A budget that all sequences of a rank fit in."""
LARGE = 1e4
"""A gradient norm that no step reaches."""
METRICS_BOUND = 1e-5
WEIGHTS_BOUND = 5e-5
"""Of the way that the weights went; see `distance`."""
BF16_BOUND = 0.05
"""As WEIGHTS_BOUND, of all weights together, which bfloat16 rounds to 8 bits."""


@cache
def plain_sft(
    model: Path, dtype: torch.dtype = torch.float32, bound: float = 1.0, sparse: bool = False
) -> PlainRun:
    batches = SPARSE if sparse else BATCHES
    return plain_run(plain_policy(model, dtype), sft_loss, batches, bound)


@cache
def plain_ppo(
    model: Path, dtype: torch.dtype = torch.float32, bound: float = 1.0, sparse: bool = False
) -> tuple[PlainRun, PlainRun]:
    """Of the actor and the critic."""
    batches = SPARSE if sparse else BATCHES
    return (
        plain_run(plain_policy(model, dtype), policy_loss, batches, bound),
        plain_run(plain_critic(model, dtype), value_loss, batches, bound),
    )


def check_sft(
    ranks: RankProcesses, model: Path, setting: Setting, out: Path, *, sparse: bool = False
) -> None:
    """In fp32, against plain PyTorch."""
    want = plain_sft(model, bound=setting.max_grad_norm, sparse=sparse)
    results = ranks.run(train_sft, model, setting, SPARSE if sparse else BATCHES, out)
    assert worst_error(results, want) < METRICS_BOUND
    assert distance(saved_weights(out), want) < WEIGHTS_BOUND


def check_ppo(
    ranks: RankProcesses, model: Path, setting: Setting, out: Path, *, sparse: bool = False
) -> None:
    """In fp32, against plain PyTorch."""
    actor, critic = plain_ppo(model, bound=setting.max_grad_norm or LARGE, sparse=sparse)
    results = ranks.run(train_ppo, model, setting, SPARSE if sparse else BATCHES, out)
    assert worst_error([of_actor for of_actor, _ in results], actor) < METRICS_BOUND
    assert worst_error([of_critic for _, of_critic in results], critic) < METRICS_BOUND
    assert distance(saved_weights(out / "actor"), actor) < WEIGHTS_BOUND
    assert distance(saved_weights(out / "critic"), critic) < WEIGHTS_BOUND


def test_the_bounds_see_what_they_should(tied: Path) -> None:
    """Clipping is active in every step, and a run without it is far outside of the bounds; so is
    one whose norms and biases decay."""
    clipped, free = plain_sft(tied), plain_sft(tied, bound=LARGE)
    assert all(step.grad_norm > 2 for step in clipped.steps)
    assert distance(free.after, clipped) > 1000 * WEIGHTS_BOUND
    decaying = {n: w * (1 - 1e-3 * 0.1) for n, w in clipped.after.items()}  # the smallest rate's
    assert distance(decaying, clipped) > 100 * WEIGHTS_BOUND
    one_step = plain_run(plain_policy(tied), sft_loss, BATCHES[:1] * 3, 1.0)
    assert distance(one_step.after, clipped) > 1000 * WEIGHTS_BOUND


ALONE = ("zero-0", "zero-2-cpu-adam")
TOGETHER = ("zero-1", "zero-3", "zero-3-all-cpu", "zero-3-weights-cpu")
"""What is tested on one rank and on two each time. Others are divided alike in tests of the critic,
of batches with little to learn, of bfloat16 and of the matrix."""


@pytest.mark.parametrize(
    ("zero", "ranks"),
    [
        *((zero, 2) for zero in TOGETHER),
        *((zero, 1) for zero in ALONE),
        *(slow(zero, 2) for zero in ALL if zero not in TOGETHER),
        *(slow(zero, 1) for zero in ALL if zero not in ALONE),
    ],
)
def test_sft_is_that_of_plain_pytorch(
    zero: str, ranks: int, tied: Path, tmp_path: Path, pool: RankProcesses
) -> None:
    check_sft(pool, tied, Setting(zero=ALL[zero]), tmp_path)


@pytest.mark.parametrize(
    "zero", [slow(zero) if zero != "zero-2-small-buckets" else zero for zero in PLAIN | BUCKETS]
)
def test_one_micro_batch_and_a_clip_that_is_not_reached(
    zero: str, tied: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    setting = Setting(
        zero=(PLAIN | BUCKETS)[zero], micro_batch_tokens=ONE_PACK, max_grad_norm=LARGE
    )
    check_sft(two_ranks, tied, setting, tmp_path)


@pytest.mark.parametrize(
    ("zero", "ranks"),
    [
        *((zero, 2) for zero in ("zero-0", "zero-1", "zero-3-all-cpu")),
        *(slow(zero, 2) for zero in ("zero-2", "zero-3")),
        *(slow(zero, 1) for zero in (*PLAIN, "zero-3-all-cpu")),
    ],
)
def test_actor_and_critic_are_those_of_plain_pytorch(
    zero: str, ranks: int, untied: Path, tmp_path: Path, pool: RankProcesses
) -> None:
    """Without clipping, and with gradient checkpointing."""
    setting = Setting(zero=ALL[zero], max_grad_norm=0.0, checkpointing=True)
    check_ppo(pool, untied, setting, tmp_path)


def test_selective_checkpointing_where_stage_3_gathers_anew(
    tied: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    """DeepSpeed gathers within the layer, and its linear adds its bias to what is kept."""
    setting = Setting(zero=zero_stage(3, bucket_elements=150_000), checkpointing="selective")
    results = two_ranks.run(train_sft_gathering, tied, setting, BATCHES, tmp_path)
    want = plain_sft(tied)
    assert worst_error(results, want) < METRICS_BOUND
    assert distance(saved_weights(tmp_path), want) < WEIGHTS_BOUND


def test_backward_gathers_from_the_nodes_own_copy(
    tied: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    """ZeRO++'s hpZ, both ranks being of one node."""
    setting = Setting(zero=zero_stage(3, hpz_partition_size=2, bucket_elements=150_000))
    check_sft(two_ranks, tied, setting, tmp_path)


def test_the_sparse_batches_are_sparse() -> None:
    packs = [
        [own_packs(Place(rank, 2, 0, "", 0, "cpu", 1), batch, 31) for rank in (0, 1)]
        for batch in SPARSE
    ]
    assert [[p.samples_S.tolist() for p in rank] for rank in packs[0]] == [[[0]], [[-1]]]
    for batch in packs[1:]:
        loss_mask = sorted(sum(pack.loss_tokens for pack in rank) for rank in batch)
        assert loss_mask[0] == 0 and loss_mask[1] > 0


@pytest.mark.parametrize("zero", ["zero-2-cpu-adam", "zero-3-all-cpu"])
def test_ranks_without_learned_tokens_change_nothing(
    zero: str, untied: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    check_sft(two_ranks, untied, Setting(zero=ALL[zero]), tmp_path, sparse=True)


@pytest.mark.parametrize("zero", [slow("zero-0"), slow("zero-1"), "zero-2", "zero-3"])
def test_actor_and_critic_on_ranks_without_learned_tokens(
    zero: str, untied: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    check_ppo(two_ranks, untied, Setting(zero=ALL[zero]), tmp_path, sparse=True)


def bf16(zero: ZeroConfig) -> Setting:
    return Setting(zero=zero, dtype="bfloat16")


BF16 = ("zero-0", "zero-2", "zero-3-all-cpu", "zero-1-bf16-gradients", "zero-3-bf16-gradients")
"""Each stage, and each way to keep gradients, each time; other pairs of them are slow."""


@pytest.mark.parametrize(
    "zero",
    [*BF16, *(slow(zero) for zero in PLAIN | BF16_GRADIENTS if zero not in BF16)],
)
def test_bf16_with_fp32_masters(
    zero: str, tied: Path, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    want = plain_sft(tied, torch.bfloat16)
    setting = bf16((ALL | BF16_GRADIENTS)[zero])
    results = two_ranks.run(train_sft, tied, setting, BATCHES, tmp_path)
    assert worst_error(results, want) < 5e-3
    assert whole_distance(saved_weights(tmp_path), want) < BF16_BOUND


def test_actor_and_critic_in_bf16(untied: Path, tmp_path: Path, two_ranks: RankProcesses) -> None:
    actor, critic = plain_ppo(untied, torch.bfloat16)
    results = two_ranks.run(train_ppo, untied, bf16(ZeroConfig(stage=2)), BATCHES, tmp_path)
    assert worst_error([of_actor for of_actor, _ in results], actor) < 2e-2
    assert worst_error([of_critic for _, of_critic in results], critic) < 2e-2
    assert whole_distance(saved_weights(tmp_path / "actor"), actor) < 0.1
    assert whole_distance(saved_weights(tmp_path / "critic"), critic) < 0.1


def test_a_dry_step_that_is_not_forgotten_would_be_seen(
    tied: Path, tmp_path: Path, one_rank: RankProcesses
) -> None:
    """At stage 0 in bf16 DeepSpeed takes a dry step, which Adam must not count."""
    want = plain_sft(tied, torch.bfloat16)
    setting = bf16(ZeroConfig(stage=0))
    one_rank.run(train_sft, tied, setting, BATCHES, tmp_path / "right")
    one_rank.run(train_sft_with_dry_step, tied, setting, BATCHES, tmp_path / "wrong")
    assert whole_distance(saved_weights(tmp_path / "right"), want) < BF16_BOUND
    assert whole_distance(saved_weights(tmp_path / "wrong"), want) > 3 * BF16_BOUND
