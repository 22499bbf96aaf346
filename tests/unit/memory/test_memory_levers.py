"""The list of levers: each says what is true of it, and whatever is added is offered everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from plimsoll.commands.planning import hardware_of
from plimsoll.config.keys import find_key, keys_of
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import load_any
from plimsoll.machine.incident import Incident, Sighting
from plimsoll.memory.advise import advise
from plimsoll.memory.contents.overheads import Constants
from plimsoll.memory.explain import explain, explanation_text
from plimsoll.memory.levers.levers import LEVERS, moves_of
from plimsoll.memory.levers.trials import Trial, Trials, apply_changes, changes_between
from plimsoll.memory.plan import make_plan
from plimsoll.memory.weigh import Ground
from plimsoll.page.plan import controls
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.timeline.levers import Lever, Move, Relief, Situation

SCENARIOS = Path(__file__).parents[3] / "examples" / "scenarios"
ROLE = "{model: {path: Qwen/Qwen2.5-1.5B}, optimizer: {learning_rate: 1e-3}}"
TEXTS = {
    "ppo": f"""\
# ppo
run: {{directory: out, steps: 10}}
cluster: {{ranks: 2, hardware: 4xA100-40GB, host_memory: 200GB}}
data: {{train: {{path: x, prompt: q}}, max_tokens: 4096}}
batch: {{prompts: 64, micro_batch_tokens: 32768}}
actor: {ROLE}
critic: {ROLE}
reference: {{model: {{path: Qwen/Qwen2.5-1.5B}}}}
rewards: {{length: {{name: length}}}}
rollout: {{sampling: {{max_new_tokens: 4096}}, ROLLOUT}}
""",
    "dpo": f"""\
# dpo
run: {{directory: out, steps: 10}}
cluster: {{ranks: 2, hardware: 2xA100-40GB, host_memory: 200GB}}
data: {{train: {{path: x, prompt: q, chosen: a, rejected: b}}, max_tokens: 4096}}
batch: {{pairs: 64, micro_batch_tokens: 32768}}
actor: {ROLE}
reference: {{model: {{path: Qwen/Qwen2.5-1.5B}}, zero: {{offload: cpu}}}}
""",
}
ROLLOUTS = (
    "placement: own",
    "placement: own, staleness: 4}\nalgorithm: {correction: {name: truncate}",
    "placement: shared, engines: 2, vllm: {memory_share: 0.9}",
    "placement: shared, engines: 2, vllm: {sleep_level: 1}, sync: {bucket_bytes: 10000000000}",
    "placement: shared, engines: 2, transformers: {}",
)


def roots(folder: Path) -> Iterator[Trials]:
    """Yield the trials of a few configs, on cards and without."""
    learning = "Qwen/Qwen2.5-1.5B}, optimizer"
    saving = "Qwen/Qwen2.5-1.5B, gradient_checkpointing: true}, optimizer"
    texts = [TEXTS["dpo"], TEXTS["dpo"].replace("32768", "8192").replace(learning, saving)]
    texts += [*(TEXTS["ppo"].replace("ROLLOUT", rollout) for rollout in ROLLOUTS)]
    texts += [
        TEXTS["ppo"].replace("ROLLOUT", "vllm: {cpu_kv_cache_gib: 9}").replace("4xA100-40GB", "cpu")
    ]
    asleep = TEXTS["ppo"].replace("ROLLOUT", "placement: shared, vllm: {sleep_level: 2}")
    texts.append(asleep.replace("{ranks: 2,", "{ranks: 2, rank_sleep: all,"))
    background = "steps: 10, save_every: 5, save_in_background: true"
    texts.append(TEXTS["dpo"].replace("steps: 10", background))
    texts.append(TEXTS["ppo"].replace("ROLLOUT", "placement: shared") + JUDGE)
    for text in texts:
        (folder / "config.yaml").write_text(text)
        spec = load_any(str(folder / "config.yaml"))
        yield Trials(spec, Ground(hardware_of(spec.cluster)))


def relieved(lever: Lever, trial: Trial) -> dict[tuple[str, str], list[int]]:
    """Return the bytes of what a lever makes smaller, at each moment on each card and host."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for store in trial.plan.stores:
        for use in store.uses:
            phase = use.moment.phase
            covered = (
                item.bytes
                for item in use.held
                if any(one.covers(item.kind, store.where, phase) for one in lever.reliefs)
            )
            sizes.setdefault((store.where, str(use.moment)), []).append(sum(covered))
    return sizes


