"""The few answers of all advice: one of each kind on the machines given, side by side, and the
config that comes of each."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from plimsoll.commands.planning import advise_job, apply_answer, fit_values, plan_job
from plimsoll.config.flags import Flag, apply_flags
from plimsoll.config.load import validate
from plimsoll.config.yaml_tree import Tree, read_tree, value_at
from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import load_any
from plimsoll.memory.advise.advise import Advice, one_of_each_kind
from plimsoll.memory.advise.effects import KINDS, kind_of
from plimsoll.memory.advise.suggestion import Suggestion
from plimsoll.memory.advise.table import answers_text
from plimsoll.memory.contents.stores import Verdict
from plimsoll.memory.plan.as_text import short_text
from plimsoll.memory.plan.plan import Plan
from plimsoll.memory.remedies.changes import Change
from plimsoll.spec.run_spec import RunSpec, resolve

SCENARIOS = sorted((Path(__file__).parents[3] / "examples" / "scenarios").glob("*.yaml"))
PPO = """\
# ppo: a 7B with all its roles, on small cards
run: {directory: out, steps: 10}
cluster: {ranks: 4, hardware: 4xRTX4090, host_memory: 512GB}
data: {train: {path: prompts.jsonl, prompt: prompt}, max_tokens: 1024}
batch: {prompts: 64, micro_batch_tokens: 4096}
actor: &trained                         # both learn alike
  model: {path: Qwen/Qwen2-7B, gradient_checkpointing: true}
  zero: {stage: 3}
