"""What a plan is refused or warned for besides bytes: each rule where it fires and where not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rule_cases import QWEN, conflicts
from torch import nn

from plimsoll.machine.local_host import LocalHost
from plimsoll.resolve.decisions import against_varlen
from plimsoll.shapes.known_models import known_models, read_shape

GEMMA, MIXTRAL = "google/gemma-2-9b", "mistralai/Mixtral-8x7B-v0.1"
LATENT = "deepseek-ai/DeepSeek-V2-Lite"
HERE = LocalHost("", {}, (), jemalloc=True, bfloat16=True)


def test_plain_settings_meet_no_rule() -> None:
    for job in ("sft", "dpo", "ppo"):
        assert conflicts(job, {"cluster.ranks": 1}, here=HERE) == {}, job


def test_cards_without_ligers_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for asks in ("memory.rules", "resolve.decisions"):
        monkeypatch.setattr(f"plimsoll.{asks}.cards_have_liger", lambda: False)
    found = conflicts("sft", {"cluster.ranks": 1})["package-missing"]
    assert found.severity == "warning" and "liger-kernel is not installed" in found.what
    assert "package-missing" not in conflicts("sft", {"cluster.ranks": 1}, "cpu")


def test_liger_needs_what_triton_compiles_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the machine at hand, where it is installed."""
    rules = "plimsoll.memory.rules"
    monkeypatch.setattr(f"{rules}.installed_version", lambda name: "0.8.5")
    monkeypatch.setattr(f"{rules}.system_tools", lambda: {"gcc": None, "Python.h": "/usr/include"})
    changes = {"cluster.ranks": 1}
    found = conflicts("sft", changes, here=HERE)["package-missing"]
    assert found.is_conflict and "lacks gcc" in found.what and "apt install gcc" in found.fix
    assert conflicts("sft", changes) == {}  # a plan of other machines
    assert conflicts("sft", changes, "cpu", here=HERE) == {}
    assert conflicts("sft", changes | {"actor.model.dtype": "float32"}, "T4", here=HERE) == {}
    monkeypatch.setattr(f"{rules}.installed_version", lambda name: None)
    assert conflicts("sft", changes, here=HERE) == {}


