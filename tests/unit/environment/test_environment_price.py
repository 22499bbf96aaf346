"""What the processes of environments hold, as the plan has it."""

from __future__ import annotations

import pytest

from plimsoll.config.rollout import EnvironmentConfig
from plimsoll.environment.price import process_items, processes_of


@pytest.mark.parametrize(
    ("at_once", "cores", "expected"), [(3, 16, 3), (None, 16, 64), (None, None, 32)]
)
def test_there_are_as_many_as_are_asked_for_or_four_for_each_core(
    at_once: int | None, cores: int | None, expected: int
) -> None:
    config = EnvironmentConfig(name="calculator", process=True, at_once=at_once)
    assert processes_of(config, cores) == expected
    [item] = process_items({"tools": config}, cores)
    assert item.name == "processes of environments.tools"
    assert item.bytes == expected * 52 * 2**20


def test_those_in_this_process_have_none() -> None:
    assert [*process_items({"tools": EnvironmentConfig(name="calculator")}, 8)] == []
