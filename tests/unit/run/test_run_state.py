from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from examples import percent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plimsoll.errors import ConfigError
from plimsoll.run.state import STATE_VERSION, RunState, SourceState

STORED = Path(__file__).parent / "states"
"""Files that earlier versions wrote, by their version."""

WHOLE = {
    "step": 3,
    "data_position": 96,
    "data_rows": 40,
    "weight_version": 3,
    "kl_coefficient": 0.01,
    "seconds": 5,
    "best": None,
    "best_step": 0,
    "evaluations_since_best": 0,
}


@settings(max_examples=percent(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    step=st.integers(0, 10**9),
    position=st.integers(0, 10**12),
    coefficient=st.floats(0, 1e6),
    seconds=st.floats(0, 1e9),
    best=st.none() | st.floats(-1e9, 1e9),
)
def test_a_state_is_read_back_exactly(
    tmp_path: Path, step: int, position: int, coefficient: float, seconds: float, best: float | None
) -> None:
    sources = {"data.train.sums": SourceState("0a", step, "1b")} if best is None else None
    numbers = (step, position, step, step, coefficient, seconds, best, step, position)
    state = RunState(*numbers, sources=sources)
    state.save(tmp_path / "state.json")
    assert RunState.load(tmp_path / "state.json") == state


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "Invalid JSON"),
        ("[]", "the file is []"),
        (json.dumps({k: v for k, v in WHOLE.items() if k != "seconds"}), "seconds: "),
        (json.dumps(WHOLE | {"epoch": 1}), "epoch is 1"),
        (json.dumps(WHOLE | {"step": 1.5}), "step is 1.5"),
        (json.dumps(WHOLE | {"step": True}), "step is True"),
        (json.dumps(WHOLE | {"version": "2"}), "version is '2'"),
        (json.dumps(WHOLE | {"seconds": "5"}), "seconds is '5'"),
        (json.dumps(WHOLE | {"seconds": None}), "seconds is None"),
        (json.dumps(WHOLE | {"best": "1"}), "best is '1'"),
        (json.dumps(WHOLE | {"sources": [1]}), "sources is [1]"),
        (json.dumps(WHOLE | {"sources": {"data.train": {"rows": 1}}}), "sources.data.train.asked"),
    ],
)
def test_a_broken_state_names_file_and_reason(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        RunState.load(path)
    assert str(path) in str(caught.value) and why in str(caught.value)


def test_a_missing_state_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state\.json .*\(No such file"):
        RunState.load(tmp_path / "state.json")


def test_whole_numbers_are_taken_for_seconds(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps(WHOLE))
    loaded: Any = RunState.load(path).seconds
    assert loaded == 5.0 and isinstance(loaded, float)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("rows-1", RunState(3, 96, 40, 3, 0.01, 5.25)),
        (
            "rl-1",
            RunState(
                *(7, 224, 40, 7, 0.0125, 61.5, 0.75, 6, 1),
                sources={
                    "data.train": SourceState("0a1b", 40, "9f00c3"),
                    "data.eval": SourceState("77", 8, "12ab"),
                },
                rewards={"helpful": {"mean": 0.5, "count": 64.0}},
                unlearned=(230, 231),
            ),
        ),
    ],
)
def test_a_state_of_an_older_version_is_read(name: str, state: RunState, tmp_path: Path) -> None:
    assert RunState.load(STORED / f"{name}.json") == state
    state.save(tmp_path / "state.json")
    assert json.loads((tmp_path / "state.json").read_text())["version"] == STATE_VERSION


def test_a_state_of_a_newer_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """Whatever else it holds."""
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"version": STATE_VERSION + 1, "step": [3], "journal": 1}))
    with pytest.raises(ConfigError) as caught:
        RunState.load(path)
    message = str(caught.value)
    assert f"{path} has version {STATE_VERSION + 1}" in message
    assert f"up to {STATE_VERSION}" in message and "run.log" in message
