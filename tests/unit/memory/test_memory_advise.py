"""Suggestions: they are what they say when they are applied, and nothing cheaper would do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import read_spec

from plimsoll.commands.planning import hardware_of
from plimsoll.config.flags import apply_flags, parse_flags
from plimsoll.config.yaml_tree import read_tree
from plimsoll.engine.zero.config import ZeroConfig
from plimsoll.jobs.which import load_any
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.advise import Advice, Suggestion, advise, smallest_change
from plimsoll.memory.contents.stores import VERDICTS
from plimsoll.memory.levers.catalogue import LEVERS, moves_of
from plimsoll.memory.levers.changes import Change, apply_changes, changes_between, value_at
from plimsoll.memory.levers.descent import Turned, cost_of, move_of
from plimsoll.memory.levers.trials import Trials
from plimsoll.memory.plan import make_plan, plan_values
from plimsoll.memory.weigh import Ground
from plimsoll.spec.run_spec import RunSpec

SCENARIOS = sorted((Path(__file__).parents[3] / "examples" / "scenarios").glob("*.yaml"))
RUN = """\
run: {{directory: out, steps: 10}}
cluster: {{ranks: {ranks}, nodes: {nodes}}}
"""
ROLE = """
  model: {{path: {model}, gradient_checkpointing: {checkpointing}}}
  zero: {{stage: {stage}}}
