"""Name the processes for which a start waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Timer

_SLOW_SECONDS = 30.0


@contextmanager
def naming_slow_starts(
    late: Callable[[], Sequence[str]], say: Callable[[str], None]
) -> Iterator[None]:
    """Name the processes that have not started, if the block takes over 30 seconds.

    Args:
        late: returns the names of these processes.
        say: takes the line with the names.
    """
    timer = Timer(
        _SLOW_SECONDS,
        lambda: say(f"waiting for {', '.join(late())} to start, for {_SLOW_SECONDS:.0f} s now"),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
