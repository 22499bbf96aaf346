"""What is predicted of each process, against the plan of whole cards and hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plimsoll.config.engine import TrainedRole
from plimsoll.config.reward import HttpReward, RewardConfig
from plimsoll.config.rl import RlConfig
from plimsoll.config.rollout import EnvironmentConfig
from plimsoll.config.run import JobConfig
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import spec_of
from plimsoll.machine.hardware import Hardware, parse_cluster
from plimsoll.memory.contents.contents import contents_of, make_job
from plimsoll.memory.contents.overheads import Constants
from plimsoll.memory.contents.stores import process_peaks
from plimsoll.memory.plan import make_plan
from plimsoll.memory.weigh import Ground
from plimsoll.reward.references import process_items

MODEL = {"model": {"path": "Qwen/Qwen2.5-0.5B"}, "optimizer": {"learning_rate": 1e-5}}
SOURCE = {"path": "rows.jsonl", "prompt": "prompt", "response": "response"}
CONSTANTS = Constants()


def sft(**cluster: Any) -> SftConfig:
    return SftConfig.model_validate(
        {
            "run": {"directory": "out", "steps": 2},
            "cluster": cluster,
            "data": {"train": SOURCE, "eval": SOURCE, "max_tokens": 512},
            "batch": {"sequences": 8, "micro_batch_tokens": 2048},
            "actor": MODEL,
        }
    )


def ppo(**rollout: Any) -> RlConfig:
    source = {"path": "rows.jsonl", "prompt": "prompt", "reference": "answer"}
    return RlConfig.model_validate(
        {
            "run": {"directory": "out", "steps": 2},
            "cluster": {"ranks": 2},
            "data": {"train": source, "max_tokens": 256},
            "batch": {"prompts": 8, "responses": 2, "micro_batch_tokens": 2048},
            "actor": MODEL,
            "critic": MODEL,
            "rewards": {"length": {"name": "length"}},
            "rollout": {"sampling": {"max_new_tokens": 128}} | rollout,
        }
    )


def held_while_loading(config: JobConfig, cluster: str = "cpu") -> dict[str, dict[str, int]]:
    """Return what every process holds from its start on, by item."""
    job = make_job(spec_of(config), parse_cluster(cluster, 1, 10**12), CONSTANTS)
    return {
        process.name: {
            one.item.name: one.item.bytes
            for one in contents_of(job, process)
            if one.item.role == "process" and one.moments == job.moments
        }
        for process in job.layout.processes
    }


def test_an_engine_of_vllm_is_a_front_a_core_and_workers_where_there_are_several() -> None:
    each = CONSTANTS.engine_process
    on_cpu = ppo(vllm={}).model_copy(update={"cluster": sft(ranks=1, device="cpu").cluster})
    assert held_while_loading(on_cpu)["engine 0"]["interpreter and vLLM"] == 2 * each
    found = held_while_loading(ppo(vllm={}), "4xA100-80GB")
    assert found["engine 0"]["interpreter and vLLM"] == each
    assert found["engine 0 worker 0"]["interpreter and vLLM"] == each  # in the core
    found = held_while_loading(ppo(vllm={"tensor_parallel": 2}), "4xA100-80GB")
    assert found["engine 0"]["interpreter and vLLM"] == 2 * each
    assert found["engine 0 worker 1"]["interpreter and vLLM"] == each


def test_a_process_that_trains_an_adapter_has_its_libraries() -> None:
    plain = sft(where="local", device="cpu")
    adapted = plain.model_copy(
        update={"actor": TrainedRole.model_validate(MODEL | {"adapter": {"rank": 8}})}
    )
    name = "PEFT and bitsandbytes"
    assert held_while_loading(adapted)["local"][name] == CONSTANTS.adapter_libraries
    assert name not in held_while_loading(plain)["local"]


def test_the_process_that_writes_trajectories_has_their_libraries() -> None:
    assert writers(ppo(engines=1)) == ["controller"]
    assert writers(sft()) == []


def test_processes_of_rewards_and_environments_are_with_the_loop_from_the_first_responses_on() -> (
    None
):
    rewards = {
        "right": RewardConfig(name="math_answer"),
        "own": RewardConfig(name="my_rewards:style", process=True, at_once=3),
        "far": RewardConfig(http=HttpReward(urls=("http://host:8000/score",))),
    }
    environments = {
        "shell": EnvironmentConfig(name="my.shell:Shell", process=True, at_once=5),
        "game": EnvironmentConfig(name="guess_number"),
    }
    config = ppo(engines=1).model_copy(update={"rewards": rewards, "environments": environments})
    node = parse_cluster("4xA100-80GB", 1, 10**12).node
    for cores, count in ((None, 8), (2, 2), (32, 8), (64, 16)):
        hardware = Hardware(replace(node, cores=cores))
        job = make_job(spec_of(config), hardware, CONSTANTS)
        found = [
            (process.name, one.item.name, one.item.bytes, {m.phase for m in one.moments})
            for process in job.layout.processes
            for one in contents_of(job, process)
            if "rewards." in one.item.name or "environments." in one.item.name
        ]
        phases = {moment.phase for moment in job.moments} - {"load"}
        assert found == [
            ("controller", "processes that rewards.right asks", count * 61 * 2**20, phases),
            ("controller", "processes of rewards.own", 3 * 51 * 2**20, phases),
            ("controller", "processes of environments.shell", 5 * 52 * 2**20, phases),
        ]


def test_a_rule_that_cannot_be_used_is_for_others_to_tell() -> None:
    wrong = {"right": RewardConfig(name="math_anser"), "code": RewardConfig(name="code", at_once=1)}
    assert [item.bytes for item in process_items(wrong, 4)] == [41 * 2**20]


def writers(config: JobConfig) -> list[str]:
    job = make_job(spec_of(config), parse_cluster("4xA100-80GB", 1, 10**12), CONSTANTS)
    items = (
        (one.name, held.item.name) for one in job.layout.processes for held in contents_of(job, one)
    )
    return [process for process, item in items if item == "pyarrow and pandas"]


def test_one_process_alone_is_its_host() -> None:
    hardware = parse_cluster("cpu", 1, 64 * 10**9)
    config = sft(where="local", device="cpu")
    found = process_peaks(make_job(spec_of(config), hardware, CONSTANTS))
    (host,) = make_plan(spec_of(config), Ground(hardware, CONSTANTS)).hosts
    assert list(found) == ["local"]
    phases = {use.moment.phase: use.bytes for use in host.phases}
    assert {p: one.host for p, one in found["local"].items() if p != "eval"} == phases
    assert all(one.device is None for one in found["local"].values())
    assert found["local"]["eval"] == found["local"]["score"]


def test_ranks_engines_and_the_recipe_are_told_apart() -> None:
    hardware = parse_cluster("4xA100-80GB", 1, 10**12)
    config = ppo(engines=1, vllm={"tensor_parallel": 2})
    found = process_peaks(make_job(spec_of(config), hardware, CONSTANTS))
    assert list(found) == ["controller", "rank 0", "rank 1", "engine 0"]
    controller = CONSTANTS.controller_process + CONSTANTS.trajectory_libraries
    renders = 25 * 2**20  # the process of the chat template
    # of 16 x (256 + 128) tokens: trajectories, packs; log-probs, values, advantages and returns;
    # all of them as rows; and what estimates advantages needs
    step = (13 + 4 + 4 * 4 + 26 + 4 * 4 + 28) * 16 * 384
    assert found["controller"]["score"].host == controller + renders + step
    assert found["controller"]["score"].device is None
    first, second = (found[f"rank {i}"]["sync"].device or 0 for i in (0, 1))
    assert first > second  # which sends no weights
    assert found["rank 0"]["eval"] == found["rank 0"]["rollout"]


@pytest.mark.parametrize("placement", ["own", "shared"])
def test_a_card_is_that_of_the_plan_with_all_that_is_on_it(placement: str) -> None:
    hardware = parse_cluster("4xA100-80GB", 1, 10**12)
    level = 1 if placement == "shared" else 0
    vllm = {"memory_share": 0.3, "sleep_level": level}
    config = ppo(engines=2, placement=placement, vllm=vllm)
    found = process_peaks(make_job(spec_of(config), hardware, CONSTANTS))
    plan = make_plan(spec_of(config), Ground(hardware, CONSTANTS))
    cards = {
        slot.card: {use.moment.phase: use for use in store.phases}
        for store in plan.devices
        for slot in store.slots
    }
    for name, card in {"rank 0": 0, "rank 1": 1}.items():
        for phase, use in cards[card].items():
            measured = found[name][phase]
            if (placement, name) == ("own", "rank 1"):  # it sends nothing
                assert (measured.device or 0) < use.bytes
            else:
                assert measured.device == use.bytes
            assert (measured.allocated or 0) <= (measured.reserved or 0) < use.bytes
    engine = 0 if placement == "shared" else 2
    assert found["engine 0"]["rollout"].device == cards[engine]["rollout"].bytes


def test_equal_processes_of_other_nodes_have_equal_peaks() -> None:
    """Ten ranks on three nodes of four cards, of which an engine has the last two."""
    config = ppo(engines=1, vllm={"tensor_parallel": 2})
    config = config.model_copy(update={"cluster": sft(ranks=10, nodes=3).cluster})
    found = process_peaks(
        make_job(spec_of(config), parse_cluster("4xA100-80GB", 3, 10**12), CONSTANTS)
    )
    assert {*found} == {"controller", "engine 0", *(f"rank {index}" for index in range(10))}
    assert found["rank 1"] == found["rank 5"] == found["rank 9"] != found["rank 0"]


def test_the_run_s_processes_and_ray_s_are_the_whole_host() -> None:
    hardware = parse_cluster("cpu", 1, 64 * 10**9)
    config = ppo(vllm={"memory_share": 0.3}).model_copy(
        update={"cluster": sft(ranks=2, device="cpu").cluster}
    )
    found = process_peaks(make_job(spec_of(config), hardware, CONSTANTS))
    (host,) = make_plan(spec_of(config), Ground(hardware, CONSTANTS)).hosts
    for use in host.phases:
        ray = sum(i.bytes for i in use.items if "Ray's own" in i.name or "object store" in i.name)
        processes = sum(one[use.moment.phase].host for one in found.values())
        assert processes >= use.bytes - ray
        if use.moment.phase not in ("sync", "save"):  # where rank 0 is not fullest when others are
            assert processes == use.bytes - ray


def test_two_buckets_of_new_weights_are_on_their_way() -> None:
    """Qwen2.5-0.5B has 494,032,768 weights, and its head 136,134,656 more that are tied."""
    tied, whole = 2 * 136_134_656, 2 * (494_032_768 + 136_134_656)
    for bucket, both in ((2**20, 4 * tied), (400 * 10**6, 2 * (400 * 10**6 + tied))):
        two = min(both, whole)
        for nodes in (1, 2):
            hardware = parse_cluster("cpu", nodes, 64 * 10**9)
            config = ppo(
                vllm={"memory_share": 0.3}, engines=2, sync={"bucket_bytes": bucket}
            ).model_copy(update={"cluster": sft(ranks=2, nodes=nodes, device="cpu").cluster})
            job = make_job(spec_of(config), hardware, CONSTANTS)
            items = {
                (process.kind, held.item.name): held.item.bytes
                for process in job.layout.processes
                for held in contents_of(job, process)
            }
            two_of = {kind: size for (kind, name), size in items.items() if "buckets" in name}
            assert two_of == {"rank": two}
            assert items["engine", "received weights"] == both // 2


def test_what_computes_on_cpu_keeps_prepared_kernels() -> None:
    job = make_job(spec_of(ppo(vllm={})), parse_cluster("cpu", 1, 64 * 10**9), CONSTANTS)
    keeping = {
        process.kind
        for process in job.layout.processes
        if "prepared kernels" in {one.item.name for one in contents_of(job, process)}
    }
    assert keeping == {"rank", "engine"}


@pytest.mark.parametrize(("engine", "working"), [("vllm", "forward"), ("transformers", "logits")])
@pytest.mark.parametrize("staleness", [0, 3])
def test_groups_wait_with_the_loop_and_engines_work_while_the_ranks_train(
    engine: str, working: str, staleness: int
) -> None:
    spec = spec_of(ppo(staleness=staleness, **{engine: {}}))
    job = make_job(spec, parse_cluster("cpu", 1, 10**12), CONSTANTS)
    held = {
        one.item.name: (process.name, one.item.bytes, {moment.phase for moment in one.moments})
        for process in job.layout.processes
        for one in contents_of(job, process)
    }
    assert ("train_actor" in held[working][2]) == (staleness > 0)
    assert ("groups that wait" in held) == (staleness > 0)
    if staleness:
        name, size, phases = held["groups that wait"]
        assert spec.sampling is not None and name == "controller"
        longest = spec.longest_sequence(held_out=True)[0]
        assert size == (staleness + 1) * spec.sampling.sequences * longest * 18
        assert {"rollout", "train_actor", "sync"} <= phases
