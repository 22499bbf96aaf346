"""The answers as a person and a program read them, and the config that comes of each."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll.commands.planning import advise_job, apply_answer, fit_values, plan_job
from plimsoll.config.flags import Flag, apply_flags
from plimsoll.config.load import validate
from plimsoll.config.yaml_tree import Tree, read_tree, value_at
from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import load_any
from plimsoll.memory.advise import Advice, advice_text, advice_values, answers_text
from plimsoll.memory.plan import short_text
from plimsoll.memory.weigh import Plan
from plimsoll.resolve.run_spec import RunSpec, resolve

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


def test_the_answers_stand_side_by_side() -> None:
    path = named("4_qwen2_7b_4090")
    lines = answers_text(advice_of(path), plan_of(path)).splitlines()
    words = [line.split() for line in lines]
    assert words[0] == ["what", "fits", "as", "written", "1", "2", "3"]
    assert words[1][1:] == ["no", "yes", "yes", "yes"]
    assert words[2][-5:] == ["the", "same", "adapters", "the", "same"]
    label, column = lines[0].index("as written"), lines[0].index("1")
    cells = {line[:label].strip(): line[label:].split() for line in lines}
    assert cells["actor.zero.optimizer_offload"] == ["none", "cpu"]
    assert cells["actor.adapter.rank"] == ["-", "16"]
    assert cells["cluster.nodes"] == ["1", "3"]
    found = {line[:label].strip(): line[column - 3 : column + 1].strip() for line in lines[1:]}
    assert (found["actor.zero.optimizer_offload"], found["actor.adapter.rank"]) == ("cpu", "")


def test_the_page_shows_the_answers_of_today() -> None:
    path = named("4_qwen2_7b_4090")
    page = (path.parents[2] / "docs" / "plan.md").read_text()
    assert f"```\n{answers_text(advice_of(path), plan_of(path))}\n```" in page


def test_roles_that_change_alike_have_one_row(ppo: Path) -> None:
    text = answers_text(advice_of(ppo), plan_of(ppo))
    assert text.count("\n  actor, critic: adapter") == text.count("adapter.") == 1
    effects = [one.effect for one in advice_of(ppo).answers]
    assert effects == ["same", "rounding", "adapters", "machines"]


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_plan_and_its_answers_fit_a_screen_of_80_columns(path: Path) -> None:
    short = short_text(plan_of(path)).splitlines()
    answers = answers_text(advice_of(path), plan_of(path)).splitlines()
    whole = advice_text(advice_of(path)).splitlines()
    assert max(map(len, [*short, *answers, *whole])) <= 80
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
    told = [
        re.match(r"8 x H100-80GB \((.*)\): peak (.*) of 84\.9 GB in (\w+); fits$", line)
        for line in lines
        if line.startswith("8 x H100")
    ]
    assert [found.groups() for found in told if found] == [
        ("node 0, cards 0-7", "68.6", "train_critic"),
        ("node 1, cards 0-7", "75.0", "sync"),
    ]
    head = next(i for i, line in enumerate(lines) if "other items" in line)
    rows = [
        [float(cell.replace(",", "")) for cell in line[31:].split()] for line in lines[2 : head + 1]
    ]
    total = float(lines[head + 2].split()[-1].replace(",", ""))
    assert sum(row[-1] for row in rows) == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_an_answer_is_what_it_says_as_flags_and_as_a_config(path: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    for number, one in enumerate(advice_of(path).answers, 1):
        new.write_text(apply_answer(str(path), [], advice_of(path), number))
        assert new.read_text().splitlines()[0] == path.read_text().splitlines()[0]  # a comment
        spec = load_any(str(path), one.flags.split())
        assert load_any(str(new)).config == spec.config
        plan = plan_job(spec)
        assert plan.verdict == one.verdict == "fits"
        assert max((store.peak.bytes for store in plan.devices), default=0) == one.device_bytes
        assert max(store.peak.bytes for store in plan.hosts) == one.host_bytes


def test_a_config_with_an_answer_has_the_flags_that_it_was_planned_with() -> None:
    path, flags = named("4_qwen2_7b_4090"), ["--cluster.host_memory=1TB", "--run.seed", "3"]
    advice = advise_job(load_any(str(path), flags))
    text = apply_answer(str(path), flags, advice, 1)
    settings = yaml.safe_load(text)
    assert settings["cluster"]["host_memory"] == "1TB" and settings["run"]["seed"] == 3
    assert settings["actor"]["zero"] == {"stage": 3, "optimizer_offload": "cpu"}
    for number in (0, -1, len(advice.answers) + 1):
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


@pytest.mark.parametrize("name", ["4_qwen2_7b_4090", "5_orz_1p5b_half"])
def test_the_json_has_the_answers_by_their_numbers(name: str) -> None:
    advice = advice_of(named(name))
    found = advice_values(advice)["suggestions"]
    assert [one["number"] for one in found] == [*range(1, len(advice.answers) + 1)]
    for values, one in zip(found, advice.answers, strict=True):
        assert set(values) == {
            *("number", "changes", "flags", "effect", "verdict", "device_bytes", "host_bytes"),
            "costs",
        }
        assert values["changes"] == [
            {"key": change.key, "from": change.before, "to": change.after} for change in one.changes
        ]
    assert advice_values(None) == {"suggestions": []}


def test_a_config_that_fits_and_one_that_nothing_mends_have_texts_of_their_own() -> None:
    fitting, plan = named("5_orz_1p5b_half"), plan_of(named("5_orz_1p5b_half"))
    assert advice_of(fitting).answers == ()
    texts = {advice_text(Advice(fits)) for fits in (True, False)}
    assert len(texts) == 2 == len({answers_text(Advice(fits), plan) for fits in (True, False)})


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


def test_engines_of_8_bits_are_an_answer_on_a_small_card(tmp_path: Path) -> None:
    path = tmp_path / "ppo.yaml"
    path.write_text(GRPO)
    advice, plan = advice_of(path), plan_of(path)
    same, rounded, adapters = advice.answers[:3]
    assert "quantization" not in same.flags and rounded.effect == "rounding"
    assert {change.key: change.after for change in adapters.changes} == {
        "actor.model.quantization": "nf4",
        "rollout.vllm.arguments.quantization": "fp8_per_channel",
    }
    lines = answers_text(advice, plan).splitlines()
    keys = [line[: lines[0].index("as written")].split() for line in lines]
    at = keys.index(["actor.zero."])  # too long for its column
    assert keys[at + 1] == ["parameter_offload"] and max(map(len, lines)) <= 80


def test_long_sequences_are_shared_by_as_few_ranks_as_fit(tmp_path: Path) -> None:
    """32k tokens of an 8B on four cards of 24 GB, with adapters; divided weights take two ranks."""
    text = """\
run: {directory: out, steps: 10}
cluster: {ranks: 4, hardware: 4xRTX4090, host_memory: 256GB}
data: {train: {path: rows.jsonl, messages: messages}, max_tokens: 32768}
batch: {sequences: 8, micro_batch_tokens: 32768}
actor:
  model: {path: meta-llama/Llama-3.1-8B, gradient_checkpointing: true}
  adapter: {}
"""
    path = tmp_path / "sft.yaml"
    path.write_text(text)
    for stage, shards in ((2, 4), (3, 2)):
        spec = load_any(str(path), ["--actor.zero.stage", str(stage)])
        found = {change.key: change.after for change in advise_job(spec).answers[0].changes}
        assert found.pop("actor.zero.stage", 3) == 3
        assert found == {
            "batch.micro_batch_tokens": 32768 // shards,
            "cluster.sequence_parallel": shards,
        }
