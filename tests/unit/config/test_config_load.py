"""Loading: values, defaults, and one readable error for everything that is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.config.base import Choice
from plimsoll.config.keys import ANY, describe_keys, dump_config, keys_of
from plimsoll.config.load import validate
from plimsoll.config.rl import RlAlgorithm, RlConfig
from plimsoll.config.yaml_tree import Tree, read_tree
from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS
from plimsoll.jobs.sft import SftConfig
from plimsoll.resolve.load import load_spec

PPO = """\
run: {directory: out, steps: 3}
data: {train: {path: rows.jsonl, prompt: question}}
actor: {model: {path: m}}
critic: {model: {path: m}}
rewards: {answer: {name: math_answer}}
"""
SFT = """\
run: {directory: out, steps: 3}
data: {train: {path: rows.jsonl, messages: turns}}
actor: {model: {path: m}}
"""


def write(folder: Path, text: str) -> str:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return str(folder / "run.yaml")


def message(folder: Path, text: str, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_spec(JOBS["ppo"], write(folder, text), flags)
    return str(caught.value)


def block(report: str, key: str) -> str:
    """The three lines of a report that speak of `key`."""
    lines = report.splitlines()
    at = next(
        i for i, s in enumerate(lines) if s.startswith((f"  {key}:", f"  {key} ", f"  {key}"))
    )
    return "\n".join(lines[at : at + 3])


def test_values_of_file_and_flags_and_defaults(tmp_path: Path) -> None:
    flags = ["--actor.optimizer.learning_rate", "1e-5", "--rewards.form.name=pattern"]
    config = load_spec(JOBS["ppo"], write(tmp_path, PPO), flags).config
    assert config.run.steps == 3
    assert config.actor.optimizer.learning_rate == 1e-5
    assert config.critic.zero.stage == 2
    assert list(config.rewards) == ["answer", "form"]


def test_a_whole_number_is_a_number_and_a_list_is_taken(tmp_path: Path) -> None:
    flags = ["--rollout.sampling.temperature", "1", "--rollout.sampling.stop", "[a, 'b']"]
    config = load_spec(JOBS["ppo"], write(tmp_path, PPO), flags).config
    assert config.rollout.sampling.temperature == 1.0
    assert config.rollout.sampling.stop == ("a", "b")


def test_options_alone_keep_the_defaults_name_and_its_other_options(tmp_path: Path) -> None:
    flags = ["--algorithm.advantage.options.gamma", "0.99"]
    algorithm = load_spec(JOBS["ppo"], write(tmp_path, PPO), flags).config.algorithm
    assert algorithm.advantage == Choice(name="gae", options={"gamma": 0.99, "gae_lambda": 0.95})
    text = PPO + "algorithm: {policy_loss: {options: {low: 0.1}}, advantage: {}}\n"
    algorithm = load_spec(JOBS["ppo"], write(tmp_path, text), ()).config.algorithm
    assert algorithm.policy_loss == Choice(name="clip", options={"low": 0.1})
    assert algorithm.advantage == RlAlgorithm().advantage


def test_a_name_brings_its_functions_own_defaults(tmp_path: Path) -> None:
    flags = ["--algorithm.advantage.name=gae", "--algorithm.advantage.options.gamma=0.99"]
    algorithm = load_spec(JOBS["ppo"], write(tmp_path, PPO), flags).config.algorithm
    assert algorithm.advantage == Choice(name="gae", options={"gamma": 0.99})
    report = message(tmp_path, PPO, "--algorithm.advantage.nmae=gae")
    assert "did you mean algorithm.advantage.name?" in report
    assert "there is no name of one" in message(tmp_path, PPO, "--rewards.form.options.pattern=x")


def test_sft_loads(tmp_path: Path) -> None:
    assert load_spec(JOBS["sft"], write(tmp_path, SFT)).config.batch.sequences == 32


def test_everything_wrong_is_in_one_error(tmp_path: Path) -> None:
    text = """\
run:
  directory: 2024
  stepz: 3
data: {train: {path: x, prompt: q}}
actor:
  model: {path: m, dtype: bf16}
  zero: {stage: true}
critic: 3
rewards: {a: {name: x, options: {k: [1]}, weihgt: 2}}
rollout:
  vllm: {memory_share: 1.5}
  engines: 0