# (job, changes that a rule is against, cluster, code, severity, words of it, changes that mend it)
CASES = [
    (
        "sft",
        {"actor.model.path": "google/gemma-2-9b", "data.max_tokens": 8193},
        "8xA100-80GB",
        "sequence-over-positions",
        "error",
        ["8,193 tokens", "8,192 positions", "data.max_tokens = 8193"],
        {"data.max_tokens": 8192},
    ),
    (
        "sft",
        {"actor.model.path": "google/gemma-3-4b-it"},
        "8xA100-80GB",
        "text-decoder",
        "warning",
        ["google/gemma-3-4b-it", "parts beside its text decoder", "actor.model.path"],
        {"actor.model.path": "google/gemma-3-1b-it"},
    ),
    (
        "ppo",
        {"critic.model.path": "Qwen/Qwen2.5-1.5B"},
        "8xA100-80GB",
        "vocabulary",
        "warning",
        ["151,936", "152,064", "critic.model"],
        {"actor.model.path": "Qwen/Qwen2.5-1.5B"},
    ),
    (
        "sft",
        {"actor.adapter.targets": ("q_proj", "w1")},
        "8xA100-80GB",
        "adapter-targets",
        "error",
        ["actor.adapter.targets: w1", "q_proj, k_proj, v_proj, o_proj, gate_proj"],
        {"actor.adapter.targets": ("all-linear",)},
    ),
    (
        "sft",
        {"actor.model.path": MIXTRAL, "actor.adapter.targets": ("q_proj", "gate_up_proj")},
        "8xA100-80GB",
        "adapter-targets",
        "error",
        ["gate_up_proj"],
        {"actor.adapter.targets": ("q_proj", "o_proj")},
    ),
    (
        "sft",
        {"actor.model.path": "zai-org/GLM-4.5-Air", "actor.adapter.targets": ("all-linear",)},
        "8xA100-80GB",
        "adapter-targets",
        "error",
        ["stacked in one tensor", "some of q_proj, k_proj, v_proj, o_proj"],
        {"actor.adapter.targets": ("q_proj", "o_proj")},
    ),
    (
        "sft",
        {"actor.model.path": LATENT, "actor.adapter.targets": ("all-linear",)},
        "8xA100-80GB",
        "adapter-targets",
        "error",
        ["stacked in one tensor", "some of q_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj"],
        {"actor.adapter.targets": ("q_proj", "o_proj")},
    ),
    (
        "sft",
        {"actor.model.path": LATENT, "actor.model.attention": "varlen"},
        "8xA100-80GB",
        "varlen-attention",
        "error",
        ["equally wide", "192 and 128"],
        {"actor.model.attention": "auto"},
    ),
    (
        "sft",
        {"actor.model.path": GEMMA, "actor.adapter.targets": ("embed_tokens",)},
        "8xA100-80GB",
        "adapter-targets",
        "error",
        ["tie_word_embeddings"],
        {"actor.model.path": QWEN},
    ),
    (
        "ppo",
        {"critic.freeze": "router"},
        "8xA100-80GB",
        "no-router",
        "error",
        ["critic.freeze", "every token passes all its weights"],
        {"critic.freeze": "none"},
    ),
    (
        "ppo",
        {"actor.model.path": QWEN, "rollout.routing": "sampled"},
        "8xA100-80GB",
        "sampled-routing",
        "error",
        ["no experts", "rollout.routing: live"],
        {"actor.model.path": "Qwen/Qwen3-30B-A3B"},
    ),
    (
        "ppo",
        {"actor.model.path": "zai-org/GLM-4.5-Air", "rollout.routing": "sampled"},
        "8xA100-80GB",
        "sampled-routing",
        "error",
        ["glm4_moe", "mixtral, olmoe, qwen2_moe, qwen3_moe"],
        {"rollout.routing": "live"},
    ),
    (
        "ppo",
        {"critic.adapter.modules_to_save": ("embed_tokens", "lm_head")},
        "8xA100-80GB",
        "adapter-targets",
        "error",
        ["critic.adapter.modules_to_save: lm_head", "one number a token"],
        {"critic.adapter.modules_to_save": ("embed_tokens",)},
    ),
    (
        "sft",
        {"actor.model.attention": "varlen", "actor.model.dtype": "float32"},
        "8xA100-80GB",
        "varlen-attention",
        "error",
        ["bfloat16", "float32", "actor.model.attention: auto"],
        {"actor.model.dtype": "bfloat16"},
    ),
    (
        "dpo",
        {"reference.model": {"path": GEMMA, "attention": "varlen"}},
        "8xA100-80GB",
        "varlen-attention",
        "error",
        ["caps its attention scores", "reference.model.attention"],
        {"reference.model": {"path": GEMMA}},
    ),
    (
        "sft",
        {"actor.model.attention": "varlen"},
        "cpu",
        "varlen-attention",
        "error",
        ["runs on CUDA, and this is cpu"],
        {"actor.model.attention": "auto"},
    ),
    (
        "sft",
        {"actor.model.attention": "varlen", "actor.model.dtype": "bfloat16"},
        "T4",
        "varlen-attention",
        "error",
        ["compute capability 8.0", "7.5"],
        {"actor.model.attention": "sdpa"},
    ),
    (
        "sft",
        {"actor.model.dtype": "bfloat16"},
        "V100-32GB",
        "bfloat16-card",
        "warning",
        ["actor: model.dtype", "7.0", "float32"],
        {"actor.model.dtype": "float32"},
    ),
    (
        "ppo",
        dict.fromkeys(("actor.model.dtype", "critic.model.dtype"), "float32")
        | {"rollout.dtype": "bfloat16"},
        "2xV100-32GB",
        "bfloat16-card",
        "error",
        ["rollout.dtype is bfloat16", "vLLM does not start"],
        {"rollout.dtype": "float32"},
    ),
    (
        "sft",
        {"actor.model.gradient_checkpointing": True, "actor.model.activation_offload": "cpu"},
        "cpu",
        "offload-without-gpu",
        "warning",
        ["actor.model.activation_offload: cpu"],
        {"actor.model.activation_offload": "none"},
    ),
    (
        "sft",
        {"actor.zero.state_dtype": "bfloat16", "actor.optimizer.learning_rate": 1e-5},
        "8xA100-80GB",
        "lost-updates",
        "warning",
        ["learning_rate 1e-05", "1.2e-4 apart", "float32"],
        {"actor.optimizer.learning_rate": 1e-4},
    ),
    (
        "sft",
        {"actor.zero.quantized_gradients": True, "actor.zero.quantized_weights": True},
        "cpu",
        "zero-plus-plus",
        "error",
        ["actor.zero.quantized_weights, actor.zero.quantized_gradients", "CUDA kernels"],
        {"actor.zero.quantized_gradients": False, "actor.zero.quantized_weights": False},
    ),
    (
        "dpo",
        {"reference": {"model": {"path": QWEN}, "zero": {"offload": "cpu"}}},
        "cpu",
        "offload-without-gpu",
        "warning",
        ["reference.zero.offload: cpu"],
        {"reference": {"model": {"path": QWEN}}},
    ),
    (
        "sft",
        {"actor.zero.optimizer_offload": "cpu"},
        "cpu",
        "offload-without-gpu",
        "warning",
        ["actor.zero.optimizer_offload: cpu"],
        {"actor.zero.optimizer_offload": "none"},
    ),
    (
        "sft",
        {"batch.sequences": 3, "cluster.ranks": 4},
        "4xH200",
        "idle-ranks",
        "warning",
        ["3 sequences", "4 ranks", "batch.sequences"],
        {"batch.sequences": 4},
    ),
    (
        "dpo",
        {"batch.pairs": 3, "cluster.ranks": 4},
        "4xH200",
        "idle-ranks",
        "warning",
        ["3 pairs", "batch.pairs"],
        {"batch.pairs": 4},
    ),
    (
        "ppo",
        {"batch.prompts": 4, "batch.responses": 4, "algorithm.mini_batches": 8, "cluster.ranks": 4},
        "8xH200",
        "idle-ranks",
        "warning",
        ["2 sequences", "fewer algorithm.mini_batches"],
        {"algorithm.mini_batches": 4},
    ),
    (
        "ppo",
        {
            "batch.prompts": 2,
            "batch.responses": 2,
            "cluster.ranks": 2,
            "reward_model.role.model.path": QWEN,
            "cluster.reward_ranks": 5,
        },
        "8xH200",
        "idle-ranks",
        "warning",
        ["4 responses", "5 ranks", "fewer cluster.reward_ranks"],
        {"cluster.reward_ranks": 4},
    ),
    (
        "ppo",
        {},
        "8xH200",
        "idle-cards",
        "warning",
        ["2 of 8 GPUs", "cluster.ranks: 7, or cluster.ranks: 1 to leave"],
        {"cluster.ranks": 1},
    ),
    (
        "sft",
        {"batch.sequences": 3},  # no more ranks than have work
        "8xH200",
        "idle-cards",
        "warning",
        ["1 of 8 GPUs", "cluster.ranks: 3, or cluster.ranks: 1 to leave"],
        {"batch.sequences": 1},
    ),
    (
        "sft",
        {"cluster.nodes": 2},
        "8xH200",
        "nodes-without-cluster",
        "warning",
        ["2 nodes", "cluster.address"],
        {"cluster.address": "10.0.0.7:6379"},
    ),
    (
        "ppo",
        {"rollout.vllm.tensor_parallel": 3},
        "8xH200",
        "tensor-parallel",
        "error",
        ["28 attention heads", "4 key-value heads", "rollout.vllm.tensor_parallel: 1, 2 or 4"],
        {"rollout.vllm.tensor_parallel": 2},
    ),
    (
        "ppo",
        {"rollout.vllm.tensor_parallel": 4},
        "2xH200",
        "tensor-parallel-node",
        "error",
        ["a node has 2 cards", "at most 2"],
        {"rollout.vllm.tensor_parallel": 2},
    ),
    (
        "ppo",
        {"rollout.vllm.tensor_parallel": 2, "rollout.vllm.pipeline_parallel": 2},
        "2xH200",
        "tensor-parallel-node",
        "error",
        [
            "rollout.vllm.tensor_parallel x rollout.vllm.pipeline_parallel: 2 x 2",
            "a node has 2 cards",
        ],
        {"rollout.vllm.tensor_parallel": 1},
    ),
    (
        "ppo",
        {"rollout.vllm.pipeline_parallel": 29},
        "8xH200",
        "pipeline-parallel",
        "error",
        ["has 28 layers", "rollout.vllm.pipeline_parallel: at most 28"],
        {"rollout.vllm.pipeline_parallel": 4},
    ),
]


