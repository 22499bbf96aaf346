"""Rollouts by transformers, with a real tiny model, against the model's own full forward."""

from __future__ import annotations

import asyncio
import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from buckets import bucket_of, posted
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from plimsoll.commands.demo import make_tokenizer
from plimsoll.config.rollout import RolloutConfig, SamplingConfig
from plimsoll.errors import WeightSyncError
from plimsoll.model.tiny import Family, tiny_config, write_tiny_model
from plimsoll.records import Prompt, Trajectory
from plimsoll.sampler.protocol import EngineSpec, Request
from plimsoll.sampler.transformers.config import TransformersConfig
from plimsoll.sampler.transformers.engine import GROUPED, TransformersEngine
from plimsoll.sync.buckets import WeightBucket

torch.set_num_threads(1)

TOKENIZER = make_tokenizer()
END: int = TOKENIZER.eos_token_id
TEXTS = ("1+1=", "12+34=", "9=", "123+456=", "0+0+0=")


def write_model(directory: Path, seed: int) -> Path:
    config = tiny_config("qwen2", True, vocab=32, hidden=32, feed_forward=48)
    config.initializer_range = 0.3  # far from uniform, so that mistakes show
    write_tiny_model(directory, config, seed, TOKENIZER)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("models")
    return [write_model(home / f"model-{seed}", seed) for seed in (0, 1)]


def make_engine(model: Path) -> TransformersEngine:
    rollout = RolloutConfig(dtype="float32").with_engine(TransformersConfig(max_sequences=8))
    return TransformersEngine(EngineSpec(0, str(model), 64, 1, "cpu", rollout))


@pytest.fixture(scope="module")
def engine(models: list[Path]) -> TransformersEngine:
    return make_engine(models[0])


def prompts(*texts: str) -> tuple[Prompt, ...]:
    return tuple(Prompt(i, np.array(TOKENIZER.encode(t)), t) for i, t in enumerate(texts))


def answers(
    engine: TransformersEngine,
    asked: tuple[Prompt, ...],
    sampling: SamplingConfig,
    responses: int = 1,
    seed: int = 3,
) -> list[Trajectory]:
    return asyncio.run(engine.generate(Request(asked, responses, sampling, seed)))


@cache
def plain_model(model: Path) -> nn.Module:
    found: nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return found


def logits(model: Path, trajectory: Trajectory) -> Tensor:
    """Return the logits of each response token, by one plain forward over the sequence alone."""
    tokens = np.concatenate([trajectory.prompt.tokens, trajectory.response_tokens])
    with torch.no_grad():
        found: Tensor = plain_model(model)(torch.from_numpy(tokens)[None]).logits[0]
    return found[len(trajectory.prompt.tokens) - 1 : -1]


