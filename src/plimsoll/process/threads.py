"""Blocking calls from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

_T = TypeVar("_T")


async def in_thread(
    function: Callable[[], _T], unused: Callable[[_T], object] = lambda result: None
) -> _T:
    """Return what a function returns, or raise what it raises, called in a thread of its own.

    If this is cancelled the thread goes on, as nothing can end a thread; the process does not wait
    for the thread when it exits. `unused` then gets what the function returned after all.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(result)  # type: ignore[arg-type]
        elif error is None:
            unused(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:  # noqa: BLE001  it is raised again where it is awaited
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    Thread(target=run, name="waits", daemon=True).start()
    return await done
