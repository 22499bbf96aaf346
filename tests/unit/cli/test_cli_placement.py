"""The text that says what runs where, and how much a step sees."""

from __future__ import annotations

import re

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
PPO_PLACED = """\
Processes
  this process     the controller; Ray on this machine
  ranks 0-1        device cpu
                   actor a (bfloat16, ZeRO stage 3, weights in host memory)
                   critic c (float32, ZeRO stage 2)
                   reference (the actor's first weights)
  engines 0-2      vllm (bfloat16, tensor parallel 2), at most 256 sequences at once
  threads of each  the machine's cores / 3
Left to auto
  device           cpu, since this machine has no NVIDIA GPU
  dtype            bfloat16, since the CPU multiplies it
  kernels          own, since Liger's are for GPUs
  attention        sdpa, since varlen_attn is for GPUs
  sync.route       host, since ranks and engines compute on CPUs
  sync.bucket_bytes 256 MiB, since no card is known
A step
  sequences        8 prompts x 4 responses = 32
  tokens           at most 100 + 28 = 128 a sequence, 4,096 in all
  micro-batch      at most 2,048 tokens on a rank
  optimizer steps  8, of 8 sequences each
  of the run       10 steps, 320 sequences
"""


def ppo(extra: str = "") -> str:
    return placement(spec_of(validate(RlConfig, read_tree(PPO + extra, "f"))))


def test_ppo_on_ray() -> None:
    """The whole text, as a user sees it."""
    assert ppo() == PPO_PLACED


def test_the_cores_of_each_of_several_nodes_are_divided() -> None:
    nodes = "cluster: {ranks: 2, critic_ranks: 5, nodes: 2, address: 'head:1'}\n"
    text = placement(
        spec_of(validate(RlConfig, read_tree(PPO.replace("cluster: {ranks: 2}\n", nodes), "f")))
    )
    assert "the machine's cores / 3\n" in text


def test_groups_on_nodes_of_their_own() -> None:
    own = "own_nodes: {actor: 2, critic: 1, engines: 1}"
    nodes = f"cluster: {{ranks: 8, critic_ranks: 5, nodes: 4, {own}, address: 'head:1'}}\n"
    text = placement(
        spec_of(validate(RlConfig, read_tree(PPO.replace("cluster: {ranks: 2}\n", nodes), "f")))
    )
    assert re.search(r"^  ranks 0-7 .*, on 2 nodes of its own$", text, re.MULTILINE)
    assert re.search(r"^  critic ranks 0-4 .*, on 1 node of its own$", text, re.MULTILINE)
    assert re.search(r"^  engine.*, on 1 node of its own$", text, re.MULTILINE)
    assert "the machine's cores / 5\n" in text


def test_reward_models_on_ranks_of_their_own() -> None:
    own = "own_nodes: {actor: 1, reward: 2, engines: 1}"
    nodes = f"cluster: {{ranks: 8, reward_ranks: 12, nodes: 4, {own}, address: 'head:1'}}\n"
    judges = "reward_models: {a: {role: {model: {path: j}}}, b: {role: {model: {path: k}}}}\n"
    config = PPO.replace("cluster: {ranks: 2}\n", nodes) + judges
    text = placement(spec_of(validate(RlConfig, read_tree(config, "f"))))
    rows = text.partition("Left to auto")[0].splitlines()
    first = next(i for i, row in enumerate(rows) if row.startswith("  reward ranks 0-11"))
    assert re.search(r" reward\.a j \(.*\), on 2 nodes of its own$", rows[first])
    assert re.search(r"^ +reward\.b k \(.*\)$", rows[first + 1])
    assert sum("reward." in row for row in rows) == 2 and "critic c" in "".join(rows[:first])
    assert "the machine's cores / 8\n" in text


def test_the_reference_of_its_own() -> None:
    text = ppo("reference: {model: {path: r}, zero: {stage: 3}}\n")
    assert re.search(r"^ +reference r \(bfloat16, divided ", text, re.MULTILINE)


def test_without_kl_there_is_no_reference() -> None:
    text = PPO.replace("algorithm: {", "algorithm: {kl: none, ")
    assert "reference" not in placement(spec_of(validate(RlConfig, read_tree(text, "f"))))


def test_sft_in_this_process() -> None:
    text = placement(spec_of(validate(SftConfig, read_tree(SFT, "f"))))
    processes, step = text.partition("Left to auto")[0], text.partition("A step")[2]
    for row in (r"this process +.* rank 0 of 1, no Ray", r"device, threads +cpu, 2"):
        assert re.search(rf"^  {row}$", processes, re.MULTILINE)
    for row in (
        r"sequences +8, .* 100 tokens: 800 .*",
        r"micro-batch +.* 4,096 tokens .*",
        r"of the run +10 steps, 80 sequences",
    ):
        assert re.search(rf"^  {row}$", step, re.MULTILINE)