"""
SFT = f"""{RUN}data: {{{{train: {{{{path: x, prompt: q, response: a}}}}, max_tokens: 512}}}}
batch: {{{{sequences: 64, micro_batch_tokens: {{tokens}}}}}}
actor:{ROLE}"""
DPO = SFT.replace("response: a", "chosen: a, rejected: b").replace("sequences", "pairs")
PPO = f"""{RUN}data: {{{{train: {{{{path: x, prompt: q, reference: a}}}}, max_tokens: 512}}}}
batch: {{{{prompts: 64, responses: 2, micro_batch_tokens: {{tokens}}}}}}
actor:{ROLE}critic:{ROLE}rewards: {{{{correct: {{{{name: math_answer}}}}}}}}
rollout: {{{{sampling: {{{{max_new_tokens: 1024}}}}}}}}
"""
TEXTS = {"sft": SFT, "dpo": DPO, "ppo": PPO}
SMALL, LARGE = "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2-7B"


def config_of(
    job: str = "sft",
    *,
    ranks: int = 1,
    nodes: int = 1,
    tokens: int = 8192,
    model: str = LARGE,
    checkpointing: bool = True,
    stage: int = 2,
) -> RunSpec[Any]:
    found = TEXTS[job].format(
        **{"ranks": ranks, "nodes": nodes, "tokens": tokens, "model": model, "stage": stage},
        checkpointing=str(checkpointing).lower(),
    )
    return read_spec(job, found)


def ground_of(spec: RunSpec[Any], cards: str, gigabytes: int) -> Ground:
    return Ground(parse_cluster(cards, spec.cluster.nodes, gigabytes * 10**9))


def advised(spec: RunSpec[Any], cards: str, gigabytes: int = 1000) -> Advice:
    return advise(spec, ground_of(spec, cards, gigabytes))


def after(one: Suggestion) -> dict[str, Any]:
    return {change.key: change.after for change in one.changes}


@cache
def scenario_advice(path: Path) -> Advice:
    spec = load_any(str(path))
    return advise(spec, Ground(hardware_of(spec.cluster)))


def test_a_change_decides_anew_what_the_config_leaves_open() -> None:
    """At stage 0 DeepSpeed adds gradients up in bfloat16, at stage 2 in float32."""
    spec = config_of(stage=0)
    made = apply_changes(spec, [Change("actor.zero.stage", 0, 2)])
    assert made is not None
    dtypes = [one.actor.settings_of(ZeroConfig).gradient_dtype for one in (spec, made)]
    assert dtypes == ["bfloat16", "float32"]


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_an_answer_typed_as_flags_is_what_it_says(path: Path) -> None:
    for one in scenario_advice(path).answers:
        again = load_any(str(path), one.flags.split())
        plan = make_plan(again, Ground(hardware_of(again.cluster)))
        assert plan.verdict == one.verdict == "fits"
        assert max((s.peak.bytes for s in plan.devices), default=0) == one.device_bytes
        assert max(s.peak.bytes for s in plan.hosts) == one.host_bytes


CASES = {
    "job": st.sampled_from([*TEXTS]),
    "model": st.sampled_from([SMALL, LARGE, "Qwen/Qwen2.5-14B"]),
    "ranks": st.sampled_from([1, 2, 4, 8]),
    "stage": st.integers(0, 3),
    "checkpointing": st.booleans(),
    "cards": st.sampled_from(["RTX4090", "4xA10", "4x12GB", "2xA100-40GB", "8xA100-80GB"]),
    "host": st.sampled_from([30, 60, 128, 512]),
}


@settings(max_examples=15, deadline=None)
@given(**CASES)
def test_answers_are_true_and_each_of_their_changes_is_needed(
    job: str, model: str, ranks: int, stage: int, checkpointing: bool, cards: str, host: int
) -> None:
    spec = config_of(job, model=model, ranks=ranks, stage=stage, checkpointing=checkpointing)
    ground = ground_of(spec, cards, host)
    trials, advice = Trials(spec, ground), advise(spec, ground)
    assert advice.fits == (trials.root.rank == 0)
    effects = [one.effect for one in advice.answers]
    assert len(effects) == len({*effects}) and len({*effects} - {"machines"}) <= 3
    for one in advice.answers:
        trial = trials.of(after(one))
        assert trial is not None and trial.plan.verdict == one.verdict
        assert trial.rank < trials.root.rank
        assert all(value_at(spec.config, c.key) == c.before != c.after for c in one.changes)
        for key in after(one):
            fewer = trials.of({name: value for name, value in after(one).items() if name != key})
            worse = fewer is None or fewer.rank > VERDICTS.index(one.verdict)
            assert worse, key


LEVER = {lever.words: lever for lever in LEVERS}
LEARNING = (
    LEVER["smaller micro-batches"],
    LEVER["gradient checkpointing"],
    LEVER["adapters"],
    LEVER["adapters on bases of 4 bits"],
    LEVER["states divided over the ranks"],
    LEVER["optimizer states in host memory"],
    LEVER["weights in host memory"],
)
SAMPLING = (
    LEVER["engines on the ranks' cards"],
    LEVER["engines that sleep while the ranks train"],
    LEVER["engines divided over several cards"],
)


def grid(trials: Trials) -> Iterator[Turned]:
    """Settings of a few levers: each as it is, or one of the two strongest that it may write."""
    levers = (*LEARNING, *(SAMPLING if trials.spec.sampling else ()))
    axes = [[None, *moves_of(lever, trials.root.situation)[-2:]] for lever in levers]
    for combination in product(*axes):
        pairs = zip(levers, combination, strict=True)
        if turned := {lever: move for lever, move in pairs if move is not None}:
            yield turned


@settings(max_examples=4, deadline=None)
@given(**CASES)
def test_nothing_of_a_grid_that_fits_is_cheaper_than_the_smallest_change(
    job: str, model: str, ranks: int, stage: int, checkpointing: bool, cards: str, host: int
) -> None:
    spec = config_of(job, model=model, ranks=ranks, stage=stage, checkpointing=checkpointing)
    ground = ground_of(spec, cards, host)
    trials, found = Trials(spec, ground), smallest_change(spec, ground)
    cost = (1000, 0)
    if found is not None and found.verdict == "fits":
        cost = cost_of(found.levers)[:2]
    for turned in grid(trials) if trials.root.rank else ():
        if cost_of(turned)[:2] < cost:
            trial = trials.of(move_of(turned))
            assert trial is None or trial.rank > 0, move_of(turned)


def test_the_first_answer_is_the_smallest_change() -> None:
    spec = config_of(ranks=4, tokens=512, stage=3)
    [same, adapters, nodes] = advised(spec, "4xRTX4090", 256).answers
    assert after(same) == {"actor.zero.optimizer_offload": "cpu"}
    assert after(adapters) == {"actor.adapter.rank": 16}
    assert after(nodes) == {"cluster.nodes": 3, "cluster.ranks": 12}
    assert smallest_change(spec, ground_of(spec, "4xRTX4090", 256)) == same


FULL_RUN = """\
run: {directory: out, steps: 10}
data: {train: {path: x, prompt: q, response: a}, max_tokens: 2048}
cluster: {where: local}
batch: {sequences: 16, micro_batch_tokens: 8192}
actor: {model: {path: Qwen/Qwen2.5-1.5B}, zero: {stage: 0}}
"""


@pytest.mark.parametrize(
    ("room", "effect"), [("40GB", "same"), ("30GB", "rounding"), ("10GB", "adapters")]
)
def test_a_run_that_trains_all_weights_is_told_of_adapters_last(room: str, effect: str) -> None:
    """In one process, with too little host memory for Adam."""
    spec, ground = read_spec("sft", FULL_RUN), Ground(parse_cluster(room, 1, 24 * 10**9))
    found = smallest_change(spec, ground)
    assert found is not None and found.effect == effect
    assert ("adapter" in found.flags) == (effect == "adapters")
    assert any("adapter" in one.flags for one in advise(spec, ground).answers)


def test_what_fits_needs_no_change_and_what_never_fits_has_none() -> None:
    fitting, hopeless = config_of(model=SMALL), config_of(model="meta-llama/Llama-2-70b-hf")
    assert advised(fitting, "A100-80GB") == Advice(fits=True)
    assert smallest_change(fitting, ground_of(fitting, "A100-80GB", 1000)) is None
    assert advised(hopeless, "1GB", 1) == Advice(fits=False)
    assert smallest_change(hopeless, ground_of(hopeless, "1GB", 1)) is None


@pytest.mark.parametrize(("room", "verdict"), [("3GB", "risky"), ("3.3GB", "fits")])
def test_risky_answers_are_given_only_if_nothing_fits(room: str, verdict: str) -> None:
    answers = advised(read_spec("sft", FULL_RUN), room, 10).answers
    assert answers and {one.verdict for one in answers} == {verdict}


def test_ranks_take_free_cards_and_no_more_than_there_are_cards_or_sequences() -> None:
    spec = apply_changes(config_of(tokens=512), [Change("actor.zero.stage", 2, 3)])
    assert spec is not None
    at = Trials(spec, ground_of(spec, "8xA100-80GB", 1000)).root.situation
    ranks, nodes = LEVER["another number of ranks on the same machines"], LEVER["more nodes"]
    assert moves_of(ranks, at) == [{"cluster.ranks": 8}]
    lacking = advised(config_of(ranks=8, model=SMALL), "4xA100-80GB").answers
    assert [after(one) for one in lacking] == [{"cluster.ranks": 4}, {"cluster.nodes": 2}]
    few = apply_changes(spec, [Change("batch.sequences", 64, 1)])
    assert few is not None
    at = Trials(few, ground_of(few, "8xA100-80GB", 1000)).root.situation
    assert moves_of(ranks, at) == moves_of(nodes, at) == []


def test_at_most_eight_times_as_many_nodes_are_suggested() -> None:
    """A 32B trains in 18 bytes a parameter, 590 GB, on cards of 85 GB with 20 GB of other things:
    on 9 or more of them."""

    def nodes_from(nodes: int, model: str) -> int | None:
        spec = config_of(ranks=nodes, nodes=nodes, model=model, stage=3, tokens=512)
        answers = {one.effect: one for one in advised(spec, "A100-80GB", 1000).answers}
        return after(answers["machines"])["cluster.nodes"] if "machines" in answers else None

    assert nodes_from(1, "Qwen/Qwen2.5-14B") == 5
    assert nodes_from(1, "Qwen/Qwen2.5-32B") == 2  # with changes beside them
    assert nodes_from(2, "Qwen/Qwen2.5-32B") in range(9, 17)


def test_an_implicit_reference_is_written_out_where_it_is_changed() -> None:
    spec = config_of("dpo", ranks=2)
    at = Trials(spec, ground_of(spec, "2xA100-80GB", 1000)).root.situation
    for words in ("divided over the ranks", "in host memory"):
        [move] = moves_of(LEVER[f"models that only score {words}"], at)
        written = {key for key in move if key.startswith("reference.model.")}
        assert written == {"reference.model.path"}  # no gradient_checkpointing: it does not learn


@pytest.mark.parametrize(("rate", "offered"), [("1e-4", True), ("1e-6", False)])
def test_narrow_states_are_offered_where_no_update_is_lost(rate: str, offered: bool) -> None:
    spec = apply_changes(
        config_of(ranks=2), [Change("actor.optimizer.learning_rate", 0, float(rate))]
    )
    assert spec is not None
    at = Trials(spec, ground_of(spec, "2xRTX4090", 100)).root.situation
    narrow = {"actor.zero.stage": 2, "actor.zero.state_dtype": "bfloat16"}
    assert moves_of(LEVER["masters and moments in bfloat16"], at) == ([narrow] if offered else [])


LONG = """\
run: {directory: out, steps: 10}
cluster: {where: local}
data: {train: {path: x, prompt: q, response: a}, max_tokens: 100000}
batch: {sequences: 1, micro_batch_tokens: 100000}
actor:
  model: {path: Qwen/Qwen2.5-7B, gradient_checkpointing: true, quantization: nf4}
  adapter: {rank: 8}
