"""Suggestions: they are what they say when they are applied, and in the order that they say."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.config.flags import apply_flags, parse_flags
from plimsoll.config.load import validate
from plimsoll.config.yaml_tree import read_tree
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import load_any, spec_of
from plimsoll.machine.hardware import Hardware, parse_bytes, parse_cluster
from plimsoll.memory.advise.advise import Advice, advise, smallest_change
from plimsoll.memory.advise.costs import COSTLESS, costs_of, speed_words
from plimsoll.memory.advise.effects import EFFECTS, effect_of, effect_words
from plimsoll.memory.advise.moves import faster_moves, filled, grown, saving_moves
from plimsoll.memory.advise.shown import advice_text, advice_values
from plimsoll.memory.advise.states import with_room
from plimsoll.memory.plan.as_json import plan_values
from plimsoll.memory.plan.plan import Ground, Plan, make_plan, weigh
from plimsoll.memory.remedies.changes import Change, changed, changes_between, value_at
from plimsoll.spec.run_spec import RunSpec

SCENARIOS = sorted((Path(__file__).parents[3] / "examples" / "scenarios").glob("*.yaml"))
SFT = """\
run: {directory: out, steps: 10}
cluster: {ranks: RANKS, nodes: NODES}
data: {train: {path: x, prompt: q, response: a}, max_tokens: 512}
batch: {sequences: 64, micro_batch_tokens: TOKENS}
actor:
  model: {path: MODEL, gradient_checkpointing: CHECKPOINTING}
  zero: {stage: STAGE}
