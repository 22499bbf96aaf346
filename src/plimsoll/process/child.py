"""The parent's side of a child process that answers messages (serve.py), and how any child is
started and ended. All calls block: an event loop makes them by threads.in_thread.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import IO, Any, Literal

from plimsoll.process.frames import JSON, Codec, frame, read_frame
from plimsoll.process.pickled import PICKLE
from plimsoll.process.serve import Answer

START_SECONDS = 300.0
"""How long a child may take to open: imports may take long on a slow disk."""
_END_SECONDS = 10.0
_LAST_LINES, _LAST_BYTES = 20, 8192
_NO_ANSWER = (OSError, EOFError, ValueError, RecursionError)  # of sockets, frames and codecs

# The kernel ends a child when the thread that started it ends. This one lasts as long as we do.
_STARTER = ThreadPoolExecutor(1, "starts-children")


@dataclass(frozen=True)
class Program:
    """What a child process runs, and its limits.

    Attributes:
        words: The program and its arguments.
        what: What messages call the child, such as "The process of reward function f".
        setup: The first message, from which the child opens what answers the later ones.
        environment: All environment variables of the child.
        codec: How messages are written.
        memory_bytes: How much memory the child may take beyond what it has once it is open.
        cpu_seconds: How much processor time the child has for each answer, before it is ended.
        forwards: Whether what the child prints appears on our standard error.
    """

    words: Sequence[str]
    what: str
    setup: object
    environment: Mapping[str, str] = field(default_factory=dict)
    codec: Codec = JSON
    memory_bytes: int | None = None
    cpu_seconds: float | None = None
    forwards: bool = True


def serving(
    open_: Callable[[Any], Answer],
    codec: Literal["json", "pickle"],
    variables: Mapping[str, str] | None = None,
    **more: Any,
) -> Program:
    """Return the program that serves by a function of ours (see serve.py), with our environment.

    Args:
        open_: A function of a module. In the child it takes the setup, and returns what answers
            messages.
        codec: How messages are written.
        variables: Environment variables beside ours.
        more: What else a `Program` has.
    """
    module = "plimsoll.process.serve"
    words = (sys.executable, "-m", module, codec, open_.__module__, open_.__name__)
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment = {**os.environ, **path, **(variables or {})}
    codecs = {"json": JSON, "pickle": PICKLE}
    return Program(words, environment=environment, codec=codecs[codec], **more)


class ChildRefused(Exception):
    """A child could not open what its setup asks for; the text is what it said."""


class ChildEnded(Exception):
    """A child ended instead of answering; the text says how.

    Attributes:
        code: The exit code; below zero the number of the signal that ended it.
        lines: The last lines that the child wrote on standard error.
    """

    def __init__(self, code: int, lines: str) -> None:
        super().__init__(describe_exit(code))
        self.code, self.lines = code, lines


def describe_exit(code: int) -> str:
    """Return how a process of this exit code ended, in words that follow its name."""
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
    """Start a process in a group of its own: Ctrl-C is not for it, and `end` ends the whole group.

    streams: `stdin`, `stdout` and `stderr`, as `subprocess.Popen` takes them. Raises OSError if it
    cannot be started.
    """
    begin = partial(subprocess.Popen, [*words], env=environment, start_new_session=True, **streams)
    return _STARTER.submit(begin).result()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and all that it started, at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Child:
    """A running child process that answers one message at a time, for one caller at a time."""

    def __init__(self, program: Program) -> None:
        """Start the process; `open` comes next. Raises OSError if it cannot be started."""
        self._program = program
        self._socket, theirs = socket.socketpair()
        with theirs:
            streams = {"stdin": theirs, "stdout": theirs, "stderr": subprocess.PIPE}
            self._process = start(program.words, program.environment, **streams)
        self._errors = _LastLines(self._process.stderr, program.forwards)
        self.pid = self._process.pid
        self.is_idle = True
        """Whether the last message has been answered, so that another one may be sent."""

    def open(self, seconds: float = START_SECONDS) -> None:
        """Wait until the child is ready. Raises as `ask`, and ChildRefused; the child is ended."""
        program = self._program
        limits = {"memory_bytes": program.memory_bytes, "cpu_seconds": program.cpu_seconds}
        try:
            refusal = self.ask({"setup": program.setup, **limits}, seconds)
            if refusal is not None:
                raise ChildRefused(refusal)
        except BaseException:
            self.end()
            raise

    def ask(self, message: object, seconds: float) -> Any:
        """Return the child's answer to a message.

        Raises TimeoutError if the answer takes longer, and ChildEnded if the child ends instead or
        sends what is no message. After either the child is of no use; `end` it.
        """
        data = frame(self._program.codec.dumps(message))
        self.is_idle, until = False, time.monotonic() + seconds
        try:
            self._socket.settimeout(_left(until))
            self._socket.sendall(data)
            answer = self._program.codec.loads(read_frame(partial(self._receive, until)))
        except BaseException as error:
            self._socket.close()
            if isinstance(error, _NO_ANSWER) and not isinstance(error, TimeoutError):
                raise self._ended() from error
            raise
        self.is_idle = True
        return answer

    def has_ended(self) -> bool:
        """Return whether the process is gone, such as one that the system ended."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End the child, and all that it started. A thread that waits for an answer gets
        ChildEnded."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        end(self._process)
        if self.is_idle:  # nobody is receiving
            self._socket.close()

    def _receive(self, until: float, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(_left(until))
            more = self._socket.recv(min(size - len(data), 2**20))
            if not more:
                break
            data += more
        return bytes(data)

    def _ended(self) -> ChildEnded:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            end(self._process)
            code = self._process.wait()
        return ChildEnded(code, self._errors.read())


class _LastLines:
    """Reads a child's standard error, in a thread, and keeps the end of it."""

    def __init__(self, stream: IO[bytes] | None, forwards: bool) -> None:
        assert stream is not None
        self._bytes = b""
        self._thread = Thread(target=self._run, args=(stream, forwards), daemon=True)
        self._thread.start()

    def _run(self, stream: IO[bytes], forwards: bool) -> None:
        with stream:
            while data := os.read(stream.fileno(), 2**16):
                self._bytes = (self._bytes + data)[-_LAST_BYTES:]
                if forwards:
                    with suppress(OSError):
                        os.write(2, data)

    def read(self) -> str:
        """Return the last lines of a child that has ended."""
        self._thread.join(1.0)  # longer only if something that it started goes on writing
        return last_lines(self._bytes)


def last_lines(data: bytes) -> str:
    """Return the last lines of what a process wrote."""
    return "\n".join(data.decode(errors="replace").splitlines()[-_LAST_LINES:])


def _left(until: float) -> float:
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds
