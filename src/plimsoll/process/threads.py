"""Blocking calls from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from threading import Thread
from typing import TypeVar, cast

_T = TypeVar("_T")


async def in_thread(
    function: Callable[[], _T], unused: Callable[[_T], object] = lambda result: None
) -> _T:
    """Return what a function returns, or raise what it raises, called in a thread of its own.

    If this is cancelled the thread goes on, as nothing can end a thread, and `unused` gets what the
    function returns; the process does not wait for the thread when it exits.
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
