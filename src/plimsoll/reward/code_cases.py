"""Read the tests of a row, in the forms of data sets, and tell whether a program passes one.

APPS and TACO: {"inputs": [...], "outputs": [...]}, with "fn_name" for calls of a function.
PRIME and LiveCodeBench: [{"input": ..., "output": ..., "testtype": "stdin" or "functional"}, ...].
MBPP: ["assert ...", ...]. HumanEval: text that defines check(candidate). Any of them as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.process.programs import CaseResult


@dataclass(frozen=True)
class Case:
    """One test of a program."""

    run: Mapping[str, object]
    """The case, as `programs.run_program` takes it."""
    expected: object = None
    """The expected output of the program, or result of the function.

    None for a check, which decides itself.
    """

    def is_passed(self, result: CaseResult) -> bool:
        """Return whether the program did what is expected."""
        if result.how != "done":
            return False
        if "check" in self.run:
            return True
        if "call" in self.run:
            return self._is_expected(result.output)
        return _lines(result.output) == _lines(str(self.expected))

    def _is_expected(self, output: str) -> bool:
        try:
            value = json.loads(output or "null")
        except (ValueError, RecursionError):  # the program wrote it instead of the function
            return False
        return bool(value == self.expected or [value] == self.expected)


def cases_of(tests: object, function: str | None) -> list[Case]:
    """Return the cases of a row's tests.

    Args:
        tests: The tests as the row has them.
        function: The function that the response should define, if the row names one.

    Raises ValueError, saying what is wrong, for tests of another form, and if there is none.
    """
    tests = _decode(tests)
    if isinstance(tests, str):
        call = f"\ncheck({function})" if function and "def check(" in tests else ""
        cases = [Case({"check": tests + call})] if tests.strip() else []
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
    """Return what JSON text stands for; other text is a program."""
    if not isinstance(tests, str):
        return tests
    try:
        value = json.loads(tests)
    except ValueError:
        return tests
    return value if isinstance(value, dict | list | str) else tests


def _cases_of_pairs(tests: Mapping[str, Any], function: str | None) -> list[Case]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence):
        raise ValueError('an object of tests has the lists "inputs" and "outputs"')
    if len(inputs) != len(outputs):
        raise ValueError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    name = tests.get("fn_name") or function
    pairs = zip(inputs, outputs, strict=True)
    if name:
        return [Case({"call": name, "arguments": [*given]}, out) for given, out in pairs]
    return [Case({"input": _text(given)}, _text(out)) for given, out in pairs]


def _case_of_item(test: object, function: str | None) -> Case:
    if isinstance(test, str):
        return Case({"check": test})
    if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
        raise ValueError('a test of a list is text, or has "input" and "output"')
    name = test.get("fn_name") or function
    if name and test.get("testtype") != "stdin":
        lines = [json.loads(line) for line in str(test["input"]).splitlines() if line.strip()]
        return Case({"call": name, "arguments": lines}, json.loads(str(test["output"])))
    return Case({"input": _text(test["input"])}, _text(test["output"]))


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    """Return the lines without white space at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
