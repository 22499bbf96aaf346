"""Whole plans: sums, peaks and verdicts of small and of real situations."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import plan, read_config, sizes, sizes_at

from plimsoll.config.rollout import RolloutConfig
from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import spec_of
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.advise import advice_values
from plimsoll.memory.contents.contents import contents_of, make_job
from plimsoll.memory.contents.overheads import Constants
from plimsoll.memory.contents.stores import Use
from plimsoll.memory.plan import make_plan, plan_values, verdict_text
from plimsoll.memory.weigh import Ground, Plan
from plimsoll.resolve.run_spec import resolve
from plimsoll.run.numbers import gigabytes
from plimsoll.sampler.price import Sampler
from plimsoll.sampler.vllm.config import VllmConfig
from plimsoll.sampler.vllm.holdings import reload_items
from plimsoll.sampler.vllm.sampler import vllm_sampler
from plimsoll.shapes.known_models import read_shape
from plimsoll.sync.price import CHECKSUM_BYTES
from plimsoll.timeline.items import Moment

SFT = """\
run: {directory: out, steps: 10}
data: {train: {path: x, prompt: q, response: a}, max_tokens: 512}
batch: {sequences: 8, micro_batch_tokens: 2048}
actor: {model: {path: Qwen/Qwen2.5-0.5B}}
"""
PPO = """\
run: {directory: out, steps: 10}
data: {train: {path: x, prompt: q}, max_tokens: 512}
batch: {prompts: 8, micro_batch_tokens: 2048}
actor: {model: {path: Qwen/Qwen2.5-1.5B}, zero: {stage: 3}}
critic: {model: {path: Qwen/Qwen2.5-1.5B}, zero: {stage: 3}}
reference: {model: {path: Qwen/Qwen2.5-1.5B}, zero: {stage: 3}}
rewards: {r: {name: length}}
"""
P = read_shape("Qwen/Qwen2.5-0.5B").parameters


def test_a_local_job_on_a_card_is_16_bytes_a_parameter_and_what_comes_beside() -> None:
    one = plan("sft", SFT + "cluster: {where: local}\n", "A100-40GB")
    trained = sizes(one, "train_actor")
    assert trained["actor weights"] == 2 * P
    assert trained["actor fp32 masters"] == 4 * P
    assert trained["actor moments"] == 8 * P
    assert trained["process CUDA context"] == Constants().cuda_context
    assert "process NCCL communicator" not in trained
    peak = one.devices[0].peak
    assert 16 * P < peak.allocated < peak.reserved < peak.bytes
    assert peak.reserved == peak.allocated + round(Constants().allocator_gap * peak.allocated)
    assert peak.bytes - peak.reserved == Constants().cuda_context
    assert one.verdict == "fits" and one.problems == ()


@pytest.mark.parametrize(("card", "alike"), [("T4", True), ("A100-40GB", False)])
def test_attention_is_what_a_run_would_take_on_the_card(card: str, alike: bool) -> None:
    """varlen_attn needs compute capability 8.0; scaled_dot_product_attention of each sequence by
    itself makes its outputs anew where it joins them."""
    auto, sdpa = (
        sizes(plan("sft", SFT.replace("0.5B}", f"0.5B, attention: {one}}}"), card), "train_actor")
        for one in ("auto", "sdpa")
    )
    assert (auto == sdpa) is alike


def test_ranks_divide_and_only_the_first_collects_the_model() -> None:
    zero = SFT + "cluster: {ranks: 2}\n"
    text = zero.replace("0.5B}}", "0.5B}, zero: {stage: 3}}")
    found = plan("sft", text, "2xA100-40GB")
    assert len(found.devices) == 1 and len(found.devices[0].slots) == 2
    assert sizes(found, "save")["actor weights"] == 2 * P // 2
    host = next(use for use in found.hosts[0].uses if use.moment == Moment("save", "gather"))
    assert [i.bytes for i in host.items if i.name == "model to save"] == [2 * P]
    libraries = [i.bytes for i in host.items if i.name == "CUDA libraries"]
    assert libraries == [2 * Constants().cuda_libraries]


def test_on_cpu_everything_is_on_the_host() -> None:
    found = plan("sft", SFT + "cluster: {where: local}\n", "cpu")
    assert found.devices == ()
    names = {item.name for item in found.hosts[0].peak.items}
    assert {"weights", "moments", "interpreter and libraries"} <= names
    assert not {"CUDA libraries", "CUDA context", "allocator gap"} & names
    asked = plan("sft", SFT + "cluster: {where: local, device: cpu}\n", "A100-40GB")
    assert asked.devices == () and asked.hosts[0].peak.bytes == found.hosts[0].peak.bytes


def test_disk_has_a_checkpoint_more_than_are_kept() -> None:
    text = SFT.replace("steps: 10", "steps: 10, keep_checkpoints: 3")
    found = plan("sft", text + "cluster: {where: local}\n", "A100-40GB")
    assert found.disk_bytes == 4 * (4 + 8) * P + 2 * P


SAVED = (("keep_checkpoints: 0", {"gather"}), ("save_model: false", {"write"}))


@pytest.mark.parametrize("job", ["sft", "ppo"])
@pytest.mark.parametrize("cluster", ["A100-40GB", "cpu"])
def test_a_run_that_saves_less_holds_the_same_at_all_other_moments(job: str, cluster: str) -> None:
    text = SFT if job == "sft" else PPO + "rollout: {transformers: {}}\n"
    text += "cluster: {where: local}\n"

    def held(more: str) -> dict[Moment, int]:
        found = plan(job, text.replace("steps: 10", f"steps: 10, {more}"), cluster)
        uses = [*found.hosts[0].uses, *(found.devices[0].uses if found.devices else ())]
        return {use.moment: sum(i.bytes for i in use.items) for use in uses}

    every = held("seed: 0")
    assert {moment.instant for moment in every if moment.phase == "save"} == {"gather", "write"}
    for less, instants in (*SAVED, ("keep_checkpoints: 0, save_model: false", set[str]())):
        kept = {m: n for m, n in every.items() if m.phase != "save" or m.instant in instants}
        assert held(less) == kept, less


def test_disk_has_what_is_saved_alone() -> None:
    def found(more: str) -> Plan:
        text = SFT.replace("steps: 10", f"steps: 10, {more}")
        return plan("sft", text + "cluster: {where: local}\n", "A100-40GB")

    assert found("keep_checkpoints: 0").disk_bytes == 2 * P
    assert found("save_model: false").disk_bytes == 3 * (4 + 8) * P
    nothing = found("keep_checkpoints: 0, save_model: false")
    assert nothing.disk == () and "disk: nothing is saved" in verdict_text(nothing)


def test_reward_models_of_a_job_that_trains_nothing_are_all_there_while_one_scores() -> None:
    """Only what is computed with comes and goes."""
    text = PPO.replace("rewards: {r: {name: length}}\n", "")
    actor, *_ = text.split("critic:")
    one = "{role: {model: {path: Qwen/Qwen2.5-1.5B}}}"
    own = f"{actor}reward_models: {{a: {one}, b: {one}}}\nrollout: {{transformers: {{}}}}\n"
    sampling = resolve(JOBS["sample"], read_config("sample", own + "cluster: {where: local}\n"))
    found = make_plan(sampling, Ground(parse_cluster("A100-80GB", 1, 10**12)))
    held = {
        use.moment.phase: {i.role: i.bytes for i in use.items if i.name == "frozen weights"}
        for use in found.devices[0].uses
        if use.moment.phase in ("rollout", "score")
    }
    assert held["score"] == held["rollout"] and held["score"].keys() == {"reward.a", "reward.b"}


def test_the_best_checkpoint_and_an_average_take_disk_too() -> None:
    text = SFT.replace("steps: 10", "steps: 10, eval_every: 5, best: {}")
    text = text.replace("actor: {", "actor: {ema: {}, ").replace(
        "train: {", "eval: {path: e, prompt: q, response: r}, train: {"
    )
    found = plan("sft", text + "cluster: {where: local}\n", "A100-40GB")
    assert found.disk_bytes == 4 * (4 + 8 + 4) * P + 2 * P


def test_disk_that_is_too_small_is_a_problem() -> None:
    job = read_config("sft", SFT + "cluster: {where: local}\n")
    hardware = parse_cluster("A100-40GB", 1, None)
    needed = (3 * 12 + 2) * P
    short = make_plan(spec_of(job), Ground(hardware, free_disk=needed - 1))
    assert [problem.code for problem in short.problems] == ["disk-space"]
    assert short.verdict == "does not fit"
    assert make_plan(spec_of(job), Ground(hardware, free_disk=needed)).verdict == "fits"


def test_the_critic_on_its_own_ranks_is_on_its_own_cards() -> None:
    text = PPO + "cluster: {ranks: 2, critic_ranks: 1}\nrollout: {vllm: {memory_share: 0.5}}\n"
    found = plan("ppo", text, "4xA100-80GB")
    roles = [{i.role for i in s.peak.items} - {"process"} for s in found.devices]
    assert roles == [{"actor", "reference"}, {"critic"}, {"rollout"}]
    assert [len(store.slots) for store in found.devices] == [2, 1, 1]


def test_reward_models_on_their_own_ranks_are_divided_over_these() -> None:
    """They leave nothing on the actor's cards, and what they score is divided over theirs."""
    judge = "reward_model: {role: {model: {path: Qwen/Qwen2.5-1.5B}, zero: {stage: 3}}}\n"
    text = PPO + judge + "rollout: {vllm: {memory_share: 0.5}}\n"
    shared = plan("ppo", text + "cluster: {ranks: 2}\n", "8xA100-80GB")
    apart = plan("ppo", text + "cluster: {ranks: 2, reward_ranks: 4}\n", "8xA100-80GB")
    roles = [{i.role for use in s.uses for i in use.items} - {"process"} for s in apart.devices]
    assert roles == [{"actor", "critic", "reference"}, {"reward"}, {"rollout"}]
    assert [len(store.slots) for store in apart.devices] == [2, 4, 1]

    def frozen_weights(found: Plan, store: int) -> int:
        [use] = [u for u in found.devices[store].uses if str(u.moment) == "score (forward)"]
        names = ("reward", "frozen weights")
        return sum(i.bytes for i in use.items if (i.role, i.name) == names)

    shape = read_shape("Qwen/Qwen2.5-1.5B")
    whole = 2 * (shape.parameters + shape.hidden)  # the tied head is the embedding; and a score
    assert frozen_weights(shared, 0) == whole / 2
    assert frozen_weights(apart, 1) == whole / 4


