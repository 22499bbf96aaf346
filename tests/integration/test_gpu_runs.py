"""Whole runs on one card: sampling in the same process, and vLLM beside the training rank, which
sleeps while the rank trains; and on two cards with an engine of two stages."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import PPO, SFT, Command, metrics, wait_for, write_config, write_task
from fakecard.library import why_not
from test_run_mixtures import SIZES, write_mixture
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from plimsoll.commands.demo import make_tokenizer
from plimsoll.run.json_lines import read_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA GPU: `make BACKEND=gpu test-gpu`"
    ),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed"),
]
needs_vllm = pytest.mark.skipif(
    find_spec("ray") is None or find_spec("vllm") is None or not why_not(),
    reason="needs Ray and vLLM, and a card that is no host memory",
)

STEPS = 2
GAP = 0.05
"""Nats: rounding in bfloat16. A wrong or stale weight gives several tenths."""
PATIENCE = 540.0
"""Seconds of one run: vLLM compiles the model and captures its graphs at its first start on a
machine."""


def shared(sleep_level: int, **vllm: Any) -> dict[str, Any]:
    """PPO whose engine has the card of the only rank."""
    config = copy.deepcopy(PPO)
    config["run"] |= {"steps": STEPS, "save_every": STEPS, "eval_every": STEPS}
    config["cluster"] |= {"where": "ray", "device": "cuda"}
    config["rollout"] |= {
        "vllm": {"memory_share": 0.3, "sleep_level": sleep_level, **vllm},
        "transformers": None,
        "placement": "shared",
    }
    return config


def check(
    home: Path, config: dict[str, Any], gap: float = GAP, environment: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """The run's rows, once it has ended well. gap: of sampler and trainer, at most."""
    write_task(home)
    write_config(home, "ppo", config)
    command = Command(home, "ppo", "ppo.yaml", environment=environment)
    outcome = command.finish(PATIENCE)
    assert outcome.code == 0, outcome.err
    wait_for(lambda: not command.processes(), "the end of all processes of the run")
    rows = metrics(home / "ppo")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all(np.isfinite(value) for row in rows for value in row.values())
    for row in rows[1:]:
        assert row["sync/logprob_gap"] < gap and row["mismatch/abs"] < gap
        assert 0.8 < row["ratio"] < 1.2 and row["actor/grad_norm"] > 0
    return rows


def test_sft_learns(tmp_path: Path) -> None:
    write_task(tmp_path)
    config = copy.deepcopy(SFT)
    config["cluster"]["device"] = "cuda"
    config["actor"]["model"]["dtype"] = "bfloat16"
    write_config(tmp_path, "sft", config)
    outcome = Command(tmp_path, "sft", "sft.yaml").finish(PATIENCE)
    assert outcome.code == 0, outcome.err
    losses = [row["loss"] for row in metrics(tmp_path / "sft") if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]


def test_ppo_in_one_process(tmp_path: Path) -> None:
    config = copy.deepcopy(PPO)
    config["run"] |= {"steps": STEPS, "save_every": STEPS, "eval_every": STEPS}
    config["cluster"]["device"] = "cuda"
    check(tmp_path, config)


def card_bytes(home: Path, phase: str) -> list[int]:
    """Return what the card showed to the engine in each step's phase, at its fullest."""
    rows = read_rows(home / "ppo" / "ledger.jsonl")
    own = [row for row in rows if (row["process"], row["phase"]) == ("engine 0", phase)]
    return [row["measured"]["device_bytes"] for row in own]


@needs_vllm
@pytest.mark.parametrize("sleep_level", [0, 1, 2])
def test_ppo_with_vllm_on_the_same_card(sleep_level: int, tmp_path: Path) -> None:
    config = shared(sleep_level)
    check(tmp_path, config)
    share = config["rollout"]["vllm"]["memory_share"] * torch.cuda.mem_get_info()[1]
    assert min(card_bytes(tmp_path, "rollout")) > 0.8 * share
    training = card_bytes(tmp_path, "train_actor")
    assert max(training) < 0.6 * share if sleep_level else min(training) > 0.8 * share


