"""The parent's side of child processes that answer messages; serve.py is the child's side.

All calls block, so an event loop makes them with threads.in_thread. The children of a pool run the
same program. They are started when needed and replaced when they end.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from queue import LifoQueue
from threading import Thread
from typing import IO, Any, Literal

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.machine.host import usable_cores
from plimsoll.machine.processes import count_as_own
from plimsoll.process.serve import CODECS, Responder
from plimsoll.run.output import safe_output

_START_SECONDS = 300.0
"""The most seconds that a child may take to open: imports may take long on a slow disk."""
_END_SECONDS = 10.0
_FEW_PROCESSES = 8
_LAST_LINES, _LAST_BYTES = 20, 8192
_LONGEST_LINE = {"json": 8 * 2**20, "pickle": 2**30}
"""The longest answer in each codec. A child that answers in JSON may have been taken over."""
_MOST_VALUES = 100_000
"""The most values in an answer in JSON: the text of an empty list is 2 bytes, the list is 56."""
ENDED_BY_LIMIT = {-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT}
"""The exit codes of a child whose answer has exhausted its time, its stack or its memory."""
HELPER_SECONDS = 300.0
"""The most seconds by the clock that callers of `helpers` wait for an answer."""
_QUOTED = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

# The kernel ends a child when the thread that started it ends. This one lasts as long as we do.
_STARTER = ThreadPoolExecutor(1, "starts-children")


def our_environment() -> dict[str, str]:
    """Return this process's environment variables, with its import path as PYTHONPATH."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@dataclass(frozen=True)
class Program:
    """The program of a child process (see serve.py), and its limits.

    Attributes:
        open_: A module's function that takes the setup, in the child, and returns the function that
            answers messages.
        what: The name of the child in messages, such as "The process for reward function f".
        setup: The first message to the child.
        codec: What encodes messages: `json`, or `pickle` for trusted children.
        python: The command that starts Python.
        environment: All environment variables of the child.
        memory_gib: How much the child may grow after it is open; None: no limit.
        cpu_seconds: The CPU time for each answer; more ends the child. None: no limit.
        forwards: Whether the child's output is copied to this process's standard error.
    """

    open_: Callable[[Any], Responder]
    what: str
    setup: object
    codec: Literal["json", "pickle"] = "json"
    python: Sequence[str] = (sys.executable,)
    environment: Mapping[str, str] = field(default_factory=our_environment)
    memory_gib: float | None = None
    cpu_seconds: float | None = None
    forwards: bool = True

    def words(self) -> tuple[str, ...]:
        """Return the command that starts the child."""
        open_ = (self.open_.__module__, self.open_.__name__)
        return (*self.python, "-m", "plimsoll.process.serve", self.codec, *open_)


class ChildEnded(Exception):
    """Raised if a child ended instead of answering; the text says how it ended.

    Attributes:
        code: The exit code; below zero the number of the signal that ended it.
        lines: The last lines that the child wrote on standard error.
    """

    def __init__(self, code: int, lines: str, how: str | None = None) -> None:
        super().__init__(how or describe_exit(code))
        self.code, self.lines = code, lines