def test_an_adapter_that_goes_by_itself_is_all_that_goes_to_the_engines() -> None:
    text = PPO.replace(
        "zero: {stage: 3}}\ncritic", "adapter: {rank: 8, targets: [q_proj]}}\ncritic"
    )
    shape = read_shape("Qwen/Qwen2.5-1.5B")
    engine = "rollout: {vllm: {memory_share: 0.5, adapter: separate}}\ncluster: {ranks: 1}\n"
    host = plan("ppo", text + engine, "2xA100-80GB").hosts[0]
    [sync] = [use for use in host.phases if use.moment.phase == "sync"]
    sent = {item.name: item.bytes for item in sync.items}
    adapter = 2 * shape.layers * 8 * 2 * shape.hidden
    names = ("adapter to send", "file in shared memory", "received weights")
    assert {name: sent[name] for name in names} == dict.fromkeys(names, adapter)


TIED = 2 * 151_936 * 1536
"""Bytes of the embedding of Qwen2.5-1.5B, and of the head that is tied to it."""
_WAYS = [
    ("own", "nccl", "", 2 * (TIED + TIED)),
    ("own", "nccl", ", adapter: {rank: 8}", 2 * 2**28),
    ("own", "nccl", ", adapter: {rank: 8, targets: [q_proj]}", 2 * 2**28),
    ("shared", "ipc", "", 2 * (TIED + TIED)),
    ("own", "host", "", 2 * (TIED + TIED)),
]