"""
DPO = """\
run: {directory: out, steps: 10}
cluster: {ranks: 2}
data: {train: {path: x, prompt: q, chosen: a, rejected: b}, max_tokens: 512}
batch: {pairs: 8, micro_batch_tokens: 1024}
actor: {model: {path: Qwen/Qwen2.5-7B, gradient_checkpointing: true}, zero: {stage: 3}}
"""


def sft(
    ranks: int = 1,
    nodes: int = 1,
    tokens: int = 512,
    model: str = "Qwen/Qwen2.5-0.5B",
    checkpointing: bool = False,
    stage: int = 2,
) -> RunSpec[Any]:
    text = SFT.replace("RANKS", str(ranks)).replace("NODES", str(nodes)).replace("MODEL", model)
    text = text.replace("TOKENS", str(tokens)).replace("STAGE", str(stage))
    return read("sft", text.replace("CHECKPOINTING", str(checkpointing).lower()))


def read(job: str, text: str) -> RunSpec[Any]:
    config = validate(JOBS[job].config, read_tree(text, f"{job}.yaml"))
    return spec_of(config)


def named_hardware(config: RunSpec[Any]) -> Hardware:
    cluster = config.cluster
    assert cluster.hardware is not None and cluster.host_memory is not None
    return parse_cluster(cluster.hardware, cluster.nodes, parse_bytes(cluster.host_memory))


def advised(config: RunSpec[Any], hardware: Hardware) -> Advice:
    return advise(config, Ground(hardware))


@cache
def scenario_advice(path: Path) -> Advice:
    config = load_any(str(path))
    return advised(config, named_hardware(config))


def replanned(config: RunSpec[Any], cards: str, host: int) -> Plan:
    return make_plan(config, Ground(parse_cluster(cards, config.cluster.nodes, host)))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_suggestion_typed_as_flags_is_what_it_says(path: Path) -> None:
    advice = scenario_advice(path)
    for one in advice.numbered:
        again = load_any(str(path), one.flags.split())
        plan = make_plan(again, Ground(named_hardware(again)))
        assert plan.verdict == one.verdict
        assert max((s.peak.bytes for s in plan.devices), default=0) == one.device_bytes
        assert max(s.peak.bytes for s in plan.hosts) == one.host_bytes


@settings(max_examples=15, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    tokens=st.sampled_from([512, 4096, 16384]),
    model=st.sampled_from(["Qwen/Qwen2.5-1.5B", "Qwen/Qwen2-7B"]),
    checkpointing=st.booleans(),
    stage=st.integers(0, 3),
    cards=st.sampled_from(["4xRTX4090", "4xA100-40GB", "4x12GB"]),
)
def test_suggestions_are_better_sorted_and_true(
    ranks: int, tokens: int, model: str, checkpointing: bool, stage: int, cards: str
) -> None:
    config = sft(ranks, 1, tokens, model, checkpointing, stage)
    plan = replanned(config, cards, 10**11)
    advice = advised(config, parse_cluster(cards, 1, 10**11))
    order = [("machines" in one.effect, one.relative_seconds) for one in advice.suggestions]
    assert order == sorted(order)
    assert advice.fits == (plan.verdict == "fits")
    for one in advice.suggestions:
        again = changed(config, one.changes)
        assert again is not None
        verdict = replanned(again, cards, 10**11).verdict
        assert verdict == one.verdict
        assert verdict in (("fits", "risky") if plan.verdict == "does not fit" else ("fits",))
        assert one.relative_seconds < 0.97 or not advice.fits
        assert all(value_at(config.config, c.key) == c.before != c.after for c in one.changes)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_move_has_words_for_what_it_costs(path: Path) -> None:
    """But more ranks, whose cards the effect names."""
    config = load_any(str(path))
    hardware = named_hardware(config)
    plan = weigh(config, Ground(hardware))
    moves = [*saving_moves(plan), *faster_moves(config, hardware)]
    changes = [change for move in moves for change in changes_between(config, move)]
    dear = [change for change in changes if change.after not in COSTLESS]
    assert {one.key for one in dear if len(costs_of(config, [one], 1.0)) == 2} <= {"cluster.ranks"}


def test_no_change_of_a_suggestion_is_superfluous() -> None:
    config = sft(ranks=4, tokens=8192, model="Qwen/Qwen2-7B")
    advice = advised(config, parse_cluster("4xRTX4090", 1, 256 * 10**9))
    assert any(len(one.changes) > 1 for one in advice.suggestions)
    for one in advice.suggestions:
        for change in one.changes:
            fewer = changed(config, [c for c in one.changes if c != change])
            plan = None if fewer is None else replanned(fewer, "4xRTX4090", 256 * 10**9)
            verdicts = ("fits", "risky", "does not fit")
            worse = None if plan is None else verdicts.index(plan.verdict)
            assert worse is None or worse > verdicts.index(one.verdict)


def test_the_smallest_cluster_fits_and_a_smaller_one_does_not() -> None:
    config = sft(ranks=4, model="Qwen/Qwen2-7B", checkpointing=True, stage=3)
    advice = advised(config, parse_cluster("4xRTX4090", 1, 10**12))
    cluster = advice.smallest_cluster
    assert cluster is not None and cluster.nodes > 1
    assert {c.key: c.after for c in cluster.suggestion.changes} == {
        "cluster.nodes": cluster.nodes,
        "cluster.ranks": 4 * cluster.nodes,
    }
    for nodes, fits in ((cluster.nodes, True), (cluster.nodes - 1, False)):
        there = sft(4 * nodes, nodes, model="Qwen/Qwen2-7B", checkpointing=True, stage=3)
        assert (replanned(there, "4xRTX4090", 10**12).verdict == "fits") == fits


def test_a_smaller_cluster_is_found_where_there_is_room_to_spare() -> None:
    advice = advised(sft(ranks=16, nodes=4), parse_cluster("4xA100-80GB", 4, 10**12))
    assert advice.smallest_cluster is not None and advice.smallest_cluster.nodes == 1
    assert "--cluster.ranks 4" in advice.smallest_cluster.suggestion.flags


def test_no_cluster_is_named_on_which_ranks_would_have_no_work() -> None:
    config = changed(sft(model="Qwen/Qwen2-7B"), [Change("batch.sequences", 64, 1)])
    assert config is not None
    advice = advised(config, parse_cluster("RTX4090", 1, 10**12))
    assert advice.smallest_cluster is None
    assert not any("cluster.ranks" in one.flags for one in advice.suggestions)


def test_a_local_run_has_no_larger_cluster() -> None:
    config = changed(sft(model="Qwen/Qwen2-7B"), [Change("cluster.where", "ray", "local")])
    assert config is not None
    advice = advised(config, parse_cluster("RTX4090", 1, 10**12))
    assert advice.smallest_cluster is None and advice.suggestions
    assert not any("cluster." in one.flags for one in advice.suggestions)
    text = advice_text(advice)
    assert "\nas written it fits on no number of these machines\n" in text
    assert text.endswith("with larger cards: 1 node\n   + cluster.hardware: 1xB200")


def test_cards_that_are_free_are_taken_before_other_machines() -> None:
    config = sft(model="Qwen/Qwen2-7B", checkpointing=True)
    advice = advised(config, parse_cluster("8xA100-80GB", 1, 10**12))
    by_flags = {one.flags: one for one in advice.suggestions}
    one = by_flags["--cluster.ranks 8"]
    assert (one.verdict, one.effect) == ("fits", "cards")
    assert "what is learned stays the same, on more cards" in one.costs
    cluster = advice.smallest_cluster
    assert cluster is not None and cluster.nodes == 1
    assert cluster.suggestion.flags == "--cluster.ranks 8"
    assert grown(config, parse_cluster("8xA100-80GB", 1, None), 1)["cluster.ranks"] == 16
    small = sft(model="Qwen/Qwen2.5-0.5B", checkpointing=True)
    faster = advised(small, parse_cluster("8xA100-80GB", 1, 10**12)).suggestions
    assert any(one.flags == "--cluster.ranks 8" for one in faster)


def test_free_cards_are_filled_as_far_as_there_is_work_for_them() -> None:
    eight = parse_cluster("8xA100-80GB", 1, None)
    few = changed(sft(), [Change("batch.sequences", 64, 4)])
    assert few is not None
    assert filled(few, eight) == {"cluster.ranks": 4}
    assert filled(sft(ranks=8), eight) == {}
    assert filled(sft(ranks=9), eight) == {}


def test_ranks_without_a_card_get_nodes_or_are_fewer() -> None:
    config = sft(ranks=8)
    advice = advised(config, parse_cluster("4xA100-80GB", 1, None))
    assert "--cluster.ranks 4" in [one.flags for one in advice.suggestions]
    assert advice.smallest_cluster is not None
    assert advice.smallest_cluster.suggestion.flags == "--cluster.nodes 2"


def test_an_implicit_reference_is_written_out_where_it_is_changed() -> None:
    config = read("dpo", DPO)
    plan = weigh(config, Ground(parse_cluster("2xA100-80GB", 1, 10**12)))
    offers = [
        " ".join(change.flag for change in changes_between(config, move))
        for move in saving_moves(plan)
    ]
    moved = [flags for flags in offers if "reference." in flags]
    assert moved
    for flags in moved:
        assert "--reference.model.path Qwen/Qwen2.5-7B" in flags
        assert "gradient_checkpointing" not in flags


@pytest.mark.parametrize(("rate", "proposed"), [("1e-4", True), ("1e-6", False)])
def test_narrow_states_are_proposed_where_no_update_is_lost(rate: str, proposed: bool) -> None:
    text = SFT.replace("RANKS", "2").replace("NODES", "1").replace("MODEL", "Qwen/Qwen2-7B")
    text = text.replace("TOKENS", "512").replace("STAGE", "2").replace("CHECKPOINTING", "true")
    config = read("sft", f"{text}  optimizer: {{learning_rate: {rate}}}\n")
    plan = weigh(config, Ground(parse_cluster("2xRTX4090", 1, 10**11)))
    moves = [dict(move) for move in saving_moves(plan)]
    narrow = {"actor.zero.stage": 2, "actor.zero.state_dtype": "bfloat16"}
    assert (narrow in moves) == proposed


def test_the_smallest_change_leaves_training_and_hardware_alone_where_it_can() -> None:
    config = sft(ranks=4, model="Qwen/Qwen2-7B", checkpointing=True, stage=3)
    found = smallest_change(config, Ground(parse_cluster("4xRTX4090", 1, 256 * 10**9)))
    assert found is not None
    assert found.changes == (Change("actor.zero.optimizer_offload", "none", "cpu"),)
    no_host = smallest_change(config, Ground(parse_cluster("4xRTX4090", 1, 60 * 10**9)))
    assert no_host is not None and no_host.effect == "rounding"
    assert "adapter" not in no_host.flags
    small = smallest_change(config, Ground(parse_cluster("4x12GB", 1, 60 * 10**9)))
    assert small is not None and small.effect == "method"


FULL_RUN = """\
run: {directory: out, steps: 10}
data: {train: {path: x, prompt: q, response: a}, max_tokens: 2048}
cluster: {where: local}
batch: {sequences: 16, micro_batch_tokens: 8192}
actor: {model: {path: Qwen/Qwen2.5-1.5B}, zero: {stage: 0}}
"""


@pytest.mark.parametrize(
    ("room", "effect"), [("40GB", "none"), ("30GB", "rounding"), ("10GB", "method")]
)
def test_a_full_parameter_run_out_of_memory_is_not_told_to_train_an_adapter_first(
    room: str, effect: str
) -> None:
    """In one process, with too little host memory for Adam; an adapter would be the fastest."""
    config, ground = read("sft", FULL_RUN), Ground(parse_cluster(room, 1, 24 * 10**9))
    found, advice = smallest_change(config, ground), advise(config, ground)
    assert found is not None and found.effect == effect
    assert ("adapter" in found.flags) == (effect == "method")
    assert any("adapter" in one.flags for one in advice.suggestions)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_smallest_change_is_marked_among_the_suggestions(path: Path) -> None:
    config, advice = load_any(str(path)), scenario_advice(path)
    found = smallest_change(config, Ground(named_hardware(config)))
    marked = [one for one in advice.suggestions if one.smallest]
    assert [one.flags for one in marked] == ([found.flags] if found else [])
    for one in advice.suggestions:
        assert one.costs[0] == effect_words(one.changes)
        least = min(advice.suggestions, key=lambda each: EFFECTS.index(each.effect))
        assert not one.smallest or one.effect == least.effect


def test_what_changes_do_to_what_is_learned() -> None:
    same = (
        Change("batch.micro_batch_tokens", 4096, 2048),
        Change("actor.zero.stage", 2, 3),
        Change("critic.zero.optimizer_offload", "none", "cpu"),
        Change("rollout.vllm.memory_share", 0.9, 0.5),
        Change("cluster.critic_ranks", None, 4),
        Change("cluster.nodes", 4, 2),
        Change("reference.model.quantization", None, "nf4"),  # the actor's, written out
    )
    rounded = (
        Change("actor.zero.state_dtype", "float32", "bfloat16"),
        Change("critic.optimizer.kind", "adamw", "adamw_8bit"),
    )
    more = Change("cluster.nodes", 1, 2)
    other = Change("actor.adapter.rank", None, 16)
    assert effect_of(()) == effect_of(same) == "none"
    assert [effect_of((*same, one)) for one in rounded] == ["rounding", "rounding"]
    assert effect_of((*rounded, more)) == "machines"
    assert effect_words((*rounded, more)) == (
        "what is learned stays the same but for rounding, on more machines"
    )
    assert effect_of((other, more)) == "method and machines"
    assert effect_words((other, more)) == "what is learned changes, on more machines"
    assert effect_of((other, Change("cluster.ranks", 1, 2))) == "method"
    assert effect_of((Change("cluster.ranks", 1, 2),)) == "cards"


def test_what_fits_needs_no_change_and_what_never_fits_has_none() -> None:
    roomy = parse_cluster("A100-80GB", 1, 10**12)
    assert smallest_change(sft(), Ground(roomy)) is None
    hopeless = parse_cluster("1GB", 1, 10**9)
    config = sft(model="meta-llama/Llama-2-70b-hf")
    assert smallest_change(config, Ground(hopeless)) is None
    advice = advised(config, hopeless)
    assert advice == Advice((), None, None, False)
    assert advice_text(advice) == "nothing that was tried would fit"


LONG = """\
run: {directory: out, steps: 10}
cluster: {where: local}
data: {train: {path: x, prompt: q, response: a}, max_tokens: 100000}
batch: {sequences: 1, micro_batch_tokens: 100000}
actor:
  model: {path: Qwen/Qwen2.5-7B, gradient_checkpointing: true, quantization: nf4}
  adapter: {rank: 8}
