"""Rules about vLLM: what it divides, and its share beside training."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rule_cases import QWEN, config, conflicts

from plimsoll.jobs.which import spec_of
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.plan import make_plan
from plimsoll.memory.weigh import Ground, Plan
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.sampler.vllm.levers import sleep_level
from plimsoll.sampler.vllm.plan_rules import against_parallel
from plimsoll.shapes.known_models import read_shape


# (heads, kv heads, MLP, vocabulary) over so many cards: whether vLLM divides them. By its asserts.
@pytest.mark.parametrize(
    ("model", "parallel", "divides"),
    [
        (QWEN, 4, True),
        (QWEN, 28, False),  # 18,944 / 28
        (QWEN, 8, False),  # 28 heads
        ("Qwen/Qwen2.5-0.5B", 2, True),
        ("Qwen/Qwen2.5-0.5B", 7, False),  # 14 heads, 2 key-value heads
        ("meta-llama/Llama-3.1-8B", 16, True),  # 8 key-value heads, each on two cards
        ("meta-llama/Llama-3.1-8B", 64, False),  # 32 heads
        ("meta-llama/Llama-2-13b", 5, False),  # 40 heads; the MLP of 13,824 is not divided
    ],
)
def test_what_vllm_divides(model: str, parallel: int, divides: bool) -> None:
    assert (not list(against_parallel(read_shape(model), parallel))) == divides


def test_no_engine_no_rule_about_engines() -> None:
    changes: dict[str, object] = {"rollout.transformers": {}, "actor.model.dtype": "bfloat16"}
    assert conflicts("ppo", changes, "V100-32GB").keys() == {"bfloat16-card"}
    assert conflicts("ppo", changes, "V100-32GB")["bfloat16-card"].severity == "warning"


def test_settings_of_vllm_outside_the_plan_are_a_warning() -> None:
    own = {
        "rollout.vllm.arguments": {
            "enforce_eager": True,
            "speculative_config": {"method": "medusa"},
        }
    }
    found = conflicts("ppo", own)["vllm-not-in-plan"]
    assert found.severity == "warning"
    assert "rollout.vllm.arguments.speculative_config.method: medusa" in found.what
    own["rollout.vllm.arguments"]["speculative_config"] = {
        "method": "ngram",
        "num_speculative_tokens": 4,
    }
    assert "vllm-not-in-plan" not in conflicts("ppo", own)


def test_speculative_decoding_is_refused_where_vllm_breaks_it() -> None:
    """On the CPU; and with a model that proposes, where sleep drops its weights."""
    vllm: dict[str, object] = {"speculative_config": {"method": "ngram"}}
    changes: dict[str, object] = {"rollout.vllm.arguments": vllm}
    assert "vllm-argument" not in conflicts("ppo", changes)
    on_cpu = conflicts("ppo", changes | {"cluster.device": "cpu"}, "cpu")["vllm-argument"]
    assert on_cpu.is_conflict and "speculative decoding (ngram)" in on_cpu.what
    changes |= {"rollout.placement": "shared", "rollout.vllm.sleep_level": 2}
    assert "vllm-argument" not in conflicts("ppo", changes)
    vllm["speculative_config"] = {"model": "Qwen/Qwen2.5-0.5B", "num_speculative_tokens": 4}
    asleep = conflicts("ppo", changes)["vllm-argument"]
    assert asleep.is_conflict and "rollout.vllm.sleep_level: 1" in asleep.fix
    assert "vllm-argument" not in conflicts("ppo", changes | {"rollout.vllm.sleep_level": 1})
    vllm["sleep_preserve_parameter_names"] = ["draft.*"]
    kept = conflicts("ppo", changes)
    assert "vllm-argument" not in kept and "sleep_preserve" in kept["vllm-not-in-plan"].what


@pytest.mark.parametrize("method", ["standard", "block", "synthetic"])
def test_tokens_that_are_accepted_at_given_rates_are_refused(method: str) -> None:
    speculation = {"method": "ngram", "rejection_sample_method": method}
    changes = {"rollout.vllm.arguments": {"speculative_config": speculation}}
    found = conflicts("ppo", changes)
    assert ("vllm-argument" in found) == (method == "synthetic")


@pytest.mark.parametrize(
    ("model", "refused"),
    [("openlm-research/open_llama_3b", True), ("microsoft/phi-2", False), (QWEN, False)],
)
def test_heads_that_vllm_has_no_attention_for_on_cpu(model: str, refused: bool) -> None:
    """The head sizes are 100, 80 and 128."""
    changes = {"actor.model.path": model, "critic.model.path": model, "actor.zero.stage": 0}
    found = conflicts("ppo", {**changes, "cluster.device": "cpu"}, "cpu")
    assert ("vllm-head-size" in found) == refused
    assert not refused or "attention heads of 100" in found["vllm-head-size"].what
    assert "vllm-head-size" not in conflicts("ppo", changes)
    transformers = {"cluster.device": "cpu", "rollout.transformers": {}}
    assert "vllm-head-size" not in conflicts("ppo", changes | transformers, "cpu")


@pytest.mark.parametrize(
    ("gib", "responses", "told"),
    [(1.0, 32, False), (0.7, 32, True), (0.7, 5, False), (0.05, 32, False)],
)
def test_a_cache_for_a_few_sequences(gib: float, responses: int, told: bool) -> None:
    """1,024 + 1,024 tokens at 57,344 bytes: 1 GiB holds 9, 0.7 GiB 6; with none, vLLM refuses."""
    changes = {
        "rollout": {"vllm": {"cpu_kv_cache_gib": gib}, "sampling": {"max_new_tokens": 1024}},
        "data.max_tokens": 1024,
        "batch": {"prompts": 1, "responses": responses},
        "cluster.device": "cpu",
    }
    found = conflicts("ppo", changes, "cpu")
    assert ("few-at-once" in found) == told
    if told:
        assert re.search(r" 6 sequences of 2,048 tokens.* 32$", found["few-at-once"].what)


@pytest.mark.parametrize(
    ("at_once", "engines", "engine", "told"),
    [
        *((20, 1, "vllm", True), (18, 1, "vllm", False), (20, 2, "vllm", False)),
        *((20, 1, "transformers", False), (None, 1, "vllm", True)),
    ],
)
def test_episodes_in_flight_beyond_the_kv_cache(
    at_once: int | None, engines: int, engine: str, told: bool
) -> None:
    """Half of 512 + 1,536 tokens at 2 x 28 layers x 4 heads x 128 x 2 bytes are 58,720,256 bytes,
    which 1 GiB holds 18 times. Without at_once the 32 episodes of a step are in flight."""
    settings = {"cpu_kv_cache_gib": 1} if engine == "vllm" else {}
    changes = {
        "environments": {"game": {"name": "guess_number", "max_tokens": 1536, "at_once": at_once}},
        "rollout": {engine: settings, "engines": engines},
        "batch": {"prompts": 32, "responses": 1},
        "cluster.device": "cpu",
    }
    found = conflicts("ppo", changes, "cpu")
    assert ("environment-cache" in found) == told
    if told:
        problem = found["environment-cache"]
        assert problem.severity == "warning"
        assert re.search(rf" 18 episodes .*\(2,048 tokens\).* {at_once or 32} ", problem.what)
        assert problem.fix.startswith("environments.game.at_once: 18, ")
        assert "rollout.vllm.cpu_kv_cache_gib" in problem.fix


def shared_plan(share: float, level: int = 0) -> Plan:
    changes = {
        "cluster.ranks": 4,
        "actor.model.path": "Qwen/Qwen2.5-1.5B",
        "critic.model.path": "Qwen/Qwen2.5-1.5B",
        "rollout": {
            "vllm": {"memory_share": share, "sleep_level": level},
            "engines": 4,
            "placement": "shared",
        },
    }
    read = config("ppo", changes)
    return make_plan(spec_of(read), Ground(parse_cluster("4xA100-80GB", 1, 10**12)))


def test_vllm_beside_training_says_the_share_that_fits() -> None:
    found = shared_plan(0.9)
    problem = next(p for p in found.problems if p.code == "vllm-share-beside-training")
    assert found.verdict == "does not fit" and not problem.is_conflict
    ways = re.match(
        r"rollout.vllm.memory_share: (0\.\d+), or rollout.vllm.memory_share: (0\.\d+) with "
        r"rollout.vllm.sleep_level: 2(?:,|$)",
        problem.fix,
    )
    assert ways is not None, problem.fix
    awake, asleep = float(ways[1]), float(ways[2])
    assert 0 < awake < 0.9 and awake < asleep
    assert shared_plan(awake).verdict == "fits" and shared_plan(awake + 0.02).verdict != "fits"
    assert shared_plan(asleep, level=1).verdict == shared_plan(asleep, level=2).verdict == "fits"


@pytest.mark.parametrize(
    ("vllm", "level"),
    [
        ({}, 2),
        ({"adapter": "merged"}, 2),
        ({"adapter": "separate"}, 1),
        ({"arguments": {"spec_method": "ngram"}}, 2),
        ({"arguments": {"spec_model": "draft"}}, 1),
        ({"arguments": {"spec_model": "draft", "sleep_preserve_parameter_names": ["draft.*"]}}, 2),
    ],
)
def test_engines_keep_asleep_what_no_sync_brings(vllm: dict[str, Any], level: int) -> None:
    assert sleep_level(VllmConfig.model_validate(vllm)) == level


def test_training_that_does_not_fit_by_itself_is_not_vllms_fault() -> None:
    read = config(
        "ppo",
        {"cluster.ranks": 4, "rollout.placement": "shared", "actor.zero.stage": 0},
    )
    found = make_plan(spec_of(read), Ground(parse_cluster("4xRTX4090", 1, 10**12)))
    codes = {problem.code for problem in found.problems}
    assert "device-memory" in codes and "vllm-share-beside-training" not in codes


@pytest.mark.parametrize(
    ("quantization", "cluster", "fix"),
    [
        ("fp8_per_channel", "8xH100", None),
        ("fp8_per_channel", "4xRTX4090", None),
        (
            "fp8_per_channel",
            "8xA100-80GB",
            "rollout.vllm.arguments.quantization: fp8_per_tensor, or",
        ),
        ("fp8_per_tensor", "8xA100-80GB", None),
        ("mxfp4", "8xA100-80GB", None),
        ("fp8_per_channel", "cpu", None),
        ("mxfp4", "cpu", "rollout.vllm.arguments.quantization: fp8_per_channel, or"),
    ],
)
def test_engines_that_vllm_cannot_quantise_there(
    quantization: str, cluster: str, fix: str | None
) -> None:
    device = "cpu" if cluster == "cpu" else "cuda"
    rollout = {"dtype": "bfloat16", "vllm": {"arguments": {"quantization": quantization}}}
    changes: dict[str, Any] = {"rollout": rollout, "cluster.device": device}
    found = conflicts("ppo", changes, cluster)
    assert "vllm-not-in-plan" not in found and ("vllm-argument" in found) == (fix is not None)
    assert fix is None or found["vllm-argument"].fix.startswith(fix)
    wide = conflicts("ppo", changes | {"rollout": {**rollout, "dtype": "float32"}}, cluster)
    assert "16 bits" in wide["vllm-argument"].why


@pytest.mark.parametrize(
    ("algorithm", "quantization", "warned"),
    [
        ({"correction": None}, "fp8_per_channel", True),
        ({"correction": {"name": "truncate"}}, "fp8_per_channel", False),
        ({"correction": None, "policy_loss": {"name": "dppo_tv"}}, "fp8_per_channel", False),
        ({"correction": None}, None, False),
    ],
)
def test_rounded_engines_want_a_correction(
    algorithm: dict[str, Any], quantization: str | None, warned: bool
) -> None:
    changes: dict[str, Any] = {f"algorithm.{key}": value for key, value in algorithm.items()}
    if quantization:
        changes["rollout.vllm.arguments"] = {"quantization": quantization}
    assert ("rounded-uncorrected" in conflicts("ppo", changes)) == warned
