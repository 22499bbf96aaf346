"""Every `auto` is decided once, by the hardware that the run is for, with a reason."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll.commands.placement import placement
from plimsoll.config.base import AUTO
from plimsoll.config.load import validate
from plimsoll.config.yaml_tree import Tree, read_tree
from plimsoll.errors import ConfigError
from plimsoll.jobs import JOBS
from plimsoll.jobs.which import load_any
from plimsoll.machine.local_host import LocalHost
from plimsoll.resolve import decisions
from plimsoll.resolve.rules.machine import local_host_rules
from plimsoll.resolve.run_spec import RunSpec, resolve, resolve_changed
from plimsoll.trainer.zero.config import ZeroConfig

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
    monkeypatch.setattr(decisions, "multiplies_bfloat16", lambda: found)
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
    assert re.search(rf"dtype +{dtype}, since the CPU", placement(spec))


@pytest.mark.parametrize("written", ["bfloat16", "float32"])
def test_engines_sample_in_the_dtype_of_the_actor(written: str, multiplies: bool) -> None:
    actor = {"model": {"path": "Qwen/Qwen2.5-0.5B", "dtype": written}}
    spec = spec_of({"device": "cpu"}, actor=actor)
    assert spec.engines is not None and spec.engines.dtype == written
    assert spec.models["reward"].dtype == ("bfloat16" if multiplies else "float32")
    own = spec_of({"device": "cpu"}, actor=actor, rollout={"dtype": "float32"})
    assert own.engines is not None and own.engines.dtype == "float32"


def test_what_is_decided_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "multiplies_bfloat16", lambda: False)
    first = spec_of({"device": "cpu"})
    monkeypatch.setattr(decisions, "multiplies_bfloat16", lambda: True)
    assert resolve(first.job, first.config).config == first.config


def test_another_run_is_decided_anew() -> None:
    """`plimsoll eval --model` measures a model that has other heads than the config's."""
    spec = spec_of({"hardware": "H100"})
    written = spec.written.actor
    model = written.model.model_copy(update={"path": "google/gemma-2-9b"})  # it caps its scores
    other = resolve_changed(spec, {"actor": written.model_copy(update={"model": model})})
    assert (spec.actor.model.attention, other.actor.model.attention) == ("varlen", "sdpa")


def test_no_hardware_is_looked_at_if_the_device_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> None:
        raise AssertionError("looked at the machine")

    monkeypatch.setattr(decisions, "_cards_here", look)
    spec_of({"device": "cpu"})
    with pytest.raises(AssertionError):
        spec_of({})


@pytest.mark.parametrize(
    ("path", "dtype", "hardware", "attention"),
    [
        ("Qwen/Qwen2-7B", "bfloat16", "A100-80GB", "varlen"),
        ("Qwen/Qwen2-7B", "bfloat16", "24GB", "varlen"),  # a card of which no more is known
        ("Qwen/Qwen2-7B", "bfloat16", "T4", "sdpa"),
        ("Qwen/Qwen2-7B", "float32", "H100", "sdpa"),
        ("Qwen/Qwen2-7B", "bfloat16", "cpu", "sdpa"),
        ("google/gemma-2-9b", "bfloat16", "H100", "sdpa"),  # it caps its scores
    ],
)
def test_attention_is_varlen_where_it_can_compute_the_model(
    path: str, dtype: str, hardware: str, attention: str
) -> None:
    actor = {"model": {"path": path, "dtype": dtype}}
    spec = spec_of({"hardware": hardware}, actor=actor)
    assert spec.models["actor"].attention == attention
    [why] = [one.why for one in spec.decisions if (one.key, one.value) == ("attention", attention)][
        :1
    ]
    assert why


@pytest.mark.parametrize(
    ("hardware", "device", "kernels"),
    [("A100-80GB", "cuda", "liger"), ("T4", "cuda", "own"), ("cpu", "cpu", "own")],
)
def test_device_and_kernels_are_those_of_the_hardware(
    hardware: str, device: str, kernels: str
) -> None:
    spec = spec_of({"hardware": hardware})
    assert spec.cluster.device == device
    assert {model.kernels for model in spec.models.values()} == {kernels}
    assert re.search(rf"device +{device}, since cluster.hardware is {hardware}", placement(spec))


@pytest.mark.parametrize(
    ("stage", "dtype", "gradients"),
    [(0, "bfloat16", "bfloat16"), (0, "float32", "float32"), (2, "bfloat16", "float32")],
)
def test_gradients_add_up_in_what_the_engine_can(stage: int, dtype: str, gradients: str) -> None:
    actor = {"model": {"path": "Qwen/Qwen2.5-0.5B", "dtype": dtype}, "zero": {"stage": stage}}
    spec = spec_of({"device": "cpu"}, actor=actor)
    assert spec.actor.settings_of(ZeroConfig).gradient_dtype == gradients


def test_a_gpu_without_the_drivers_tools_is_not_planned_as_a_cpu(
    tell_cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may lack the driver's tools."""
    tell_cards()
    decisions._cards_here.cache_clear()
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"]))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"nvidia-smi.*compute,utility.*cluster\.device: cpu"):
        spec_of({})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert spec_of({}).cluster.device == "cpu"


def test_no_file_of_the_source_decides_one_again() -> None:
    """`"auto"` is a word of config/ and resolve/ alone."""
    source = EXAMPLES.parent / "src" / "plimsoll"
    files = [
        path.relative_to(source) for path in source.rglob("*.py") if '"auto"' in path.read_text()
    ]
    assert {path.parts[0] for path in files} <= {"config", "resolve"}


def test_a_card_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ConfigError, match="No card is called"):
        spec_of({"hardware": "8xA1000000"})


def values_in(tree: object) -> Iterator[object]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from values_in(value)
    else:
        yield tree


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_example_leaves_one_undecided(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    tree = load_any(str(path)).config.model_dump()
    assert AUTO not in [*values_in({**tree, "run": {}})]


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


@pytest.mark.parametrize(
    ("cluster", "own", "route", "why"),
    [
        ({"device": "cpu"}, "own", "host", "ranks and engines compute on CPUs"),
        ({"hardware": "2xH100"}, "own", "nccl", "engines have cards of their own"),
        ({"hardware": "H100"}, "shared", "ipc", "engines share the ranks' cards"),
        (
            {"hardware": "2xH100", "critic_ranks": 1},
            "shared",
            "host",
            "cards of critic ranks, too",
        ),
        (
            {"hardware": "3xH100", "critic_ranks": 1, "reward_ranks": 1},
            "shared",
            "host",
            "critic ranks and reward ranks, too",
        ),
        (
            {"hardware": "H100", "where": "local"},
            "own",
            "host",
            "ranks and engines are one process",
        ),
    ],
)
def test_weights_take_the_fastest_way_there_is(
    cluster: dict[str, Any], own: str, route: str, why: str
) -> None:
    rollout = {"transformers": {}, "placement": own}
    spec = spec_of(cluster, rollout=rollout)
    assert spec.config.rollout.sync.route == route
    assert re.search(rf"sync.route +{route}, since .*{why}", placement(spec))
    written = spec_of(cluster, rollout={**rollout, "sync": {"route": "host"}})
    assert written.config.rollout.sync.route == "host" and "sync.route" not in placement(written)