"""
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


def shorter(job: str, text: str) -> dict[str, Any]:
    """Return the changes of the only answer, which has shorter sequences."""
    [one] = advised(read_spec(job, text), "RTX-4090", 64).answers
    assert one.effect == "shorter"
    return after(one)


def with_sets(text: str) -> str:
    """With two sets of held-out prompts, one of which has the longest responses of all."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("data:")]
    return "".join(lines) + SETS


def test_where_nothing_else_fits_the_longest_sequences_that_do_are_named() -> None:
    tokens = shorter("sft", LONG)
    length = tokens["data.max_tokens"]
    assert {*tokens} == {"data.max_tokens"} and length % 64 == 0

    def verdict(length: int) -> str:
        spec = read_spec("sft", LONG.replace("100000", str(length)))
        return make_plan(spec, ground_of(spec, "RTX-4090", 64)).verdict

    assert (verdict(length), verdict(length + 64)) == ("fits", "risky")


def test_shorter_sequences_of_ppo_are_shorter_responses_of_training_and_of_every_set() -> None:
    tokens = shorter("ppo", LONG_PPO)
    new = tokens["rollout.sampling.max_new_tokens"]
    assert tokens["batch.micro_batch_tokens"] == new + 1000 and new % 64 == 0
    tokens = shorter("ppo", with_sets(LONG_PPO))
    new = tokens["rollout.sampling.max_new_tokens"]
    assert tokens["data.eval.hard.sampling.max_new_tokens"] == new
    assert "eval_sampling.max_new_tokens" not in tokens  # as short as it was