@pytest.mark.parametrize(("placement", "route", "adapter", "two"), _WAYS)
def test_two_buckets_of_a_rank_that_sends(
    placement: str, route: str, adapter: str, two: int
) -> None:
    """On its card, or by `host` in host memory, for good. A frozen embedding is not sent."""
    text = PPO.replace("zero: {stage: 3}}\ncritic", f"zero: {{stage: 3}}{adapter}}}\ncritic")
    sync = f"sync: {{route: {route}}}" if route == "host" else ""
    engine = f"rollout: {{placement: {placement}, vllm: {{memory_share: 0.3}}, {sync}}}\n"
    found = plan("ppo", text + engine + "cluster: {ranks: 1}\n", "2xA100-80GB")
    assert found.job.sending is not None and found.job.sending.route == route
    sending = sizes_at(found, Moment("sync", "gather"))
    [host] = found.hosts
    scoring = next(use for use in host.uses if use.moment == Moment("score", "forward"))
    kept = [item.bytes for item in scoring.items if item.name == "buckets of weights"]
    if route == "host":
        assert kept == [two] and sending["actor packed bucket"] == two // 2 + CHECKSUM_BYTES
    else:
        assert kept == [] and sending["actor buckets of weights"] == two + CHECKSUM_BYTES
    joins = [_communicators(store.uses) for store in found.devices]
    assert joins == ([[570 * 2**20]] * 2 if route == "nccl" else [[]] * len(joins))
    landing = [store for store in found.devices if store is not found.devices[0]]
    for store in landing:  # a card of an engine alone
        use = next(use for use in store.uses if use.moment == Moment("sync", "gather"))
        items = {item.name: item.bytes for item in use.items}
        free = items["vLLM profile peak, graphs"]
        assert items.get("bucket on the card", 0) >= two // 2 + CHECKSUM_BYTES - free