@needs_vllm
@pytest.mark.parametrize(("sleep_level", "depth"), [(2, "states"), (2, "all"), (1, "all")])
def test_ranks_sleep_while_the_engine_samples(sleep_level: int, depth: str, tmp_path: Path) -> None:
    config = shared(sleep_level)
    config["cluster"]["rank_sleep"] = depth
    check(tmp_path, config)
    training = rank_bytes(tmp_path, "train_actor")
    for phase in ("rollout", "eval"):
        assert max(rank_bytes(tmp_path, phase)) < (0.1 if depth == "all" else 0.5) * min(training)


@needs_vllm
def test_ranks_sleep_beside_an_engine_that_is_sent_an_adapter_alone(tmp_path: Path) -> None:
    config = shared(1, adapter="separate")
    config["actor"]["adapter"] = {"rank": 8}
    config["cluster"]["rank_sleep"] = "all"
    check(tmp_path, config)


@needs_vllm
def test_a_mixture_learns_with_the_experts_that_vllm_took(tmp_path: Path) -> None:
    """vLLM returns them itself there; on a CPU they are recorded beside it."""
    write_mixture(tmp_path / "mixture", MixtralConfig(**SIZES, num_local_experts=4))
    config = shared(1)
    config["actor"]["model"] = {"path": "mixture", "dtype": "bfloat16"}
    config["rollout"]["routing"] = "sampled"
    rows = check(tmp_path, config)
    assert all(row["rollout/rerouted"] == 0 for row in rows[1:])


def rank_bytes(home: Path, phase: str) -> list[int]:
    """What torch had allocated on the card for the rank in each step's phase, at its fullest."""
    rows = read_rows(home / "ppo" / "ledger.jsonl")
    own = [row for row in rows if (row["process"], row["phase"]) == ("rank 0", phase)]
    return [row["measured"]["allocated_bytes"] for row in own]


@needs_vllm
def test_a_card_may_be_named_by_the_beginning_of_its_uuid(tmp_path: Path) -> None:
    beginning = f"GPU-{torch.cuda.get_device_properties(0).uuid}"[:12]
    check(tmp_path, shared(0), environment={"CUDA_VISIBLE_DEVICES": beginning})


@needs_vllm
@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three GPUs")
def test_an_engine_of_two_cards_in_a_placement_group_starts_its_own_workers(tmp_path: Path) -> None:
    """Elsewhere than the rank. vLLM asks Ray for its workers if it finds itself in such a group."""
    config = shared(0, tensor_parallel=2)
    config["rollout"]["placement"] = "own"
    check(tmp_path, config)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("exchange", ["heads", "keys"])
def test_cards_that_share_packs_learn_what_one_learns(
    exchange: str, dtype: str, tmp_path: Path
) -> None:
    """By varlen_attn in bfloat16, by PyTorch's own kernels in float32; with inputs on the host."""
    write_task(tmp_path)
    found = {}
    for shards in (1, 2):
        config = copy.deepcopy(SFT)
        config["run"] |= {"directory": f"on{shards}", "steps": 3, "save_every": None}
        config["cluster"] = {"where": "ray", "device": "cuda", "ranks": shards}
        config["cluster"] |= {"sequence_parallel": shards, "sequence_exchange": exchange}
        config["actor"]["model"] |= {
            "dtype": dtype,
            "gradient_checkpointing": "selective",
            "activation_offload": "cpu",
        }
        write_config(tmp_path, f"on{shards}", config)
        outcome = Command(tmp_path, "sft", f"on{shards}.yaml").finish(PATIENCE)
        assert outcome.code == 0, outcome.err
        found[shards] = metrics(tmp_path / f"on{shards}")
    within = 0.02 if dtype == "bfloat16" else 1e-4
    for alone, shared_pack in zip(found[1], found[2], strict=True):
        assert shared_pack["loss"] == pytest.approx(alone["loss"], rel=within)
        assert shared_pack["grad_norm"] == pytest.approx(alone["grad_norm"], rel=within)


@needs_vllm
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sleep_level", [0, 1, 2])
def test_ppo_with_an_engine_of_two_stages(sleep_level: int, tmp_path: Path) -> None:
    config = shared(sleep_level, pipeline_parallel=2)
    config["cluster"]["ranks"] = 2
    check(tmp_path, config)


