"""Incidents that are made up: each question answered yes and no, on hosts and on cards."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.config.rl import RlConfig
from plimsoll.config.run import JobConfig
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import spec_of
from plimsoll.machine.hardware import Hardware, parse_cluster
from plimsoll.machine.incident import Holder, Incident, NodeState, Sighting
from plimsoll.machine.nvidia import CardProcess, LiveCard
from plimsoll.memory.contents.contents import make_job
from plimsoll.memory.contents.overheads import Constants
from plimsoll.memory.contents.stores import process_peaks
from plimsoll.memory.explain import (
    Explanation,
    Finding,
    Scene,
    answer_questions,
    explain,
    explanation_text,
    role_of,
    room_needed,
    scene_of,
)
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.numbers import gigabytes_text
from plimsoll.run.readings import DividedShare, Footprint, HostReading, Reading

GB = 10**9
CONSTANTS = Constants()
MODEL = {"path": "Qwen/Qwen2.5-0.5B"}
LEARNING = {"learning_rate": 1e-5}
NODES = {"rank 0": "a", "rank 1": "a", "critic rank 0": "b", "critic rank 1": "b", "engine 0": "c"}


def ppo(stage: int = 3, tokens: int = 16384, **cluster: Any) -> RlConfig:
    role = {"model": MODEL, "optimizer": LEARNING, "zero": {"stage": stage}}
    source = {"path": "rows.jsonl", "prompt": "prompt", "reference": "answer"}
    return RlConfig.model_validate(
        {
            "run": {"directory": "out", "steps": 2},
            "cluster": {"ranks": 2, **cluster},
            "data": {"train": source, "max_tokens": 256},
            "batch": {"prompts": 64, "responses": 4, "micro_batch_tokens": tokens},
            "actor": role,
            "critic": role,
            "rewards": {"length": {"name": "length"}},
            "rollout": {"sampling": {"max_new_tokens": 256}, "placement": "own"},
        }
    )


def sft() -> SftConfig:
    source = {"path": "rows.jsonl", "prompt": "prompt", "response": "response"}
    return SftConfig.model_validate(
        {
            "run": {"directory": "out", "steps": 2},
            "cluster": {"ranks": 1},
            "data": {"train": source, "max_tokens": 512},
            "batch": {"sequences": 64, "micro_batch_tokens": 32768},
            "actor": {"model": MODEL, "optimizer": LEARNING},
        }
    )


def state(free: int, own: int = 0, capacity: int = 512 * GB) -> NodeState:
    others = (Holder(7, "chromium", 3 * GB), Holder(8, "notebook", 10**6))
    return NodeState(capacity, free, own, others, 0)


def card(index: int, used: int, *processes: CardProcess) -> LiveCard:
    return LiveCard(
        index, f"GPU-{index}", "A100", 80 * GB, 0, used, (8, 0), "570", tuple(processes)
    )


def shares(held: int) -> dict[str, Reading]:
    """Return the share of rank 0, last read; the incident tells rank 1's. 500 MB for each would be
    even."""
    host = HostReading("a", 2 * GB, 2 * GB, 9 * GB, 512 * GB)
    return {"rank 0": Reading(host, None, (DividedShare("actor", "weights", GB, 2, held),))}


def at(process: str = "rank 1", node: str = "a", **seen: Any) -> Sighting:
    return Sighting(process, node, **{"nodes": NODES, "before": state(500 * GB), **seen})


def hosts(nodes: int) -> Hardware:
    return parse_cluster("cpu", nodes, 512 * GB)


def spec_on_cpu(config: JobConfig) -> RunSpec[Any]:
    cluster = config.cluster.model_copy(update={"hardware": "cpu"})
    return spec_of(config.model_copy(update={"cluster": cluster}))


def host_scene(
    config: JobConfig, seen: Sighting, phase: str = "train_actor", **incident: Any
) -> Scene:
    found = Incident("host", "killed", seen=seen, **incident)
    return scene_of(spec_on_cpu(config), hosts(config.cluster.nodes), CONSTANTS, found, phase)


def host_answers(
    config: JobConfig, seen: Sighting, phase: str = "train_actor", **incident: Any
) -> tuple[Finding, ...]:
    return answer_questions(host_scene(config, seen, phase, **incident))


def card_scene(seen: Sighting) -> Scene:
    found = Incident("device", "CUDA out of memory", seen=seen)
    return scene_of(spec_of(ppo()), CARDS, CONSTANTS, found, "train_actor")


def on_host(
    config: JobConfig, seen: Sighting, phase: str = "train_actor", **incident: Any
) -> Explanation:
    found = Incident("host", "killed", seen=seen, **incident)
    return explain(spec_on_cpu(config), hosts(config.cluster.nodes), CONSTANTS, found, phase)


CARDS = parse_cluster("8xA100-80GB", 1, 1000 * GB)
APART = ppo(nodes=3, critic_ranks=2)


def verdict(answer: Finding) -> tuple[str, str]:
    return answer.question, answer.verdict


def sizes(answer: Finding) -> list[str]:
    """Return the bytes that the text names, in its order."""
    return re.findall(r"[\d.]+ [kMG]B", answer.text)


def test_is_the_nodes_free_memory_below_the_plans() -> None:
    question = "Is the node's free memory below the plan's?"
    enough = host_answers(APART, at())[0]
    assert verdict(enough) == (question, "no")
    need = host_scene(APART, at()).store.peak.bytes
    assert sizes(enough) == ["500 GB", gigabytes_text(need), "512 GB"]
    assert verdict(host_answers(APART, at(before=state(need - 1)))[0]) == (question, "yes")
    assert verdict(host_answers(APART, at(before=state(need)))[0]) == (question, "no")
    # What the run holds itself is its own to have.
    assert verdict(host_answers(APART, at(before=state(need - 9, own=9)))[0])[1] == "no"
    late = host_answers(APART, at(before=None, after=state(1 * GB)))[0]
    assert late.verdict == "yes" and sizes(late)[0] == "1 GB"
    assert host_answers(APART, at(before=None))[0].verdict == "unknown"


def test_is_the_cards_free_memory_below_the_plans() -> None:
    question = "Is the card's free memory below the plan's?"
    need = card_scene(at(card=1)).store.peak.bytes

    def answer(used: int) -> Finding:
        cards = (card(0, 0), card(1, used))
        before = replace(state(GB), cards=cards)
        return answer_questions(card_scene(at(card=1, before=before)))[0]

    assert verdict(answer(80 * GB - need)) == (question, "no")
    assert verdict(answer(80 * GB - need + 1)) == (question, "yes")
    assert verdict(answer_questions(card_scene(at(card=None)))[0]) == (question, "unknown")


def test_did_the_partitioning_take_effect() -> None:
    question = "Did the partitioning take effect?"
    even = host_answers(ppo(), at(readings=shares(GB // 2)))[1]
    assert verdict(even) == (question, "yes")
    assert even.text.startswith("rank 0 ") and "the actor's weights" in even.text
    assert sizes(even) == ["500 MB", "1 GB", "500 MB"]
    whole = (DividedShare("actor", "weights", GB, 2, GB),)
    uneven = host_answers(ppo(), at(readings=shares(GB // 2)), shares=whole)[1]
    assert verdict(uneven) == (question, "no")
    assert uneven.text.startswith("rank 1 ") and "the actor's weights" in uneven.text
    assert sizes(uneven) == ["1 GB", "1 GB", "500 MB"]
    early = host_answers(ppo(), at(), "load")[1]
    assert verdict(early) == (question, "unknown")
    assert "actor and critic" in early.text
    none = host_answers(ppo(stage=0), at())[1]
    assert verdict(none) == (question, "no")
    divisions = "actor at stage 0, critic at stage 0, reference at stage 0, on 2 ranks"
    assert none.text.endswith(divisions)
    apart = host_answers(ppo(stage=0, nodes=3, critic_ranks=3), at("critic rank 0", "b"))[1]
    divisions = "actor at stage 0, reference at stage 0, on 2 ranks; critic at stage 0, on 3 ranks"
    assert apart.text.endswith(divisions)


def test_did_two_models_land_on_one_node() -> None:
    question = "Did two models land on one node?"
    apart = host_answers(APART, at("critic rank 0", "b"), "train_critic")[2]
    assert verdict(apart) == (question, "no")
    assert apart.text.startswith("critic (") and apart.text.endswith(" planned)")
    together = host_answers(APART, at(nodes=dict.fromkeys(NODES, "a")))[2]
    assert verdict(together) == (question, "yes")
    assert together.text.startswith("actor (")
    assert "; the plan has the " in together.text and together.text.endswith(" elsewhere")
    assert host_answers(sft(), at("rank 0"))[2].verdict == "no"
    shared = answer_questions(card_scene(at(card=1)))[2]
    assert verdict(shared) == ("Did two models land on one card?", "yes")
    assert shared.text.startswith("actor (") and "critic (" in shared.text


def test_what_do_other_processes_hold() -> None:
    question = "Do other processes hold much?"
    little = host_answers(APART, at(after=state(free=300 * GB, own=200 * GB)))[3]
    assert verdict(little) == (question, "no")
    assert sizes(little) == ["12 GB", "3 GB", "1 MB"]
    assert re.findall(r"\w+ \(pid \d\)", little.text) == ["chromium (pid 7)", "notebook (pid 8)"]
    # Who holds more than all that is held here is in another cgroup.
    here = host_answers(APART, at(after=state(free=31 * GB, own=GB, capacity=33 * GB)))[3]
    assert sizes(here) == ["1 GB", "1 MB"] and "notebook (pid 8)" in here.text
    much = host_answers(APART, at(after=state(free=100 * GB, own=200 * GB)))[3]
    assert verdict(much) == (question, "yes") and sizes(much)[0] == "212 GB"
    assert host_answers(APART, at(before=None))[3].verdict == "unknown"


def test_what_do_other_processes_hold_of_a_card() -> None:
    ours, theirs = CardProcess(10, "ray::RankActor", 30 * GB), CardProcess(11, "python", 20 * GB)

    def answer(*processes: CardProcess) -> Finding:
        cards = (card(0, 0), card(1, 50 * GB, *processes))
        after = replace(state(GB), cards=cards, pids=frozenset({10}))
        return answer_questions(card_scene(at(card=1, after=after, before=None)))[3]

    both = answer(ours, theirs)
    assert (both.verdict, sizes(both)) == ("yes", ["20 GB", "20 GB"])
    assert "python (pid 11)" in both.text and "pid 10" not in both.text
    alone = answer(replace(ours, bytes=50 * GB))
    assert (alone.verdict, sizes(alone)) == ("no", ["0 kB"])
    # In a container the driver hides them: then nobody can say whose the card's bytes are.
    assert answer().verdict == "unknown"


def test_the_change_fits_what_was_there() -> None:
    """One run was killed with less memory than was planned, one had as much."""
    whole = on_host(sft(), at("rank 0"))
    assert whole.room == whole.scene.store.peak.bytes and whole.change is not None
    tight = on_host(sft(), at("rank 0", before=state(whole.room * 2 // 3)))
    assert tight.room == whole.room * 2 // 3 and tight.change is not None
    for found in (whole, tight):
        assert found.change is not None and found.change.verdict == "fits"
        assert found.change.host_bytes < found.room
    assert whole.should_have_fitted and not tight.should_have_fitted


def test_a_cache_of_vllm_larger_than_any_host_shrinks_to_the_free_memory() -> None:
    settings = ppo().model_dump()
    settings["rollout"] |= {"vllm": {"cpu_kv_cache_gib": 10_000.0}}
    found = on_host(RlConfig.model_validate(settings), at("engine 0"), "load")
    assert found.change is not None
    (change,) = found.change.changes
    assert (change.key, change.before) == ("rollout.vllm.cpu_kv_cache_gib", 10_000.0)
    assert isinstance(change.after, float) and 0.8 * 500 * GB < change.after * 2**30 < 500 * GB


def test_a_process_that_held_more_than_predicted_leaves_less_room() -> None:
    peaks = process_peaks(make_job(spec_of(ppo()), hosts(1), CONSTANTS))["rank 1"]
    twice = Footprint(2 * max(one.host for one in peaks.values()))
    scene = host_scene(ppo(), at(before=state(40 * GB)), held=twice)
    assert scene.store.peak.bytes > 20 * GB
    assert room_needed(scene) == 20 * GB


def test_the_role_is_known_from_the_process_or_else_from_the_phase() -> None:
    hardware = hosts(1)

    def role(process: str, phase: str, told: str | None = None) -> str:
        found = Incident("host", "killed", told, seen=at(process))
        return role_of(scene_of(spec_of(ppo()), hardware, CONSTANTS, found, phase))

    assert role("rank 1", "score", "critic") == "critic"
    assert role("rank 1", "train_critic") == "critic"
    assert role("rank 1", "score") == "actor or critic or reference"
    assert role("engine 0", "sync") == "rollout"


def test_a_phase_outside_the_plan_has_no_prediction() -> None:
    found = on_host(sft(), at("rank 0"), "data")
    assert re.search(r"^Predicted: .* phase data$", explanation_text(found), re.MULTILINE)


@pytest.mark.parametrize("phase", ["load", "train_actor"])
def test_the_text_has_place_figures_answers_and_change_in_80_columns(phase: str) -> None:
    held = Footprint(3 * GB, 60 * GB, 70 * GB, 79 * GB)
    seen = at(card=1)
    incident = Incident("device", "CUDA out of memory", "actor", 2 * GB, held, seen=seen)
    found = explain(spec_of(ppo()), CARDS, CONSTANTS, incident, phase)
    text = explanation_text(found)
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    told = dict(re.findall(r"^(\w+)(?: [\w ]*)?: ((?:.|\n  )*)$", text, re.MULTILINE))
    for word in ("device", "rank 1", "node a", f"phase {phase}", "role actor"):
        assert word in told["Where"]
    assert re.findall(r"[\d.]+ GB", told["Asked"]) == ["2 GB"]
    measured = re.findall(r"(\d+) GB (\w+)", " ".join(told["Measured"].split()))
    assert measured == [("60", "allocated"), ("70", "reserved"), ("79", "used"), ("3", "host")]
    assert told["Predicted"]
    numbered = [line for line in lines if line[:2] in ("1.", "2.", "3.", "4.")]
    assert [line[:2] for line in numbered] == ["1.", "2.", "3.", "4."]
    assert found.change is not None
    for change in found.change.changes:
        assert f"   + {change.key}: " in text


@settings(max_examples=percent(40))
@given(
    before=st.integers(0, 512) | st.none(),
    after=st.integers(0, 512) | st.none(),
    held=st.integers(0, 10**4) | st.none(),
)
def test_four_questions_are_answered_whatever_was_seen(
    before: int | None, after: int | None, held: int | None
) -> None:
    """The room is never more than there was, nor than the plan needs."""
    seen = at(
        "rank 0",
        before=None if before is None else state(before * GB),
        after=None if after is None else state(after * GB),
    )
    footprint = None if held is None else Footprint(held * 10**6)
    incident = Incident("host", "killed", held=footprint, seen=seen)
    scene = scene_of(spec_of(sft()), hosts(1), CONSTANTS, incident, "train_actor")
    answers, room = answer_questions(scene), room_needed(scene)
    known = before if before is not None else after
    assert (answers[0].verdict == "unknown") == (known is None)
    assert 0 < room <= scene.store.peak.bytes
    if known is not None:
        assert room <= max(1, known * GB)
        assert (answers[0].verdict == "yes") == (known * GB < scene.store.peak.bytes)
    assert all(answer.text for answer in answers)
