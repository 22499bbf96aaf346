"""Programs that nobody trusts: what they can reach from the sandbox, and how much they may use."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll.process.programs import (
    CaseResult,
    ProgramBounds,
    Sandbox,
    run_program,
    sandbox_trouble,
)

BOUNDS = ProgramBounds(seconds=2.0, total_seconds=20.0, memory_bytes=2**30)
works = pytest.mark.skipif(bool(sandbox_trouble()), reason=sandbox_trouble())


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
    results = run_program(program, cases, ProgramBounds(0.5, 20.0, 2**30), "bwrap")
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


@works
def test_an_older_bubblewrap_gives_no_folder_to_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = f"""#!/bin/sh
case "$*" in *--size*) echo 'bwrap: Unknown option --size' >&2; exit 1;; esac
[ "$1" = --help ] || exec {shutil.which("bwrap")} "$@"
"""
    (tmp_path / "bwrap").write_text(older)
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    program = "try: open('file', 'w')\nexcept OSError: print('refused')"
    assert run(program) == CaseResult("done", "refused\n")


@pytest.fixture
def forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bwrap that says what the real one says where user namespaces are forbidden."""
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    sandbox_trouble.cache_clear()
    yield
    sandbox_trouble.cache_clear()


def test_forbidden_namespaces_are_reported_in_the_words_of_bwrap(forbidden: None) -> None:
    assert "bwrap: No permissions" in sandbox_trouble()
