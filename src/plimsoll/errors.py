"""The errors that Plimsoll raises on purpose, and the exit code each ends the command with.

Every one says what is wrong, the value, why, and what to do. They cross process boundaries,
so each is built from plain strings alone and pickles as it is.
"""

from __future__ import annotations


class PlimsollError(Exception):
    """Anything that Plimsoll stops for knowingly. The command ends with exit code 1."""

    exit_code = 1


class ConfigError(PlimsollError):
    """Wrong usage, a wrong setting, or input that cannot be read. Exit code 2."""

    exit_code = 2


class DataError(ConfigError):
    """Rows that cannot be used; the message names file, line and field. Exit code 2."""


class DoesNotFit(PlimsollError):
    """The plan says that the run does not fit the machine. Exit code 3."""

    exit_code = 3


class SettingsConflict(PlimsollError):
    """Settings that are right by themselves but cannot work together. Exit code 4."""

    exit_code = 4


class FunctionFailed(PlimsollError):
    """A function that the config chooses (a loss, an advantage, a reward), most often the user's
    own, raised something. The message has the lines of its traceback."""


class WorkerDied(PlimsollError):
    """A training rank or a rollout engine ended without being asked to."""


class WeightSyncError(PlimsollError):
    """The weights that a rollout engine samples with are not the trainer's."""


class Interrupted(PlimsollError):
    """The user asked to stop (Ctrl-C); what there is to save is. Exit code 130, as in shells."""

    exit_code = 130
