"""What a problem is: its value as it stands in the settings, and the exit code that it leads to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from decided import decided_model

from plimsoll.config.data import SourceConfig
from plimsoll.config.engine import EmaConfig, TrainedRole
from plimsoll.config.problems import Problem, Section, conflict, find, finding, invalid, refuse
from plimsoll.errors import ConfigError, SettingsConflict

ROLE = Section(
    "actor",
    TrainedRole(model=decided_model(path="m: n", dtype="bfloat16"), ema=EmaConfig(decay=1e-5)),
)


@pytest.mark.parametrize(
    ("section", "name", "shown"),
    [
        (ROLE, "zero.stage", "actor.zero.stage: 2"),
        (ROLE, "model.path", "actor.model.path: 'm: n'"),
        (ROLE, "ema.decay", "actor.ema.decay: 1e-05"),
        (ROLE, "ema", "actor.ema: given"),
        (ROLE, "zero.quantized_weights", "actor.zero.quantized_weights: false"),
        (Section("data.train", SourceConfig(path="x")), "prompt", "data.train.prompt"),
        (Section("", ROLE.settings), "zero.stage", "zero.stage: 2"),
    ],
)
def test_a_problem_of_a_section_shows_the_value_that_is_there(
    section: Section, name: str, shown: str
) -> None:
    told = str(section.invalid(name, "Why.", "fix"))
    assert told.splitlines()[0].strip() == shown


def test_conflicts_alone_have_an_exit_code_of_their_own() -> None:
    both = conflict("a", "1", "Why.", "fix", "offload-stage")
    alone = invalid("b", None, "Why.", "fix", code="data-columns")
    with pytest.raises(SettingsConflict, match=r"1 problem .*\n  a: 1\n +\[offload-stage\]"):
        refuse([both])
    with pytest.raises(ConfigError, match=r"2 problems .*\n  a: 1\n(?s:.*)\n  b\n"):
        refuse([both, alone])
    refuse([])


def test_only_errors_that_no_room_mends_are_conflicts() -> None:
    def of(code: str, severity: str) -> bool:
        return Problem(code, severity, "what").is_conflict  # type: ignore[arg-type]

    assert of("tensor-parallel", "error") and not of("tensor-parallel", "warning")
    assert not of("device-memory", "error")
    assert not invalid("a", "1", "Why.", "fix").is_conflict


def test_what_is_right_needs_no_mending() -> None:
    assert finding("swap", "ok", "none", "why", "fix") == finding("swap", "ok", "none")
    assert finding("swap", "warning", "all", "why", "fix").fix == "fix"


def test_rules_are_asked_in_their_order() -> None:
    def told(key: str) -> Callable[[int], list[Problem]]:
        return lambda most: [invalid(key, str(most), "Why.", "fix")]

    def silent(most: int) -> list[Problem]:
        return []

    found = find([told("b"), silent, told("a")], 3)
    assert [(one.key, one.what) for one in found] == [("b", "3"), ("a", "3")]