def is_relief(before: Sequence[int], after: Sequence[int]) -> bool:
    """Return whether the fullest card or host has less, or the emptiest."""
    return max(after, default=0) < max(before) or min(after, default=0) < min(before)


def test_each_lever_relieves_what_it_says(tmp_path: Path) -> None:
    """In one config at least; but for those that only mend an error."""
    found = set()
    for trials in roots(tmp_path):
        before = trials.root
        for lever in LEVERS:
            for move in moves_of(lever, before.situation):
                after = trials.of(move)
                if after is not None:
                    sizes, others = relieved(lever, before), relieved(lever, after)
                    if any(is_relief(size, others.get(key, [])) for key, size in sizes.items()):
                        found.add(lever)
    lacking = {lever.words for lever in {*LEVERS} - found if lever.reliefs}
    assert lacking == set()


def test_each_lever_turns_known_keys_and_says_what_it_costs() -> None:
    known = [tuple(keys_of(job.config)) for job in JOBS.values()]
    for lever in LEVERS:
        section = {"run": "", "trained": "actor.", "frozen": "reference."}[lever.scope]
        for key in lever.keys:
            path = tuple(f"{section}{key}".split("."))
            assert key.startswith("rollout.vllm.") or any(find_key(k, path) for k in known), key
        assert lever.words and lever.cost and lever.rank > 0
    assert len({lever.words for lever in LEVERS}) == len(LEVERS)


def _smaller_buckets(at: Situation) -> list[Move]:
    return [{"zero.bucket_elements": 1_000_000}]


BUCKETS = Lever(
    keys=("zero.bucket_elements",),
    words="smaller buckets",
    cost="ranks exchange gradients in smaller pieces",
    rank=1,
    settings=_smaller_buckets,
    reliefs=(Relief(("buffers",)),),
    scope="trained",
    control=True,
)
TIGHT = """\
# sft
run: {directory: out, steps: 10}
cluster: {ranks: 2, hardware: 2xHARDWARE, host_memory: 200GB}
data: {train: {path: x, prompt: q, response: a}, max_tokens: 512}
batch: {sequences: 64, micro_batch_tokens: 512}
actor:
  model: {path: Qwen/Qwen2.5-0.5B, gradient_checkpointing: true}
  zero: {bucket_elements: 4000000000}
"""


def tight_spec(folder: Path, hardware: str) -> RunSpec[Any]:
    (folder / "tight.yaml").write_text(TIGHT.replace("HARDWARE", hardware))
    return load_any(str(folder / "tight.yaml"))


def test_a_lever_that_is_added_in_one_place_is_offered_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a refusal, a suggestion, the report of a run out of memory, and on the page."""
    key = "actor.zero.bucket_elements"
    spec = tight_spec(tmp_path, "14GB")
    ground = Ground(hardware_of(spec.cluster))
    [problem] = [one for one in make_plan(spec, ground).problems if one.severity == "error"]
    assert key not in problem.fix
    monkeypatch.setattr("plimsoll.memory.levers.levers.LEVERS", (*LEVERS, BUCKETS))
    [problem] = [one for one in make_plan(spec, ground).problems if one.severity == "error"]
    assert f"{key}: 1000000" in problem.fix
    [answer, *_] = advise(spec, ground).answers
    assert ([change.key for change in answer.changes], answer.costs) == ([key], (BUCKETS.cost,))
    assert key in {control.key for control in controls(spec)}
    incident = Incident("device", "the card is full", seen=Sighting("rank 0", "a"))
    explanation = explain(spec, ground.hardware, Constants(), incident, "train_actor")
    assert f"+ {key}: 1000000" in explanation_text(explanation)


JUDGE = "reward_model: {role: {model: {path: Qwen/Qwen2.5-1.5B}}}\n"
OWN_NODES = "nodes: 3, critic_ranks: 2, own_nodes: {actor: 1, critic: 1, engines: 1}, ranks: 2"


def moves_to_nodes(
    folder: Path, cluster: str, rollout: str = "placement: own", more: str = ""
) -> list[Move]:
    """Return the moves to more nodes that leave the run's settings in agreement."""
    (folder / "config.yaml").write_text(
        TEXTS["ppo"]
        .replace("ROLLOUT", rollout)
        .replace("cluster: {ranks: 2", f"cluster: {{{cluster}")
        + more
    )
    spec = load_any(str(folder / "config.yaml"))
    trials = Trials(spec, Ground(hardware_of(spec.cluster)))
    lever = next(lever for lever in LEVERS if lever.words == "more nodes")
    moves = moves_of(lever, trials.root.situation)
    return [m for m in moves if apply_changes(spec, changes_between(spec, m)) is not None]