"""


def test_where_nothing_else_fits_the_longest_sequences_that_do_are_named() -> None:
    config, hardware = read("sft", LONG), parse_cluster("RTX-4090", 1, 64 * 10**9)
    advice = advised(config, hardware)
    assert advice.suggestions == () and advice.shorter is not None
    assert smallest_change(config, Ground(hardware)) == advice.shorter
    tokens = {change.key: change.after for change in advice.shorter.changes}
    length = tokens["data.max_tokens"]
    assert tokens == {"data.max_tokens": length, "batch.micro_batch_tokens": length}
    assert isinstance(length, int) and length % 64 == 0

    def verdict(length: int) -> str:
        shorter = read("sft", LONG.replace("100000", str(length)))
        return make_plan(shorter, Ground(hardware)).verdict

    assert (verdict(length), verdict(length + 64)) == ("fits", "risky")
    assert (
        f"   + data.max_tokens: {length}\n     what is learned changes\n"
        "     longer rows are refused, or cut with data.over_long: truncate"
    ) in advice_text(advice)


LONG_PPO = """\
run: {directory: out, steps: 10}
cluster: {where: local}
data: {train: {path: x, prompt: q, reference: a}, max_tokens: 1000}
batch: {prompts: 8, micro_batch_tokens: 101000}
actor: {model: {path: Qwen/Qwen2.5-0.5B, gradient_checkpointing: true}}
critic: {model: {path: Qwen/Qwen2.5-0.5B, gradient_checkpointing: true}}
rewards: {correct: {name: exact_match}}
rollout: {transformers: {max_sequences: 1}, sampling: {max_new_tokens: 100000}}
"""
SETS = """\
data:
  train: {path: x, prompt: q, reference: a}
  eval:
    easy: {path: y, prompt: q, reference: a}
    hard: {path: z, prompt: q, reference: a, sampling: {max_new_tokens: 200000}}
  max_tokens: 1000