@pytest.mark.parametrize(("job", "changes", "cluster", "code", "severity", "words", "mend"), CASES)
def test_a_rule_fires_and_can_be_mended(
    job: str,
    changes: dict[str, Any],
    cluster: str,
    code: str,
    severity: str,
    words: list[str],
    mend: dict[str, Any],
) -> None:
    problem = conflicts(job, changes, cluster)[code]
    assert problem.severity == severity
    assert problem.what and problem.why and problem.fix
    assert all(word in str(problem) for word in words), str(problem)
    assert code not in conflicts(job, changes | mend, cluster)


def test_every_role_that_is_too_short_is_told() -> None:
    changes = {
        "critic.model.path": GEMMA,
        "data.max_tokens": 8000,
        "rollout.sampling.max_new_tokens": 200,
    }
    found = conflicts("ppo", changes)["sequence-over-positions"]
    assert "critic" in found.what and "8,200 tokens" in found.what
    assert "sequence-over-positions" not in conflicts(
        "ppo", changes | {"rollout.sampling.max_new_tokens": 192}
    )


def test_episodes_that_the_models_positions_do_not_hold_are_refused() -> None:
    """Qwen2.5-7B has 131,072."""
    game = {"name": "guess_number", "max_tokens": 131_072 - 511}
    found = conflicts("ppo", {"environments": {"game": game}})["sequence-over-positions"]
    assert "131,073 tokens" in found.what and "environments.game.max_tokens = 130561" in found.what
    game = game | {"max_tokens": 131_072 - 512}
    assert "sequence-over-positions" not in conflicts("ppo", {"environments": {"game": game}})


