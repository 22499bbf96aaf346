"""What is told of a function that the config chooses, and that raises while a run goes on."""

from __future__ import annotations

import traceback

from plimsoll.errors import FunctionFailed


def failure(what: str, error: BaseException, shown: str = "") -> FunctionFailed:
    """What the function raised, in a line, and under it where that came from, as Python shows it,
    from the function's own lines on. To be raised where the function is called.

    what: how the function is called. shown: what it was called with, in sentences.
    """
    told, lines = told_of(error)
    return FunctionFailed(f"{what} raised {told}{'. ' if shown else ''}{shown}\n{lines}".rstrip())


def told_of(error: BaseException) -> tuple[str, str]:
    """What a function raised, in a line; and where it came from, from the function's own lines on.
    To be asked where the function is called."""
    told = " ".join("".join(traceback.format_exception_only(error)).split())
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one is the call
    return told, "".join(traceback.StackSummary.from_list(frames).format())
