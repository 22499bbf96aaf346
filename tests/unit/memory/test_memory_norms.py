"""Copies that gradient norms are taken of, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from some_roles import ACTOR

from plimsoll.resolve.run_spec import Phase
from plimsoll.timeline.items import Moment, Tensors, job_moments, state_items
from plimsoll.trainer.zero.settings import Counts, ZeroSizes
from plimsoll.trainer.zero.states import norm_copies

COUNTS = Counts(trained=10_000_000, frozen=0, largest=6_000_000, element=2)
SIZES = ZeroSizes(stage=2, ranks=1, accumulate=4, bucket=1000)


def copies(
    counts: Counts = COUNTS, cpu: bool = False, **sizes: object
) -> dict[str, tuple[str, int]]:
    changed = replace(SIZES, **sizes)  # type: ignore[arg-type]
    made = norm_copies(counts, changed, "cpu" if cpu else "cuda")
    return {one.name: (one.where, one.bytes) for one in made}


def test_one_gradient_at_a_time_is_copied_to_double() -> None:
    assert copies() == {"norm of a gradient": ("device", 48_000_000)}
    assert copies(stage=1, accumulate=2) == copies()


def test_of_a_gradient_a_rank_has_its_share_alone() -> None:
    assert copies(ranks=4)["norm of a gradient"] == ("device", 8 * 2_500_000)  # of all of them
    assert copies(ranks=4, stage=3)["norm of a gradient"] == ("device", 8 * 1_500_000)  # of each


@pytest.mark.parametrize("stage", [0, 1])
def test_nothing_is_copied_to_double_where_deepspeed_stays_in_fp32(stage: int) -> None:
    assert copies(stage=stage) == {}
    assert copies(replace(COUNTS, trained=0)) == {}


def test_a_gradient_that_waited_on_the_host_comes_back_for_its_norm() -> None:
    narrow = copies(offload=True, accumulate=2)
    assert narrow["gradient from the host"] == ("device", 2 * 6_000_000)
    assert "gradient from the host" not in copies(offload=True)  # in fp32 it never left
    divided = copies(offload=True, stage=3, ranks=2)
    assert divided["gradient from the host"] == ("device", 4 * 3_000_000)
    assert "gradient from the host" not in copies(cpu=True, offload=True, stage=3)


def test_offloaded_stage_3_copies_parts_of_a_huge_gradient() -> None:
    huge = replace(COUNTS, trained=10**9, largest=6 * 10**8)
    assert copies(huge, offload=True, stage=3)["norm of a gradient"][1] == 8 * 250_000_000
    assert copies(huge, stage=3)["norm of a gradient"][1] == 8 * 6 * 10**8


def test_on_cpu_the_copies_are_the_host_s() -> None:
    assert copies(cpu=True) == {"norm of a gradient": ("host", 48_000_000)}


def test_the_norm_is_taken_before_the_step() -> None:
    moments = job_moments((ACTOR,), frozenset[Phase]({"train_actor"}))
    step = Tensors("buffers", "copy", "gradients", 10, 4, "", life="stepping")
    kept = (*norm_copies(COUNTS, SIZES, "cuda"), step)
    items = state_items(ACTOR, kept, moments)
    held = {one.item.name: one.moments for one in items}
    assert held["norm of a gradient"] == {Moment("train_actor", "norm")}
    assert held["copy"] == {Moment("train_actor", "step")}
