"""What all commands share: reading their options, and showing what they were asked for."""

from __future__ import annotations

import argparse
import sys
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