def describe_exit(code: int) -> str:
    """Return a phrase on how a process ended, such as "ended with exit code 1"."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ": often the system's, when host memory runs out" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def start(
    words: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> subprocess.Popen[bytes]:
    """Start a process in a new session and return it.

    Ctrl-C does not reach it, and `end` ends it with all processes that it started. `streams` are
    the arguments `stdin`, `stdout` and `stderr` of `subprocess.Popen`. Raises OSError if the
    process cannot be started.
    """
    begin: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    options = {"env": environment, "start_new_session": True, **streams}
    return _STARTER.submit(begin, [*words], **options).result()


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process from `start` and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Child:
    """A running child process that answers one message at a time, for one caller at a time."""

    def __init__(self, program: Program) -> None:
        """Start the process; `open` comes next. Raises OSError if it cannot be started."""
        self._program, self._codec = program, CODECS[program.codec]
        self._socket, theirs = socket.socketpair()
        with theirs:
            streams = {"stdin": theirs, "stdout": theirs, "stderr": subprocess.PIPE}
            self._process = start(program.words(), program.environment, **streams)
        self._last = bytearray()
        errors = (self._process.stderr, self._last, program.forwards)
        self._reader = Thread(target=_keep_last, args=errors, daemon=True)
        self._reader.start()
        self.pid = self._process.pid
        self.is_idle = True
        """Whether the last message has been answered, so that another one may be sent."""

    def open(self) -> None:
        """Send the setup and wait until the child is ready.

        Raises ConfigError, with the child's message, if the child refuses its setup, and
        PlimsollError if the child does not start. In both cases the child is ended.
        """
        program = self._program
        limits = {"memory_gib": program.memory_gib, "cpu_seconds": program.cpu_seconds}
        try:
            refusal = self.ask({"setup": program.setup, **limits}, _START_SECONDS)
        except (ChildEnded, TimeoutError) as error:
            self.end()
            how = f"{error}\n{error.lines}" if isinstance(error, ChildEnded) else "no answer"
            raise PlimsollError(f"{program.what} did not start: {how}".rstrip()) from error
        if refusal is not None:
            self.end()
            raise ConfigError(refusal)

    def ask(self, message: object, seconds: float) -> Any:
        """Send a message and return the child's answer.

        Raises TimeoutError if the answer takes more than `seconds`, and ChildEnded if the child
        ends or sends something that is no message. After either error, `end` the child.
        """
        line = self._codec.dumps(message).encode() + b"\n"
        self.is_idle, until = False, time.monotonic() + seconds
        try:
            self._wait_until(until)
            self._socket.sendall(line)
            answer = self._parse(self._receive_line(until))
        except TimeoutError:  # which is an OSError
            raise
        except OSError as error:
            raise self._end_error() from error
        except (ValueError, RecursionError) as error:
            self.end()
            self._reader.join(1.0)
            how = f"was ended, because what it sent is no answer: {error}"
            raise ChildEnded(self._process.wait(), last_lines(self._last), how) from error
        self.is_idle = True
        return answer

    def has_ended(self) -> bool:
        """Return whether the process has ended by itself or was killed."""
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill the child and all processes that it started.

        A thread that waits for its answer gets ChildEnded.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        end(self._process)

    def _wait_until(self, until: float) -> None:
        """Limit the next socket operation to the time left; raise TimeoutError if none is."""
        seconds = until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self._socket.settimeout(seconds)

    def _receive_line(self, until: float) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            self._wait_until(until)
            received = self._socket.recv(2**20)
            if not received:
                raise ConnectionError
            line += received
            if len(line) > _LONGEST_LINE[self._program.codec]:
                raise ValueError(f"over {_LONGEST_LINE[self._program.codec]:,} bytes")
        return bytes(line)

    def _parse(self, line: bytes) -> Any:
        """Return the value in a line; raise ValueError if JSON would take much memory."""
        if self._program.codec == "json" and _count_values(line) > _MOST_VALUES:
            values = _count_values(_QUOTED.sub(b"", line))
            if values > _MOST_VALUES:
                raise ValueError(f"{values:,} values in JSON")
        return self._codec.loads(line)

    def _end_error(self) -> ChildEnded:
        """Wait for the process to end, or end it, and return how it ended."""
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            end(self._process)
        self._reader.join(1.0)  # longer only if something that it started goes on writing
        return ChildEnded(self._process.wait(), last_lines(self._last))


def _count_values(line: bytes) -> int:
    return sum(map(line.count, (b",", b"[", b"{")))


def _keep_last(stream: IO[bytes], last: bytearray, forwards: bool) -> None:
    """Read a child's standard error to its end, and keep the last bytes in `last`."""
    decoder = getincrementaldecoder("utf-8")("backslashreplace")
    with stream:
        while data := os.read(stream.fileno(), 2**16):
            last += data
            del last[:-_LAST_BYTES]
            if forwards:
                with suppress(OSError):
                    os.write(2, safe_output(decoder.decode(data)).encode())


def last_lines(data: bytes | bytearray) -> str:
    """Return the last lines of a process's output as text."""
    return "\n".join(data.decode(errors="replace").splitlines()[-_LAST_LINES:])


class Pool:
    """A pool of at most `size` children of one program, for any thread.

    The child that answered last gets the next message, so a sequence of messages needs only one
    child. A child that gave no answer is killed. A child that has ended is replaced.
    """

    def __init__(self, program: Program, size: int) -> None:
        self._program = program
        self._idle: LifoQueue[Child | None] = LifoQueue()  # None: one may yet be started
        self._running: set[Child] = set()
        self._closed = False
        for _ in range(size):
            self._idle.put(None)

    def ask(self, message: object, seconds: float) -> Any:
        """Return the answer of any free child. Raises the errors of `take` and `Child.ask`."""
        child = self.take()
        try:
            return child.ask(message, seconds)
        finally:
            self.give_back(child)

    def take(self) -> Child:
        """Return a free child, the caller's until `give_back`; wait if there is none.

        Raises the errors of `Child.open`.
        """
        child = self._idle.get()
        if child is not None and not child.has_ended():
            return child
        try:
            if child is not None:
                self._drop(child)
            return self._start()
        except BaseException:
            self._idle.put(None)
            raise

    def give_back(self, child: Child) -> None:
        """Return a child to the pool, or kill it if its last message has no answer."""
        kept = child if child.is_idle else None
        if kept is None:
            self._drop(child)
        self._idle.put(kept)

    def close(self) -> None:
        """Kill all children. Threads that wait for an answer get ChildEnded."""
        self._closed = True
        for child in tuple(self._running):
            child.end()

    def _drop(self, child: Child) -> None:
        child.end()
        self._running.discard(child)

    def _start(self) -> Child:
        """Return a new child that is open; end it if the pool was closed meanwhile."""
        child = Child(self._program)
        count_as_own(child.pid)
        self._running.add(child)
        if self._closed:  # by another thread, which may not have seen this child
            child.end()
        try:
            child.open()
        except BaseException:
            self._drop(child)
            raise
        return child


def processes_at_once(cores: int | None) -> int:
    """Return how many processes work at once on a machine, if nobody says how many.

    They are 8, or a quarter of the cores if there are more than 32, and no more than cores.
    """
    cores = cores or _FEW_PROCESSES
    return min(cores, max(_FEW_PROCESSES, cores // 4))


@functools.cache
def helpers(
    open_: Callable[[Any], Responder],
    what: str,
    memory_gib: float,
    cpu_seconds: float,
    most: int | None = None,
) -> Pool:
    """Return this process's pool of children that answer within limits; see `Program`.

    It has at most `most` children; None: see `processes_at_once`. What they print about a question
    is of no interest to the run.
    """
    program = Program(
        open_, what, None, memory_gib=memory_gib, cpu_seconds=cpu_seconds, forwards=False
    )
    return Pool(program, most or processes_at_once(usable_cores()))
