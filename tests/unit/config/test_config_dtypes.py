"""`dtype: auto` is decided once, by the hardware that the run is for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from plimsoll.commands.placement import placement
from plimsoll.config.load import validate
from plimsoll.config.yaml_tree import Tree, read_tree
from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import load_any
from plimsoll.machine.local_host import LocalHost
from plimsoll.spec import dtypes
from plimsoll.spec.rules.machine import local_host_rules
from plimsoll.spec.run_spec import RunSpec, resolve

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIGS = [path for path in sorted(EXAMPLES.rglob("*.yaml")) if path.parent.name != "cluster"]
RL = """\
run: {directory: out, steps: 1}
data: {train: {path: rows.jsonl, prompt: prompt, reference: answer}}
batch: {prompts: 2, responses: 2}
actor: {model: {path: Qwen/Qwen2.5-0.5B}}
reward_model: {role: {model: {path: Qwen/Qwen2.5-0.5B}}}
rollout: {transformers: {}}
"""


def spec_of(cluster: dict[str, Any], **changes: Any) -> RunSpec[Any]:
    values = read_tree(RL, "rl.yaml").values | {"cluster": cluster} | changes
    return resolve(JOBS["rl"], validate(JOBS["rl"].config, Tree(values, {})))


@pytest.fixture(params=[True, False], ids=["with", "without"])
def multiplies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the CPU of this test multiplies bfloat16."""
    found: bool = request.param
    monkeypatch.setattr(dtypes, "multiplies_bfloat16", lambda: found)
    return found


@pytest.mark.parametrize(
    ("cluster", "dtype"),
    [
        ({"hardware": "2xA100-80GB"}, "bfloat16"),
        ({"hardware": "RTX4090"}, "bfloat16"),
        ({"hardware": "V100-32GB"}, "float32"),
        ({"hardware": "T4"}, "float32"),
        ({"hardware": "24GB"}, "bfloat16"),  # a card of which no more is known
        ({"device": "cuda", "hardware": "8xH100"}, "bfloat16"),
    ],
)
def test_on_cards_it_is_what_they_multiply(
    cluster: dict[str, str], dtype: str, multiplies: bool
) -> None:
    spec = spec_of(cluster)
    models = {model.dtype for model in spec.models.values()}
    assert models == {dtype} and spec.engines is not None and spec.engines.dtype == dtype


@pytest.mark.parametrize("cluster", [{"device": "cpu"}, {"hardware": "cpu"}])
def test_on_a_cpu_it_is_what_the_cpu_multiplies(cluster: dict[str, str], multiplies: bool) -> None:
    spec = spec_of(cluster)
    dtype = "bfloat16" if multiplies else "float32"
    assert {name: model.dtype for name, model in spec.models.items()} == {
        "actor": dtype,
        "reference": dtype,
        "reward": dtype,
    }
    assert spec.engines is not None and spec.engines.dtype == dtype
    assert re.search(rf"dtype: auto +{dtype}, since the CPU", placement(spec))


@pytest.mark.parametrize("written", ["bfloat16", "float32"])
def test_engines_sample_in_the_dtype_of_the_actor(written: str, multiplies: bool) -> None:
    actor = {"model": {"path": "Qwen/Qwen2.5-0.5B", "dtype": written}}
    spec = spec_of({"device": "cpu"}, actor=actor)
    assert spec.engines is not None and spec.engines.dtype == written
    assert spec.models["reward"].dtype == ("bfloat16" if multiplies else "float32")
    own = spec_of({"device": "cpu"}, actor=actor, rollout={"dtype": "float32"})
    assert own.engines is not None and own.engines.dtype == "float32"


def test_what_is_decided_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "multiplies_bfloat16", lambda: False)
    first = spec_of({"device": "cpu"})
    monkeypatch.setattr(dtypes, "multiplies_bfloat16", lambda: True)
    assert resolve(first.job, first.config).config == first.config


def test_no_hardware_is_looked_at_where_every_dtype_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def look() -> None:
        raise AssertionError("looked at the machine")

    monkeypatch.setattr(dtypes, "_cards_here", look)
    model = {"path": "Qwen/Qwen2.5-0.5B", "dtype": "float32"}
    spec_of({}, actor={"model": model}, reward_model={"role": {"model": model}})
    with pytest.raises(AssertionError):
        spec_of({})


def test_a_card_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ConfigError, match="No card is called"):
        spec_of({"hardware": "8xA1000000"})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_example_leaves_one_undecided(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    spec = load_any(str(path))
    engines = [] if spec.engines is None else [spec.engines.dtype]
    assert "auto" not in [*engines, *(model.dtype for model in spec.models.values())]


@pytest.mark.parametrize("multiplies_it", [True, False])
def test_a_bfloat16_that_is_asked_for_on_a_cpu_without_it_is_a_warning(multiplies_it: bool) -> None:
    host = LocalHost("", {}, (), jemalloc=True, bfloat16=multiplies_it)
    asked = {"model": {"path": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16"}}
    spec = spec_of({"device": "cpu"}, actor=asked)
    found = [one for one in local_host_rules(spec, host) if one.code == "bfloat16-cpu"]
    assert len(found) == (not multiplies_it)
    for one in found:
        assert one.severity == "warning" and "actor.model.dtype" in one.what
        assert "six to twelve times" in one.why