@needs_vllm
def test_speculation_by_ngrams_samples_with_the_log_probs_of_the_trainer(tmp_path: Path) -> None:
    """Accepted tokens are of the model's own distribution, and so are their log-probs."""
    proposed = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    check(tmp_path, shared(0, arguments={"speculative_config": proposed}))


@needs_vllm
def test_an_adapter_alone_goes_to_an_engine_that_slept(tmp_path: Path) -> None:
    config = shared(1, adapter="separate")
    config["actor"]["adapter"] = {"rank": 8}
    check(tmp_path, config)


@needs_vllm
@pytest.mark.parametrize("targets", [["all-linear"], ["all-linear", "experts"]], ids=str)
@pytest.mark.parametrize("way", ["merged", "separate"])
def test_an_adapter_of_a_mixture(way: str, targets: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    mixture = Qwen3MoeConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, max_position_embeddings=256,
        eos_token_id=15, initializer_range=0.1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(mixture).save_pretrained(tmp_path / "mixture")
    make_tokenizer().save_pretrained(tmp_path / "mixture")
    config = shared(1, adapter=way)
    config["actor"] |= {"model": {"path": "mixture"}, "adapter": {"rank": 8, "targets": targets}}
    config["critic"] |= {"model": {"path": "mixture"}, "adapter": {"rank": 8, "targets": targets}}
    check(tmp_path, config)


@needs_vllm
@pytest.mark.parametrize("sleep_level", [0, 2])
@pytest.mark.parametrize(("quantization", "gap"), [("fp8_per_tensor", 0.2), ("mxfp4", 1.0)])
def test_an_engine_of_fewer_bits_rounds_what_it_is_sent(
    quantization: str, gap: float, sleep_level: int, tmp_path: Path
) -> None:
    config = shared(sleep_level, arguments={"quantization": quantization})
    config["rollout"]["sync"] = {"max_logprob_gap": gap}
    config["actor"]["adapter"] = {"rank": 8}
    config["actor"]["model"]["quantization"] = "nf4"
    rows = check(tmp_path, config, gap)
    assert min(row["sync/logprob_gap"] for row in rows[1:]) > 1e-4  # rounded


@needs_vllm
def test_an_adapter_alone_goes_to_an_engine_of_fewer_bits(tmp_path: Path) -> None:
    config = shared(1, adapter="separate", arguments={"quantization": "fp8_per_tensor"})
    config["rollout"]["sync"] = {"max_logprob_gap": 0.2}
    config["actor"]["adapter"] = {"rank": 8}
    check(tmp_path, config, 0.2)


@needs_vllm
def test_a_quantised_actor_goes_merged_to_an_engine_that_slept(tmp_path: Path) -> None:
    config = shared(2)
    config["actor"]["adapter"] = {"rank": 8}
    config["actor"]["model"]["quantization"] = "nf4"
    check(tmp_path, config)


@needs_vllm
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_requests_go_on_across_syncs_on_a_card_of_their_own(tmp_path: Path) -> None:
    """Weights hardly move, so a mistake in what requests keep would show in the log-probs."""
    write_task(tmp_path, vocabulary=1024)
    config = copy.deepcopy(PPO)
    config["run"] = {"directory": "ppo", "steps": 6}
    config["cluster"] |= {"where": "ray", "device": "cuda"}
    for role in ("actor", "critic"):
        config[role]["optimizer"]["learning_rate"] = 1e-9
    config["algorithm"]["correction"] = {"name": "truncate"}
    config["batch"]["micro_batch_tokens"] = 8000
    config["rollout"] |= {
        "vllm": {"memory_share": 0.3, "max_sequences": 8},
        "transformers": None,
        "staleness": 4,
        "sampling": {"max_new_tokens": 2000},
    }
    del config["data"]["eval"]
    write_config(tmp_path, "ppo", config)
    outcome = Command(tmp_path, "ppo", "ppo.yaml").finish(PATIENCE)
    assert outcome.code == 0, outcome.err
    rows = metrics(tmp_path / "ppo")
    assert max(row["mismatch/abs"] for row in rows) < GAP
    assert max(row["staleness/continued"] for row in rows) > 0
    assert max(row["staleness/max"] for row in rows) <= 4
