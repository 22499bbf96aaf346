"""Tokens a second at the peak of the cards: each against a figure worked out by hand."""

from __future__ import annotations

import pytest
from plan_cases import read_spec

from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.contents.contents import make_job
from plimsoll.memory.contents.overheads import Constants
from plimsoll.memory.plan import pace_text, tokens_at_peak
from plimsoll.shapes.known_models import read_shape

H, F, KV, V, L = 3584, 18944, 512, 152064, 28
LAYER = 2 * H * H + H + 2 * (H * KV + KV) + 3 * H * F  # q and o, the biases of q, k and v, the MLP
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


def at_peak(job: str, text: str, cluster: str) -> float | None:
    hardware = parse_cluster(cluster, 1, None)
    return tokens_at_peak(make_job(read_spec(job, text), hardware, Constants()))


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


def test_a_step_takes_at_least_its_products_and_the_reading_of_weights() -> None:
    text = PPO.replace("SLEEP", "0").replace("EPOCHS", "1")
    job = make_job(read_spec("ppo", text), parse_cluster("4xA100-80GB", 1, None), Constants())
    work, sampling = job.spec.workload, job.spec.sampling
    assert sampling is not None
    tokens = work.sequences * work.mini_batches * work.longest
    computing = tokens * 10 * 2 * job.policy.active_parameters / (4 * 312e12)
    reading = max(sampling.longest_responses.values()) * 2 * job.policy.active_parameters / 2039e9
    said = pace_text(job)
    assert f"a step of {tokens:,} tokens" in said
    assert f"at least {computing:.2g} s of computing" in said
    assert f"and {reading:.2g} s of sampling" in said
    assert (
        pace_text(make_job(read_spec("sft", SFT), parse_cluster("cpu", 1, None), Constants())) == ""
    )


def test_engines_without_a_card_have_no_pace() -> None:
    """A plan that lacks cards for its engines is refused; its text is made all the same."""
    text = PPO.replace("SLEEP", "0").replace("EPOCHS", "1").replace(", placement: shared", "")
    job = make_job(read_spec("ppo", text), parse_cluster("4xA100-80GB", 1, None), Constants())
    assert "of computing" in pace_text(job)
    assert "of sampling" not in pace_text(job)