def left(scores: Tensor, sampling: SamplingConfig) -> Tensor:
    """What the settings leave of a response's logits, one token after the other, in vLLM's order:
    temperature, minimum tokens, min-p, top-k, top-p."""
    scores = scores / sampling.temperature
    scores[: sampling.min_new_tokens, END] = float("-inf")
    probabilities = scores.softmax(-1)
    least = sampling.min_p * probabilities.amax(-1, keepdim=True)
    scores = scores.masked_fill(probabilities < least, float("-inf"))
    if sampling.top_k:
        kth = scores.sort(-1, descending=True).values[:, sampling.top_k - 1, None]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    return nucleus(scores, sampling.top_p)


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keep the fewest tokens, the most likely first, that together have top_p; drop the rest."""
    kept = torch.full_like(scores, float("-inf"))
    for row, probabilities in enumerate(scores.softmax(-1)):
        total = 0.0
        for token in probabilities.argsort(descending=True):
            kept[row, token] = scores[row, token]
            total += float(probabilities[token])
            if total >= top_p:
                break
    return kept


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.3},
        {"min_new_tokens": 6},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "min_new_tokens": 3},
    ],
)
def test_sampler_log_probs_are_those_of_the_distribution_that_was_sampled_from(
    engine: TransformersEngine, models: list[Path], settings: dict[str, float]
) -> None:
    sampling = SamplingConfig.model_validate({"max_new_tokens": 12} | settings)
    for trajectory in answers(engine, prompts(*TEXTS), sampling, responses=2):
        scores = left(logits(models[0], trajectory), sampling)
        tokens = torch.from_numpy(trajectory.response_tokens)
        expected = scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0].numpy()
        np.testing.assert_allclose(trajectory.sampler_logprobs, expected, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3"])
def test_groups_of_heads_attend_as_in_a_full_forward(family: Family, tmp_path: Path) -> None:
    """One, two and four heads of queries share a head of keys, beyond a sliding window of 6."""
    for kv_heads in (1, 2, 4):
        config = tiny_config(family, True, vocab=32, hidden=32, kv_heads=kv_heads, window=6)
        config.initializer_range = 0.3
        model = tmp_path / f"model-{kv_heads}"
        write_tiny_model(model, config, 0, TOKENIZER)
        engine = make_engine(model)
        assert engine._model.config._attn_implementation == GROUPED
        sampling = SamplingConfig(max_new_tokens=12, min_new_tokens=11)
        for trajectory in answers(engine, prompts(*TEXTS), sampling):
            scores = left(logits(model, trajectory), sampling)
            tokens = torch.from_numpy(trajectory.response_tokens)
            expected = scores.log_softmax(-1).gather(1, tokens[:, None])[:, 0].numpy()
            np.testing.assert_allclose(trajectory.sampler_logprobs, expected, atol=5e-5)


def test_the_models_own_sampling_settings_change_nothing(
    engine: TransformersEngine, models: list[Path], tmp_path: Path
) -> None:
    """Qwen2.5-Instruct has a repetition penalty, of which the trainer knows nothing."""
    own = {"repetition_penalty": 3.0, "no_repeat_ngram_size": 2, "suppress_tokens": [3, 4, 5],
           "min_new_tokens": 10, "do_sample": True, "temperature": 0.2, "top_k": 2, "top_p": 0.5,
           "min_p": 0.2, "eos_token_id": END}  # fmt: skip
    shutil.copytree(models[0], tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(own))
    sampling = SamplingConfig(max_new_tokens=12)
    given = answers(make_engine(tmp_path / "model"), prompts(*TEXTS), sampling)
    for trajectory, plain in zip(given, answers(engine, prompts(*TEXTS), sampling), strict=True):
        np.testing.assert_array_equal(trajectory.response_tokens, plain.response_tokens)
        np.testing.assert_array_equal(trajectory.sampler_logprobs, plain.sampler_logprobs)


def test_sampled_tokens_follow_the_model(engine: TransformersEngine, models: list[Path]) -> None:
    asked = prompts("1+1=")
    sampling = SamplingConfig(max_new_tokens=1, temperature=0.7)
    found = answers(engine, asked, sampling, responses=4000)
    counts = np.bincount([int(t.response_tokens[0]) for t in found], minlength=32) / 4000
    expected = (logits(models[0], found[0])[0] / 0.7).softmax(-1).numpy()
    # Five standard deviations of a share out of 4000 draws.
    np.testing.assert_array_less(
        np.abs(counts - expected), 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-3
    )


def test_a_response_ends_with_its_end_token_or_at_its_limit(engine: TransformersEngine) -> None:
    sampling = SamplingConfig(max_new_tokens=20)
    found = answers(engine, prompts(*TEXTS), sampling, responses=8)
    assert {t.finish_reason for t in found} == {"stop", "length"}
    for trajectory in found:
        tokens = trajectory.response_tokens
        assert len(tokens) == len(trajectory.sampler_logprobs)
        assert END not in tokens[:-1]
        if trajectory.finish_reason == "stop":
            assert tokens[-1] == END
        else:
            assert len(tokens) == 20 and tokens[-1] != END


def test_no_response_ends_before_the_fewest_tokens(engine: TransformersEngine) -> None:
    free = answers(engine, prompts(*TEXTS), SamplingConfig(max_new_tokens=20), responses=8)
    assert min(len(t.response_tokens) for t in free) < 6
    sampling = SamplingConfig(max_new_tokens=20, min_new_tokens=6)
    held = answers(engine, prompts(*TEXTS), sampling, responses=8)
    assert all(len(t.response_tokens) >= 7 or END not in t.response_tokens for t in held)
    assert any(t.finish_reason == "stop" for t in held)


def test_each_prompt_has_its_own_limit(engine: TransformersEngine) -> None:
    """A limit over that of the settings is theirs."""
    limits = (3, 9, 40)
    sampling = SamplingConfig(max_new_tokens=12, min_new_tokens=4)
    request = Request(prompts(*TEXTS[:3]), 24, sampling, 3, limits)
    assert request.most_tokens() == [3, 9, 12]
    found = asyncio.run(engine.generate(request))
    for trajectory, most in zip(found, np.repeat((3, 9, 12), 24), strict=True):
        length = len(trajectory.response_tokens)
        ended = trajectory.response_tokens[-1] == END
        assert length <= most and length == len(trajectory.sampler_logprobs)
        assert trajectory.finish_reason == ("stop" if ended else "length")
        assert ended or length == most
    assert {t.finish_reason for t in found[24:]} == {"stop", "length"}


def test_responses_come_in_the_order_of_prompts_and_samples(engine: TransformersEngine) -> None:
    asked = prompts(*TEXTS)
    found = answers(engine, asked, SamplingConfig(max_new_tokens=2), responses=3)
    expected = [(prompt.index, sample) for prompt in asked for sample in range(3)]
    assert [(t.prompt.index, t.sample_index) for t in found] == expected


def test_a_stop_string_ends_the_response_and_nothing_comes_after_it(
    engine: TransformersEngine,
) -> None:
    sampling = SamplingConfig(max_new_tokens=30, stop=("3", "+7"))
    found = answers(engine, prompts("3+7=", "12+34="), sampling, responses=24)
    by_string = 0
    for trajectory in found:
        plain = TOKENIZER.decode(trajectory.response_tokens, skip_special_tokens=True)
        if "3" in plain or "+7" in plain:
            by_string += 1
            assert trajectory.finish_reason == "stop"
            assert plain.endswith(("3", "+7")) and END not in trajectory.response_tokens
            assert "3" not in plain[:-1] and "+7" not in plain[:-1]
        assert "3" not in trajectory.response_text and "+7" not in trajectory.response_text
    assert 0 < by_string < len(found)


def test_a_stop_string_before_the_fewest_tokens_does_not_count(engine: TransformersEngine) -> None:
    sampling = SamplingConfig(max_new_tokens=30, min_new_tokens=4, stop=("3",))
    found = answers(engine, prompts("3+7=", "12+34="), sampling, responses=24)
    early = [t for t in found if "3" in TOKENIZER.decode(t.response_tokens[:4])]
    assert early and all(len(t.response_tokens) > 4 for t in early)
    for trajectory in found:
        least = TOKENIZER.decode(trajectory.response_tokens[:4], skip_special_tokens=True)
        assert trajectory.response_text.startswith(least)
        assert "3" not in trajectory.response_text[len(least) :]


def test_special_tokens_end_responses_as_stop_strings(tmp_path: Path) -> None:
    """Alone they are end tokens; within a longer string they are sought where it is."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    turn = tokenizer.convert_tokens_to_ids("<turn>")
    config = tiny_config("qwen2", True, vocab=32, hidden=32, feed_forward=48)
    config.initializer_range = 0.3
    write_tiny_model(tmp_path / "model", config, 0, tokenizer)
    own, asked = make_engine(tmp_path / "model"), prompts("3+7=", "12+34=")
    alone = answers(own, asked, SamplingConfig(max_new_tokens=60, stop=("<turn>",)), responses=24)
    assert any(turn in t.response_tokens for t in alone)
    for trajectory in alone:
        assert turn not in trajectory.response_tokens[:-1]
        ended = trajectory.response_tokens[-1] in (turn, END)
        assert (trajectory.finish_reason == "stop") == ended
    sampling = SamplingConfig(max_new_tokens=60, stop=("<turn>7",))
    longer, stopped = answers(own, asked, sampling, responses=48), 0
    for trajectory in longer:
        text = tokenizer.decode(trajectory.response_tokens)
        assert "<turn>7" not in text[:-1] and "<turn>" not in trajectory.response_text
        stopped += text.endswith("<turn>7")
        if text.endswith("<turn>7"):
            expected = text.removesuffix("<turn>7").replace("<turn>", "")
            assert trajectory.response_text == expected and trajectory.finish_reason == "stop"
    assert stopped and any("<turn>" in tokenizer.decode(t.response_tokens) for t in longer)


