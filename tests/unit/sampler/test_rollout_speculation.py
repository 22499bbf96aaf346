"""What vLLM holds for speculative decoding, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from plimsoll.config.rollout import RolloutConfig
from plimsoll.sampler.price import STARTING, Sampler
from plimsoll.sampler.vllm.config import vllm_of
from plimsoll.sampler.vllm.holdings import GIB, card_items, card_share, pinned_copy
from plimsoll.sampler.vllm.sampler import VllmSampler, unpriced, vllm_sampler
from plimsoll.sampler.vllm.speculation import Speculation, draft_model, speculation_of
from plimsoll.shapes.known_models import read_shape
from plimsoll.timeline.items import Moment

QWEN, DRAFT = read_shape("Qwen/Qwen2.5-1.5B"), read_shape("Qwen/Qwen2.5-0.5B")
BY_DRAFT = {"model": "Qwen/Qwen2.5-0.5B", "num_speculative_tokens": 4}
BY_NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
CARD = 80_000_000_000
SAMPLING = Moment("rollout", "generate")

VOCABULARY, PARAMETERS, NORMS = 151_936, 494_032_768, (2 * 24 + 1) * 896
PROFILED = 256 * VOCABULARY * (2 + 3 * 4)


def rollout(speculative: Mapping[str, object] | None = None, **settings: object) -> RolloutConfig:
    arguments = {} if speculative is None else {"speculative_config": speculative}
    vllm = {"arguments": arguments, **settings}
    return RolloutConfig.model_validate({"vllm": vllm, "dtype": "bfloat16"})


def sampler(speculative: Mapping[str, object] | None = None, **settings: object) -> VllmSampler:
    base = Sampler(rollout(speculative, **settings), QWEN, longest=1024, sequences=64)
    return vllm_sampler(base)


def test_a_draft_model_has_weights_and_a_cache_of_its_own() -> None:
    """Qwen2.5-0.5B beside 1.5B: 24 layers, 2 key-value heads of 64, 2 bytes a number."""
    alone, both = sampler(), sampler(BY_DRAFT)
    assert both.weights - alone.weights == 2 * PARAMETERS
    assert both.kv_token - alone.kv_token == 2 * 24 * 2 * 64 * 2
    assert card_share(alone, CARD).kv_cache - card_share(both, CARD).kv_cache == 2 * PARAMETERS
    halves = sampler(BY_DRAFT, tensor_parallel=2)
    half = 2 * ((PARAMETERS - NORMS) // 2 + NORMS)
    assert halves.weights - sampler(tensor_parallel=2).weights == half
    assert halves.kv_token - sampler(tensor_parallel=2).kv_token == 2 * 24 * 1 * 64 * 2


def test_settings_of_the_model_and_of_its_draft_are_their_own() -> None:
    """fp8 is of the policy's weights alone; a KV cache of a byte a number is of both, unless the
    draft's is said."""
    fp8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    alone, both = sampler(arguments=fp8), sampler(arguments=fp8 | {"speculative_config": BY_DRAFT})
    assert both.weights - alone.weights == 2 * PARAMETERS
    assert both.kv_token - alone.kv_token == 2 * 24 * 2 * 64
    other = sampler(
        arguments=fp8 | {"speculative_config": BY_DRAFT | {"kv_cache_dtype": "bfloat16"}}
    )
    assert other.kv_token - alone.kv_token == 2 * 24 * 2 * 64 * 2


@pytest.mark.parametrize("speculative", [BY_NGRAM, {"method": "suffix"}])
def test_proposals_from_the_text_hold_nothing_of_the_share(speculative: dict[str, object]) -> None:
    alone, both = sampler(), sampler(speculative)
    assert both.weights == alone.weights and both.kv_token == alone.kv_token
    assert card_share(both, CARD) == card_share(alone, CARD)


