"""Suggestions: they are what they say when they are applied, and nothing cheaper would do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, cast

import pytest
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import read_spec

from plimsoll.config.flags import apply_flags, parse_flags
from plimsoll.config.yaml_tree import read_tree
from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.advise import Advice, Suggestion, advise, smallest_change
from plimsoll.memory.contents.stores import VERDICTS
from plimsoll.memory.levers.descent import Turned, cost_of, move_of, strongest_first
from plimsoll.memory.levers.levers import LEVERS, moves_of
from plimsoll.memory.levers.trials import Change, Trials, apply_changes, changes_between, value_at
from plimsoll.memory.plan import make_plan, plan_values
from plimsoll.memory.weigh import Ground
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.timeline.levers import Move
from plimsoll.trainer.zero.config import ZeroConfig

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


CASES = {
    "job": st.sampled_from([*TEXTS]),
    "model": st.sampled_from([SMALL, LARGE, "Qwen/Qwen2.5-14B"]),
    "ranks": st.sampled_from([1, 2, 4, 8]),
    "stage": st.integers(0, 3),
    "checkpointing": st.booleans(),
    "cards": st.sampled_from(["RTX4090", "4xA10", "4x12GB", "2xA100-40GB", "8xA100-80GB"]),
    "host": st.sampled_from([30, 60, 128, 512]),
}


@settings(max_examples=percent(3))
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


@settings(max_examples=percent(2))
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


FULL_RUN = """\
run: {directory: out, steps: 10}
data: {train: {path: x, prompt: q, response: a}, max_tokens: 2048}
cluster: {where: local}
batch: {sequences: 16, micro_batch_tokens: 8192}
actor: {model: {path: Qwen/Qwen2.5-1.5B}, zero: {stage: 0}}
"""
HERE: dict[str, Any] = {"same": {}, "adapters": {}}


def large_run(gpus: int, parameters: str) -> dict[str, Any]:
    """Return settings for one node a card, at stage 3.

    Training takes 18 bytes a parameter, so a 32B needs 590 GB. Cards of 85 GB have 20 GB of other
    things, so a 32B needs 9 of them or more.
    """
    model = f"Qwen/Qwen2.5-{parameters}"
    return {"ranks": gpus, "nodes": gpus, "model": model, "stage": 3, "tokens": 512}


@pytest.mark.parametrize(
    ("settings", "cards", "host", "answers"),
    [
        pytest.param({"model": SMALL}, "A100-80GB", 1000, None, id="fits as written"),
        pytest.param({"model": "meta-llama/Llama-2-70b-hf"}, "1GB", 1, {}, id="nothing fits"),
        pytest.param(
            {"ranks": 4, "tokens": 512, "stage": 3},
            *("4xRTX4090", 256),
            {
                "same": {"actor.zero.optimizer_offload": "cpu"},
                "adapters": {"actor.adapter.rank": 16},
                "machines": {"cluster.nodes": 3, "cluster.ranks": 12},
            },
            id="one of each kind",
        ),
        pytest.param(
            {"ranks": 8, "model": SMALL},
            *("4xA100-80GB", 1000),
            {"same": {"cluster.ranks": 4}, "machines": {"cluster.nodes": 2}},
            id="more ranks than cards",
        ),
        # Without room for Adam on the host, an adapter is the last resort.
        (FULL_RUN, "40GB", 24, {"same": {}, "rounding": {}, "adapters": {}}),
        (FULL_RUN, "30GB", 24, {"rounding": {}, "adapters": {}}),
        (FULL_RUN, "10GB", 24, {"adapters": {}}),
        (FULL_RUN, "3.3GB", 10, {"adapters": {}}),
        (FULL_RUN, "3GB", 10, {"risky adapters": {}}),  # only if nothing fits
        # At most eight times as many nodes are suggested.
        (large_run(1, "14B"), "A100-80GB", 1000, {**HERE, "machines": {"cluster.nodes": 5}}),
        (
            large_run(1, "32B"),
            *("A100-80GB", 1000),
            {"same": {}, "rounding": {}, "adapters": {}, "machines": {"cluster.nodes": 2}},
        ),
        (large_run(2, "32B"), "A100-80GB", 1000, {**HERE, "machines": {"cluster.nodes": 10}}),
    ],
)
def test_the_smallest_change_is_the_first_answer_of_one_of_each_kind(
    settings: dict[str, Any] | str, cards: str, host: int, answers: dict[str, Any] | None
) -> None:
    spec = read_spec("sft", settings) if isinstance(settings, str) else config_of(**settings)
    advice = advised(spec, cards, host)
    assert advice.fits == (answers is None)
    kinds = [f"{one.verdict} {one.effect}".removeprefix("fits ") for one in advice.answers]
    assert kinds == [*(answers or {})]
    for one, changes in zip(advice.answers, (answers or {}).values(), strict=True):
        assert changes.items() <= after(one).items()
    first = advice.answers[0] if answers else None
    assert smallest_change(spec, ground_of(spec, cards, host)) == first


SHARDED = {"tokens": 512, "stage": 3}
RANKS = "another number of ranks on the same machines"
RATE = "actor.optimizer.learning_rate"
NARROW = {"actor.zero.stage": 2, "actor.zero.state_dtype": "bfloat16"}
PATH = {"reference.model.path": LARGE}
DPO_RUN = {"job": "dpo", "ranks": 2}


@pytest.mark.parametrize(
    ("lever", "settings", "written", "cards", "moves"),
    [
        # Ranks take free cards, and no more than there are cards or sequences.
        (RANKS, SHARDED, {}, "8xA100-80GB", [{"cluster.ranks": 8}]),
        (RANKS, SHARDED, {"batch.sequences": 1}, "8xA100-80GB", []),
        ("more nodes", SHARDED, {"batch.sequences": 1}, "8xA100-80GB", []),
        # An implicit reference is written out, without the settings of a model that learns.
        (
            "models that only score divided over the ranks",
            DPO_RUN,
            {},
            "2xA100-80GB",
            [{**PATH, "reference.zero.stage": 3}],
        ),
        (
            "models that only score in host memory",
            DPO_RUN,
            {},
            "2xA100-80GB",
            [{**PATH, "reference.zero.offload": "cpu"}],
        ),
        # Narrow states lose updates that are small.
        ("masters and moments in bfloat16", {"ranks": 2}, {RATE: 1e-4}, "2xRTX4090", [NARROW]),
        ("masters and moments in bfloat16", {"ranks": 2}, {RATE: 1e-6}, "2xRTX4090", []),
    ],
)
def test_a_lever_offers_only_moves_that_can_help(
    lever: str, settings: dict[str, Any], written: dict[str, Any], cards: str, moves: list[Move]
) -> None:
    spec = config_of(**settings)
    made = apply_changes(spec, changes_between(spec, written))
    assert made is not None
    assert (
        moves_of(LEVER[lever], Trials(made, ground_of(made, cards, 1000)).root.situation) == moves
    )


LONG = """\
run: {directory: out, steps: 10}
cluster: {where: local}
data: {train: {path: x, prompt: q, response: a}, max_tokens: 400000}
batch: {sequences: 1, micro_batch_tokens: 400000}
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


