"""Programs of a policy: what they pass, and what they cannot do."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll.errors import ConfigError, DataError
from plimsoll.records import Prompt, Trajectory, single_turn
from plimsoll.reward import code
from plimsoll.reward.sandbox.cases import cases_of
from plimsoll.reward.sandbox.run import Bounds, run

STDIN = json.dumps({"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7", "11\n\n"]})
BOUNDS = Bounds(seconds=2.0, total_seconds=20.0, memory_bytes=2**30)


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
    """As a column, and as JSON text of the reference; as a function, and as LeetCode's class."""
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
        ("[[1]]", 'a test of a list is text, or has "input" and "output"'),
    ],
)
def test_tests_that_cannot_be_read_are_told(tests: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        cases_of(tests, None)
    with pytest.raises(DataError, match=why):
        code.reward(trajectory("", tests))


def test_a_row_without_tests_is_told() -> None:
    with pytest.raises(DataError, match=r"no tests\. They are read from the column 'unit'"):
        code.reward(trajectory("", None), tests="unit")


def output(program: str, **bounds: Any) -> tuple[str, str]:
    given = Bounds(**{**vars(BOUNDS), **bounds})
    (ended,) = run(program, [{"input": "in"}], given)
    return ended.how, ended.output


FORBIDDEN = {
    "connect": "socket.create_connection(('127.0.0.1', PORT))",
    "send": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "write": "open(PATH + '/new', 'w')",
    "overwrite": "open(PATH + '/kept', 'w')",
    "append": "open(PATH + '/kept', 'a')",
    "remove": "os.remove(PATH + '/kept')",
    "rename": "os.rename(PATH + '/kept', PATH + '/new')",
    "make a folder": "os.mkdir(PATH + '/new')",
    "link": "os.symlink('/', PATH + '/new')",
    "rights": "os.chmod(PATH + '/kept', 0)",
    "truncate": "os.truncate(PATH + '/kept', 0)",
    "fork": "os.fork()",
    "start": "subprocess.run(['true'])",
    "become": "os.execv('/bin/true', ['true'])",
    "kill": "os.kill(PARENT, 0)",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_the_kernel_refuses(what: str, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"PORT": server.getsockname()[1], "PATH": str(tmp_path), "PARENT": os.getpid()}
        lines = [f"{name} = {value!r}" for name, value in names.items()]
        tried = f"try:\n    {FORBIDDEN[what]}\nexcept PermissionError: print('refused')"
        program = "\n".join(["import os, socket, subprocess", *lines, tried])
        assert output(program) == ("done", "refused\n")
        exec(f"import os, socket, subprocess\n{chr(10).join(lines)}\n{allowed(what)}")
    assert (tmp_path / "kept").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def allowed(what: str) -> str:
    """The same outside, where that does no harm: that it is refused is the sandbox's doing."""
    harmless = ("connect", "send", "start", "kill")
    return FORBIDDEN[what] if what in harmless else "pass"


def test_what_a_program_may_do() -> None:
    program = "import threading, math\nt = threading.Thread(target=print, args=(input(),))\n"
    program += "t.start(); t.join(); print(len(open('/proc/self/maps').read()) > 0)"
    assert output(program) == ("done", "in\nTrue\n")


@pytest.mark.slow  # on a busy machine, what ends first is a matter of luck
def test_time_memory_and_output_are_bounded() -> None:
    start = time.monotonic()
    assert output("while True: pass", seconds=0.5)[0] == "time"
    assert output("import time; time.sleep(60)", seconds=0.5)[0] == "time"
    assert output("x = bytearray(2**31)")[0] == "error"
    how, written = output("while True: print('a' * 1000)", seconds=5.0)
    assert how == "error" and len(written) <= 4 * 1024**2
    ended = run("while True: pass", [{"input": ""}] * 50, Bounds(0.3, 1.0, 2**30))
    assert [one.how for one in ended] == ["time"] * 50
    assert time.monotonic() - start < 15


def test_a_program_does_not_see_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "secret" not in output("import os; print(os.environ)")[1]


def test_without_a_filter_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="run only where the kernel confines them by seccomp"):
        code.reward(trajectory(fenced("print(1)"), STDIN))