def test_left_padding_does_not_change_a_result(engine: TransformersEngine) -> None:
    greedy = SamplingConfig(max_new_tokens=16, temperature=0)
    together = answers(engine, prompts(*TEXTS), greedy)
    for prompt, batched in zip(prompts(*TEXTS), together, strict=True):
        [alone] = answers(engine, (prompt,), greedy)
        assert alone.response_tokens.tolist() == batched.response_tokens.tolist()
        np.testing.assert_allclose(alone.sampler_logprobs, batched.sampler_logprobs, atol=2e-5)


def test_a_seed_repeats_a_request_and_leaves_the_process_alone(engine: TransformersEngine) -> None:
    sampling = SamplingConfig(max_new_tokens=16)
    before = torch.get_rng_state()
    first, again = (answers(engine, prompts(*TEXTS), sampling) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert [t.response_text for t in first] == [t.response_text for t in again]
    other = answers(engine, prompts(*TEXTS), sampling, seed=4)
    assert [t.response_text for t in first] != [t.response_text for t in other]


def test_log_probs_are_at_temperature_one(engine: TransformersEngine, models: list[Path]) -> None:
    [trajectory] = answers(engine, prompts("12+34="), SamplingConfig(max_new_tokens=8))
    whole = np.concatenate([trajectory.prompt.tokens, trajectory.response_tokens])
    [found] = asyncio.run(engine.log_probs([whole]))
    assert len(found) == len(whole) - 1
    tokens = torch.from_numpy(trajectory.response_tokens)
    expected = logits(models[0], trajectory).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    np.testing.assert_allclose(found[-len(tokens) :], expected.numpy(), atol=2e-5)


def weights_of(model: Path) -> dict[str, Tensor]:
    named = plain_model(model).named_parameters(remove_duplicate=False)
    return {name: parameter.detach() for name, parameter in named}


def send(engine: TransformersEngine, names: tuple[str, ...], *buckets: WeightBucket) -> None:
    async def steps() -> None:
        await engine.begin_sync(names, [posted(*buckets)])
        for _ in buckets:
            await engine.receive()
        await engine.end_receiving()
        await engine.finish_sync(5)

    asyncio.run(steps())


def test_new_weights_are_used_and_their_version_is_noted(models: list[Path]) -> None:
    engine = make_engine(models[0])
    weights = weights_of(models[1])
    assert "lm_head.weight" in weights
    names = list(weights)
    buckets = [bucket_of({n: weights[n] for n in part}) for part in (names[:3], names[3:])]
    sampling = SamplingConfig(max_new_tokens=8)
    assert {v for t in answers(engine, prompts(*TEXTS), sampling) for v in t.weight_versions} == {0}
    send(engine, tuple(names), *buckets)
    found = answers(engine, prompts(*TEXTS), sampling)
    expected = answers(make_engine(models[1]), prompts(*TEXTS), sampling)
    assert {v for t in found for v in t.weight_versions} == {5}
    assert [t.response_text for t in found] == [t.response_text for t in expected]
    assert all(
        np.array_equal(a.sampler_logprobs, b.sampler_logprobs)
        for a, b in zip(found, expected, strict=True)
    )


def test_weights_that_do_not_come_whole_are_refused(models: list[Path]) -> None:
    engine = make_engine(models[0])
    weights = weights_of(models[1])
    first = dict(list(weights.items())[:1])
    with pytest.raises(WeightSyncError, match=f"{len(weights) - 1} tensors .* never arrived"):
        send(engine, tuple(weights), bucket_of(first))
    unknown = {"model.extra.weight": torch.ones(2)}
    with pytest.raises(WeightSyncError, match=r"no tensor model\.extra\.weight"):
        send(engine, tuple(unknown), bucket_of(unknown))
    [trajectory] = answers(engine, prompts("1+1="), SamplingConfig(max_new_tokens=1))
    assert set(trajectory.weight_versions) == {0}


def test_a_paused_engine_lets_requests_wait_for_the_new_weights(models: list[Path]) -> None:
    engine, request = make_engine(models[0]), Request(prompts("1+1="), 1, SamplingConfig(), 3)

    async def talk() -> tuple[bool, Trajectory]:
        await engine.pause()
        await engine.begin_sync((), [posted()])
        asked = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0)
        waited = not asked.done()
        await engine.finish_sync(1)
        await engine.resume()
        return waited, (await asked)[0]

    waited, response = asyncio.run(talk())
    assert waited and set(response.weight_versions) == {1}