def test_actor_critic_and_engines_are_offered_nodes_of_their_own(tmp_path: Path) -> None:
    """Their cards would fit on one node; the nodes' host memory may be too small."""
    own = {"cluster.own_nodes.actor": 1, "cluster.own_nodes.critic": 1}
    move = {"cluster.critic_ranks": 2, **own, "cluster.own_nodes.engines": 1, "cluster.nodes": 3}
    assert move in moves_to_nodes(tmp_path, "ranks: 2")
    assert {"cluster.critic_ranks": 2, **own, "cluster.nodes": 2} in moves_to_nodes(
        tmp_path, "ranks: 2", "placement: shared"
    )


def test_reward_models_are_offered_nodes_of_their_own(tmp_path: Path) -> None:
    """Beside a critic that shares the actor's ranks, and beside one that has its own nodes."""
    move = {"cluster.reward_ranks": 2, "cluster.own_nodes.actor": 1, "cluster.own_nodes.reward": 1}
    move |= {"cluster.own_nodes.engines": 1, "cluster.nodes": 3}
    assert move in moves_to_nodes(tmp_path, "ranks: 2", more=JUDGE)
    assert move not in moves_to_nodes(tmp_path, "ranks: 2")
    four = move | {"cluster.own_nodes.critic": 1, "cluster.nodes": 4}
    assert four in moves_to_nodes(tmp_path, OWN_NODES, more=JUDGE)


def test_a_larger_cluster_has_cards_for_all_groups_of_ranks(tmp_path: Path) -> None:
    """Each node has four cards, of which the groups took two each."""
    groups = {"cluster.ranks": 6, "cluster.critic_ranks": 6}
    assert groups | {"cluster.nodes": 4} in moves_to_nodes(
        tmp_path, "nodes: 2, critic_ranks: 2, ranks: 2"
    )
    cluster = "nodes: 2, critic_ranks: 2, reward_ranks: 2, ranks: 2"
    assert groups | {"cluster.reward_ranks": 6, "cluster.nodes": 5} in moves_to_nodes(
        tmp_path, cluster, more=JUDGE
    )


def test_engines_have_the_room_that_reward_models_leave_of_shared_cards(tmp_path: Path) -> None:
    cluster = "{ranks: 1, reward_ranks: 1, hardware: 2xA100-40GB"
    text = TEXTS["ppo"].replace("ROLLOUT", "placement: shared, engines: 2") + JUDGE
    text = text.replace("{ranks: 2, hardware: 4xA100-40GB", cluster)
    (tmp_path / "config.yaml").write_text(text)
    spec = load_any(str(tmp_path / "config.yaml"))
    rooms = Trials(spec, Ground(hardware_of(spec.cluster))).root.situation.rooms
    cards = [room for room in rooms if room.where == "device"]
    assert len(cards) == 2 and cards[1].others["score"] > cards[1].others["train_actor"]


def test_nodes_of_their_own_grow_with_the_cluster(tmp_path: Path) -> None:
    assert moves_to_nodes(tmp_path, OWN_NODES)[0] == {
        "cluster.ranks": 6,
        "cluster.critic_ranks": 6,
        "cluster.own_nodes.actor": 2,
        "cluster.own_nodes.critic": 2,
        "cluster.nodes": 5,
    }
