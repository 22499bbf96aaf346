"""Presets: values under a config of one's own, as a command, by name and as a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll.config.choice import check_choice
from plimsoll.config.load import leaves
from plimsoll.config.rl import RlConfig
from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll.jobs import JOBS
from plimsoll.resolve.load import load_spec, read_spec
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.rl.presets import PRESETS

MINIMAL: dict[str, Any] = {
    "run": {"directory": "out", "steps": 3},
    "data": {"train": {"path": "rows.jsonl", "prompt": "question"}},
    "actor": {"model": {"path": "model"}},
    "rewards": {"length": {"name": "length"}},
}
WITH_CRITIC = {"ppo", "orz"}
WITH_REFERENCE = {"ppo", "reinforce_pp"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(more: Mapping[str, Any], critic: bool = False) -> str:
    """The path of a config file."""
    values = {**MINIMAL, **more}
    if critic:
        values["critic"] = {"model": {"path": "model"}}
    Path("c.yaml").write_text(yaml.safe_dump(values))
    return "c.yaml"


def spec_of(command: str, *flags: str, **more: Any) -> RunSpec[RlConfig]:
    named = {command, more.get("preset")}
    critic = bool(named & WITH_CRITIC)
    return load_spec(JOBS[command], written(more, critic), list(flags))


def value_at(config: RlConfig, path: tuple[str, ...]) -> Any:
    value: Any = config.model_dump()
    for name in path:
        assert isinstance(value, dict)
        value = value[name]
    return value


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_is_a_run_with_the_roles_that_it_takes(name: str) -> None:
    spec = spec_of(name)
    expected = {"actor"} | {
        r for r, of in (("critic", WITH_CRITIC), ("reference", WITH_REFERENCE)) if name in of
    }
    assert set(spec.roles) == expected
    assert spec.job is JOBS[name] and spec.config.preset == name
    for path, value in leaves(PRESETS[name].values).items():
        found = value_at(spec.config, path)
        if value != {}:  # an empty section stands for its defaults
            assert found == (None if value == "none" else value), path
    for package, choice in spec.job.choices(spec.config).items():
        check_choice(choice, f"plimsoll.algorithm.{package}")


@pytest.mark.parametrize("name", PRESETS)
def test_a_command_is_rl_with_that_preset(name: str) -> None:
    assert spec_of(name).config == spec_of("rl", preset=name).config


def test_a_preset_is_named_by_a_flag_too() -> None:
    assert spec_of("rl", "--preset", "rloo", preset="grpo").config == spec_of("rloo").config


def test_a_preset_without_what_it_takes_says_what() -> None:
    with pytest.raises(ConfigError, match=r"\[critic-needed\].*\bgae\b"):
        load_spec(JOBS["ppo"], written({}))
    with pytest.raises(SettingsConflict, match=r"\[critic-unused\].*\bgrpo\b"):
        load_spec(JOBS["grpo"], written({}, critic=True))
    with pytest.raises(ConfigError, match=r"\[group-of-one\]"):
        load_spec(JOBS["grpo"], written({"batch": {"responses": 1}}))


# Another value for each kind of value that presets have.
def other(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 0.01
    return {
        "tokens": "sequences",
        "sequences": "tokens",
        "constant": "tokens",
        "none": {"place": "loss", "estimator": "k3"},
        None: {"name": "icepop"},
    }[value]  # type: ignore[index]


OVERRIDABLE = [
    (name, path, value)
    for name, preset in PRESETS.items()
    for path, value in leaves(preset.values).items()
    if path[-1] != "name" and value != {}
]
RATIOS = {"gamma", "gae_lambda"}
"""At most 1."""


@pytest.mark.parametrize(("name", "path", "value"), OVERRIDABLE)
@pytest.mark.parametrize("how", ["file", "flag"])
def test_every_key_of_a_preset_gives_way(
    how: str, name: str, path: tuple[str, ...], value: object
) -> None:
    wanted = 0.5 if path[-1] in RATIOS else other(value)
    more: dict[str, Any] = {}
    if how == "flag":
        key = ".".join(path)
        below = wanted if isinstance(wanted, dict) else {}
        flags = [f"--{key}.{part}={word}" for part, word in below.items()]
        found = spec_of(name, *(flags or [f"--{key}={str(wanted).lower()}"]), **more)
    else:
        below = more
        for part in path[:-1]:
            below = below.setdefault(part, {})
        below[path[-1]] = wanted
        found = spec_of(name, **more)
    got = value_at(found.config, path)
    if isinstance(wanted, dict):
        assert {part: got[part] for part in wanted} == wanted
    else:
        assert got == wanted
    rest = {p: v for p, v in leaves(PRESETS[name].values).items() if p != path and v != {}}
    for other_path, kept in rest.items():
        assert value_at(found.config, other_path) == (None if kept == "none" else kept)


def test_a_named_function_takes_the_place_of_the_presets_with_its_own_options() -> None:
    clip = spec_of("dapo").config.algorithm.policy_loss
    assert clip.options == {"clip_low": 0.2, "clip_high": 0.28}
    gspo = spec_of("dapo", algorithm={"policy_loss": {"name": "gspo"}}).config.algorithm
    assert (gspo.policy_loss.name, gspo.policy_loss.options) == ("gspo", {})
    same = spec_of("dapo", algorithm={"policy_loss": {"name": "clip"}}).config.algorithm
    assert same.policy_loss == clip
    mixed = spec_of("dapo", "--algorithm.policy_loss.options.clip_high=0.4").config.algorithm
    assert mixed.policy_loss.options == {"clip_low": 0.2, "clip_high": 0.4}
    off = spec_of("dapo", batch={"dynamic_sampling": None}).config.batch
    assert off.dynamic_sampling is None and off.responses == 8


def test_a_preset_of_ones_own_is_a_file() -> None:
    Path("mine.yaml").write_text(
        "batch: {responses: 4}\n"
        "algorithm: {advantage: {name: rloo}, kl: none, policy_loss: {name: sapo}}\n"
    )
    found = spec_of("rl", preset="mine.yaml").config
    assert (found.batch.responses, found.algorithm.policy_loss.name) == (4, "sapo")
    assert found.preset == "mine.yaml"
    found = spec_of("rl", "--batch.responses=2", preset="mine.yaml").config
    assert (found.batch.responses, found.algorithm.advantage.name) == (2, "rloo")


def test_a_wrong_key_of_a_preset_says_where_it_stands() -> None:
    Path("mine.yaml").write_text("batch: {respnses: 4}\n")
    with pytest.raises(ConfigError, match=r"batch\.respnses: 4 +\(preset mine\.yaml\)"):
        spec_of("rl", preset="mine.yaml")


def test_the_origin_of_a_value_is_known() -> None:
    _, origins = read_spec(JOBS["grpo"], written({"batch": {"responses": 4}}))
    assert origins["algorithm", "advantage", "name"] == "preset grpo"
    assert origins["batch", "responses"].startswith("c.yaml:")


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("gropo", r"'gropo'.* grpo\? Presets: ppo, grpo,"),
        ("xyz", r"'xyz'\. Presets: ppo, .*my_preset\.yaml"),
        ("there_is_none.yaml", r"there_is_none\.yaml: .*no such"),
    ],
)
def test_an_unknown_preset_is_refused_with_the_nearest(preset: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of("rl", preset=preset)


def test_two_presets_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"preset: grpo.*`plimsoll rloo`"):
        spec_of("rloo", preset="grpo")
    Path("mine.yaml").write_text("preset: grpo\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: .*preset.*another"):
        spec_of("rl", preset="mine.yaml")
    assert spec_of("grpo", preset="grpo").config.preset == "grpo"


def test_a_preset_that_is_no_name_is_refused_by_the_schema() -> None:
    with pytest.raises(ConfigError, match=r"preset: 3"):
        spec_of("rl", preset=3)


def test_the_resolved_config_means_the_same_again() -> None:
    """What a run writes down names its preset, and has all of its values."""
    for name in PRESETS:
        spec = spec_of(name)
        Path("again.yaml").write_text(yaml.safe_dump(spec.config.model_dump(mode="json")))
        assert load_spec(JOBS["rl"], "again.yaml").config == spec.config
        assert load_spec(JOBS[name], "again.yaml").config == spec.config
