"""Make blocking calls from an event loop, and run coroutines in the loop of another thread."""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop, run_coroutine_threadsafe
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread
from typing import Any, TypeVar, cast

_T = TypeVar("_T")


async def in_thread(
    function: Callable[[], _T], unused: Callable[[_T], object] = lambda result: None
) -> _T:
    """Call a function in a new thread; return its result, or raise its error.

    A cancelled call cannot end its thread: the function runs on, and `unused` gets its result. The
    process does not wait for the thread when it exits.
    """
    outcome: Future[tuple[_T | None, BaseException | None]] = Future()

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # noqa: BLE001  a future takes no StopIteration itself
            error = raised
        try:
            outcome.set_result((result, error))
        except InvalidStateError:  # cancelled
            if error is None:
                unused(cast(_T, result))

    Thread(target=run, name="waits", daemon=True).start()
    result, error = await asyncio.wrap_future(outcome)
    if error is not None:
        raise error
    return cast(_T, result)


R = TypeVar("R")


@contextmanager
def beside(function: Callable[[], object]) -> Iterator[None]:
    """Call a function in a thread during the block; its end waits for it, and raises its error."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(function)
        yield
        future.result()


def call_in_background(function: Callable[[], R]) -> Future[R]:
    """Call a function in a new thread, and return the future of its result.

    The process does not wait for the thread when it exits.
    """
    future: Future[R] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001  the caller of `result` raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, name="background", daemon=True).start()
    return future


@contextmanager
def conversing(loop: AbstractEventLoop, talk: Coroutine[Any, Any, R]) -> Iterator[Future[R]]:
    """Run a coroutine in the loop of another thread; yield the future of its result.

    If an error or Ctrl-C leaves the block, cancel the coroutine and wait for its end.
    """
    ended: Future[None] = Future()

    async def run_talk() -> R:
        try:
            return await talk
        finally:
            ended.set_result(None)

    talking = run_coroutine_threadsafe(run_talk(), loop)
    try:
        yield talking
    except BaseException:
        if talking.cancel():  # else it has ended by itself
            ended.result()
        raise
