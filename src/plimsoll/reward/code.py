"""Reward for a program that passes the tests of its row, which are run within limits."""

from __future__ import annotations

import re

from plimsoll.config.base import PositiveFloat, PositiveInt
from plimsoll.errors import DataError
from plimsoll.records import Trajectory
from plimsoll.reward.marks import ANSWER_TAG, last_within
from plimsoll.reward.references import asks_processes, checks_references
from plimsoll.reward.sandbox.cases import Case, cases_of
from plimsoll.reward.sandbox.run import Bounds, run

_BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def check(reference: object) -> None:
    """Raises ValueError for a reference that holds no tests."""
    cases_of(reference, None)


@asks_processes(25 * 2**20, "measured: a runner 13.7 MB resident, a program 11.6 MB at first")
@checks_references(check, unless="tests", whole=True)
def reward(
    trajectory: Trajectory,
    *,
    tests: str | None = None,
    entry_point: str | None = None,
    setup: str | None = None,
    all_or_nothing: bool = False,
    seconds: PositiveFloat = 5.0,
    total_seconds: PositiveFloat = 30.0,
    memory_gib: PositiveFloat = 1.0,
    max_tests: PositiveInt | None = None,
) -> float:
    """The share of the tests that the response's program passes; with `all_or_nothing` 1 if it
    passes all, else 0. The program: see `program_in`.

    tests: the column of the tests; default: the reference. entry_point: the column with the name of
    the function that is asked for. setup: the column with lines that go before the program, such as
    imports. seconds: of the processor for one test (of the clock twice as many); total_seconds: of
    the clock for all, after which no further test is passed. max_tests: only so many are run.

    Raises DataError where the row has no tests that can be read, and ConfigError where this machine
    cannot confine a program.
    """
    cases = _cases(trajectory, tests, entry_point)[:max_tests]
    program = program_in(trajectory.response_text)
    if setup is not None:
        program = f"{trajectory.prompt.columns.get(setup) or ''}\n{program}"
    bounds = Bounds(seconds, total_seconds, int(memory_gib * 1024**3))
    ended = run(program, [case.run for case in cases], bounds)
    passed = sum(case.passed(one) for case, one in zip(cases, ended, strict=True))
    return float(passed == len(cases)) if all_or_nothing else passed / len(cases)


def program_in(response: str) -> str:
    """Return the last block of Python code; without a block the text of the last
    `<answer>...</answer>`, or else the whole response."""
    blocks: list[str] = _BLOCK.findall(response)
    return blocks[-1] if blocks else last_within(response, ANSWER_TAG) or response


def _cases(trajectory: Trajectory, tests: str | None, entry_point: str | None) -> list[Case]:
    prompt = trajectory.prompt
    given = prompt.given_reference if tests is None else prompt.columns.get(tests)
    if given is None:
        where = "data.train.reference" if tests is None else f"the column {tests!r}"
        raise DataError(f"the prompt has no tests. They are read from {where}.")
    function = None if entry_point is None else str(prompt.columns.get(entry_point) or "")
    try:
        return cases_of(given, function)
    except ValueError as error:
        raise DataError(f"the tests cannot be read: {error}.") from error
