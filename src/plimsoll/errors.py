"""The errors that Plimsoll raises on purpose, each with the command's exit code.

Each message says what is wrong, the value, why, and what to do. The errors cross process
boundaries, so each is built from plain strings alone and pickles as it is.
"""

from __future__ import annotations

import traceback
from typing import ClassVar, Literal

Recovery = Literal["none", "process", "error"]
"""Whether a run that ended may succeed if it is started again. `process`: a process died or hung.
`error`: an error that nobody expected, or a lack of memory. `none`: it would fail again."""


class PlimsollError(Exception):
    """The base of all errors that Plimsoll raises on purpose. Exit code 1."""

    exit_code = 1
    fault: ClassVar[Recovery] = "none"


class ConfigError(PlimsollError):
    """Wrong usage, a wrong setting, or input that cannot be read. Exit code 2."""

    exit_code = 2


class DataError(ConfigError):
    """Rows that cannot be used; the message names file, line and field. Exit code 2."""


class DoesNotFit(PlimsollError):
    """The plan's verdict that the run does not fit the machine. Exit code 3."""

    exit_code = 3


class SettingsConflict(PlimsollError):
    """Settings that are valid one by one but cannot work together. Exit code 4."""

    exit_code = 4


class FunctionFailed(PlimsollError):
    """An error that a function chosen by the config raised: a loss, an advantage or a reward.

    Most often the function is the user's own. The message has the lines of its traceback.
    """


class CheckpointDamaged(PlimsollError):
    """A damaged checkpoint that was put aside; the run can go on from the one before."""

    fault = "process"


class CannotWrite(PlimsollError):
    """A disk that is full, read-only, not shared by all nodes, or not ours to write to.

    A new start of the run meets the same error.
    """


class WorkerDied(PlimsollError):
    """A training rank or a rollout engine that ended without a request to stop."""

    fault = "process"


class EngineDied(WorkerDied):
    """A rollout engine that ended or hangs; another can take its place."""


class NodesMissing(WorkerDied):
    """Fewer nodes in the cluster than the run asks for.

    `flags` lets the run go on with those that are there; it is empty if that cannot be said.
    """

    def __init__(self, text: str, flags: tuple[str, ...] = ()) -> None:
        super().__init__(text, flags)  # both arguments, so that the exception pickles
        self.text = text
        self.flags = flags

    def __str__(self) -> str:
        return self.text


class WorkerFailed(PlimsollError):
    """An error in a training rank or a rollout engine that nobody expected."""

    fault = "error"


class WeightSyncError(PlimsollError):
    """A rollout engine that samples with weights other than the trainer's.

    New processes may well have the same, if something went wrong on the way.
    """

    fault = "error"


class StageFailed(PlimsollError):
    """A command that another command runs, and that ended with this exit code."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text, exit_code)  # both arguments, so that the exception pickles
        self.text = text
        self.exit_code = exit_code

    def __str__(self) -> str:
        return self.text


class Interrupted(PlimsollError):
    """The user's request to stop (Ctrl-C), raised once the run is saved. Exit code 130."""

    exit_code = 130


def failure(what: str, error: BaseException, arguments: str = "") -> FunctionFailed:
    """Return a FunctionFailed for an error of a function: a summary line, then the traceback.

    Call this where the function is called: the traceback begins inside the function. `what` names
    the function, and `arguments` says in sentences what it was called with.
    """
    summary, lines = describe_error(error)
    end = f". {arguments}" if arguments else ""
    return FunctionFailed(f"{what} raised {summary}{end}\n{lines}".rstrip())


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return a function's error as one line, and its traceback from inside the function.

    Call this where the function is called: the first frame counts as the call and is left out.
    """
    summary = " ".join("".join(traceback.format_exception_only(error)).split())
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one is the call
    return summary, "".join(traceback.StackSummary.from_list(frames).format())
