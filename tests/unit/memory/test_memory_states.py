"""Weights and states against numbers worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from decided import decided_model, decided_role
from hypothesis import given
from hypothesis import strategies as st
from some_roles import ACTOR, CRITIC, REFERENCE

from plimsoll.config.engine import AdapterConfig, TrainedRole
from plimsoll.model.price.form import trained_parameters
from plimsoll.resolve.roles import HeadKind
from plimsoll.shapes.known_models import find_shape
from plimsoll.timeline.items import (
    Moment,
    Tensors,
    job_moments,
    lifetimes,
    pinned_block,
    state_items,
)
from plimsoll.trainer.zero.settings import Counts, ZeroSizes, trained_counts
from plimsoll.trainer.zero.states import zero_states

MOMENTS = job_moments(
    (ACTOR, CRITIC, REFERENCE),
    ("rollout", "score", "train_critic", "train_actor", "sync", "save"),
)
SIZES = ZeroSizes(stage=2, ranks=1, accumulate=4, bucket=1000)


def textbook(parameters: int, ranks: int, stage: int) -> float:
    """GB of weights, gradients and states in mixed precision."""
    divisors = [ranks if stage >= least else 1 for least in (3, 2, 1)]
    kept = [
        Tensors("weights", name, "parameters", parameters, each, "ZeRO, table 1", divisor)
        for name, each, divisor in zip(
            ("weights", "gradients", "states"), (2, 2, 12), divisors, strict=True
        )
    ]
    return sum(one.bytes for one in kept) / 1e9


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_zero_papers_example(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters on 64 GPUs."""
    assert textbook(7_500_000_000, 64, stage) == pytest.approx(gigabytes, abs=0.05)


