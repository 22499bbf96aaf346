"""The plan of ranks that sleep while engines sample: what is on cards and hosts, and when."""

from __future__ import annotations

from math import ceil

import pytest
from plan_cases import plan
from rule_cases import conflicts

from plimsoll.config.cluster import RankSleep
from plimsoll.memory.levers.levers import LEVERS, moves_of
from plimsoll.memory.levers.trials import Trials
from plimsoll.memory.weigh import Ground, Plan
from plimsoll.shapes.known_models import read_shape
from plimsoll.shapes.shape import parameter_tensors
from plimsoll.timeline.items import Moment, pinned_block
from plimsoll.timeline.levers import Lever

QWEN = "Qwen/Qwen2.5-7B-Instruct"
PARAMETERS, RANKS = 7_615_616_512, 4
SAMPLING, GATHERING = Moment("rollout", "generate"), Moment("sync", "gather")
VERIFYING, STEP = Moment("sync", "forward"), Moment("train_actor", "step")
WRITING, SAVING = Moment("save", "write"), Moment("save", "gather")
BUILDING, SCORING = Moment("load", "build actor"), Moment("score", "forward")
STATES = {"actor fp32 masters", "actor moments", "actor accumulated gradients"}
WEIGHTS = {"actor": "actor weights", "reference": "reference frozen weights"}


def grpo(depth: RankSleep, cluster: str = "4xA100-80GB", **changes: str) -> Plan:
    text = f"""\
run: {{directory: out, steps: 10}}
cluster: {{ranks: {RANKS}, rank_sleep: {depth}}}
data: {{train: {{path: x, prompt: q}}, max_tokens: 1024}}
batch: {{prompts: 64, responses: 4, micro_batch_tokens: 8192}}
actor: {{model: {{path: {QWEN}, gradient_checkpointing: true}}, zero: {{stage: STAGE}} ADAPTER}}
reference: {{model: {{path: {QWEN}}}, zero: {{stage: OTHER}}}}
algorithm: {{kl: {{coefficient: 0.001}}}}
rewards: {{length: {{name: length}}}}
rollout: {{placement: shared, engines: {RANKS}, vllm: {{memory_share: 0.3, sleep_level: 2}}}}
"""
    for name, value in ({"STAGE": "3", "ADAPTER": "", "OTHER": "3"} | changes).items():
        text = text.replace(name, value)
    return plan("grpo", text, cluster)


def on_cards(found: Plan, moment: Moment) -> set[str]:
    return held(found.devices[0].uses, moment)


def held(uses: object, moment: Moment) -> set[str]:
    assert isinstance(uses, tuple)
    [use] = [use for use in uses if use.moment == moment]
    return {f"{item.role} {item.name}" for item in use.held if item.bytes}


def on_host(found: Plan) -> dict[str, int]:
    """Return the bytes of what sleeps, of all ranks together."""
    [use] = [use for use in found.hosts[0].uses if use.moment == STEP]
    return {f"{i.role} {i.name}": i.bytes for i in use.items if i.name.endswith("asleep")}


def test_states_are_on_the_card_while_ranks_work() -> None:
    found = grpo("states")
    for moment in (SAMPLING, GATHERING, VERIFYING, WRITING):
        names = on_cards(found, moment)
        assert names.isdisjoint(STATES) and names >= {*WEIGHTS.values()}, moment
    for moment in (SCORING, STEP, SAVING):
        assert on_cards(found, moment) >= STATES | {*WEIGHTS.values()}, moment
    awake = grpo("none")
    assert all(on_cards(awake, moment) >= STATES for moment in (SAMPLING, VERIFYING, WRITING))
    assert on_host(awake) == {}


def test_of_all_only_the_weights_that_are_sent_are_awake_in_a_sync() -> None:
    found = grpo("all")
    for moment in (SAMPLING, WRITING):
        assert on_cards(found, moment).isdisjoint(STATES | {*WEIGHTS.values()}), moment
    for moment in (GATHERING, VERIFYING):
        names = on_cards(found, moment)
        assert WEIGHTS["actor"] in names and WEIGHTS["reference"] not in names, moment
    assert on_cards(found, STEP) >= STATES | {*WEIGHTS.values()}


def test_engines_sleep_while_ranks_that_sleep_load_and_save() -> None:
    for moment in (BUILDING, SAVING):
        assert "rollout KV cache" in on_cards(grpo("none"), moment)
        assert "rollout KV cache" not in on_cards(grpo("states"), moment)
    assert "rollout KV cache" in on_cards(grpo("all"), WRITING)