def _communicators(uses: Sequence[Use]) -> list[int]:
    """The sizes of NCCL's communicators in the items of one moment of a store."""
    return [item.bytes for item in uses[0].items if item.name.endswith("NCCL communicator")]


def test_the_experts_of_a_layer_are_held_until_they_are_whole() -> None:
    """Mixtral: 8 experts of three matrices of 4096 x 14336, in 2 bytes; half of them is made."""
    shape = read_shape("mistralai/Mixtral-8x7B-v0.1")
    moments = frozenset({Moment("sync", "gather"), Moment("rollout", "generate")})
    rollout = RolloutConfig(dtype="bfloat16").with_engine(
        VllmConfig(tensor_parallel=2, max_sequences=8)
    )
    sampler = vllm_sampler(Sampler(rollout, shape, 1024, 8))
    layer = 2 * 8 * 3 * 4096 * 14336
    [held] = reload_items(sampler, "device", 2**28, moments)
    assert held.item.bytes == layer * 3 // 2 - 2**28 > 0
    assert held.moments == {Moment("sync", "gather")}
    dense = vllm_sampler(Sampler(rollout, read_shape("Qwen/Qwen2.5-7B"), 1024, 8))
    assert not [*reload_items(dense, "device", 2**28, moments)]


def test_a_forward_of_the_actor_proves_a_sync_beside_the_engine_awake() -> None:
    engines = (
        "rollout: {vllm: {sleep_level: 2, memory_share: 0.4}, engines: 2, placement: shared}\n"
    )
    several = "algorithm: {mini_batches: 2}\n"  # then it scores, too
    found = plan("ppo", PPO + several + engines + "cluster: {ranks: 2}\n", "2xA100-80GB")
    sampling, scoring, proving = (sizes(found, phase) for phase in ("rollout", "score", "sync"))
    assert proving["rollout KV cache"] == sampling["rollout KV cache"]
    work = ("logits chunk", "live parameters", "prefetch bucket")
    assert all(proving[f"actor {item}"] == scoring[f"actor {item}"] > 0 for item in work)
    assert not any(f"{role} {item}" in proving for role in ("critic", "reference") for item in work)


