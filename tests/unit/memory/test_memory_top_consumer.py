"""Which item breaks a plan, and the way out that is offered."""

from __future__ import annotations

import pytest
from plan_cases import plan, read_spec

from plimsoll.memory.contents.stores import Store
from plimsoll.memory.weigh import Plan, find_top_consumer
from plimsoll.timeline.items import Allocation, Item, Kind, Moment

DPO = """\
run: {directory: out, steps: 10}
cluster: {ranks: 8}
data: {train: {path: x, prompt: q, chosen: a, rejected: b}, max_tokens: 1024}
batch: {pairs: 64, micro_batch_tokens: TOKENS}
actor:
  model: {path: codellama/CodeLlama-34b-hf, gradient_checkpointing: CHECKPOINTING}
  zero: {stage: 3, gradient_dtype: bfloat16}
reference: {model: {path: codellama/CodeLlama-34b-hf}, zero: {stage: 3, offload: OFFLOAD}}
"""
SFT = """\
run: {directory: out, steps: 10}
cluster: {ranks: 4}
data: {train: {path: x, prompt: q, response: a}, max_tokens: 128}
batch: {sequences: 64, micro_batch_tokens: 512}
actor:
  model: {path: Qwen/Qwen2-7B, gradient_checkpointing: true}
  zero: {stage: 3, optimizer_offload: ADAM}
"""
PPO = """\
run: {directory: out, steps: 10}
cluster: {ranks: 4}
data: {train: {path: x, prompt: q}, max_tokens: 512}
batch: {prompts: 8, micro_batch_tokens: 2048}
actor: {model: {path: Qwen/Qwen2.5-1.5B}, zero: {stage: 3}}
critic: {model: {path: Qwen/Qwen2.5-1.5B}, zero: {stage: 3}}
reference: {model: {path: Qwen/Qwen2.5-1.5B}, zero: {stage: 3}}
rewards: {r: {name: length}}
rollout: {vllm: {memory_share: SHARE}, engines: 4, placement: shared}
"""
LARGE = """\
run: {directory: out, steps: 10}
cluster: {ranks: 8, nodes: 2}
data: {train: {path: x, prompt: q}, max_tokens: 1024}
batch: {prompts: 64, micro_batch_tokens: 4096}
actor: &trained
  model: {path: meta-llama/Llama-2-70b-hf, gradient_checkpointing: true}
  zero: {stage: 3, optimizer_offload: cpu}
critic: *trained
rewards: {r: {name: length}}
algorithm: {kl: none}
rollout: {vllm: {tensor_parallel: 8, memory_share: 0.85}, engines: 1}
"""


def dpo(tokens: int = 2048, checkpointing: str = "true", offload: str = "cpu") -> Plan:
    text = DPO.replace("TOKENS", str(tokens)).replace("CHECKPOINTING", checkpointing)
    return plan("dpo", text.replace("OFFLOAD", offload), "8xA100-80GB")


def test_34b_dpo_is_close_to_the_line_and_fits() -> None:
    found = dpo()
    assert found.verdict in ("fits", "risky")
    assert not any(problem.severity == "error" for problem in found.problems)


@pytest.mark.parametrize(
    ("found", "top", "fix"),
    [
        (dpo(offload="none"), "the reference model", "reference.zero.offload: cpu"),
        (dpo(checkpointing="false"), "actor's activations", "gradient_checkpointing: true"),
        (dpo(tokens=32_768), "actor's activations", "batch.micro_batch_tokens: 4096"),
        (
            plan("sft", SFT.replace("ADAM", "none"), "4xRTX4090"),
            "actor's optimizer states",
            "actor.zero.optimizer_offload: cpu",
        ),
    ],
)
def test_each_way_to_break_has_a_line_of_its_own(found: Plan, top: str, fix: str) -> None:
    assert found.verdict == "does not fit"
    (problem,) = (p for p in found.problems if p.severity == "error")
    assert problem.code == "device-memory"
    assert top in problem.why and "the rest fits" in problem.why
    assert fix in problem.fix


def test_vllm_beside_the_ranks_breaks_by_its_share() -> None:
    found = plan("ppo", PPO.replace("SHARE", "0.9"), "4xA100-80GB")
    spec = read_spec("ppo", PPO.replace("SHARE", "0.9"))
    top = find_top_consumer(found.devices[0], spec)
    assert found.verdict == "does not fit" and top.alone
    assert top.what == "the rollout engines"
    assert top.bytes == int(0.9 * (found.devices[0].capacity or 0))


@pytest.mark.parametrize(
    "found",
    [
        plan("sft", SFT.replace("ADAM", "cpu"), "4xRTX4090"),
        plan(
            "sft",
            SFT.replace("ADAM", "none").replace("zero:", "adapter: {rank: 16}\n  zero:"),
            "4xRTX4090",
        ),
        plan("ppo", PPO.replace("SHARE", "0.5"), "4xA100-80GB"),
    ],
)
def test_the_remedies_are_remedies(found: Plan) -> None:
    assert found.verdict == "fits"


def test_a_host_that_cannot_hold_both_is_told_to_part_them() -> None:
    together = plan("ppo", LARGE, "8xH100-80GB", nodes=2, host=2 * 10**12)
    (problem,) = (p for p in together.problems if p.severity == "error")
    assert problem.code == "host-memory" and "all of the " in problem.why
    assert "cluster.nodes: 3" in problem.fix
    apart = LARGE.replace("ranks: 8, nodes: 2", "ranks: 8, critic_ranks: 8, nodes: 3")
    needs = [
        max(store.peak.bytes for store in one.hosts)
        for one in (together, plan("ppo", apart, "8xH100-80GB", nodes=3, host=2 * 10**12))
    ]
    assert needs[1] < 0.6 * needs[0]


def test_where_nothing_would_do_alone_the_largest_is_named() -> None:
    when = frozenset({Moment("train_actor", "step")})

    def held(kind: Kind, size: int) -> Allocation:
        return Allocation(
            Item("actor", kind, kind, "device", "allocated", size, "by hand", "a test"), when
        )

    items = (held("weights", 50), held("gradients", 40), held("optimizer states", 60))
    spec = read_spec("sft", SFT.replace("ADAM", "none"))
    store = Store("device", (((0,), 0),), "card", 30, items, 0.0)
    top = find_top_consumer(store, spec)
    assert top.what == "the actor's optimizer states"
    assert not top.alone and top.bytes == 60
    enough = find_top_consumer(Store("device", (((0,), 0),), "card", 105, items, 0.0), spec)
    assert (enough.what, enough.alone) == ("the actor's optimizer states", True)
