"""Estimates of a step's time: each term against a figure worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decided import decided_model

from plimsoll.config.engine import AdapterConfig, FrozenRole, TrainedRole
from plimsoll.config.load import validate
from plimsoll.config.rollout import RolloutConfig, SamplingConfig
from plimsoll.config.yaml_tree import read_tree
from plimsoll.engine.zero.config import ZeroConfig
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import spec_of
from plimsoll.machine.hardware import Node, find_card, parse_cluster
from plimsoll.memory.advise.speed import (
    ELEMENTWISE,
    NETWORK,
    PCIE,
    UTILISATION,
    Pass,
    Rates,
    adam_seconds,
    dequantise_seconds,
    exchange_seconds,
    forward_seconds,
    inputs_offload_seconds,
    passes,
    rates_of,
    recomputed,
    sampling_seconds,
    scoring_seconds,
    sequences_at_once,
    step_seconds,
    sync_seconds,
    tokens_at_peak,
    training_seconds,
    waking_seconds,
    weights_offload_seconds,
)
from plimsoll.memory.contents.contents import make_job
from plimsoll.memory.contents.overheads import Constants
from plimsoll.rollout.price import Sampler
from plimsoll.rollout.vllm.config import VllmConfig
from plimsoll.rollout.vllm.sampler import vllm_sampler
from plimsoll.shapes.known_models import read_shape

QWEN = read_shape("Qwen/Qwen2-7B")
H, F, KV, V, L = 3584, 18944, 512, 152064, 28
LAYER = 2 * H * H + H + 2 * (H * KV + KV) + 3 * H * F  # q and o, the biases of q, k and v, the MLP
P = 7_615_616_512
ONE = Rates(flops=1.0, memory=1.0, link=1.0, pcie=1.0, host=1.0)
WORK = Pass(QWEN, tokens=1000, longest=100, micro_batches=5, updates=2, ranks=4, element=2)


def role(**zero: object) -> TrainedRole:
    return TrainedRole(model=decided_model(path="Qwen/Qwen2-7B", dtype="bfloat16")).with_engine(
        ZeroConfig.model_validate(zero)
    )


def test_a_forward_is_two_flops_a_parameter_and_attention() -> None:
    assert QWEN.active_parameters == L * LAYER + V * H
    attention = 2 * L * 100 * H
    expected = 1000 * (2 * (L * LAYER + V * H) + attention)
    assert forward_seconds(WORK, ONE) == pytest.approx(expected)


def test_of_experts_only_the_chosen_are_multiplied() -> None:
    mixtral = read_shape("mistralai/Mixtral-8x7B-v0.1")
    # 12.9B active of 46.7B, as its paper says (Jiang et al. 2024)
    assert mixtral.active_parameters == pytest.approx(12.9e9, rel=0.02)


def test_training_is_three_forwards_four_with_checkpointing_and_two_with_an_adapter() -> None:
    full = role()
    checkpointed = full.model.model_copy(update={"gradient_checkpointing": True})
    assert passes(full) == 3
    assert passes(full.model_copy(update={"model": checkpointed})) == 4
    assert passes(full.model_copy(update={"adapter": AdapterConfig()})) == 2


@pytest.mark.parametrize(
    ("checkpointing", "every", "again"),
    [(True, 1, 1), (True, 4, 1 / 4), ("selective", 1, ELEMENTWISE), (False, 1, 0)],
)
def test_what_checkpointing_computes_again(
    checkpointing: bool | str, every: int, again: float
) -> None:
    changes = {"gradient_checkpointing": checkpointing, "checkpoint_every": every}
    assert recomputed(role().model.model_copy(update=changes)) == pytest.approx(again)


def test_offloaded_layer_inputs_cross_pcie_there_and_back() -> None:
    changes = {"gradient_checkpointing": True, "activation_offload": "cpu"}
    moved = role().model_copy(update={"model": role().model.model_copy(update=changes)})
    assert inputs_offload_seconds(moved, WORK, ONE) == pytest.approx(2 * 2 * 1000 * H * L)
    assert inputs_offload_seconds(role(), WORK, ONE) == 0


def test_zero_plus_plus_sends_8_bits_of_a_weight_and_4_of_a_gradient() -> None:
    once = 2 * P * 3 / 4
    weights = exchange_seconds(role(stage=3, quantized_weights=True), WORK, ONE)
    gradients = exchange_seconds(role(stage=3, quantized_gradients=True), WORK, ONE)
    assert weights == pytest.approx(5 * (2 / 2 + 1) * once)
    assert gradients == pytest.approx(5 * (2 + 1 / 4) * once)


def test_stage_3_moves_three_times_the_weights_for_each_micro_batch() -> None:
    once = 2 * P * 3 / 4
    assert exchange_seconds(role(stage=3), WORK, ONE) == pytest.approx(5 * 3 * once)
    assert exchange_seconds(role(stage=2), WORK, ONE) == pytest.approx((5 + 2) * once)
    assert exchange_seconds(role(stage=1), WORK, ONE) == pytest.approx((2 + 2) * once)
    assert exchange_seconds(role(stage=3), replace(WORK, ranks=1), ONE) == 0


def test_adam_on_the_host_crosses_pcie_and_reads_host_memory() -> None:
    on_card = adam_seconds(role(stage=2), WORK, ONE)
    assert on_card == pytest.approx(2 * 30 * P / 4)
    rates = replace(ONE, pcie=10.0, host=5.0)
    on_host = adam_seconds(role(stage=2, optimizer_offload="cpu"), WORK, rates)
    assert on_host == pytest.approx((5 + 2) * 2 * P / 4 / 10 + 2 * 30 * P / 4 / 5)
    assert adam_seconds(role(stage=0), WORK, ONE) == pytest.approx(2 * 30 * P)


def test_offloaded_weights_cross_pcie_twice_for_each_micro_batch() -> None:
    offloaded = role(stage=3, parameter_offload="cpu")
    assert weights_offload_seconds(offloaded, WORK, ONE) == pytest.approx(5 * 2 * 2 * P / 4)
    assert weights_offload_seconds(role(stage=3), WORK, ONE) == 0


def test_four_bits_are_unpacked_at_each_visit_and_gathered_in_four() -> None:
    linear = L * LAYER
    assert dequantise_seconds(WORK, 2, ONE) == pytest.approx(5 * 2 * 4.52 * linear)
    quantised = role(stage=3).model_copy(
        update={
            "model": decided_model(path="Qwen/Qwen2-7B", quantization="nf4", dtype="bfloat16"),
            "adapter": AdapterConfig(rank=8, targets=("o_proj",)),
        }
    )
    adapter = L * 8 * (H + H)
    weights = 0.52 * linear + 2 * (P - linear)
    moved = (5 * 2 * adapter + 5 * 2 * weights) * 3 / 4
    assert exchange_seconds(quantised, WORK, ONE) == pytest.approx(moved)


def test_a_frozen_model_is_fetched_whole_or_in_shares() -> None:
    model = decided_model(path="Qwen/Qwen2-7B", dtype="bfloat16")
    forward = forward_seconds(WORK, ONE)

    def extra(stage: int, offload: str) -> float:
        zero = {"stage": stage, "offload": offload}
        frozen = FrozenRole.model_validate({"model": model, "zero": zero})
        return scoring_seconds(frozen, WORK, ONE) - forward

    assert extra(0, "none") == 0
    assert extra(0, "cpu") == pytest.approx(2 * P)
    assert extra(3, "none") == pytest.approx(5 * 2 * P * 3 / 4)
    assert extra(3, "cpu") == pytest.approx(5 * 2 * P * 3 / 4 + 5 * 2 * P / 4)


def test_sampling_reads_weights_and_cache_for_each_token() -> None:
    rollout = RolloutConfig(
        sampling=SamplingConfig(max_new_tokens=100), dtype="bfloat16"
    ).with_engine(VllmConfig(max_sequences=8))
    sampler = Sampler(rollout, QWEN, longest=300, sequences=8)
    kv_token = 2 * L * KV * 2
    rates = replace(ONE, flops=1e30)
    decode = (
        3 * 100 * (vllm_sampler(sampler).weights + 8 * kv_token * 250)
    )  # 20 sequences in 3 waves of 8
    assert sampling_seconds(sampler, 8, 20, rates) == pytest.approx(decode)
    assert sequences_at_once(sampler, 5.5 * kv_token * 300, 20) == 5
    assert sequences_at_once(sampler, 1e30, 20) == 8
    assert sequences_at_once(sampler, 0.5 * kv_token * 300, 20) == 8  # as with room to start
    assert sequences_at_once(sampler, -1.0, 20) == 8


def test_the_parts_of_an_engine_exchange_what_each_layer_gives() -> None:
    """A ring sends each byte 2 (n - 1) / n times: of 300 tokens, twice in each layer."""
    whole, halves = (
        Sampler(
            RolloutConfig.model_validate(
                {"vllm": {"tensor_parallel": parallel}, "dtype": "bfloat16"}
            ),
            QWEN,
            300,
            8,
        )
        for parallel in (1, 2)
    )
    slow = replace(ONE, flops=1e30, memory=1e30, link=1.0)
    assert sampling_seconds(whole, 1, 1, slow) == pytest.approx(0, abs=1)
    sent = 300 * 2 * QWEN.layers * QWEN.hidden * 2
    assert sampling_seconds(halves, 1, 1, slow) == pytest.approx(sent)


def test_stages_read_all_weights_for_each_part_of_the_sequences() -> None:
    """Two, each on half of 8 sequences: twice half of the weights, and half of their cache at once;
    prompts take half the time."""
    one, two = (
        Sampler(
            RolloutConfig.model_validate(
                {"vllm": {"pipeline_parallel": stages}, "dtype": "bfloat16"}
            ),
            QWEN,
            600,
            8,
        )
        for stages in (1, 2)
    )
    read = replace(ONE, flops=1e30)
    cache = 512 * 8 * vllm_sampler(one).kv_token * (600 - 256)
    difference = sampling_seconds(one, 8, 8, read) - sampling_seconds(two, 8, 8, read)
    assert difference == pytest.approx(cache / 2)
    computed = replace(ONE, memory=1e30)
    assert sampling_seconds(two, 8, 8, computed) == pytest.approx(
        sampling_seconds(one, 8, 8, computed) / 2
    )


def test_only_sleep_level_1_copies_weights() -> None:
    def waking(level: int) -> float:
        rollout = RolloutConfig.model_validate(
            {"vllm": {"sleep_level": level}, "placement": "shared", "dtype": "bfloat16"}
        )
        return waking_seconds(Sampler(rollout, QWEN, 300, 8), ONE)

    assert [waking(0), waking(2)] == [0, 0]
    assert waking(1) == pytest.approx(2 * 2 * P, rel=1e-6)
    assert sync_seconds(10.0, ONE) == 40


def test_rates_are_the_cards_and_the_slowest_way_to_the_others() -> None:
    node = Node((find_card("A100-80GB"),) * 8, None)
    rates = rates_of(node, ranks=8, nodes=1)
    assert rates.flops == UTILISATION * 312e12 and rates.link == 300e9 and rates.pcie == PCIE
    assert rates_of(node, ranks=16, nodes=2).link == NETWORK
    assert rates_of(node, ranks=8, nodes=1).host == rates_of(node, ranks=4, nodes=1).host / 2
    slow = Node((find_card("RTX4090"),) * 8, None)
    assert rates_of(slow, ranks=16, nodes=2).link == 32e9


def test_a_step_on_the_host_is_slower_and_an_adapter_faster() -> None:
    rates = rates_of(Node((find_card("RTX4090"),) * 4, None), 4, 1)
    full = role(stage=3)
    offloaded = role(stage=3, optimizer_offload="cpu")
    adapted = full.model_copy(update={"adapter": AdapterConfig()})
    seconds = [training_seconds(one, WORK, rates) for one in (adapted, full, offloaded)]
    assert seconds == sorted(seconds) and len(set(seconds)) == 3


SFT = """\
run: {directory: out, steps: 10}
cluster: {where: local}
data: {train: {path: x, prompt: q, response: a}, max_tokens: 512}
batch: {sequences: 8, micro_batch_tokens: 2048}
actor: {model: {path: Qwen/Qwen2-7B}, zero: {stage: 2}}
"""
PPO = """\
run: {directory: out, steps: 10}
cluster: {ranks: 4}
data: {train: {path: x, prompt: q}, max_tokens: 512}
batch: {prompts: 8, micro_batch_tokens: 2048}
actor: {model: {path: Qwen/Qwen2.5-1.5B}, zero: {stage: 3}}
critic: {model: {path: Qwen/Qwen2.5-1.5B}, zero: {stage: 3}}
rewards: {r: {name: length}}
rollout: {vllm: {sleep_level: SLEEP}, engines: 4, placement: shared}
algorithm: {epochs: EPOCHS}
"""


def seconds(job: str, text: str, cluster: str) -> float:
    config = validate(JOBS[job].config, read_tree(text, f"{job}.yaml"))
    return step_seconds(make_job(spec_of(config), parse_cluster(cluster, 1, None), Constants()))


def test_a_step_of_one_card_is_its_products_and_its_optimizer() -> None:
    tokens = 8 * 512
    flops = 3 * tokens * (2 * (L * LAYER + V * H) + 2 * L * 512 * H)
    expected = flops / (0.4 * 312e12) + 30 * P / 2039e9
    assert seconds("sft", SFT, "A100-80GB") == pytest.approx(expected)


def test_a_second_epoch_adds_training_and_no_sampling() -> None:
    def ppo(sleep: int, epochs: int) -> float:
        text = PPO.replace("SLEEP", str(sleep)).replace("EPOCHS", str(epochs))
        return seconds("ppo", text, "4xA100-80GB")

    first, second, third = (ppo(0, epochs) for epochs in (1, 2, 3))
    assert second - first == pytest.approx(third - second)
    assert 0 < second - first < first
    weights = 2 * read_shape("Qwen/Qwen2.5-1.5B").parameters
    assert ppo(1, 1) - first == pytest.approx(2 * weights / PCIE, rel=1e-3)
    assert ppo(2, 1) == first


def at_peak(job: str, text: str, cluster: str) -> float | None:
    config = validate(JOBS[job].config, read_tree(text, f"{job}.yaml"))
    return tokens_at_peak(make_job(spec_of(config), parse_cluster(cluster, 1, None), Constants()))


def test_the_peak_of_a_card_is_three_forwards_a_token_whatever_is_computed_again() -> None:
    flops = 3 * 2 * (L * LAYER + V * H)
    assert at_peak("sft", SFT, "A100-80GB") == pytest.approx(312e12 / flops)
    again = SFT.replace("Qwen2-7B}", "Qwen2-7B, gradient_checkpointing: true}")
    assert at_peak("sft", again, "H100-80GB") == pytest.approx(989e12 / flops)
    adapted = SFT.replace("zero:", "adapter: {rank: 8}, zero:")
    assert at_peak("sft", adapted, "A100-80GB") == pytest.approx(312e12 / flops * 3 / 2)


def test_the_peak_of_ppo_counts_every_role_and_sampling() -> None:
    """Actor and critic: an epoch or two of three forwards, and old log-probs and values; the
    reference; and the engines."""
    size = read_shape("Qwen/Qwen2.5-1.5B").active_parameters
    for epochs, forwards in ((1, 2 * (3 + 1) + 1 + 1), (2, 2 * (6 + 1) + 1 + 1)):
        text = PPO.replace("SLEEP", "0").replace("EPOCHS", str(epochs))
        assert at_peak("ppo", text, "4xA100-80GB") == pytest.approx(
            4 * 312e12 / (forwards * 2 * size), rel=1e-6
        )


def test_without_cards_of_known_speed_there_is_no_peak() -> None:
    assert at_peak("sft", SFT, "24GB") is None
    assert at_peak("sft", SFT, "cpu") is None
