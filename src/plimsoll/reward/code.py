"""Reward for a program that passes the tests of its row, which are run in a sandbox."""

from __future__ import annotations

import re

from plimsoll.config.base import PositiveFloat, PositiveInt
from plimsoll.errors import DataError
from plimsoll.process.programs import REMEDY, ProgramBounds, run_program, sandbox_trouble
from plimsoll.process.sandbox import Sandbox
from plimsoll.records import Trajectory
from plimsoll.reward.code_cases import Case, cases_of
from plimsoll.reward.marks import ANSWER_TAG, last_within
from plimsoll.reward.references import asks_processes, checks_references, needs_machine

_BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def check(reference: object) -> None:
    """Raise ValueError for a reference that holds no tests."""
    cases_of(reference, None)


def missing(*, sandbox: Sandbox = "bwrap") -> str:
    """Return why the sandbox does not work on this machine; "" if it does, or none is asked for."""
    return sandbox_trouble() if sandbox == "bwrap" else ""


@asks_processes(
    25 * 2**20, "measured: bwrap 3.9 MB resident, a runner 12.1, a program 9.5 at first"
)
@needs_machine(missing, REMEDY)
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
    sandbox: Sandbox = "bwrap",
) -> float:
    """Return the share of the tests that the response's program passes (see `program_in`).

    Args:
        trajectory: The response.
        tests: The column of the tests; default: the reference.
        entry_point: The column with the name of the function that the program should define.
        setup: The column with lines that go before the program, such as imports.
        all_or_nothing: Return 1 if the program passes all tests, else 0.
        seconds: Processor time for one test; a test may take twice as long by the clock.
        total_seconds: Time by the clock for all tests. Tests that are left then are not passed.
        memory_gib: Memory of a process of the program.
        max_tests: How many tests are run at most.
        sandbox: What keeps the program from the rest of the machine: bubblewrap, or nothing.

    Raises DataError if the row has no tests that can be read, and ConfigError if the sandbox does
    not work on this machine.
    """
    cases = _cases(trajectory, tests, entry_point)[:max_tests]
    program = program_in(trajectory.response_text)
    if setup is not None:
        program = f"{trajectory.prompt.columns.get(setup) or ''}\n{program}"
    bounds = ProgramBounds(seconds, total_seconds, int(memory_gib * 1024**3))
    results = run_program(program, [case.run for case in cases], bounds, sandbox)
    passed = sum(map(Case.is_passed, cases, results))
    return float(passed == len(cases)) if all_or_nothing else passed / len(cases)


def program_in(response: str) -> str:
    """Return the last block of Python code in a response.

    Without a block: the text of the last `<answer>...</answer>`, or else the whole response.
    """
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
