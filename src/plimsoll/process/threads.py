"""Blocking calls from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Thread
from typing import TypeVar

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