critic: *trained
reference: {model: {path: Qwen/Qwen2-7B}, zero: {stage: 3}}
rewards: {}
reward_model: {role: {model: {path: Qwen/Qwen2-7B}, zero: {stage: 3}}}
rollout: {vllm: {memory_share: 0.5}, engines: 4, placement: shared}
"""


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ppo") / "ppo.yaml"
    path.write_text(PPO)
    return path


@cache
def advice_of(path: Path) -> Advice:
    return advise_job(load_any(str(path)))


@cache
def plan_of(path: Path) -> Plan:
    return plan_job(load_any(str(path)))


def named(name: str) -> Path:
    return next(path for path in SCENARIOS if path.stem == name)


def suggestion(change: Change, verdict: Verdict = "fits") -> Suggestion:
    return Suggestion((change,), "none", verdict, 1, 1, 1.0, ())


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_answers_are_the_first_and_of_different_kinds_on_the_machines_given(path: Path) -> None:
    advice = advice_of(path)
    kinds = [kind_of(one.changes) for one in advice.answers]
    assert len(kinds) <= 3 and kinds == sorted({*kinds}, key=KINDS.index)
    assert advice.numbered[: len(kinds)] == advice.answers
    assert len({*advice.numbered}) == len(advice.numbered)
    for one in advice.answers:
        assert one.verdict == "fits"
        assert not any(change.key == "cluster.nodes" for change in one.changes)
    fitting = [one for one in advice.suggestions if one.verdict == "fits"]
    offered = {kind_of(one.changes) for one in fitting} - {None}
    assert {*kinds} >= offered or len(kinds) == 3


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_what_asks_for_least_is_an_answer_unless_it_takes_other_machines(path: Path) -> None:
    marked = [one for one in advice_of(path).suggestions if one.smallest and one.verdict == "fits"]
    assert all(one in advice_of(path).answers or "nodes" in one.flags for one in marked)


def test_at_most_three_kinds_are_answered_and_more_machines_are_none() -> None:
    made = [
        suggestion(Change("data.max_tokens", 2, 1)),
        suggestion(Change("cluster.nodes", 1, 2)),
        suggestion(Change("actor.adapter.rank", None, 16)),
        suggestion(Change("actor.adapter.rank", None, 8)),
        suggestion(Change("actor.optimizer.kind", "adamw", "adamw_8bit")),
    ]
    shorter, _, adapter, _, rounded = made
    assert one_of_each_kind(made) == (rounded, adapter, shorter)
    moved = suggestion(Change("actor.zero.optimizer_offload", "none", "cpu"))
    assert one_of_each_kind([*made, moved]) == (moved, rounded, adapter)
    assert one_of_each_kind(made[1:2]) == ()
    risky = suggestion(Change("actor.zero.parameter_offload", "none", "cpu"), "risky")
    assert one_of_each_kind([risky, *made]) == (rounded, adapter, shorter)
    assert one_of_each_kind([risky, *made[1:2]]) == (risky,)


def test_the_answers_stand_side_by_side() -> None:
    path = named("4_qwen2_7b_4090")
    lines = answers_text(advice_of(path), plan_of(path)).splitlines()
    rows = [line.split() for line in lines]
    assert rows[0] == ["what", "fits", "on", "these", "machines", "as", "written", "1", "2"]
    assert rows[1][1:] == ["no", "yes", "yes"]
    assert rows[2][-3:] == ["the", "same", "adapters"]
    label, column = lines[0].index("as written"), lines[0].index("1")
    cells = {line[:label].strip(): line[label:].split() for line in lines}
    assert cells["actor.zero.optimizer_offload"] == ["none", "cpu"]
    assert cells["actor.adapter.rank"] == ["-", "16"]
    found = {line[:label].strip(): line[column - 3 : column + 1].strip() for line in lines[1:]}
    assert (found["actor.zero.optimizer_offload"], found["actor.adapter.rank"]) == ("cpu", "")
    assert "risky" in [one.verdict for one in advice_of(path).suggestions]  # not an answer
    assert "  1 gives up: on the CPU, Adam is bound by host memory and PCIe" in lines
    assert "as written it fits on 3 nodes (answer 4), or on 1 node of 4xL40S (answer 6)" in lines


def test_the_page_shows_the_answers_of_today() -> None:
    path = named("4_qwen2_7b_4090")
    page = (path.parents[2] / "docs" / "plan.md").read_text()
    assert f"```\n{answers_text(advice_of(path), plan_of(path))}\n```" in page


def test_roles_that_change_alike_have_one_row_and_what_one_needs_is_told(ppo: Path) -> None:
    text = answers_text(advice_of(ppo), plan_of(ppo))
    assert "\n  actor, critic: zero.optimizer_offload" in text
    assert "critic.zero" not in text and text.count("adapter.rank") == 1
    assert "of the actor's and the critic's" in text
    same, adapters = advice_of(ppo).answers
    assert (same.effect, adapters.effect) == ("none", "method")


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_plan_and_its_answers_fit_a_screen_of_80_columns(path: Path) -> None:
    short = short_text(plan_of(path)).splitlines()
    answers = answers_text(advice_of(path), plan_of(path)).splitlines()
    assert max(map(len, [*short, *answers])) <= 80
    assert len(short) <= 45 and len(answers) <= 30
    assert sum(line.startswith(store.name) for store in plan_of(path).stores for line in short) == (
        len(plan_of(path).stores)
    )
    assert short[-1] == f"verdict: {plan_of(path).verdict}"


def test_a_plan_in_short_shows_what_does_not_fit_and_adds_up() -> None:
    """The host alone is too small; cards have a line each."""
    plan = plan_of(named("3_ppo_70b_cpu_adam"))
    lines = short_text(plan).splitlines()
    assert lines[0] == "host memory (node 0)"
    assert [line for line in lines if line.startswith("8 x H100")] == [
        "8 x H100-80GB (node 0, cards 0-7): peak 67.3 of 84.9 GB in train_critic; fits",
        "8 x H100-80GB (node 1, cards 0-7): peak 74.0 of 84.9 GB in load; fits",
    ]
    head = next(i for i, line in enumerate(lines) if "smaller items" in line)
    rows = [
        [float(cell.replace(",", "")) for cell in line[31:].split()] for line in lines[2 : head + 1]
    ]
    total = float(lines[head + 2].split()[-1].replace(",", ""))
    assert sum(row[-1] for row in rows) == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_config_with_an_answer_has_its_plan_and_its_comments(path: Path, tmp_path: Path) -> None:
    advice, new = advice_of(path), tmp_path / "new.yaml"
    for number, one in enumerate(advice.numbered, 1):
        new.write_text(apply_answer(str(path), [], advice, number))
        plan = plan_job(load_any(str(new)))
        assert plan.verdict == one.verdict
        assert max(store.peak.bytes for store in plan.devices) == one.device_bytes
        assert new.read_text().splitlines()[0] == path.read_text().splitlines()[0]


def test_a_config_with_an_answer_has_the_flags_that_it_was_planned_with() -> None:
    path, flags = named("4_qwen2_7b_4090"), ["--cluster.host_memory=1TB", "--run.seed", "3"]
    advice = advise_job(load_any(str(path), flags))
    text = apply_answer(str(path), flags, advice, 1)
    assert "\n  host_memory: 1TB\n" in text and "\n  seed: 3\n" in text
    assert "\n  zero: {stage: 3, optimizer_offload: cpu}\n" in text
    for number in (0, -1, len(advice.numbered) + 1):
        with pytest.raises(ConfigError, match=f"--apply {number}: there is no such answer"):
            apply_answer(str(path), flags, advice, number)


def values_of(**cluster: str) -> dict[str, object]:
    tree = read_tree(named("4_qwen2_7b_4090").read_text(), "sft.yaml")
    flags = [Flag(("cluster", key), value) for key, value in cluster.items()]
    return apply_flags(tree, flags).values


def sft_of(values: dict[str, object]) -> RunSpec[Any]:
    return resolve(JOBS["sft"], validate(JOBS["sft"].config, Tree(values, {})))


def test_a_config_made_in_python_is_made_to_fit_by_what_changes_least() -> None:
    values = values_of()
    found = fit_values(sft_of(values), values)
    assert values == values_of() and found is not None
    assert plan_job(sft_of(found)).verdict == "fits"
    assert value_at(found, ("actor", "zero", "optimizer_offload")) == "cpu"
    assert fit_values(sft_of(found), found) is found
    little = values_of(host_memory="40GB")  # too little for Adam
    found = fit_values(sft_of(little), little)
    assert found is not None and plan_job(sft_of(found)).verdict == "fits"
    assert value_at(found, ("actor", "adapter", "rank")) == 16
    hopeless = values_of(hardware="4x1GB")
    assert fit_values(sft_of(hopeless), hopeless) is None


def test_larger_cards_are_named_where_they_take_fewer_nodes() -> None:
    """A card would hold 43.3 GB: more than 40 GiB, and less than the next size, 48 GiB."""
    written = plan_of(named("4_qwen2_7b_4090")).devices[0].peak.bytes
    assert 42.3e9 < written < 45e9
    others = advice_of(named("4_qwen2_7b_4090")).other_cards
    assert others is not None and others.nodes == 1
    assert others.suggestion.flags == "--cluster.hardware 4xL40S"
    assert advice_of(named("3_ppo_70b_cpu_adam")).other_cards is None  # its hosts are too small
    assert advice_of(named("5_orz_1p5b_half")).other_cards is None  # it fits


GRPO = """\
run: {directory: out, steps: 10}
cluster: {ranks: 1, hardware: 1xRTX4090, host_memory: 128GB}
data: {train: {path: x, prompt: q, reference: a}, max_tokens: 512}
batch: {prompts: 16, responses: 8, micro_batch_tokens: 4096}
algorithm: {advantage: {name: grpo}}
actor:
  model: {path: Qwen/Qwen2.5-7B, gradient_checkpointing: true}
  adapter: {rank: 16}
rewards: {correct: {name: math_answer}}
rollout: {placement: shared}
"""


def test_engines_of_8_bits_beside_a_base_of_4_are_an_answer_on_a_small_card(tmp_path: Path) -> None:
    """Both together, and nothing else: no weight waits on the host, and the step is the fastest."""
    path = tmp_path / "ppo.yaml"
    path.write_text(GRPO)
    advice, plan = advice_of(path), plan_of(path)
    same, rounded, adapters = advice.answers
    assert {change.key: change.after for change in adapters.changes} == {
        "actor.model.quantization": "nf4",
        "rollout.vllm.arguments.quantization": "fp8_per_channel",
    }
    assert adapters.relative_seconds < min(same.relative_seconds, rounded.relative_seconds)
    assert "rollout.vllm.arguments.quantization" in rounded.flags and rounded.effect == "rounding"
    assert "quantization" not in same.flags
    lines = answers_text(advice, plan).splitlines()
    keys = [line[: lines[0].index("as written")].split() for line in lines]
    at = keys.index(["rollout.vllm."])  # too long for its column
    assert (
        keys[at + 1 : at + 3] == [["arguments."], ["quantization"]] and max(map(len, lines)) <= 80
    )
