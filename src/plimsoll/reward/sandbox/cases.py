"""The tests of a row, in the forms that data sets have them in, and whether a program passes one.

APPS and TACO: {"inputs": [...], "outputs": [...]}, with "fn_name" for calls of a function.
PRIME and LiveCodeBench: [{"input": ..., "output": ..., "testtype": "stdin" or "functional"}, ...].
MBPP: ["assert ...", ...]. HumanEval: text that defines check(candidate). Any of them as JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.reward.sandbox.run import Ended


@dataclass(frozen=True)
class Case:
    """run: as `sandbox.run.run` takes it. expected: what the program should write, or the function
    give; None of a check, which decides itself."""

    run: Mapping[str, object]
    expected: object = None

    def passed(self, ended: Ended) -> bool:
        """Whether the program did what is expected."""
        if ended.how != "done":
            return False
        if "check" in self.run:
            return True
        if "call" in self.run:
            value = json.loads(ended.output or "null")
            return bool(value == self.expected or [value] == self.expected)
        return _lines(ended.output) == _lines(str(self.expected))


def cases_of(tests: object, function: str | None) -> list[Case]:
    """The cases of a row. function: the one that the response is to define, where the row says so.

    Raises ValueError, saying what is wrong, for what is none of these forms, or has no case.
    """
    given = _decoded(tests)
    if isinstance(given, str):
        call = f"\ncheck({function})" if function and "def check(" in given else ""
        found = [Case({"check": given + call})] if given.strip() else []
    elif isinstance(given, Mapping):
        found = _paired(given, function)
    elif isinstance(given, Sequence):
        found = [_listed(one, function) for one in given]
    else:
        raise ValueError(f"{type(given).__name__} is no form of tests")
    if not found:
        raise ValueError("there is no test in it")
    return found


def _decoded(tests: object) -> object:
    """What JSON text stands for; other text is a program."""
    if not isinstance(tests, str):
        return tests
    try:
        found = json.loads(tests)
    except ValueError:
        return tests
    return found if isinstance(found, dict | list | str) else tests


def _paired(tests: Mapping[str, Any], function: str | None) -> list[Case]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence):
        raise ValueError('an object of tests has the lists "inputs" and "outputs"')
    if len(inputs) != len(outputs):
        raise ValueError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    called = tests.get("fn_name") or function
    pairs = zip(inputs, outputs, strict=True)
    if called:
        return [Case({"call": called, "arguments": [*given]}, out) for given, out in pairs]
    return [Case({"input": _text(given)}, _text(out)) for given, out in pairs]


def _listed(test: object, function: str | None) -> Case:
    if isinstance(test, str):
        return Case({"check": test})
    if not isinstance(test, Mapping) or not {"input", "output"} <= test.keys():
        raise ValueError('a test of a list is text, or has "input" and "output"')
    called = test.get("fn_name") or function
    if called and test.get("testtype") != "stdin":
        lines = [json.loads(line) for line in str(test["input"]).splitlines() if line.strip()]
        return Case({"call": called, "arguments": lines}, json.loads(str(test["output"])))
    return Case({"input": _text(test["input"])}, _text(test["output"]))


def _text(value: object) -> str:
    """Input or output as one text; some data sets have lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    """Without white space at the ends of lines, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
