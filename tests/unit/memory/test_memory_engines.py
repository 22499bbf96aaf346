"""What vLLM takes of a card and of a host, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from some_roles import ACTOR, CRITIC

from plimsoll.config.rollout import RolloutConfig
from plimsoll.sampler.price import STARTING, EngineProcess, Sampler, rollout_price
from plimsoll.sampler.vllm.config import vllm_of
from plimsoll.sampler.vllm.holdings import (
    GIB,
    card_items,
    card_share,
    cpu_items,
    least_cpu_cache,
    least_share,
    routing_items,
)
from plimsoll.sampler.vllm.sampler import VllmSampler, unpriced, vllm_sampler
from plimsoll.shapes.known_models import read_shape
from plimsoll.shapes.shape import ModelShape
from plimsoll.timeline.items import Allocation, Moment, job_moments

QWEN = read_shape("Qwen/Qwen2.5-1.5B")
PARAMETERS = 1_543_714_304
NORMS = (2 * 28 + 1) * 1536
MOMENTS = job_moments(
    (ACTOR, CRITIC), ("rollout", "score", "train_critic", "train_actor", "sync", "save")
) | {STARTING}
TRAINING = Moment("train_actor", "step")
SAMPLING = Moment("rollout", "generate")
SENDING, PROVING = Moment("sync", "gather"), Moment("sync", "forward")
CARD = 80_000_000_000


def sampler(
    *,
    dtype: str = "bfloat16",
    rank: int | None = None,
    shape: ModelShape = QWEN,
    **vllm: object,
) -> VllmSampler:
    rollout = RolloutConfig.model_validate({"vllm": {"memory_share": 0.5, **vllm}, "dtype": dtype})
    return vllm_sampler(Sampler(rollout, shape, longest=1024, sequences=64, adapter_rank=rank))


def held_at(held: Iterable[Allocation], moment: Moment) -> dict[str, int]:
    return {one.item.name: one.item.bytes for one in held if moment in one.moments}


def test_weights_and_keys_are_divided_by_tensor_parallel() -> None:
    assert QWEN.parameters == PARAMETERS and QWEN.other_parameters == NORMS
    assert sampler().weights == 2 * PARAMETERS
    assert sampler(tensor_parallel=2).weights == 2 * ((PARAMETERS - NORMS) // 2 + NORMS)
    assert sampler().kv_token == 2 * 28 * 2 * 128 * 2
    assert sampler(tensor_parallel=2).kv_token == 2 * 28 * 1 * 128 * 2
    assert sampler(tensor_parallel=4).kv_token == sampler(tensor_parallel=2).kv_token
    assert sampler(dtype="float32").weights == 4 * PARAMETERS


def test_latent_attention_is_divided_from_its_heads_on() -> None:
    """DeepSeek-V2-Lite: 27 layers of 2048 x (512 + 64) numbers come before the heads."""
    shape = read_shape("DeepSeek-V2-Lite")
    both = 27 * 2048 * (512 + 64) + shape.other_parameters
    whole, half = sampler(shape=shape), sampler(shape=shape, tensor_parallel=2)
    assert whole.weights == 2 * shape.parameters
    assert half.weights == (shape.parameters - both) + 2 * both
    assert whole.kv_token == half.kv_token == 2 * 27 * (512 + 64)


def test_a_stage_has_its_layers_and_the_ends_have_a_table() -> None:
    """28 layers as 9, 10 and 9: one that is left over goes before the last stage. Norms are spread
    evenly: 57 over 28 layers, rounded up."""
    first, middle, last = sampler(pipeline_parallel=3).stages
    layer = 2 * 1536 * (1536 + 256) + 1536 + 2 * 256 + 3 * 1536 * 8960
    table, tokens = 151_936 * 1536, 2048
    assert first.weights == last.weights == 2 * (9 * layer + table + 19 * 1536)
    assert middle.weights == 2 * (10 * layer + 21 * 1536)
    assert [one.kv_token for one in (first, middle, last)] == [
        n * 2 * 2 * 128 * 2 for n in (9, 10, 9)
    ]
    forward = tokens * 2 * (4 * 1536 + 3 * 8960)
    assert first.profile_peak == middle.profile_peak == forward < last.profile_peak
    assert first.token_counts == middle.token_counts == 0 < last.token_counts
    assert [one.handed_over for one in (first, middle, last)] == [0, *2 * [2 * tokens * 1536 * 2]]
    [half, _] = sampler(tensor_parallel=2, pipeline_parallel=2).stages
    assert half.weights == 2 * ((14 * layer + table) // 2 + 29 * 1536)
    untied = sampler(shape=replace(QWEN, tied=False), pipeline_parallel=3).stages
    assert [one.weights for one in untied] == [first.weights, middle.weights, last.weights]
    rooms = [stage.adapter_room for stage in sampler(rank=16, pipeline_parallel=2).stages]
    assert [2 * room for room in rooms] == 2 * [sampler(rank=16).adapter_room]


def test_every_stage_has_as_many_blocks_as_the_one_with_room_for_the_fewest() -> None:
    """It is the stage with the most layers; at a small share the last one, which has logits beside
    a table."""

    def caches(one: VllmSampler) -> list[int]:
        held = (held_at(card_items(stage, CARD, 0, MOMENTS), SAMPLING) for stage in one.stages)
        return [items["KV cache"] for items in held]

    large, small = (sampler(pipeline_parallel=3, memory_share=share) for share in (0.5, 0.05))
    room = card_share(large.stages[1], CARD).kv_cache
    assert caches(large) == [room * 9 // 10, room, room * 9 // 10]
    room = card_share(small.stages[2], CARD).kv_cache
    assert caches(small) == [room, room * 10 // 9, room]
    last = card_share(small.stages[2], CARD)
    needed = last.weights + last.fixed + 9 * 2 * 2 * 128 * 2 * 1024
    assert needed / CARD <= least_share(small, CARD) < needed / CARD + 0.01


def test_the_stages_of_an_engine_on_cpu() -> None:
    one = sampler(pipeline_parallel=3)
    held = [held_at(cpu_items(stage, MOMENTS), SAMPLING) for stage in one.stages]
    nine = GIB // 2 * 9 // 10
    assert [items["KV cache"] for items in held] == [nine, GIB // 2, nine]
    assert ["packed head" in items for items in held] == [False, False, True]
    assert ["from the stage before" in items for items in held] == [False, True, True]
    assert least_cpu_cache(one) == ceil(100 * 10 * 2 * 2 * 128 * 2 * (1024 + 256) / GIB) / 100


def test_vllms_own_settings_are_priced() -> None:
    """A KV cache of a byte a number, a larger batch, no CUDA graphs, and linear layers of a byte a
    weight, whose biases and whose embedding are as ever."""
    assert sampler(arguments={"kv_cache_dtype": "fp8"}).kv_token == 28 * 2 * 2 * 128
    assert sampler(arguments={"kv_cache_dtype": "auto"}).kv_token == 2 * 28 * 2 * 2 * 128
    most = sampler(arguments={"max_num_batched_tokens": 65_536}, max_sequences=8)
    assert most.profile_peak == 65_536 * 2 * (4 * 1536 + 3 * 8960)
    graphs = int(0.8 * GIB)
    share, eager = (
        card_share(sampler(arguments=own), CARD) for own in ({}, {"enforce_eager": True})
    )
    assert eager.kv_cache - share.kv_cache == graphs
    linears = 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960)
    narrow = sampler(arguments={"quantization": "fp8"}).weights
    assert narrow == 2 * PARAMETERS - linears


def test_what_has_no_price_is_named() -> None:
    counted = {"kv_cache_dtype": "fp8", "quantization": "fp8", "max_num_batched_tokens": 4096}
    own = {**counted, "enforce_eager": True, "block_size": 32}
    assert unpriced(sampler(arguments=own).vllm) == ("block_size",)
    own = {"speculative_config": {"method": "mtp"}, "kv_cache_dtype": "nvfp4"}
    named = ("kv_cache_dtype", "speculative_config.method: mtp")
    assert unpriced(sampler(arguments=own).vllm) == named


def test_an_engine_takes_its_share_of_the_card_and_no_more() -> None:
    items = card_items(sampler(), CARD, 10**9, MOMENTS)
    for moment in MOMENTS:
        assert sum(held_at(items, moment).values()) == CARD // 2
    share = card_share(sampler(), CARD)
    forward = 2048 * 2 * (4 * 1536 + 3 * 8960)
    logits = 256 * 151_936 * (2 + 3 * 4)
    assert sampler().profile_peak == max(forward, logits)
    assert sampler().token_counts == 256 * (151_936 * 4 + 151_936 // 8)
    rest = int(0.3 * GIB) + int(0.8 * GIB) + sampler().profile_peak + sampler().token_counts
    assert held_at(items, TRAINING)["KV cache"] == CARD // 2 - 2 * PARAMETERS - rest
    assert share.kv_cache == held_at(items, TRAINING)["KV cache"]


def test_an_engine_makes_room_for_an_adapter_around_every_layer() -> None:
    """Queries and outputs of 1536, keys and values of 256, an MLP of 8960; rank 16, 2 bytes."""
    beside = sampler(rank=16)
    attention = 2 * (1536 + 1536) + 2 * (1536 + 256)
    assert beside.adapter_room == 2 * 16 * 28 * (attention + 3 * (1536 + 8960))
    assert card_share(sampler(), CARD).kv_cache - card_share(beside, CARD).kv_cache == (
        beside.adapter_room
    )
    halves = sampler(rank=16, tensor_parallel=2).adapter_room
    attention = 2 * (1536 + 768) + 2 * (1536 + 128)
    assert halves == 2 * 16 * 28 * (attention + 3 * (1536 + 4480))
    assert sampler().adapter_room == 0
    assert "room for an adapter" in held_at(cpu_items(beside, MOMENTS), TRAINING)


def test_an_engine_keeps_the_experts_that_it_takes_beside_its_cache() -> None:
    """Qwen3-30B-A3B: 48 layers of 8 experts, whose numbers vLLM writes in 4 bytes and keeps in 1;
    its keys and values are 48 x 2 x 4 x 128 numbers."""
    mixture = sampler(shape=read_shape("Qwen/Qwen3-30B-A3B"), memory_share=0.9)
    routed = replace(mixture, rollout=mixture.rollout.model_copy(update={"routing": "sampled"}))
    held = held_at(routing_items(routed, "cuda", CARD, MOMENTS), SAMPLING)
    cached = card_share(mixture, CARD).kv_cache // (2 * 48 * 2 * 4 * 128)
    assert held == {
        "experts taken": 4 * 384 * mixture.batched_tokens,
        "experts of cached tokens": 384 * cached,
    }
    assert cached > 0
    on_cpu = held_at(routing_items(routed, "cpu", 0, MOMENTS), SAMPLING)
    assert on_cpu == {"experts of cached tokens": 2 * 384 * 1024 * 256}
    assert [*routing_items(mixture, "cuda", CARD, MOMENTS)] == []


def test_an_engine_whose_weights_do_not_fit_its_share_still_adds_up_to_it() -> None:
    small = sampler(memory_share=0.02)
    assert card_share(small, CARD).kv_cache < 0
    items = held_at(card_items(small, CARD, 0, MOMENTS), SAMPLING)
    assert sum(items.values()) == int(0.02 * CARD)


def test_a_sleeping_engine_keeps_a_residue_with_its_context() -> None:
    items = card_items(sampler(sleep_level=2), CARD, GIB // 2, MOMENTS)
    assert held_at(items, TRAINING) == {"sleep residue": int(0.8 * GIB) - GIB // 2}
    for awake in (SAMPLING, PROVING):
        assert sum(held_at(items, awake).values()) == CARD // 2
    assert "KV cache" not in held_at(items, SENDING)
    assert held_at(items, SENDING)["vLLM weights"] == 2 * PARAMETERS


def test_vllm_on_cpu_packs_a_tied_head_beside_the_embedding() -> None:
    items = held_at(cpu_items(sampler(cpu_kv_cache_gib=2.0), MOMENTS), TRAINING)
    assert items == {
        "vLLM weights": 2 * PARAMETERS,
        "KV cache": 2 * GIB,
        "packed head": 2 * 151_936 * 1536,
    }
    untied = sampler(shape=replace(QWEN, tied=False))
    assert "packed head" not in held_at(cpu_items(untied, MOMENTS), TRAINING)


def test_transformers_keep_the_keys_of_what_is_sampled_at_once() -> None:
    rollout = RolloutConfig.model_validate({"transformers": {}, "dtype": "bfloat16"})
    base = Sampler(rollout, QWEN, longest=1024, sequences=64)
    process = EngineProcess(base, "engine", 0, "cpu", None, 0, None, MOMENTS)
    held = [*rollout_price(rollout).contents(process)]
    items = held_at(held, SAMPLING)
    cache = 64 * 1024 * 2 * 28 * 2 * 128 * 2
    assert items["KV cache"] == cache + cache // 28
    assert items["weights"] == 2 * PARAMETERS
    assert set(held_at(held, TRAINING)) == {"weights"}


def test_what_vllm_quantises_is_the_linear_layers() -> None:
    """Qwen2.5-7B: 28 layers of 3584 to 3584 twice, to 512 twice, and three of 18,944. Table, head,
    biases and norms keep 2 bytes."""
    matrices = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18_944)
    rest = 7_615_616_512 - matrices
    assert (matrices, rest) == (6_525_288_448, 1_090_328_064)

    def weights(quantization: str) -> int:
        settings = {"dtype": "bfloat16", "vllm": {"arguments": {"quantization": quantization}}}
        rollout = RolloutConfig.model_validate(settings)
        assert "quantization" not in unpriced(vllm_of(rollout))
        base = Sampler(rollout, read_shape("Qwen/Qwen2.5-7B"), 1024, 64)
        return vllm_sampler(base).weights

    for name in ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"):
        assert weights(name) == matrices + 2 * rest
    assert weights("mxfp8") == matrices * 33 // 32 + 2 * rest
    assert weights("mxfp4") == matrices * 17 // 32 + 2 * rest
    other = RolloutConfig.model_validate({"vllm": {"arguments": {"quantization": "torchao"}}})
    assert unpriced(vllm_of(other)) == ("quantization",)
