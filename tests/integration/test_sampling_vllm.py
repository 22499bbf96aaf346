"""vLLM's sampling settings, against transformers' full forward over what it sampled."""

from __future__ import annotations

import dataclasses
from asyncio import Runner
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import AsyncEngineArgs
from vllm.distributed.utils import get_pp_indices
from vllm_cases import started

from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.rollout import RolloutConfig, SamplingConfig
from plimsoll.model.tiny import tiny_config, write_tiny_model
from plimsoll.records import Floats, Prompt, Trajectory
from plimsoll.sampler.price import Sampler
from plimsoll.sampler.protocol import EngineSpec, Request
from plimsoll.sampler.transformers.engine import Recorder
from plimsoll.sampler.vllm.config import ArgumentValue, VllmConfig
from plimsoll.sampler.vllm.engine import VllmEngine
from plimsoll.sampler.vllm.rules import FIXED, OWNED, check_arguments
from plimsoll.sampler.vllm.sampler import VllmSampler, stages_of, vllm_sampler
from plimsoll.shapes.known_models import read_shape

pytestmark = pytest.mark.engine

TOKENIZER = make_tokenizer()
TOKENIZER.add_special_tokens({"additional_special_tokens": ["<turn>"]})
TURN: int = TOKENIZER.convert_tokens_to_ids("<turn>")
END: int = TOKENIZER.eos_token_id
PROMPTS = tuple(
    Prompt(i, np.array(TOKENIZER.encode(text)), text) for i, text in enumerate(("1+1=", "12+34="))
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sampling") / "model"
    config = tiny_config("qwen2", True, vocab=32, hidden=64, heads=2, feed_forward=96)
    config.initializer_range = 0.2  # far from uniform, so that mistakes show
    write_tiny_model(path, config, 0, TOKENIZER)
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[tuple[VllmEngine, Runner]]:
    own: dict[str, ArgumentValue] = {"max_num_batched_tokens": 640}
    rollout = RolloutConfig(dtype="float32").with_engine(
        VllmConfig(cpu_kv_cache_gib=0.25, arguments=own)
    )
    with started(EngineSpec(0, str(model), 64, 1, "cpu", rollout)) as both:
        yield both


def expected(model: Path, trajectory: Trajectory, sampling: SamplingConfig) -> Floats:
    """The log-prob of each response token in the distribution that the settings leave of the
    model's, as the engine on transformers makes it."""
    prompt = len(trajectory.prompt.tokens)
    tokens = np.concatenate([trajectory.prompt.tokens, trajectory.response_tokens])
    ids = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits
    recorder = Recorder(sampling, prompt, torch.tensor([END]))
    for step in range(prompt, len(tokens)):
        recorder(ids[:, :step], found[:, step - 1])
    result: Floats = recorder.finish(ids)[0].numpy()
    return result


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 4},
        {"min_p": 0.3},
        {"min_new_tokens": 8},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "min_new_tokens": 3},
    ],
)
def test_sampler_log_probs_are_those_of_the_distribution_that_was_sampled_from(
    engine: tuple[VllmEngine, Runner], model: Path, settings: dict[str, float]
) -> None:
    vllm, loop = engine
    sampling = SamplingConfig.model_validate({"max_new_tokens": 12} | settings)
    found = loop.run(vllm.generate(Request(PROMPTS, 4, sampling, seed=2)))
    for trajectory in found:
        wanted = expected(model, trajectory, sampling)
        np.testing.assert_allclose(trajectory.sampler_logprobs, wanted, atol=1e-4)
    least = sampling.min_new_tokens
    assert all(END not in trajectory.response_tokens[:least] for trajectory in found)


def test_what_plimsoll_sets_of_vllm_is_what_vllm_has() -> None:
    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert names >= OWNED.keys() | FIXED.keys()
    found = check_arguments(
        VllmConfig(arguments=dict.fromkeys(names - OWNED.keys() - FIXED.keys()))
    )
    assert [*found] == []


def test_stages_have_the_layers_that_vllm_gives_them() -> None:
    for layers in range(1, 41):
        for count in range(1, layers + 1):
            ends = accumulate((stage.layers for stage in stages_of(layers, count)), initial=0)
            found = [get_pp_indices(layers, rank, count) for rank in range(count)]
            assert found == [*pairwise(ends)]


