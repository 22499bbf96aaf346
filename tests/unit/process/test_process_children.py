"""Children that answer messages: what they answer, how they end, and what then happens."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import psutil
import pytest

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.process.child import Child, ChildEnded, Pool, Program
from plimsoll.process.threads import in_thread

SETUP = {"greeting": "hello"}


def open_echo(setup: dict[str, str]) -> Callable[[Any], Any]:
    """Return what does as it is told; here tests and their children both import it."""
    if "refuse" in setup:
        raise ConfigError("there is no such thing")

    def answer(message: Any) -> Any:
        match message:
            case "pid":
                return os.getpid()
            case "hang":
                time.sleep(60)
            case "spin":
                while True:
                    pass
            case "die":
                print("the last words", flush=True)
                os._exit(3)
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "spawn":
                return subprocess.Popen(["/bin/sleep", "60"]).pid
            case "eat":
                return len(bytearray(2**31))
            case "long":
                return "a" * 9 * 2**20
            case "many":
                return [[]] * 200_000
        return [setup["greeting"], message]

    return answer


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return Program(open_echo, "The process of the test", SETUP)


@pytest.fixture
def pool(program: Program) -> Iterator[Pool]:
    pool = Pool(program, 2)
    yield pool
    pool.close()


@pytest.mark.parametrize(("codec", "answer"), [("json", [1]), ("pickle", (1,))])
def test_a_child_answers_in_its_codec(
    program: Program, codec: Literal["json", "pickle"], answer: object
) -> None:
    child = Child(replace(program, codec=codec))
    child.open()
    assert child.ask((1,), 10.0) == ["hello", answer]
    large = "a" * 5_000_000
    assert child.ask(large, 10.0) == ["hello", large]
    child.end()


def test_an_answer_in_json_is_bounded_in_bytes_and_in_values(program: Program) -> None:
    """A program that has taken over its runner could make the run parse gigabytes."""
    pool = Pool(program, 1)
    for message, why in (("long", "over 8,388,608 bytes"), ("many", "values in JSON")):
        with pytest.raises(ChildEnded, match=f"was ended, because .* no answer: .*{why}"):
            pool.ask(message, 30.0)
    text = '[{"\\,' * 200_000  # in a text nothing is a value
    assert pool.ask(text, 30.0) == ["hello", text]
    pool.close()
    trusted = Pool(replace(program, codec="pickle"), 1)
    assert len(trusted.ask("long", 30.0)) == 9 * 2**20
    assert len(trusted.ask("many", 30.0)) == 200_000
    trusted.close()


def test_a_child_that_dies_is_reported_with_its_last_words_and_replaced(pool: Pool) -> None:
    first = pool.ask("pid", 10.0)
    assert pool.ask("pid", 10.0) == first != os.getpid()
    with pytest.raises(ChildEnded, match="ended with exit code 3") as death:
        pool.ask("die", 10.0)
    assert (death.value.code, death.value.lines) == (3, "the last words")
    with pytest.raises(ChildEnded, match="ended by SIGSEGV"):
        pool.ask("segfault", 10.0)
    assert pool.ask("pid", 10.0) != first
    with pytest.raises(TimeoutError):
        pool.ask("hang", 0.2)
    assert pool.ask("hi", 10.0) == ["hello", "hi"]


def test_the_last_words_appear_on_our_standard_error(
    pool: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ChildEnded):
        pool.ask("die", 10.0)
    assert capfd.readouterr().err == "the last words\n"


def test_memory_and_processor_time_are_limited(program: Program) -> None:
    pool = Pool(replace(program, memory_gib=1.0, cpu_seconds=0.2), 1)
    with pytest.raises(ChildEnded) as death:
        pool.ask("spin", 30.0)
    assert death.value.code == -signal.SIGPROF
    with pytest.raises(ChildEnded) as death:
        pool.ask("eat", 30.0)
    assert "MemoryError" in death.value.lines
    pool.close()


def test_a_child_ends_with_all_that_it_started(pool: Pool) -> None:
    grandchild = psutil.Process(pool.ask("spawn", 10.0))
    pool.close()
    psutil.wait_procs([grandchild], timeout=10)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_a_child_ends_with_its_parent_though_it_hangs(tmp_path: Path) -> None:
    """The thread that asked for the child has ended long before, and does not take it along."""
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from threading import Thread
from test_process_children import *
pool = Pool(Program(open_echo, "", SETUP), 1)
for message in ("pid", "pid"):
    thread = Thread(target=lambda: print(pool.ask(message, 10.0), flush=True))
    thread.start()
    thread.join()
pool.ask("hang", 60.0)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert pids[0] == pids[1]
    child = psutil.Process(pids[0])
    parent.kill()
    parent.wait()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_what_a_child_cannot_open_is_refused_in_its_words(program: Program) -> None:
    pool = Pool(replace(program, setup={"refuse": "it"}), 1)
    for _ in range(2):  # the place is free again
        with pytest.raises(ConfigError, match="there is no such thing"):
            pool.ask("hi", 10.0)
    broken = replace(program, python=(sys.executable, "-c", "import nothing_of_this_name"))
    with pytest.raises(PlimsollError, match="No module named 'nothing_of_this_name'"):
        Pool(broken, 1).ask("hi", 10.0)


@pytest.mark.parametrize("sent", [b"{\n", b"[" * 100_000 + b"\n", b"\xff\n", b"1"])
def test_output_that_is_no_message_ends_the_child(program: Program, sent: bytes) -> None:
    script = f"import os; os.write(1, {sent!r})"
    child = Child(replace(program, python=(sys.executable, "-c", script)))
    with pytest.raises(PlimsollError, match="the test did not start: "):
        child.open()


def test_closing_the_pool_frees_whoever_waits(pool: Pool) -> None:
    before = {child.pid for child in psutil.Process().children()}
    deaths: list[Exception] = []

    def wait(message: str) -> None:
        try:
            pool.ask(message, 60.0)
        except (ChildEnded, PlimsollError) as death:
            deaths.append(death)

    threads = [Thread(target=wait, args=("hang",)) for _ in range(3)]  # one waits for a child
    for thread in threads:
        thread.start()
    pids = set[int]()
    while len(pids) < 2:
        time.sleep(0.01)
        pids = {child.pid for child in psutil.Process().children()} - before
    pool.close()
    for thread in threads:
        thread.join(10.0)
    assert len(deaths) == 3


def test_a_child_that_comes_too_late_is_given_back(program: Program) -> None:
    pool = Pool(program, 1)

    async def main() -> None:
        taking = asyncio.create_task(in_thread(pool.take, pool.give_back))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        async with asyncio.timeout(30):  # there is one place, and it is free again
            assert await in_thread(partial(pool.ask, "hi", 20.0)) == ["hello", "hi"]

    asyncio.run(main())
    pool.close()


def test_a_thread_hands_on_the_exception_that_a_future_refuses() -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(in_thread(lambda: next(iter(()))))