eval_sampling: {max_new_tokens: 50}
"""


def test_shorter_sequences_of_ppo_are_shorter_responses() -> None:
    config = read("ppo", LONG_PPO)
    advice = advised(config, parse_cluster("RTX-4090", 1, 64 * 10**9))
    assert advice.shorter is not None
    found = {change.key: change.after for change in advice.shorter.changes}
    new = found["rollout.sampling.max_new_tokens"]
    assert isinstance(new, int) and new % 64 == 0
    assert found["batch.micro_batch_tokens"] == new + 1000
    assert advice.shorter.costs == ("what is learned changes", "longer responses are cut off")


def with_sets(text: str) -> str:
    """With two sets of held-out prompts, one of which has the longest responses of all."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("data:")]
    return "".join(lines) + SETS


def test_shorter_sequences_are_those_of_every_set_of_held_out_prompts() -> None:
    hardware = parse_cluster("RTX-4090", 1, 64 * 10**9)
    advice = advised(read("ppo", with_sets(LONG_PPO)), hardware)
    assert advice.shorter is not None
    found = {change.key: change.after for change in advice.shorter.changes}
    new = found["rollout.sampling.max_new_tokens"]
    assert found["data.eval.hard.sampling.max_new_tokens"] == new
    assert "eval_sampling.max_new_tokens" not in found  # as short as it was
    assert changed(read("ppo", with_sets(LONG_PPO)), advice.shorter.changes) is not None


