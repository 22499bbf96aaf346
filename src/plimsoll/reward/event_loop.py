"""The event loop in which all rewards of a run are waited for, in a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that consumes coroutines handed to it by `asyncio.run_coroutine_threadsafe`, waits for
    what they wait for, and gives their results through futures. The end of
    the block ends it, and its thread is waited for."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=_run, args=(loop,), name="rewards", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


async def end_all() -> None:
    """Cancel all other work of the loop that this is awaited in, and wait until it has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