GRPO = PPO[: PPO.index("critic:")] + "rewards: {r: {name: length}}\n"


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        (GRPO, False),
        (GRPO + "algorithm: {mini_batches: 2}\n", True),
        (GRPO + "algorithm: {epochs: 2}\n", True),
    ],
)
def test_the_actor_scores_only_what_several_updates_learn_from(text: str, scores: bool) -> None:
    text = text.replace("stage: 3", "stage: 0") + "cluster: {ranks: 1}\n"
    found = plan("grpo", text, "2xA100-80GB")
    scored, proved = sizes(found, "score"), sizes_at(found, Moment("sync", "forward"))
    assert scored["actor weights"] == proved["actor weights"]
    for item in ("logits chunk", "input ids and rotary tables"):
        assert proved[f"actor {item}"] > 0
        assert scored.get(f"actor {item}", 0) == (proved[f"actor {item}"] if scores else 0)


def test_nodes_that_hold_the_same_are_one_host() -> None:
    text = PPO + "cluster: {ranks: 4, critic_ranks: 8, nodes: 5}\n"
    text += "rollout: {vllm: {tensor_parallel: 4, memory_share: 0.5}, engines: 2}\n"
    hosts = plan("ppo", text, "4xA100-80GB", nodes=5).hosts
    assert [[slot.node for slot in host.slots] for host in hosts] == [[0], [1, 2], [3, 4]]


def test_the_cards_of_a_stage_hold_the_same() -> None:
    """Each stage has two cards: 12 layers of Qwen2.5-0.5B in both stages, and the head in the
    second."""
    text = PPO + "cluster: {ranks: 1}\n"
    text += "rollout: {vllm: {tensor_parallel: 2, pipeline_parallel: 2, memory_share: 0.5}}\n"
    found = plan("ppo", text, "5xA100-80GB").devices
    assert [[slot.card for slot in device.slots] for device in found] == [[0], [1, 2], [3, 4]]


def test_ranks_and_engines_without_a_card_are_a_problem_with_a_remedy() -> None:
    found = plan("ppo", PPO + "cluster: {ranks: 4}\n", "4xA100-80GB")
    assert found.verdict == "does not fit"
    problem = next(p for p in found.problems if p.code == "more-ranks-than-gpus")
    assert "needs 5 GPUs" in problem.what and "engine 0" in problem.what
    assert "rollout.placement: shared" in problem.fix
    [alone] = plan("sft", SFT + "cluster: {ranks: 4}\n", "2xA100-80GB").problems
    assert alone.code == problem.code
    assert "cluster.ranks: 2" in alone.fix and "cluster.nodes: 2" in alone.fix


def test_missing_cards_are_a_problem() -> None:
    found = plan("sft", SFT + "cluster: {where: local, device: cuda}\n", "cpu")
    assert [problem.code for problem in found.problems] == ["no-gpu"]


