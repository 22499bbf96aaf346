"""The five situations of examples/scenarios: right verdict, right culprit, right repair."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from plimsoll.commands.planning import hardware_of, plan_job
from plimsoll.config.problems import Problem
from plimsoll.config.rl import RlConfig
from plimsoll.jobs.which import load_any, spec_of
from plimsoll.memory.advise.advise import Advice, advise
from plimsoll.memory.advise.states import Site
from plimsoll.memory.plan.plan import Ground, Plan
from plimsoll.memory.remedies.changes import changes_between
from plimsoll.rollout.vllm.config import VllmConfig
from plimsoll.spec.run_spec import RunSpec

SCENARIOS = Path(__file__).parents[3] / "examples" / "scenarios"
FITS = [
    "2_lora_zero3",
    "2_qlora_zero2",
    "2_qlora_zero3",
    "3_ppo_70b_cpu_adam_four_nodes",
    "4_qwen2_7b_4090_cpu_adam",
    "4_qwen2_7b_4090_lora",
    "5_orz_1p5b_half",
    "5_orz_1p5b_sleep",
]
BREAKS = {
    "1_dpo_34b_larger_micro_batch": (
        "device-memory",
        "the actor's activations",
        "batch.micro_batch_tokens: 4096",
    ),
    "1_dpo_34b_no_checkpointing": (
        "device-memory",
        "the actor's activations",
        "actor.model.gradient_checkpointing: true",
    ),
    "1_dpo_34b_reference_on_gpu": (
        "device-memory",
        "the reference model",
        "reference.zero.offload: cpu",
    ),
    "3_ppo_70b_cpu_adam": ("host-memory", "all of the ", "cluster.critic_ranks"),
    "4_qwen2_7b_4090": (
        "device-memory",
        "the actor's optimizer states",
        "actor.zero.optimizer_offload: cpu",
    ),
    "5_orz_1p5b": (
        "vllm-share-beside-training",
        "vLLM takes its share",
        "rollout.vllm.memory_share: ",
    ),
}


def config(name: str) -> RunSpec[Any]:
    return load_any(str(SCENARIOS / f"{name}.yaml"))


def plan(name: str) -> Plan:
    return plan_job(config(name))


def errors(name: str) -> list[Problem]:
    return [problem for problem in plan(name).problems if problem.severity == "error"]


@cache
def advice(name: str) -> Advice:
    job = config(name)
    return advise(job, Ground(hardware_of(job.cluster)))


def offers(name: str) -> dict[str, tuple[str, float]]:
    """Flags -> verdict and relative seconds, the fastest first."""
    found = advice(name).suggestions
    return {one.flags: (one.verdict, one.relative_seconds) for one in found}


def host_need(name: str) -> int:
    return max(store.peak.bytes for store in plan(name).hosts)


def test_every_scenario_is_judged_here() -> None:
    scored = {"1_dpo_34b", "3_ppo_70b_cpu_adam_own_node", *FITS, *BREAKS}
    assert scored == {path.stem for path in SCENARIOS.glob("*.yaml")}


@pytest.mark.parametrize("name", FITS)
def test_it_fits(name: str) -> None:
    assert plan(name).verdict == "fits" and errors(name) == []


@pytest.mark.parametrize("name", BREAKS)
def test_it_does_not_fit_and_says_what_breaks_it_and_the_way_out(name: str) -> None:
    code, top_consumer, fix = BREAKS[name]
    (problem,) = errors(name)
    assert plan(name).verdict == "does not fit"
    assert problem.code == code
    assert top_consumer in problem.why and fix in problem.fix


def test_34b_dpo_is_close_to_the_line() -> None:
    found = plan("1_dpo_34b")
    assert found.verdict in ("fits", "risky") and errors("1_dpo_34b") == []
    assert 75e9 < found.devices[0].peak.bytes < 85e9


@pytest.mark.parametrize(
    ("variant", "repair"),
    [
        ("larger_micro_batch", "--batch.micro_batch_tokens 4096"),
        ("no_checkpointing", "--actor.model.gradient_checkpointing true"),
        ("reference_on_gpu", "--reference_logprobs.precompute true"),
    ],
)
def test_the_way_back_to_34b_dpo_is_offered(variant: str, repair: str) -> None:
    verdict, relative = offers(f"1_dpo_34b_{variant}")[repair]
    assert verdict == plan("1_dpo_34b").verdict
    assert relative >= 1


def test_70b_ppo_shows_the_three_groups_of_280_gb_and_what_the_rule_leaves_out() -> None:
    host = max(plan("3_ppo_70b_cpu_adam").hosts, key=lambda store: store.peak.bytes)
    step = next(use for use in host.uses if use.moment.instant == "step")
    actor = {item.name: item.bytes for item in step.items if item.role == "actor"}
    # 68,976,648,192 parameters of 4 bytes are 276 GB; the moments are two such groups
    parameters = 68_976_648_192
    assert actor["fp32 masters"] >= 4 * parameters
    assert actor["moments"] >= 8 * parameters
    assert sum(actor.values()) > 12 * parameters + 4 * parameters
    assert host.peak.bytes > 1_680e9


def test_70b_ppo_is_parted_or_given_more_nodes() -> None:
    found = offers("3_ppo_70b_cpu_adam")
    apart = [flags for flags in found if "--cluster.critic_ranks 8" in flags and "nodes 3" in flags]
    more = [flags for flags in found if flags == "--cluster.nodes 3 --cluster.ranks 16"]
    assert apart and more
    cluster = advice("3_ppo_70b_cpu_adam").smallest_cluster
    assert cluster is not None and cluster.nodes == 3


def test_each_further_node_lowers_the_need() -> None:
    together = host_need("3_ppo_70b_cpu_adam")
    apart = host_need("3_ppo_70b_cpu_adam_own_node")
    four = host_need("3_ppo_70b_cpu_adam_four_nodes")
    assert four < apart < together


def test_7b_on_four_4090s_is_offered_lora_first_and_then_adam_on_the_cpu() -> None:
    found = offers("4_qwen2_7b_4090")
    lora, adam = "--actor.adapter.rank 16", "--actor.zero.optimizer_offload cpu"
    assert found[lora][0] == found[adam][0] == "fits"
    assert list(found).index(lora) < list(found).index(adam)
    assert found[lora][1] < 1 < found[adam][1]


def test_1p5b_ppo_is_told_a_lower_share_and_a_higher_one_with_sleep() -> None:
    [problem] = errors("5_orz_1p5b")
    awake, asleep = map(float, re.findall(r"memory_share: (0\.\d+)", problem.fix))
    assert f"rollout.vllm.sleep_level: 2 with rollout.vllm.memory_share: {asleep}" in problem.fix
    assert 0.5 <= awake < asleep < 0.9
    for share, level in ((awake, 0), (asleep, 2)):
        job = config("5_orz_1p5b").config
        assert isinstance(job, RlConfig)
        settings = {"memory_share": share, "sleep_level": level}
        rollout = job.rollout.with_engine(VllmConfig.model_validate(settings))
        assert plan_job(spec_of(job.model_copy(update={"rollout": rollout}))).verdict == "fits"
    offered = [{change.key for change in one.changes} for one in advice("5_orz_1p5b").suggestions]
    assert {"rollout.vllm.memory_share"} in offered


ADAPTERS = {"actor.adapter.rank": 16, "critic.adapter.rank": 16}
ADAM_ON_HOST = {
    "actor.zero.optimizer_offload": "cpu",
    "critic.zero.optimizer_offload": "cpu",
}


@pytest.mark.parametrize(
    "more",
    [
        {"rollout.vllm.sleep_level": 1, "rollout.vllm.memory_share": 0.71},
        {**ADAPTERS, "rollout.vllm.memory_share": 0.8},
        {**ADAM_ON_HOST, "rollout.vllm.memory_share": 0.79},
        {"cluster.nodes": 2, "rollout.placement": "own"},
        {"cluster.nodes": 2, "cluster.critic_ranks": 4, "rollout.vllm.memory_share": 0.73},
    ],
    ids=lambda more: "-".join(more),
)
def test_a_suggestion_that_asks_for_more_and_gives_nothing_is_left_out(more: Any) -> None:
    """All of these fit, and none is faster by the quarter that estimates can tell."""
    spec = config("5_orz_1p5b")
    site = Site(spec, Ground(hardware_of(spec.cluster)))
    [suggested] = advice("5_orz_1p5b").suggestions
    one, other = (
        site.tried(frozenset(suggested.changes)),
        site.tried(frozenset(changes_between(spec, more))),
    )
    assert one is not None and other is not None
    assert one.plan.verdict == other.plan.verdict == "fits"
    assert one.seconds < 1.25 * other.seconds
    assert one.size(site.root) < other.size(site.root)
