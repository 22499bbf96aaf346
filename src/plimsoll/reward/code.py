"""Reward for a program that passes the tests of its row. The tests run in a sandbox.

A row may have its tests in the form of any of these data sets:
APPS and TACO: {"inputs": [...], "outputs": [...]}, with "fn_name" for calls of a function.
PRIME and LiveCodeBench: [{"input": ..., "output": ..., "testtype": "stdin" or "functional"}, ...].
MBPP: ["assert ...", ...]. HumanEval: text that defines check(candidate).
Each form may also be given as JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.config.base import PositiveFloat, PositiveInt
from plimsoll.config.json_text import parse_json
from plimsoll.errors import DataError
from plimsoll.process.programs import (
    REMEDY,
    CaseResult,
    ProgramBounds,
    Sandbox,
    find_sandbox,
    run_program,
)
from plimsoll.records import Trajectory
from plimsoll.reward.answers import ANSWER_TAG, last_within
from plimsoll.reward.references import asks_processes, checks_references, needs_machine


@dataclass(frozen=True)
class _Case:
    """One test of a program."""

    run: Mapping[str, object]
    """The test in the form that `programs.run_program` takes."""
    expected: object = None
    """The expected output of the program, or the expected result of the function.

    None for a check: it passes if it runs to its last line.
    """

    def is_passed(self, result: CaseResult) -> bool:
        """Return whether the program passed this test."""
        if result.how != "done":
            return False
        if "check" in self.run:
            return True
        if "call" in self.run:
            return self._is_expected(result.output)
        return _lines(result.output) == _lines(str(self.expected))

    def _is_expected(self, output: str) -> bool:
        """Return whether JSON text, which the program may have written itself, is as expected."""
        # Parsed, brackets take 20 times the memory of their text; equal values have like lengths.
        if len(output) > 8 * len(json.dumps(self.expected, default=str)) + 64:
            return False
        try:
            value = parse_json(output or "null")
        except ValueError:  # the program wrote it instead of the function
            return False
        return bool(value == self.expected or [value] == self.expected)


def cases_of(tests: object, function: str | None) -> list[_Case]:
    """Return a row's tests as a list of cases, at least one.

    Args:
        tests: The tests as the row has them.
        function: The name of the function that the response should define, if the row has it.

    Raises ValueError, saying what is wrong, if the form is unknown or there is no test.
    """
    tests = _decode(tests)
    if isinstance(tests, str):
        call = f"\ncheck({function})" if function and "def check(" in tests else ""
        cases = [_Case({"check": tests + call})] if tests.strip() else []
    elif isinstance(tests, Mapping):
        cases = _cases_of_pairs(tests, function)
    elif isinstance(tests, Sequence):
        cases = [_case_of_item(item, function) for item in tests]
    else:
        raise ValueError(f"{type(tests).__name__} is no form of tests")
    if not cases:
        raise ValueError("there is no test in it")
    return cases


def _decode(tests: object) -> object:
    """Return the value of JSON text, or the tests unchanged if they are no JSON text."""
    if not isinstance(tests, str):
        return tests
    try:
        value = parse_json(tests)
    except ValueError:
        return tests
    return value if isinstance(value, dict | list | str) else tests


def _cases_of_pairs(tests: Mapping[str, Any], function: str | None) -> list[_Case]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence):
        raise ValueError('an object of tests has the lists "inputs" and "outputs"')
    if len(inputs) != len(outputs):
        raise ValueError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    name = tests.get("fn_name") or function
    pairs = zip(inputs, outputs, strict=True)
    if name:
        return [_Case({"call": name, "arguments": [*given]}, out) for given, out in pairs]
    return [_Case({"input": _text(given)}, _text(out)) for given, out in pairs]


def _case_of_item(test: object, function: str | None) -> _Case:
    if isinstance(test, str):
        return _Case({"check": test})
    if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
        raise ValueError('a test of a list is text, or has "input" and "output"')
    name = test.get("fn_name") or function
    if name and test.get("testtype") != "stdin":
        lines = [parse_json(line) for line in str(test["input"]).splitlines() if line.strip()]
        return _Case({"call": name, "arguments": lines}, parse_json(str(test["output"])))
    return _Case({"input": _text(test["input"])}, _text(test["output"]))


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    """Return the lines without white space at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


_BLOCK = re.compile(r"```[ \t]*(?:(?:python3?|py)[ \t]*)?\n(.*?)```", re.DOTALL | re.IGNORECASE)


def check(reference: object) -> None:
    """Raise ValueError if a reference holds no tests in a known form."""
    cases_of(reference, None)


def missing(*, sandbox: Sandbox = "bwrap") -> str:
    """Return why the sandbox does not work on this machine; "" if it works or is not used."""
    return find_sandbox().trouble if sandbox == "bwrap" else ""


@asks_processes(
    41 * 2**20,
    "measured: bwrap 3.6 MB resident, a runner 14.3, a program and its assertions 12.1 each",
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
        memory_gib: Memory of the program's processes together.
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
    passed = sum(map(_Case.is_passed, cases, results))
    return float(passed == len(cases)) if all_or_nothing else passed / len(cases)


def program_in(response: str) -> str:
    """Return the program of a response: its last fenced block of Python code.

    If there is no block, return the text of the last `<answer>...</answer>`; if there are no such
    tags either, return the response unchanged.
    """
    blocks: list[str] = _BLOCK.findall(response)
    return blocks[-1] if blocks else last_within(response, ANSWER_TAG) or response


def _cases(trajectory: Trajectory, tests: str | None, entry_point: str | None) -> list[_Case]:
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