def test_the_longest_responses_of_a_set_are_in_the_plan() -> None:
    """The cache of the transformers engine grows with them."""
    text = LONG_PPO.replace("100000", "1000").replace("101000", "2000")
    sets = with_sets(text).replace("200000", "{max_new_tokens}")

    def cache(new: int) -> float:
        config = read("ppo", sets.replace("{max_new_tokens}", str(new)))
        values = plan_values(make_plan(config, Ground(parse_cluster("RTX-4090", 1, 64 * 10**9))))
        items = cast(list[dict[str, Any]], values["items"])
        [found] = {item["bytes"] for item in items if item["item"] == "KV cache"}
        return float(found)

    assert cache(100) == cache(1000)  # those of training are as long
    assert cache(3000) == pytest.approx(2 * cache(1000), rel=0.01)


def test_changes_are_a_diff_and_flags_that_the_parser_reads_back() -> None:
    config = sft(stage=2)
    changes = changes_between(
        config, {"actor.zero.stage": 3, "actor.adapter.rank": 16, "run.steps": 10}
    )
    assert [line for change in changes for line in change.lines] == [
        "- actor.zero.stage: 2",
        "+ actor.zero.stage: 3",
        "+ actor.adapter.rank: 16",
    ]
    typed = [word for change in changes for word in change.flag.split()]
    tree = apply_flags(read_tree("", "nothing"), parse_flags(typed))
    assert tree.values == {"actor": {"zero": {"stage": 3}, "adapter": {"rank": 16}}}
    again = changed(config, changes)
    assert again is not None and again.actor.adapter is not None
    assert changed(config, [Change("actor.model.quantization", "none", "nf4")]) is None


