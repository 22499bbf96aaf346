"""Describe an error that a function of the user's raises while a run goes on."""

from __future__ import annotations

import traceback

from plimsoll.errors import FunctionFailed


def failure(what: str, error: BaseException, arguments: str = "") -> FunctionFailed:
    """Return the error to raise where the function is called: a summary line, then the traceback.

    The traceback has Python's form and begins with the function's own lines. `what` names the
    function, and `arguments` says in sentences what it was called with.
    """
    summary, lines = describe_error(error)
    end = f". {arguments}" if arguments else ""
    return FunctionFailed(f"{what} raised {summary}{end}\n{lines}".rstrip())


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return a function's error as one line, and its traceback from the function's own lines on.

    Call it where the function is called: the first frame is taken for the call and left out.
    """
    summary = " ".join("".join(traceback.format_exception_only(error)).split())
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one is the call
    return summary, "".join(traceback.StackSummary.from_list(frames).format())
