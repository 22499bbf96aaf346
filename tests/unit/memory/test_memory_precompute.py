"""The plan of KTO, and of a reference that scores everything before the actor is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from plan_cases import read_spec

from plimsoll.machine.hardware import parse_cluster
from plimsoll.memory.advise import advise
from plimsoll.memory.contents.overheads import Constants
from plimsoll.memory.plan import make_plan
from plimsoll.memory.weigh import Ground, Plan
from plimsoll.resolve.run_spec import RunSpec

BASE = """\
run: {directory: out, steps: 10}
cluster: {ranks: 2}
data: {train: {path: x, prompt: q, chosen: a, rejected: b}, max_tokens: 1024}
batch: {BATCH, micro_batch_tokens: 4096}
actor: {model: {path: Qwen/Qwen2.5-7B, gradient_checkpointing: true}, zero: {stage: 3}}
"""
WHOLE = "reference: {model: {path: Qwen/Qwen2.5-7B}}\n"
"""A reference with a full copy on each rank."""
BATCHES = {"dpo": "pairs: 8", "kto": "sequences: 16"}
PARAMETERS = 7_615_616_512
WEIGHTS = 2 * PARAMETERS


def read(job: str, *, precompute: bool, more: str = WHOLE) -> RunSpec[Any]:
    text = BASE.replace("BATCH", BATCHES[job]) + more
    if precompute:
        text += "reference_logprobs: {precompute: true}\n"
    return read_spec(job, text)


def plan(job: str, *, precompute: bool, more: str = WHOLE) -> Plan:
    hardware = parse_cluster("2xA100-80GB", 1, 10**12)
    return make_plan(read(job, precompute=precompute, more=more), Ground(hardware))


def by_phase(found: Plan) -> dict[str, dict[str, int]]:
    """Phase -> bytes of each role's items at its fullest instant, on a card."""
    uses = found.devices[0].phases
    return {use.moment.phase: {f"{i.role} {i.name}": i.bytes for i in use.items} for use in uses}


@pytest.mark.parametrize("job", ["dpo", "kto"])
def test_the_reference_is_there_before_the_actor_or_beside_it(job: str) -> None:
    live = by_phase(plan(job, precompute=False))
    assert list(live) == ["load", "score", "train_actor", "save"]
    assert all(live[phase]["reference frozen weights"] == WEIGHTS for phase in list(live)[1:])
    before = by_phase(plan(job, precompute=True))
    phases = ["precompute", "load", "train_actor", "save"]
    assert list(before) == (phases if job == "dpo" else [*phases[:2], "score", *phases[2:]])
    for phase, items in before.items():
        roles = {name.split()[0] for name in items}
        assert roles == {"process", "reference" if phase == "precompute" else "actor"}
    assert before["precompute"]["reference frozen weights"] == WEIGHTS
    assert before["precompute"]["reference working set"] > 0
    assert live["score"].get("actor weights") == before["train_actor"].get("actor weights")


def test_a_reference_that_is_not_given_is_divided_as_the_actor_is() -> None:
    """Two ranks have half of it each."""
    items = by_phase(plan("dpo", precompute=False, more=""))["score"]
    assert items["reference frozen weights"] == WEIGHTS // 2


@pytest.mark.parametrize("job", ["dpo", "kto"])
def test_the_peak_falls_by_the_references_weights(job: str) -> None:
    live, before = (plan(job, precompute=precompute) for precompute in (False, True))
    peaks = [sum(by_phase(one)["train_actor"].values()) for one in (live, before)]
    gap = Constants().allocator_gap
    assert peaks[0] - peaks[1] == pytest.approx((1 + gap) * WEIGHTS, rel=1e-6)
    assert before.devices[0].peak.bytes < live.devices[0].peak.bytes


def test_an_adapter_that_is_its_own_reference_still_scores_before() -> None:
    adapter = "reference_logprobs: {precompute: true}\n"
    config = BASE.replace("BATCH", BATCHES["dpo"]).replace("zero:", "adapter: {rank: 8}, zero:")
    for text, phases in ((config, ["load", "score"]), (config + adapter, ["precompute", "load"])):
        hardware = parse_cluster("2xA100-80GB", 1, 10**12)
        found = make_plan(read_spec("dpo", text), Ground(hardware))
        assert list(by_phase(found))[:2] == phases


def test_kto_scores_prompts_with_other_responses_by_the_actor_too() -> None:
    """In turn with the reference: of what exists only meanwhile, the larger role's counts."""
    items = by_phase(plan("kto", precompute=True))["score"]
    assert items["actor working set"] > 0 and "reference working set" not in items


@pytest.mark.parametrize(("job", "rows"), [("dpo", 10 * 16), ("kto", 10 * 16 * 2)])
def test_the_file_is_in_the_plan_of_the_disk(job: str, rows: int) -> None:
    found = {item.name: item.bytes for item in plan(job, precompute=True).disk}
    assert found["log-probs"] == 20 * rows
    assert "log-probs" not in {item.name for item in plan(job, precompute=False).disk}


def test_it_is_suggested_where_the_reference_breaks_the_plan() -> None:
    spec = read("dpo", precompute=False)
    room = plan("dpo", precompute=False).devices[0].peak.bytes - WEIGHTS // 4
    advice = advise(spec, Ground(parse_cluster(f"2x{room}B", 1, 10**12)))
    assert "--reference_logprobs.precompute true" in [one.flags for one in advice.answers]