zero: {stage: 2}
"""
    report = message(tmp_path, text, "--rollout.sampling.stop=5", "--actor.zero.optimzer", "x")
    assert report.startswith("12 problems in the settings\n")
    expected = {
        "run.directory": ["2024", "run.yaml:2", "text", '"2024"'],
        "run.stepz": ["3", "run.yaml:3", "no such key", "run.steps"],
        "actor.model.dtype": ["bf16", "run.yaml:6", "bfloat16 | float32", "did you mean bfloat16"],
        "actor.zero.stage": ["true", "run.yaml:7", "0 | 1 | 2 | 3"],
        "critic": ["3", "run.yaml:8", "section"],
        "rewards.a.options.k": ["[1]", "run.yaml:9", "text"],
        "rewards.a.weihgt": ["2", "rewards.a.weight"],
        "rollout.vllm.memory_share": ["1.5", "run.yaml:11", "> 0 and <= 1"],
        "rollout.engines": ["0", "run.yaml:12", "integer >= 1", "default 1"],
        "zero": ["run.yaml:13", "no such key", "actor.zero or critic.zero"],
        "rollout.sampling.stop": ["5", "flag --rollout.sampling.stop", "list of text"],
        "actor.zero.optimzer": ["x", "flag --actor.zero.optimzer", "did you mean actor.zero.opt"],
    }
    for key, parts in expected.items():
        told = block(report, key)
        assert all(part in told for part in parts), (key, told)


def test_missing_sections_are_listed_key_by_key(tmp_path: Path) -> None:
    report = message(tmp_path, "")
    for key in ("run.directory", "data.train.path", "actor.model.path"):
        assert "Missing" in block(report, key)
    assert "data.train.path.path" not in report
    assert "pydantic" not in report and "Field required" not in report


def test_a_key_with_nothing_like_it_is_answered_with_the_valid_ones(tmp_path: Path) -> None:
    report = message(tmp_path, PPO, "--actor.zero.xyzzy", "1")
    assert "keys here: stage, optimizer_offload" in block(report, "actor.zero.xyzzy")


@pytest.mark.parametrize("value", [".nan", ".inf", "1e999", "-1", "true", "'1'"])
def test_a_learning_rate_that_is_not_positive_is_refused(tmp_path: Path, value: str) -> None:
    report = message(tmp_path, PPO, "--actor.optimizer.learning_rate", value)
    assert "number > 0" in block(report, "actor.optimizer.learning_rate")


@pytest.mark.parametrize("value", ["0", "1", "7"])
def test_buckets_are_even_as_deepspeed_wants_them(tmp_path: Path, value: str) -> None:
    report = message(tmp_path, PPO, "--actor.zero.bucket_elements", value)
    assert "integer >= 2 and a multiple of 2" in block(report, "actor.zero.bucket_elements")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, PPO)
    with pytest.raises(ConfigError, match=r"rnu\.yaml.* Nearest: .*run\.yaml"):
        load_spec(JOBS["ppo"], str(tmp_path / "rnu.yaml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_spec(JOBS["ppo"], str(tmp_path))
    (tmp_path / "latin.yaml").write_bytes("a: ü".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_spec(JOBS["ppo"], str(tmp_path / "latin.yaml"))


OPTIONS: st.SearchStrategy[object] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**9),
    st.text(),
    st.floats(allow_nan=False, allow_infinity=False),
)


@settings(max_examples=percent(30))
@given(
    directory=st.text(st.characters(codec="utf-8", exclude_characters="\0")),  # no path has NUL
    rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    options=st.dictionaries(st.text(), OPTIONS),
    stop=st.lists(st.text()).map(tuple),
    stage=st.sampled_from([0, 1, 2, 3]),
    reference=st.none() | st.just({"model": {"path": "r"}, "zero": {"stage": 3}}),
)
def test_a_dumped_config_loads_to_the_equal_config(
    directory: str,
    rate: float,
    options: dict[str, object],
    stop: tuple[str, ...],
    stage: int,
    reference: object,
) -> None:
    values = read_tree(PPO, "f").values | {
        "run": {"directory": directory, "steps": 2},
        "actor": {
            "model": {"path": "m"},
            "zero": {"stage": stage},
            "optimizer": {"learning_rate": rate},
        },
        "rewards": {"a": {"name": directory, "options": options}},
        "rollout": {"sampling": {"stop": stop}},
        "reference": reference,
    }
    config = validate(RlConfig, Tree(values, {}))
    text = dump_config(config)
    again = validate(RlConfig, read_tree(text, "f"))
    assert again == config
    assert dump_config(again) == text


def test_a_dump_names_every_key_with_its_default(tmp_path: Path) -> None:
    config = load_spec(JOBS["sft"], write(tmp_path, SFT)).config
    dumped = read_tree(dump_config(config), "f")
    optional = {
        *(("data", "eval"), ("run", "best"), ("actor", "adapter"), ("actor", "ema")),
        ("data", "train", "generate"),
    }
    keys = {
        key.path
        for key in keys_of(SftConfig)
        if not {key.path[:2], key.path[:3]} & optional and ANY not in key.path
    }
    assert set(dumped.origins) == keys | optional
    assert list(dumped.values) == list(SftConfig.model_fields)


def test_every_key_of_every_job_says_what_it_is() -> None:
    for job in (SftConfig, RlConfig):
        for key in keys_of(job):
            assert key.doc and key.kind, key


def test_help_shows_type_default_and_meaning() -> None:
    text = describe_keys(RlConfig)
    types = dict(re.findall(r"^ *--(\S+)  \[(.*)\]\n      \S", text, re.MULTILINE))
    expected = {
        "actor.zero.stage": "0 | 1 | 2 | 3; default 2",
        "rollout.vllm.memory_share": "number > 0 and <= 1; default 0.5",
        "run.directory": "text; required",
        "run.steps": "integer >= 1 or null; default null",
    }
    assert {key: types[key] for key in expected} == expected
    assert types["rewards.<name>.name"].startswith("text")
    assert all(len(line) <= 100 for line in text.splitlines())


def test_help_for_a_section_alone() -> None:
    text = describe_keys(RlConfig, "actor.zero")
    assert text.startswith("actor.zero:") and "--actor.optimizer" not in text
    with pytest.raises(ConfigError, match=r"Nearest: actor\.zero"):
        describe_keys(RlConfig, "actor.zreo")