def test_sequences_beyond_where_a_longrope_changes() -> None:
    """Phi-3.5 has 131,072 positions, and other angles for all of a pack with more than 4,096."""
    changes = {"actor.model.path": "microsoft/Phi-3.5-mini-instruct", "data.max_tokens": 4097}
    found = conflicts("sft", changes)["sequence-over-positions"]
    assert "4,096 positions" in found.why and "longrope" in found.why
    assert "sequence-over-positions" not in conflicts("sft", changes | {"data.max_tokens": 4096})


def test_of_a_directory_the_config_tells_of_other_parts(tmp_path: Path) -> None:
    text = dict(known_models()["google/gemma-3-1b-it"])
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    for values, told in ((whole, True), (text, False)):
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert ("text-decoder" in conflicts("sft", {"actor.model.path": str(tmp_path)})) == told


def test_a_family_that_no_entry_describes(tmp_path: Path) -> None:
    """Its positions may be no limit, and the names of a guessed model's layers are not known."""
    values = {**known_models()["Qwen/Qwen2.5-0.5B"], "max_position_embeddings": 64}
    changes = {
        "actor.model.path": str(tmp_path),
        "actor.adapter.targets": ("c_fc",),
        "data.max_tokens": 512,
    }
    for family, words in (("arcee", "are counted"), ("nobody", "plan is coarse")):
        (tmp_path / "config.json").write_text(json.dumps({**values, "model_type": family}))
        found = conflicts("sft", changes)
        assert family in found["model-family"].what and words in found["model-family"].why
        assert "sequence-over-positions" not in found
        assert ("adapter-targets" in found) == (family == "arcee")


def test_heads_that_varlen_has_no_kernel_for() -> None:
    plain = ("cuda", (9, 0), "bfloat16", False)
    assert list(against_varlen(*plain, 256)) == list(against_varlen(*plain, 0)) == []
    (obstacle,) = against_varlen(*plain, 264)
    assert " 256 dimensions, not 264" in obstacle
    (obstacle,) = against_varlen(*plain, 100)
    assert " 8 dimensions, not 100" in obstacle
    assert len(list(against_varlen("cpu", None, "float32", True, 512))) == 4


# Names of layers: those of transformers' own models, whose weights are never made.
@pytest.mark.parametrize("model", [QWEN, GEMMA, MIXTRAL, "microsoft/phi-2", "Qwen/Qwen3-30B-A3B"])
def test_a_target_is_refused_where_the_model_has_no_such_linear(model: str) -> None:
    values = dict(known_models()[read_shape(model).name])
    kind = values.pop("model_type")
    made = transformers.AutoConfig.for_model(kind, **values | {"num_hidden_layers": 4})
    with torch.device("meta"):
        decoder = transformers.AutoModel.from_config(made)
    named = [(name.rpartition(".")[2], layer) for name, layer in decoder.named_modules()]
    linears = {name for name, layer in named if isinstance(layer, nn.Linear)}
    every = {name for name, _ in named if name and not name.isdigit()}
    for name in sorted(every - {"embed_tokens"}):
        changes = {"actor.model.path": model, "actor.adapter.targets": (name,)}
        refused = "adapter-targets" in conflicts("sft", changes)
        assert refused == (name not in linears), name


def test_a_conflict_is_told_from_what_more_room_would_mend() -> None:
    conflict = conflicts("ppo", {"rollout.vllm.tensor_parallel": 3})["tensor-parallel"]
    room = conflicts("ppo", {"rollout.vllm.tensor_parallel": 4}, "2xH200")["tensor-parallel-node"]
    assert conflict.is_conflict and not room.is_conflict
