"""The text that says what runs where, and how much a step sees."""

from __future__ import annotations

from plimsoll.commands.placement import placement
from plimsoll.config.load import validate
from plimsoll.config.rl import RlConfig
from plimsoll.config.yaml_tree import read_tree
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import spec_of

PPO = """\
run: {directory: out, steps: 10}
cluster: {ranks: 2}
data: {train: {path: x, prompt: q}, max_tokens: 100}
batch: {prompts: 8, responses: 4, micro_batch_tokens: 2048}
actor: {model: {path: a}, zero: {stage: 3, parameter_offload: cpu}}
critic: {model: {path: c, dtype: float32}}
rewards: {r: {name: pattern}}
rollout: {vllm: {tensor_parallel: 2}, engines: 3, sampling: {max_new_tokens: 28}}
algorithm: {epochs: 2, mini_batches: 4}
"""
SFT = """\
run: {directory: out, steps: 10}
cluster: {where: local, device: cpu, threads: 2}
data: {train: {path: x, messages: m}, max_tokens: 100}
batch: {sequences: 8}
actor: {model: {path: a}}
"""


def ppo(extra: str = "") -> str:
    return placement(spec_of(validate(RlConfig, read_tree(PPO + extra, "f"))))


def test_ppo_on_ray() -> None:
    assert ppo() == (
        "Processes\n"
        "  this process     the controller; Ray on this machine\n"
        "  ranks 0-1        device cpu\n"
        "                   actor a (bfloat16, ZeRO stage 3, weights in host memory)\n"
        "                   critic c (float32, ZeRO stage 2)\n"
        "                   reference (the actor's first weights)\n"
        "  engines 0-2      vllm (bfloat16, tensor parallel 2), at most 256 sequences at once\n"
        "  threads of each  the machine's cores / 3\n"
        "Left to auto\n"
        "  device           cpu, since this machine has no NVIDIA GPU\n"
        "  dtype            bfloat16, since the CPU multiplies it\n"
        "  kernels          own, since Liger's are for GPUs\n"
        "  attention        sdpa, since varlen_attn is for GPUs\n"
        "A step\n"
        "  sequences        8 prompts x 4 responses = 32\n"
        "  tokens           at most 100 + 28 = 128 a sequence, 4,096 in all\n"
        "  micro-batch      at most 2,048 tokens on a rank\n"
        "  optimizer steps  8, of 8 sequences each\n"
        "  of the run       10 steps, 320 sequences\n"
    )


def test_the_cores_of_each_of_several_nodes_are_divided() -> None:
    nodes = "cluster: {ranks: 2, critic_ranks: 5, nodes: 2, address: 'head:1'}\n"
    text = placement(
        spec_of(validate(RlConfig, read_tree(PPO.replace("cluster: {ranks: 2}\n", nodes), "f")))
    )
    assert "the machine's cores / 3\n" in text


def test_the_reference_of_its_own() -> None:
    assert "reference r (bfloat16, divided over the ranks)" in ppo(
        "reference: {model: {path: r}, zero: {stage: 3}}\n"
    )


def test_without_kl_there_is_no_reference() -> None:
    text = PPO.replace("algorithm: {", "algorithm: {kl: none, ")
    assert "reference" not in placement(spec_of(validate(RlConfig, read_tree(text, "f"))))


def test_sft_in_this_process() -> None:
    assert placement(spec_of(validate(SftConfig, read_tree(SFT, "f")))) == (
        "Processes\n"
        "  this process     the controller with rank 0 of 1, no Ray\n"
        "                   actor a (bfloat16, ZeRO stage 2)\n"
        "  device, threads  cpu, 2\n"
        "Left to auto\n"
        "  dtype            bfloat16, since the CPU multiplies it\n"
        "  kernels          own, since Liger's are for GPUs\n"
        "  attention        sdpa, since varlen_attn is for GPUs\n"
        "A step\n"
        "  sequences        8, of at most 100 tokens: 800 at most\n"
        "  micro-batch      at most 4,096 tokens on a rank\n"
        "  of the run       10 steps, 80 sequences\n"
    )
