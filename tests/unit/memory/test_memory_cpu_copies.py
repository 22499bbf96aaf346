"""What training on CPU copies, and what is left of a micro-batch when a bucket is reduced."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decided import decided_role
from some_roles import ACTOR

from plimsoll.config.engine import TrainedRole
from plimsoll.shapes.known_models import read_shape
from plimsoll.shapes.shape import MicroBatch
from plimsoll.timeline.items import Allocation, Moment, job_moments
from plimsoll.trainer.price import RoleWork, trained_role
from plimsoll.trainer.zero.settings import ZeroSizes
from plimsoll.trainer.zero.states import BOTH_TABLES, layers_left

READ = Moment("load", "read actor")
SHAPE = read_shape("Qwen/Qwen2.5-7B")
ENDS = 152_064 * 3584  # of its embedding, and of its head
MOMENTS = job_moments((ACTOR,), ("train_actor", "save"))


def left(bucket: int, stage: int = 2, adapted: bool = False, trained: int = 0) -> int:
    sizes = ZeroSizes(stage, ranks=1, accumulate=4, bucket=bucket)
    return layers_left(SHAPE, trained or SHAPE.parameters, sizes, () if adapted else BOTH_TABLES)


def test_a_bucket_is_full_before_a_layer_is_undone_where_the_head_fills_it() -> None:
    assert left(ENDS) == left(10**6) == SHAPE.layers == 28


def test_a_bucket_that_takes_half_of_the_layers_leaves_the_other_half() -> None:
    layers = SHAPE.parameters - 2 * ENDS
    assert left(ENDS + layers // 2) == 14
    assert left(1000, adapted=True, trained=4000) == 21


def test_a_bucket_that_takes_all_is_reduced_when_nothing_is_left() -> None:
    assert left(SHAPE.parameters) == 0
    assert left(10**6, stage=0) == 0


def test_the_bucket_and_the_highest_logits_are_never_there_together() -> None:
    names = role_moments()
    assert Moment("train_actor", "forward_backward") not in names["reduce bucket"]
    assert names["logits chunk"] == {Moment("train_actor", "forward_backward")}
    assert names["copy to reduce"] == {Moment("train_actor", "reduce")}


def test_eight_bit_adam_writes_five_copies_out_on_cpu() -> None:
    step = {one.item.name: one.item.bytes for one in role(optimizer={"kind": "adamw_8bit"})}
    assert step["copies for 8-bit AdamW"] == 5 * 4 * SHAPE.parameters
    assert "copies for 8-bit AdamW" not in role_moments()


def test_while_an_engine_is_built_zeros_come_beside_the_flat_copy_of_the_weights() -> None:
    second = {one.item.name: one for one in role()}
    zeros, flat = second["zeros for gradients"], second["flat copy of weights"]
    assert (zeros.item.bytes, flat.item.bytes) == (4 * SHAPE.parameters, 2 * SHAPE.parameters)
    assert zeros.moments == flat.moments == {Moment("load", "build actor")}
    offloaded = [one.item.name for one in role(zero={"optimizer_offload": "cpu"})]
    assert "zeros for gradients" not in offloaded  # there they stay: the optimizer's gradients


def test_gloo_reduces_a_clone_of_a_full_bucket_at_stage_3() -> None:
    bucket = 50_000_000
    third = {one.item.name: one for one in role(zero={"stage": 3, "bucket_elements": bucket})}
    clone, copy = third["gloo's copy to reduce"], third["copy to reduce"]
    assert clone.item.bytes == copy.item.bytes == 2 * ENDS  # the head alone is larger than a bucket
    assert clone.moments == copy.moments == {Moment("train_actor", "reduce")}
    assert "gloo's copy to reduce" not in role_moments()


def test_a_quantised_model_is_read_in_16_bits_on_cpu() -> None:
    four_bits = role(model={"quantization": "nf4"}, adapter={"rank": 8})
    [read] = [one for one in four_bits if one.item.name == "weights to quantise"]
    linears = SHAPE.parameters - 2 * ENDS - SHAPE.other_parameters
    assert read.moments == {READ}
    assert read.item.bytes == pytest.approx(2 * linears, rel=1e-3)


def role(**settings: object) -> tuple[Allocation, ...]:
    model = {
        "path": "Qwen/Qwen2.5-7B",
        "dtype": "bfloat16",
        "attention": "sdpa",
        "kernels": "own",
    } | settings.pop("model", {})  # type: ignore[operator]
    trained = decided_role(TrainedRole.model_validate({"model": model, **settings}))
    work = MicroBatch(tokens=512, sequences=2, longest=256, loss_tokens=512)
    learning = replace(ACTOR, settings=trained)
    return trained_role(RoleWork(learning, SHAPE, work, 1, "cpu", MOMENTS))


def role_moments() -> dict[str, frozenset[Moment]]:
    return {one.item.name: one.moments for one in role()}