def test_vllms_own_settings_are_its_own(engine: tuple[VllmEngine, Runner]) -> None:
    assert engine[0]._llm.vllm_config.scheduler_config.max_num_batched_tokens == 640


@pytest.mark.slow
def test_a_draft_model_takes_its_cache_from_the_engines(model: Path, tmp_path: Path) -> None:
    """The engine has as many blocks as both models' keys and values leave; what is sampled is the
    policy's."""
    shape = tiny_config("qwen2", False, vocab=32, hidden=128, heads=4, feed_forward=96)
    write_tiny_model(tmp_path / "draft", shape, 1, TOKENIZER)
    asked = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    own: dict[str, ArgumentValue] = {"speculative_config": asked}
    rollout = RolloutConfig(dtype="float32").with_engine(
        VllmConfig(cpu_kv_cache_gib=0.25, arguments=own)
    )
    base = Sampler(rollout, read_shape(str(model)), 64, 4)
    priced = vllm_sampler(base)
    sampling = SamplingConfig(max_new_tokens=12, temperature=0.0)
    with started(EngineSpec(0, str(model), 64, 1, "cpu", rollout)) as (vllm, loop):
        cache = vllm._llm.vllm_config.cache_config
        found = loop.run(vllm.generate(Request(PROMPTS, 1, sampling, seed=2)))
    assert cache.num_gpu_blocks == 2**28 // (cache.block_size * priced.kv_token)
    alone = VllmSampler(**vars(base)).kv_token
    assert cache.num_gpu_blocks < 2**28 // (cache.block_size * alone)
    for trajectory in found:
        wanted = expected(model, trajectory, sampling)
        np.testing.assert_allclose(trajectory.sampler_logprobs, wanted, atol=1e-4)


def test_each_prompt_has_its_own_limit(engine: tuple[VllmEngine, Runner]) -> None:
    vllm, loop = engine
    sampling = SamplingConfig(max_new_tokens=20, min_new_tokens=8)
    found = loop.run(vllm.generate(Request(PROMPTS, 8, sampling, 2, limits=(5, 30))))
    assert {len(t.response_tokens) for t in found[:8]} == {5}
    assert max(len(t.response_tokens) for t in found[8:]) == 20


def test_a_stop_string_before_the_fewest_tokens_does_not_count(
    engine: tuple[VllmEngine, Runner],
) -> None:
    vllm, loop = engine
    sampling = SamplingConfig(max_new_tokens=20, min_new_tokens=4, stop=("3",))
    found = loop.run(vllm.generate(Request(PROMPTS, 24, sampling, seed=2)))
    early = [t for t in found if "3" in TOKENIZER.decode(t.response_tokens[:4])]
    assert early and all(len(t.response_tokens) > 4 for t in early)
    for trajectory in found:
        least = TOKENIZER.decode(trajectory.response_tokens[:4], skip_special_tokens=True)
        assert trajectory.response_text.startswith(least)
        assert "3" not in trajectory.response_text[len(least) :]


def test_special_tokens_end_responses_as_stop_strings(engine: tuple[VllmEngine, Runner]) -> None:
    vllm, loop = engine
    alone = SamplingConfig(max_new_tokens=40, stop=("<turn>",))
    found = loop.run(vllm.generate(Request(PROMPTS, 24, alone, seed=2)))
    assert any(t.response_tokens[-1] == TURN for t in found)
    for trajectory in found:
        assert TURN not in trajectory.response_tokens[:-1]
        ended = trajectory.response_tokens[-1] in (TURN, END)
        assert (trajectory.finish_reason == "stop") == ended
    string = next(t for t in found if t.response_tokens[-1] == TURN)
    last = TOKENIZER.decode(string.response_tokens[-2:])  # as "7<turn>"
    longer = SamplingConfig(max_new_tokens=40, stop=(last,))
    stopped = loop.run(vllm.generate(Request(PROMPTS, 24, longer, seed=2)))
    for trajectory in stopped:
        text = TOKENIZER.decode(trajectory.response_tokens)
        assert last not in text[:-1] and "<turn>" not in trajectory.response_text
    by_string = [t for t in stopped if TOKENIZER.decode(t.response_tokens).endswith(last)]
    assert by_string and {t.finish_reason for t in by_string} == {"stop"}
