"""What all commands share: reading their options, and showing what they were asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.run.output import silence


class Parser(argparse.ArgumentParser):
    """An argument parser of a command, whose errors are Plimsoll's. more: as argparse takes it."""

    def __init__(self, command: str, **more: Any) -> None:
        super().__init__(prog=f"plimsoll {command}", allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `{self.prog} --help` shows what there is.")

    def print_help(self, file: object = None) -> None:
        show(self.format_help())


def flags_of(stand_for: Mapping[str, tuple[str, object]], flags: Sequence[str]) -> list[str]:
    """The dotted flags that plain options stand for. stand_for: of each option its flag, and its
    value, None where it is not given.

    Raises ConfigError for an option beside its flag.
    """
    from json import dumps

    from plimsoll.config.flags import parse_flags

    given = {flag.name for flag in parse_flags(flags)}
    for option, (flag, value) in stand_for.items():
        if value is not None and flag in given:
            raise ConfigError(f"{option} and {flag} set the same key. Give one.")
    return [f"{flag}={dumps(value)}" for flag, value in stand_for.values() if value is not None]


REPLAY_FLAG = "--rollout.replay"
"""What `--replay RUN` stands for."""


class ReaderGone(Exception):
    """Nobody reads what was asked for, as after `| head -1`: the command ends, without a word."""


def show(text: str) -> None:
    """Print what a command was asked for."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence(sys.stdout.fileno())
        raise ReaderGone from None
    except OSError as error:
        silence(sys.stdout.fileno())
        raise PlimsollError(f"Standard output cannot be written: {error.strerror}.") from error