def seventy_billion(stage: int, accumulate: int = 4) -> dict[str, int]:
    """GB in host memory, over all of 8 ranks together, of a 70B model with Adam on the CPU."""
    counts = Counts(trained=70_000_000_000, frozen=0, largest=8192, element=2)
    sizes = ZeroSizes(stage, 8, accumulate, 1000, sub_group=1_000_000_000, offload=True)
    made = zero_states(counts, sizes, "cuda")
    return {one.name: 8 * one.bytes // 10**9 for one in made if one.where == "host"}


def test_adam_on_the_cpu_needs_more_than_three_fp32_groups() -> None:
    third = seventy_billion(stage=3)
    assert third["fp32 masters"] == 280
    assert third["moments"] == 560
    assert third["fp32 gradients of the optimizer"] == 280
    assert third["accumulated gradients"] == 280
    assert sum(third.values()) == 20 * 70

    second = seventy_billion(stage=2)
    assert second["staging buffer"] == 140
    assert sum(second.values()) == 18 * 70


def test_narrow_accumulation_saves_two_bytes_at_stage_3() -> None:
    assert sum(seventy_billion(stage=3, accumulate=2).values()) == 18 * 70


@pytest.mark.parametrize(("stage", "elements"), [(2, 500), (3, 300)])
def test_what_is_widened_is_a_rank_s_share(stage: int, elements: int) -> None:
    """It is a share of all gradients together, which may hold a tensor whole; at stage 3 of each
    gradient."""
    counts = Counts(trained=1000, frozen=0, largest=600, element=2)
    sizes = ZeroSizes(stage, 2, 4, 100, sub_group=10**9)
    made = {one.name: one.bytes for one in zero_states(counts, sizes, "cuda")}
    assert made["widened gradient"] == 4 * elements


def test_moments_come_with_the_first_step() -> None:
    counts = Counts(trained=1000, frozen=0, largest=10, element=2)
    kept = zero_states(counts, SIZES, "cuda")
    items = state_items(ACTOR, kept, MOMENTS)
    held = {one.item.name: one.moments for one in items}
    assert held["moments"] == {m for m in MOMENTS if m.phase != "load"}
    assert Moment("load", "build actor") in held["fp32 masters"]
    assert Moment("load", "read actor") not in held["fp32 masters"]
    assert Moment("load", "read critic", 1) in held["fp32 masters"]


def test_gradients_exist_in_their_own_phase_only() -> None:
    counts = Counts(trained=1000, frozen=0, largest=10, element=2)
    kept = zero_states(counts, SIZES, "cuda")
    items = state_items(CRITIC, kept, MOMENTS)
    held = {one.item.name: one.moments for one in items}
    instants = ("forward_backward", "backward", "reduce", "norm", "step")
    own = {Moment("train_critic", i) for i in instants}
    assert held["fp32 gradients"] == own
    assert held["copy to reduce"] == {Moment("train_critic", "reduce")}
    assert held["weights"] >= own | {Moment("train_actor", "step"), Moment("rollout", "generate")}


def test_a_role_exists_while_later_ones_are_loaded_and_not_before() -> None:
    critic = lifetimes(CRITIC, MOMENTS)["always"]
    assert Moment("load", "read actor") not in critic
    assert Moment("load", "read critic", 1) in critic
    assert Moment("load", "build reference", 2) in critic


def test_only_what_is_trained_has_states() -> None:
    """An adapter of 1,000 parameters on 1,000,000 frozen ones."""
    counts = Counts(trained=1000, frozen=1_000_000, largest=1000, element=2)
    made = zero_states(counts, SIZES, "cuda")
    sizes = {one.name: one.bytes for one in made}
    assert sizes["frozen weights"] == 2_000_000
    assert (sizes["weights"], sizes["fp32 masters"], sizes["moments"]) == (2000, 4000, 8000)


def test_four_bits_with_and_without_double_quantisation() -> None:
    for scales, each in ((4 / 64, 0.5625), (1 / 64 + 4 / (64 * 256), 0.516)):
        counts = Counts(0, 0, 0, 2, quantized=64 * 256 * 1000, scales=scales)
        made = zero_states(counts, SIZES, "cuda")
        size = sum(one.bytes for one in made)
        assert size / counts.quantized == pytest.approx(each, abs=0.0005)


def test_stage_3_gathers_at_most_what_it_may_keep_live() -> None:
    counts = Counts(trained=7_000_000_000, frozen=0, largest=10, element=2, small=1_000_000)
    sizes = ZeroSizes(3, 8, 4, 1000, prefetch=50_000_000, live=1_000_000_000, sub_group=10**9)
    made = {one.name: one.bytes for one in zero_states(counts, sizes, "cuda")}
    assert made["live parameters"] == 2_000_000_000
    assert made["prefetch bucket"] == 100_000_000
    assert made["small parameters kept whole"] == 2_000_000
    assert made["copy of a sub-group"] == 4 * 7_000_000_000 // 8


def test_one_rank_gathers_nothing() -> None:
    counts = Counts(trained=1000, frozen=0, largest=10, element=2)
    made = zero_states(counts, ZeroSizes(3, 1, 4, 10, live=10**9, sub_group=10**9), "cuda")
    assert "live parameters" not in {one.name for one in made}


def test_on_a_cpu_everything_is_in_plain_host_memory() -> None:
    counts = Counts(trained=1000, frozen=10, largest=10, element=2)
    sizes = ZeroSizes(2, 2, 4, 10, offload=True, pinned=True)
    made = zero_states(counts, sizes, "cpu")
    assert {one.where for one in made} == {"host"}
    assert not any(one.pinned for one in made)


def test_pinned_blocks_are_rounded_one_by_one() -> None:
    one = Tensors(
        "optimizer states", "masters", "parameters", 2500, 4, "", where="host", pinned=1000
    )
    assert one.bytes == 2 * 4096 + 2048  # 4,000 and 4,000 and 2,000 bytes
    assert "powers of two" in one.formula


@given(st.integers(1, 2**40))
def test_a_pinned_block_is_the_next_power_of_two(size: int) -> None:
    block = pinned_block(size)
    assert size <= block < 2 * size
    assert block & (block - 1) == 0


def test_an_empty_block_takes_nothing() -> None:
    assert pinned_block(0) == 0


@given(st.integers(1, 10**12), st.integers(1, 4096))
def test_shares_cover_the_whole(elements: int, ranks: int) -> None:
    one = Tensors("weights", "weights", "parameters", elements, 2, "", ranks)
    assert 0 <= ranks * one.bytes - 2 * elements < 2 * ranks


def test_a_formula_has_its_numbers() -> None:
    one = Tensors("weights", "weights", "trained parameters", 7_615_616_512, 2, "", 8)
    figures = re.findall(r"[\d,]+", one.formula)
    assert figures == ["2", "7,615,616,512", "8"] and "trained parameters" in one.formula
    assert one.bytes == 1_903_904_128


def test_streams_of_their_own_hold_what_is_on_its_way() -> None:
    """Three buckets before the one that is filled, of gradients and of weights; and the memory of
    the stream that reduces, which no other may use."""
    counts = Counts(trained=7_000, frozen=0, largest=10, element=2)
    sizes = ZeroSizes(3, 8, 4, 1000, prefetch=500, live=1000, sub_group=10**9)
    apart = replace(sizes, overlaps=True)
    alone, beside = (
        {one.name: one for one in zero_states(counts, each, "cuda")} for each in (sizes, apart)
    )
    assert beside.keys() - alone.keys() == {"gradients to reduce"}
    assert beside["gradients to reduce"].bytes == 2 * 4 * 1000
    assert (alone["prefetch bucket"].bytes, beside["prefetch bucket"].bytes) == (1000, 4 * 1000)
    assert beside["copy to reduce"] == replace(alone["copy to reduce"], life="training")


def test_frozen_routers_have_no_states() -> None:
    """Qwen3-30B-A3B: 48 layers, whose routers have 128 rows of 2048."""
    shape = find_shape("Qwen/Qwen3-30B-A3B")
    role = decided_role(TrainedRole(model=decided_model("none", dtype="bfloat16")))
    frozen = role.model_copy(update={"freeze": "router"})
    routers, whole = 48 * 128 * 2048, 30_532_122_624
    heads: dict[HeadKind, int] = {"policy": whole, "value": whole + 2048 - 151_936 * 2048}
    for head, every in heads.items():
        assert trained_parameters(role, shape, head) == every
        assert trained_parameters(frozen, shape, head) == every - routers
    counts = trained_counts(frozen, shape, "policy", SIZES)
    assert (counts.trained, counts.frozen) == (whole - routers, routers)
    adapted = role.model_copy(update={"adapter": AdapterConfig(targets=("q_proj",))})
    both = adapted.model_copy(update={"freeze": "router"})
    assert trained_counts(both, shape, "policy", SIZES) == trained_counts(
        adapted, shape, "policy", SIZES
    )
    dense = find_shape("Qwen/Qwen2.5-7B")
    assert trained_parameters(frozen, dense, "policy") == dense.parameters


@pytest.mark.parametrize(
    ("model", "together"),
    [
        ("Qwen/Qwen3-30B-A3B", 128 * 3 * 2048 * 768 + 128 * 2048),
        ("Qwen/Qwen3-235B-A22B", 128 * 3 * 4096 * 1536 + 128 * 4096),
        ("Qwen/Qwen2-57B-A14B", 64 * 3 * 3584 * 2560 + 64 * 3584 + 3 * 3584 * 20_480),
        ("Qwen/Qwen2.5-7B", 0),
    ],
)
def test_stage_3_gathers_the_experts_of_a_layer_together(model: str, together: int) -> None:
    """At least as much as that, whatever DeepSpeed's limit of what is gathered."""
    sizes, shape = ZeroSizes(3, 8, 4, 1000, live=10**9, persistence=100_000), find_shape(model)
    for every, kept in ((1, 0), (2, shape.layers // 2)):
        checkpointed = {"gradient_checkpointing": True, "checkpoint_every": every}
        settings = decided_model("none", dtype="bfloat16", **checkpointed)
        counts = trained_counts(decided_role(TrainedRole(model=settings)), shape, "policy", sizes)
        assert counts.together == together
        stacked = sum(one.parameters for one in shape.linears if one.stacked > 1)
        assert counts.kept == stacked * kept // shape.layers  # a view of them is kept by autograd
        live = {one.name: one.elements for one in zero_states(counts, sizes, "cuda")}
        assert live["live parameters"] == max(10**9, together) + counts.kept
