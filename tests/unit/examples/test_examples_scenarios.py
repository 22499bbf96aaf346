"""The six situations of examples/scenarios: right verdict, right culprit, right repair."""

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
from plimsoll.memory.advise import Advice, advise
from plimsoll.memory.weigh import Ground, Plan
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.sampler.vllm.config import VllmConfig

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
    "6_grpo_7b_4090",
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
    "3_ppo_70b_cpu_adam": ("host-memory", "all of the ", "cluster.nodes: 3"),
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


def offers(name: str) -> list[str]:
    """Return the flags of the answers."""
    return [one.flags for one in advice(name).answers]


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


@pytest.mark.parametrize("variant", ["larger_micro_batch", "no_checkpointing", "reference_on_gpu"])
def test_34b_dpo_is_made_to_fit(variant: str) -> None:
    assert offers(f"1_dpo_34b_{variant}")[0] == "--actor.zero.optimizer_offload cpu"


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


def test_70b_ppo_is_given_more_nodes_or_an_adapter() -> None:
    assert offers("3_ppo_70b_cpu_adam") == [
        "--actor.adapter.rank 16",
        "--cluster.nodes 3 --cluster.ranks 16",
    ]


def test_each_further_node_lowers_the_need() -> None:
    together = host_need("3_ppo_70b_cpu_adam")
    apart = host_need("3_ppo_70b_cpu_adam_own_node")
    four = host_need("3_ppo_70b_cpu_adam_four_nodes")
    assert four < apart < together


def test_7b_on_four_4090s_is_offered_adam_on_the_cpu_lora_and_nodes() -> None:
    assert offers("4_qwen2_7b_4090") == [
        "--actor.zero.optimizer_offload cpu",
        "--actor.adapter.rank 16",
        "--cluster.nodes 3 --cluster.ranks 12",
    ]


def test_7b_grpo_fits_24_gb_because_its_engine_has_8_bits() -> None:
    """By hand: 6,525,288,448 weights of linear layers of a byte, the others of two."""
    name = "6_grpo_7b_4090"
    [card] = plan(name).devices
    held = {item.name: item.bytes for use in card.uses for item in use.items}
    assert held["vLLM weights"] == 6_525_288_448 + 2 * (7_615_616_512 - 6_525_288_448)
    job = config(name).config
    assert isinstance(job, RlConfig) and job.algorithm.correction is not None
    wide = job.rollout.settings_of(VllmConfig).model_copy(update={"arguments": {}})
    rollout = job.rollout.with_engine(wide)
    changed = plan_job(spec_of(job.model_copy(update={"rollout": rollout})))
    assert [p.code for p in changed.problems if p.severity == "error"] == ["vllm-share"]


def test_1p5b_ppo_is_offered_a_lower_share_and_a_higher_one_with_sleep() -> None:
    [problem] = errors("5_orz_1p5b")
    awake, asleep = re.findall(r"memory_share: (0\.\d+)", problem.fix)[:2]
    assert f"rollout.vllm.memory_share: {asleep} with rollout.vllm.sleep_level: 2" in problem.fix
    assert 0.5 <= float(awake) < float(asleep) < 0.9
    for share, level in ((awake, 0), (asleep, 2)):
        job = config("5_orz_1p5b").config
        assert isinstance(job, RlConfig)
        settings = {"memory_share": float(share), "sleep_level": level}
        rollout = job.rollout.with_engine(VllmConfig.model_validate(settings))
        assert plan_job(spec_of(job.model_copy(update={"rollout": rollout}))).verdict == "fits"
    [answer] = advice("5_orz_1p5b").answers  # whatever else would do changes more
    assert [change.key for change in answer.changes] == ["rollout.vllm.memory_share"]