def with_sets(text: str) -> str:
    """Return the config with two sets of held-out prompts, one of which has the longest responses
    of all."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith("data:")]
    return "".join(lines) + SETS


NEW, SET = "rollout.sampling.max_new_tokens", "data.eval.hard.sampling.max_new_tokens"
PACKED = {NEW: 0, "batch.micro_batch_tokens": 1000}  # a prompt has 1000


@pytest.mark.parametrize(
    ("job", "text", "beyond"),
    [
        ("sft", LONG, {"data.max_tokens": 0}),
        ("ppo", LONG_PPO, PACKED),
        ("ppo", with_sets(LONG_PPO), {**PACKED, SET: 0}),  # the other set's are short already
    ],
)
def test_if_nothing_else_fits_the_longest_sequences_that_fit_are_named(
    job: str, text: str, beyond: dict[str, int]
) -> None:
    spec = read_spec(job, text)
    ground = ground_of(spec, "RTX-4090", 64)
    [one] = advise(spec, ground).answers
    tokens = after(one)
    length = min(tokens.values())
    assert one.effect == "shorter" and length % 64 == 0
    assert tokens == {key: length + more for key, more in beyond.items()}
    verdicts = [
        trial.plan.verdict
        for more in (0, 64)
        if (trial := Trials(spec, ground).of({key: n + more for key, n in tokens.items()}))
    ]
    assert verdicts == ["fits", "risky"]


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
    spec = config_of(stage=0)
    made = {"actor.zero.stage": 3, "actor.adapter.rank": 16, "run.steps": 10}
    changes = changes_between(spec, made)
    assert [line for change in changes for line in change.lines] == [
        "- actor.zero.stage: 0",
        "+ actor.zero.stage: 3",
        "+ actor.adapter.rank: 16",
    ]
    typed = [word for change in changes for word in change.flag.split()]
    tree = apply_flags(read_tree("", "nothing"), parse_flags(typed))
    assert tree.values == {"actor": {"zero": {"stage": 3}, "adapter": {"rank": 16}}}


def test_applied_changes_decide_anew_what_the_config_leaves_open() -> None:
    """At stage 0 DeepSpeed adds gradients up in bfloat16, at stage 2 in float32."""
    spec = config_of(stage=0)
    made = apply_changes(spec, [Change("actor.zero.stage", 0, 2)])
    assert made is not None
    dtypes = [one.actor.settings_of(ZeroConfig).gradient_dtype for one in (spec, made)]
    assert dtypes == ["bfloat16", "float32"]
    assert apply_changes(spec, [Change("actor.model.quantization", "none", "nf4")]) is None


def test_of_more_than_128_moves_a_few_are_tried() -> None:
    moves = [{"cluster.nodes": nodes} for nodes in range(1, 897)]
    tried = [move["cluster.nodes"] for move in strongest_first(moves)]
    assert tried == [896, 448, 224, 112, 56, 28, 14, 7, 4, 2, 1]
    assert [*strongest_first(moves[:128])] == moves[127::-1]
    assert [*strongest_first([])] == []
