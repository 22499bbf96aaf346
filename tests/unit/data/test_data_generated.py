"""Rows that reasoning-gym generates: equal for equal seeds; and settings that are refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from plimsoll.config.data import GenerateConfig, SourceConfig
from plimsoll.config.rl import RlConfig
from plimsoll.data import generated
from plimsoll.data.fields import RawRow
from plimsoll.data.first_rows import first_columns
from plimsoll.data.generated import LIBRARY, check_generated
from plimsoll.data.sources import read_rows
from plimsoll.errors import ConfigError

needs_library = pytest.mark.skipif(
    importlib.util.find_spec(LIBRARY) is None,
    reason=f"reasoning-gym is not installed: {generated.INSTALL}",
)


def source(tasks: Any = ("chain_sum",), *, seed: int = 1, size: int = 4, **more: Any) -> Any:
    given: dict[str, Any] = {
        "path": LIBRARY,
        "generate": GenerateConfig(tasks=tasks, size=size, seed=seed),
    }
    return SourceConfig(prompt="question", **given | more)


def problems_of(given: SourceConfig) -> list[tuple[str, str, str]]:
    return [(p.key, p.why, p.fix) for p in check_generated("data.train", given)]


def rows(given: SourceConfig) -> list[RawRow]:
    read_back = list(read_rows(given, whole=True))
    assert all(isinstance(row, RawRow) for row in read_back), read_back
    return read_back  # type: ignore[return-value]


def test_tasks_are_names_or_names_with_options() -> None:
    named = GenerateConfig(tasks=("gcd", "lcm"), size=1, seed=0)
    assert named.options() == {"gcd": {}, "lcm": {}}
    with_options = GenerateConfig.model_validate(
        {"tasks": {"gcd": {"min_numbers": 3, "kinds": ("a", "b")}, "lcm": {}}, "size": 1, "seed": 0}
    )
    assert with_options.options() == {"gcd": {"min_numbers": 3, "kinds": ("a", "b")}, "lcm": {}}


def test_a_source_of_a_config_may_be_generated() -> None:
    train = {"path": LIBRARY, "prompt": "question", "generate": {"tasks": ("gcd",)}}
    with pytest.raises(ValueError, match=r"size"):
        RlConfig.model_validate({"data": {"train": train}})
    columns = first_columns(source())
    assert columns is not None and columns.all
    assert columns.names == ("question", "answer", "task", LIBRARY)


def test_tasks_that_cannot_be_generated_are_refused_without_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    [(key, why, fix)] = problems_of(source())
    assert key == "data.train.path" and "not installed" in why
    assert fix == "`pip install 'reasoning-gym>=0.1.25,<0.2'`"
    [(key, why, fix)] = problems_of(source(path="rows.jsonl"))
    assert key == "data.train.path" and fix.startswith("data.train.path: reasoning_gym")
    keys = [key for key, *_ in problems_of(source(path="rows.jsonl", name="main", split="test"))]
    assert keys == ["data.train.name", "data.train.split", "data.train.path"]


@needs_library
def test_the_same_seed_gives_the_same_rows_and_another_one_others() -> None:
    """This includes word_ladder, which draws from sets. Each task in turn gives one row."""
    tasks = {"chain_sum": {"min_terms": 2, "max_terms": 2}, "word_ladder": {}}
    first = rows(source(tasks))
    assert first == rows(source(tasks)) and len(first) == 8
    assert [row.values["task"] for row in first] == ["chain_sum", "word_ladder"] * 4
    assert [row.line for row in first] == [*range(1, 9)]
    assert first[:4] == rows(source(tasks, limit=4))
    sums = [str(row.values["question"]) for row in first[::2]]
    assert all(text.count(" + ") + text.count(" - ") == 1 for text in sums)
    held_out = rows(source(tasks, seed=2, size=2))
    assert not {row.values["question"] for row in held_out} & {
        row.values["question"] for row in first
    }


@needs_library
@pytest.mark.parametrize(
    ("tasks", "refusal"),
    [
        (("chain_sums",), "Did you mean 'chain_sum'?"),
        (("composite",), "There is no task 'composite'."),
        ({"chain_sum": {"min_term": 2}}, "Did you mean 'min_terms'?"),
        ({"chain_sum": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms"),
    ],
)
def test_tasks_that_the_library_does_not_take_are_refused(tasks: Any, refusal: str) -> None:
    from plimsoll.data.generated import open_generator

    options = GenerateConfig(tasks=tasks, size=1, seed=0).options()
    with pytest.raises(ConfigError) as caught:
        open_generator({"tasks": options, "size": 1, "seed": 0})
    assert refusal in str(caught.value)


@needs_library
def test_the_refusal_comes_before_anything_is_generated() -> None:
    [(key, why, _)] = problems_of(source(("chain_sums",)))
    assert key == "data.train.generate.tasks" and "Did you mean 'chain_sum'?" in why