def test_flat_buffers_lie_in_one_block_of_a_power_of_two_each() -> None:
    share = PARAMETERS // RANKS
    group = 1_000_000_000  # DeepSpeed's sub-groups of states, the last of which is smaller
    moments = [2 * pinned_block(4 * size) for size in (group, share - group)]
    flat = {
        "actor fp32 masters asleep": RANKS * sum(moments) // 2,
        "actor moments asleep": RANKS * sum(moments),
        "actor accumulated gradients asleep": RANKS * pinned_block(4 * share),
    }
    assert on_host(grpo("states")) == flat
    weights = RANKS * pinned_block(2 * share)
    found = on_host(grpo("all"))
    assert found["actor weights asleep"] == weights
    assert found.keys() - flat.keys() >= {"reference frozen weights asleep"}


def blocks(each: float, ranks: int = 1) -> int:
    """Return the bytes of a block for every tensor of the model, on each of 4 ranks."""
    tensors = parameter_tensors(read_shape(QWEN))
    return RANKS * sum(
        t.parameters // t.elements * pinned_block(ceil(each * -(-t.elements // ranks)))
        for t in tensors
    )


def test_what_is_not_divided_has_a_block_for_each_tensor() -> None:
    found = on_host(grpo("all", "4xH200", STAGE="0", OTHER="0"))
    assert found["actor weights asleep"] == blocks(2)
    assert found["actor moments asleep"] == 2 * blocks(4)
    assert found["reference frozen weights asleep"] == blocks(2)
    divided = on_host(grpo("all"))["reference frozen weights asleep"]
    assert divided == blocks(2, RANKS)


def test_of_an_adapter_the_states_are_small_and_the_base_is_not() -> None:
    adapter = {"STAGE": "2", "ADAPTER": ", adapter: {rank: 16}", "OTHER": "0"}
    found = on_host(grpo("all", **adapter))
    assert 0 < found["actor moments asleep"] < 10**10
    assert found["actor frozen weights asleep"] == blocks(2)


def test_linear_layers_in_4_bits_have_blocks_of_their_own_and_so_have_scales() -> None:
    adapter = {"STAGE": "2", "ADAPTER": ", adapter: {rank: 16}", "OTHER": "0"}
    in_4_bits = {"checkpointing: true}": "checkpointing: true, quantization: nf4}"}
    found = on_host(grpo("all", **in_4_bits, **adapter))
    linears = [(x.inputs * x.outputs, x.count) for x in read_shape(QWEN).linears]

    def of_linears(each: float) -> int:
        return RANKS * sum(n * pinned_block(ceil(each * size)) for size, n in linears)

    assert found["actor 4-bit weights asleep"] == of_linears(0.5)
    scales = 1 / 64 + 4 / (64 * 256)  # of 8 bits, themselves scaled
    assert found["actor scales of 4-bit weights asleep"] == of_linears(scales)
    small = RANKS * sum(n * pinned_block(2 * size) for size, n in linears)
    assert found["actor frozen weights asleep"] == blocks(2) - small


@pytest.mark.parametrize("depth", ["states", "all"])
def test_on_the_cpu_nothing_changes_but_a_warning(depth: RankSleep) -> None:
    changes = {"rollout.placement": "shared", "cluster.rank_sleep": depth}
    found = conflicts("ppo", changes | {"cluster.device": "cpu"}, "cpu")
    assert found["offload-without-gpu"].severity == "warning"
    assert f"cluster.rank_sleep is {depth}" in found["offload-without-gpu"].what


def test_engines_that_stay_awake_are_refused() -> None:
    changes = {"rollout.placement": "shared", "cluster.rank_sleep": "states"}
    found = conflicts("ppo", changes)["sleep-not-shared"]
    assert found.severity == "error" and "rollout.vllm.sleep_level: 2" in found.fix
    assert "sleep-not-shared" not in conflicts("ppo", changes | {"rollout.vllm.sleep_level": 2})


def test_both_levers_are_offered_for_engines_that_sleep_on_cards() -> None:
    sleep, stay = (lever for lever in LEVERS if lever.keys == ("cluster.rank_sleep",))

    def moves(lever: Lever, found: Plan) -> list[object]:
        trials = Trials(found.job.spec, Ground(found.job.hardware))
        return [move["cluster.rank_sleep"] for move in moves_of(lever, trials.root.situation)]

    none, states, everything = grpo("none"), grpo("states"), grpo("all")
    assert moves(sleep, none) == ["states", "all"] and moves(stay, none) == []
    assert moves(sleep, states) == ["all"] and moves(stay, states) == ["none"]
    assert moves(sleep, everything) == [] and moves(stay, everything) == ["states", "none"]
    assert moves(sleep, grpo("none", "cpu")) == []
