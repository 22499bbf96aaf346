"""Between threads and event loops: blocking calls from a loop, and coroutines in another's loop."""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop, run_coroutine_threadsafe
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any, TypeVar

_T = TypeVar("_T")


async def in_thread(
    function: Callable[[], _T], unused: Callable[[_T], object] = lambda result: None
) -> _T:
    """Return what a function returns, or raise what it raises, called in a thread of its own.

    If this is cancelled the thread goes on, as nothing can end a thread, and `unused` gets what the
    function returns; the process does not wait for the thread when it exits.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001  it is raised again where it is awaited
            with suppress(InvalidStateError):
                future.set_exception(error)
            return
        try:
            future.set_result(result)
        except InvalidStateError:  # cancelled
            unused(result)

    Thread(target=run, name="waits", daemon=True).start()
    return await asyncio.wrap_future(future)


R = TypeVar("R")


@contextmanager
def conversing(loop: AbstractEventLoop, talk: Coroutine[Any, Any, R]) -> Iterator[Future[R]]:
    """Run the coroutine in the loop during the block.

    If an error, or Ctrl-C, leaves the block, the coroutine is cancelled, and its end is waited for.
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