def test_a_share_too_small_for_one_sequence_says_what_works() -> None:
    text = PPO + "cluster: {ranks: 1}\nrollout: {vllm: {memory_share: MEMORY}}\n"
    found = plan("ppo", text.replace("MEMORY", "0.05"), "2xA100-80GB")
    problem = next(p for p in found.problems if p.code == "vllm-share")
    share = problem.fix.removeprefix("rollout.vllm.memory_share: ").partition(",")[0]
    assert float(share) > 0.05
    better = plan("ppo", text.replace("MEMORY", share), "2xA100-80GB")
    assert "vllm-share" not in {p.code for p in better.problems}


def test_a_cache_on_cpu_that_holds_no_sequence_says_the_least_that_works() -> None:
    text = PPO + "cluster: {ranks: 1}\n"
    vllm = text + "rollout: {vllm: {cpu_kv_cache_gib: 0.01}}\n"
    transformers = text + "rollout: {transformers: {}}\n"
    found = plan("ppo", vllm, "cpu")
    problem = next(p for p in found.problems if p.code == "vllm-cache")
    assert found.verdict == "does not fit"
    least = problem.fix.removeprefix("rollout.vllm.cpu_kv_cache_gib: ").partition(",")[0]
    better = plan("ppo", vllm.replace("0.01", least), "cpu")
    assert "vllm-cache" not in {p.code for p in better.problems}
    for other, cluster in ((transformers, "cpu"), (vllm, "2xA100-80GB")):
        assert "vllm-cache" not in {p.code for p in plan("ppo", other, cluster).problems}


def test_of_what_roles_have_only_while_they_score_the_largest_counts() -> None:
    job = make_job(
        spec_of(read_config("ppo", PPO + "cluster: {ranks: 1}\n")),
        parse_cluster("2xH100", 1, None),
        Constants(),
    )
    rank = next(p for p in job.layout.processes if p.kind == "rank")
    passing = {
        one.item.role
        for one in contents_of(job, rank)
        if any(m.phase == "score" for m in one.moments)
        and not any(m.phase == "save" for m in one.moments)
    }
    assert len(passing) == 1


def test_the_json_has_the_agreed_keys() -> None:
    text = PPO + "cluster: {ranks: 2}\nrollout: {placement: shared, engines: 2}\n"
    values = plan_values(plan("ppo", text, "2xA100-80GB")) | advice_values(None)
    agreed = {"verdict", "band", "devices", "hosts", "disk", "items", "problems", "suggestions"}
    assert agreed <= set(values)
    assert [d["device"] for d in values["devices"]] == ["node 0, cards 0-1"]
    peak = values["devices"][0]["peak"]
    assert set(peak) == {"phase", "allocated_bytes", "reserved_bytes", "device_bytes"}
    assert set(values["devices"][0]) == {"device", "count", "capacity_bytes", "peak"}
    assert set(values["hosts"][0]) == {"device", "nodes", "count", "capacity_bytes", "peak"}
    assert set(values["hosts"][0]["peak"]) == {"phase", "bytes"}
    assert set(values["items"][0]) == {
        *("role", "phase", "instant", "item", "where", "device", "bytes", "formula", "source"),
    }
    assert values["disk"]["bytes"] == sum(
        i["bytes"] for i in values["items"] if i["where"] == "disk"
    )


def test_thousands_of_cards_are_as_many_entries_as_there_are_kinds() -> None:
    """Rank 0 and its node, further nodes of ranks, and nodes of engines."""
    text = GRPO + "cluster: {ranks: 2048, nodes: 512}\nrollout: {engines: 2048, vllm: {}}\n"
    values = plan_values(plan("grpo", text, "8xA100-80GB", nodes=512))
    assert [(d["device"], d["count"]) for d in values["devices"]] == [
        ("nodes 0-255, cards 0-7", 2048),
        ("nodes 256-511, cards 0-7", 2048),
    ]
    assert [(h["device"], h["count"]) for h in values["hosts"]] == [
        *(("node 0", 1), ("nodes 1-255", 255)),
        ("nodes 256-511", 256),
    ]
    assert values["hosts"][1]["nodes"] == [*range(1, 256)]
    assert len(json.dumps(values)) < 200_000