def test_the_longest_responses_of_a_set_are_in_the_plan() -> None:
    """The cache of the transformers engine grows with them."""
    text = LONG_PPO.replace("100000", "1000").replace("101000", "2000")
    sets = with_sets(text).replace("200000", "{max_new_tokens}")

    def cache(new: int) -> float:
        spec = read_spec("ppo", sets.replace("{max_new_tokens}", str(new)))
        values = plan_values(make_plan(spec, ground_of(spec, "RTX-4090", 64)))
        items = cast(list[dict[str, Any]], values["items"])
        [found] = {item["bytes"] for item in items if item["item"] == "KV cache"}
        return float(found)

    assert cache(100) == cache(1000)  # those of training are as long
    assert cache(3000) == pytest.approx(2 * cache(1000), rel=0.01)


def test_changes_are_a_diff_and_flags_that_the_parser_reads_back() -> None:
    spec = config_of()
    made = {"actor.zero.stage": 3, "actor.adapter.rank": 16, "run.steps": 10}
    changes = changes_between(spec, made)
    assert [line for change in changes for line in change.lines] == [
        "- actor.zero.stage: 2",
        "+ actor.zero.stage: 3",
        "+ actor.adapter.rank: 16",
    ]
    typed = [word for change in changes for word in change.flag.split()]
    tree = apply_flags(read_tree("", "nothing"), parse_flags(typed))
    assert tree.values == {"actor": {"zero": {"stage": 3}, "adapter": {"rank": 16}}}
    again = apply_changes(spec, changes)
    assert again is not None and again.actor.adapter is not None
    assert apply_changes(spec, [Change("actor.model.quantization", "none", "nf4")]) is None