# (tokens proposed, logits that are verified at once: of 256 sequences, of at most 2048 tokens)
@pytest.mark.parametrize(("tokens", "rows"), [(4, 1280), (7, 2048), (9, 2560)])
def test_verified_logits_come_beyond_what_was_profiled(tokens: int, rows: int) -> None:
    """All in 16 bits, and in fp32 at most a GiB of them."""
    found = sampler(BY_NGRAM | {"num_speculative_tokens": tokens})
    logits = rows * VOCABULARY
    by_hand = 2 * logits + min(4 * logits, GIB) - PROFILED
    assert sampler().profile_peak == PROFILED and sampler().verifying == 0
    assert found.verifying == by_hand > 0
    items = card_items(found, CARD, 0, frozenset({STARTING, SAMPLING}))
    [held] = [one for one in items if one.item.name == "vLLM logits of proposed tokens"]
    assert held.item.bytes == by_hand and held.moments == {SAMPLING}
    assert sum(one.item.bytes for one in items) == CARD // 2 + by_hand


def test_logits_that_a_draft_keeps_are_counted() -> None:
    keeps = sampler(BY_DRAFT | {"draft_sample_method": "probabilistic"})
    assert sampler(BY_DRAFT).draft_logits == 0
    assert keeps.draft_logits == 256 * 4 * VOCABULARY * 2
    caches = [card_share(one, CARD).kv_cache for one in (sampler(BY_DRAFT), keeps)]
    assert caches[0] - caches[1] == keeps.draft_logits


def test_a_sleeping_engine_keeps_its_draft_on_the_host() -> None:
    """In pinned blocks: an MLP of 16.6 (alone in 32 MiB) and 8.3 (two share 20 MiB, which take 32),
    queries, keys and values of 2 (ten share) and outputs of 1.5 (13), a table of 259.7."""
    blocks = 24 * 32 + 12 * 32 + 3 * 32 + 2 * 32 + 512
    more = pinned_copy(sampler(BY_DRAFT)) - pinned_copy(sampler())
    assert more == blocks * 2**20


# What it is asked for, what of it has no price.
@pytest.mark.parametrize(
    ("speculative", "named"),
    [
        (BY_NGRAM, []),
        ({"model": "[ngram]"}, []),
        ({"method": "ngram_gpu"}, []),
        (BY_DRAFT, []),
        (BY_DRAFT | {"draft-tensor-parallel-size": 1}, []),
        (BY_DRAFT | {"draft_tensor_parallel_size": 2}, ["draft_tensor_parallel_size: 2"]),
        (BY_DRAFT | {"quantization": "awq"}, ["quantization: awq"]),
        (BY_DRAFT | {"kv_cache_dtype": "nvfp4"}, ["kv_cache_dtype: nvfp4"]),
        ({"method": "mtp"}, ["method: mtp"]),
        ({"method": "medusa", "model": "x/medusa"}, ["method: medusa"]),
        ({"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}, ["method: eagle3"]),
        ({"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}, ["method: eagle"]),
        ({"model": "mine.proposers.Mine"}, ["method: custom_class"]),
        ({"model": "mine/unknown-0.1B"}, ["model: mine/unknown-0.1B"]),
    ],
)
def test_what_has_no_price_is_named(speculative: dict[str, object], named: list[str]) -> None:
    found = rollout(speculative)
    assert unpriced(vllm_of(found)) == tuple(f"speculative_config.{one}" for one in named)
    assert not named or speculation_of(vllm_of(found)) == Speculation()


def test_vllms_short_arguments_say_the_same() -> None:
    short = {"spec_model": BY_DRAFT["model"], "spec_tokens": 4}
    assert sampler(arguments=short).weights == sampler(BY_DRAFT).weights
    assert sampler(arguments=short).verifying == sampler(BY_DRAFT).verifying > 0
    assert unpriced(vllm_of(rollout(arguments={"spec_method": "eagle"}))) == ("spec_method: eagle",)
    assert draft_model(vllm_of(rollout(arguments=short))) == (
        "rollout.vllm.arguments.spec_model",
        "Qwen/Qwen2.5-0.5B",
    )
    assert draft_model(vllm_of(rollout(BY_NGRAM))) is None
