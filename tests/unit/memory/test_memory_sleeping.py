"""What the host keeps of engines that sleep, against blocks that are added up by hand."""

from __future__ import annotations

import pytest

from plimsoll.config.rollout import RolloutConfig
from plimsoll.sampler.price import STARTING, Sampler
from plimsoll.sampler.vllm.holdings import pinned_copy, sleep_items
from plimsoll.sampler.vllm.sampler import VllmSampler, vllm_sampler
from plimsoll.shapes.known_models import known_models, read_shape
from plimsoll.timeline.items import Moment

MIB = 2**20
ASLEEP = Moment("train_actor", "step")
MOMENTS = frozenset({STARTING, ASLEEP})


def sampler(model: str, **vllm: object) -> VllmSampler:
    rollout = RolloutConfig.model_validate(
        {"vllm": {"memory_share": 0.5, **vllm}, "dtype": "bfloat16"}
    )
    return vllm_sampler(Sampler(rollout, read_shape(model), longest=1024, sequences=64))


def test_blocks_of_a_model() -> None:
    """Qwen2.5-7B: hidden 3584, queries, keys and values 4608 together, an MLP of 18944, a table and
    a head of 152,064 rows, 28 layers, 2 bytes; norms and biases share 2 MiB."""
    qkv, out, gate_up, down = 32, 32, 512, 256  # MiB, of 31.5, 24.5, 259 and 129.5
    table = 2048  # of 1,039.5
    small = 2 * (57 * 3584 + 28 * 4608)
    assert 0 < small <= 2 * MIB
    by_hand = 28 * (qkv + out + gate_up + down) + 2 * table + 2
    assert pinned_copy(sampler("Qwen/Qwen2.5-7B")) == by_hand * MIB


def test_tensors_of_less_than_10_mib_share_blocks() -> None:
    """Qwen2.5-1.5B: hidden 1536, queries, keys and values 2048 together (6 MiB: three in 20, which
    take 32), the output 4.5 MiB (four), an MLP of 8960, a table of 151,936 rows."""
    shared = 10 * 32 + 7 * 32
    alone = 28 * (64 + 32) + 512  # of 52.5, 26.25 and 445.1
    assert pinned_copy(sampler("Qwen/Qwen2.5-1.5B")) == (shared + alone + 2) * MIB


def test_experts_of_a_layer_are_two_tensors_and_ranks_divide_them() -> None:
    """Qwen3-30B-A3B: 128 experts, 2048 to 768 and back; 48 layers, 4096 and 2 x 512 of attention,
    routers of 0.5 MiB."""
    experts = 48 * (1024 + 512)  # of 768 and 384
    attention = 48 * (32 + 16)  # of 20 and 16
    tables = 2 * 1024  # of 593.5
    small = 48 * 0.5 + 48 * 2 * (2 * 2048 + 2 * 128) / MIB + 2 * 2048 / MIB
    whole = experts + attention + tables + -(-small // 2) * 2
    assert pinned_copy(sampler("Qwen/Qwen3-30B-A3B")) == whole * MIB
    halves = sampler("Qwen/Qwen3-30B-A3B", tensor_parallel=2)
    assert 0.45 * whole * MIB < pinned_copy(halves) < 0.55 * whole * MIB


def test_blocks_of_the_stages_of_a_model() -> None:
    """The same as those of the whole, but for norms and biases, which share 2 MiB in each stage."""
    whole = pinned_copy(sampler("Qwen/Qwen2.5-7B"))
    stages = sampler("Qwen/Qwen2.5-7B", pipeline_parallel=4).stages
    assert [*map(pinned_copy, stages)] == [
        (7 * (32 + 32 + 512 + 256) + table + 2) * MIB for table in (2048, 0, 0, 2048)
    ]
    assert sum(map(pinned_copy, stages)) == whole + 3 * 2 * MIB


@pytest.mark.parametrize("model", known_models())
@pytest.mark.parametrize("parallel", [1, 2])
def test_no_weight_is_left_out_and_none_counted_twice(model: str, parallel: int) -> None:
    one = sampler(model, tensor_parallel=parallel)
    assert one.weights <= pinned_copy(one) < 2.2 * one.weights + 2 * MIB


def test_only_level_1_keeps_a_copy_and_only_after_the_first_sleep() -> None:
    one = sampler("Qwen/Qwen2.5-1.5B", sleep_level=1)
    (held,) = sleep_items(one, MOMENTS)
    assert held.item.bytes == pinned_copy(one) and held.item.where == "host"
    assert held.moments == {ASLEEP}
    assert not [*sleep_items(sampler("Qwen/Qwen2.5-1.5B", sleep_level=2), MOMENTS)]


def test_blocks_of_weights_of_8_bits_are_half_as_large() -> None:
    """Qwen2.5-7B: of 15.75 MiB (queries, keys and values), 12.25, 129.5 and 64.75; table and head
    keep 2 bytes."""
    narrow = sampler("Qwen/Qwen2.5-7B", arguments={"quantization": "fp8_per_channel"})
    assert pinned_copy(narrow) == (28 * (16 + 16 + 256 + 128) + 2 * 2048 + 2) * MIB