def by_place(values: dict[str, Any]) -> dict[tuple[str, str], dict[str, int]]:
    """(where, device) -> phase -> the sum of its items."""
    sums: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for item in values["items"]:
        sums[item["where"], item["device"]][item["phase"]] += item["bytes"]
    return sums


@settings(max_examples=percent(25))
@given(
    ranks=st.integers(1, 4),
    critic=st.sampled_from([None, 1, 2]),
    engines=st.integers(1, 2),
    parallel=st.sampled_from([1, 2]),
    placement=st.sampled_from(["own", "shared"]),
    sleep=st.integers(0, 2),
    stage=st.sampled_from([0, 1, 2, 3]),
    offload=st.booleans(),
    cluster=st.sampled_from(["4xA100-80GB", "8x24GB", "cpu"]),
    nodes=st.integers(1, 2),
)
def test_items_add_up_to_the_peaks_on_every_card_and_host(
    ranks: int,
    critic: int | None,
    engines: int,
    parallel: int,
    placement: str,
    sleep: int,
    stage: int,
    offload: bool,
    cluster: str,
    nodes: int,
) -> None:
    zero = f"{{stage: {stage}, optimizer_offload: {'cpu' if offload else 'none'}}}"
    text = PPO.replace("zero: {stage: 3}", f"zero: {zero}", 2) + (
        f"cluster: {{ranks: {ranks}, critic_ranks: {critic or 'null'}}}\n"
        f"rollout: {{engines: {engines}, placement: {placement}, "
        f"vllm: {{tensor_parallel: {parallel}, sleep_level: {sleep}}}}}\n"
    )
    values = plan_values(plan("ppo", text, cluster, nodes))
    sums = by_place(values)
    for device in values["devices"]:
        phases, peak = sums["device", device["device"]], device["peak"]
        assert phases[peak["phase"]] == max(phases.values()) == peak["device_bytes"]
        assert peak["allocated_bytes"] <= peak["reserved_bytes"] <= peak["device_bytes"]
    for host in values["hosts"]:
        phases, peak = sums["host", host["device"]], host["peak"]
        assert phases[peak["phase"]] == max(phases.values()) == peak["bytes"]
    assert sorted(n for host in values["hosts"] for n in host["nodes"]) == [*range(nodes)]
    assert all(item["bytes"] > 0 and item["formula"] and item["source"] for item in values["items"])


def test_more_ranks_never_make_a_card_fuller_at_stage_3() -> None:
    peaks = []
    for ranks in (1, 2, 4, 8):
        text = SFT.replace("0.5B}}", "0.5B}, zero: {stage: 3}}") + f"cluster: {{ranks: {ranks}}}\n"
        peaks.append(sizes(plan("sft", text, "8xA100-80GB"), "train_actor"))
    for item in ("actor weights", "actor moments", "actor fp32 masters"):
        found = [one[item] for one in peaks]
        assert found == sorted(found, reverse=True) and found[0] == 8 * found[-1]


def test_a_host_of_unknown_memory_is_said_not_to_be_judged() -> None:
    job = read_config("sft", SFT + "cluster: {where: local}\n")
    unknown = make_plan(spec_of(job), Ground(parse_cluster("A100-40GB", 1, None)))
    known = make_plan(spec_of(job), Ground(parse_cluster("A100-40GB", 1, 10**12)))
    needed = gigabytes(known.hosts[0].peak.bytes)
    line = f"host memory: {needed} GB, not judged: give --host-memory"
    assert line in verdict_text(unknown) and "not judged" not in verdict_text(known)


def test_a_model_of_unknown_shape_has_no_plan() -> None:
    with pytest.raises(ConfigError, match="'nobody/knows'"):
        plan("sft", SFT.replace("Qwen/Qwen2.5-0.5B", "nobody/knows"), "cpu")
