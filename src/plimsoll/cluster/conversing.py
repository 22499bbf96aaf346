"""A coroutine in the event loop of another thread, which ends before its caller goes on."""

from __future__ import annotations

from asyncio import AbstractEventLoop, run_coroutine_threadsafe
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

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