def test_nodes_grow_with_ranks_on_all_their_cards_and_one_for_each_group() -> None:
    hardware = parse_cluster("8xH100", 2, None)
    ppo = load_any(str(next(p for p in SCENARIOS if p.stem.endswith("own_node"))))
    assert grown(ppo, hardware, 2) == {
        "cluster.ranks": 24,
        "cluster.critic_ranks": 24,
        "cluster.nodes": 7,
    }
    assert with_room(ppo, {"cluster.ranks": 16}, hardware) == {
        "cluster.ranks": 16,
        "cluster.nodes": 4,
    }


def test_speed_is_said_in_words() -> None:
    words = [speed_words(r) for r in (1.62, 1.0, 0.5)]
    assert words == [
        "about 1.6 x slower per step",
        "about as fast per step",
        "about 2.0 x faster per step",
    ]


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_text_is_80_columns_and_the_json_has_the_agreed_keys(path: Path) -> None:
    config = load_any(str(path))
    advice = scenario_advice(path)
    assert max(map(len, advice_text(advice).splitlines())) <= 80
    plan = make_plan(config, Ground(named_hardware(config)))
    values = plan_values(plan) | advice_values(advice)
    assert len(values["suggestions"]) == len(advice.suggestions)
    agreed = {"changes", "flags", "effect", "smallest", "verdict", "device_bytes", "host_bytes"}
    agreed |= {"relative_seconds", "costs", "number"}
    for one in values["suggestions"]:
        assert set(one) == agreed
        assert all(set(change) == {"key", "from", "to"} for change in one["changes"])
    for cluster in (values["smallest_cluster"], values["other_cards"]):
        assert cluster is None or set(cluster) == {*agreed, "nodes"}
    assert set(advice_values(None)) == set(advice_values(advice))


def test_no_cluster_of_more_than_eight_times_as_many_nodes_is_named() -> None:
    """A 32B trains in 18 bytes a parameter, 590 GB, on cards of 85 GB with 20 GB of other things:
    on 9 or more of them."""

    def nodes_from(nodes: int, model: str) -> int | None:
        config = sft(ranks=nodes, nodes=nodes, model=model, stage=3, checkpointing=True)
        cluster = advised(config, parse_cluster("A100-80GB", nodes, 10**12)).smallest_cluster
        return None if cluster is None else cluster.nodes

    assert nodes_from(1, "Qwen/Qwen2.5-14B") == 5
    assert nodes_from(1, "Qwen/Qwen2.5-32B") is None
    found = nodes_from(2, "Qwen/Qwen2.5-32B")
    assert found is not None and 8 < found <= 16
