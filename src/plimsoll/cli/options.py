"""Functions for all commands: parse options, and print results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from os.path import expanduser
from pathlib import Path
from typing import Any, NoReturn

from plimsoll.config.secrets import mask_urls
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.run.output import Drawn, beneath, safe_text, silence


class Parser(argparse.ArgumentParser):
    """An argument parser of a command; its errors are ConfigErrors."""

    def __init__(
        self, command: str, about: str | None = None, takes: str | None = None, **more: Any
    ) -> None:
        """Make a parser of a command.

        Args:
            command: the name of the command.
            about: what it does, for its help.
            takes: what comes before the flags of a command with dotted flags; None for others.
            more: as ArgumentParser takes it.
        """
        prog = f"plimsoll {command}"
        if takes is not None:
            more["usage"] = f"{prog} {takes} [--section.key VALUE ...] [options]"
        super().__init__(prog=prog, allow_abbrev=False, **{"description": about, **more})

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message."""
        raise ConfigError(f"{mask_urls(message)}. `{self.prog} --help` shows what there is.")

    def switch(self, name: str, text: str | None = None) -> None:
        """Add an option without a value; `text` is its help."""
        self.add_argument(name, action="store_true", help=text)

    def path(self, *names: str, **more: Any) -> None:
        """Add an option that names a place on the disk, in which `~` is the home directory."""
        self.add_argument(*names, type=lambda text: Path(expanduser(text)), **more)

    def trust(self) -> None:
        """Add the switch for run directories that hold code, or name it."""
        text = "let the config of RUN name code, which then runs as you, and keys to send"
        self.switch("--trust-run", text)

    def machines(self) -> None:
        """Add the options for the hardware of a plan."""
        cards = "the cards of each machine, such as 8xA100-80GB, or cpu"
        self.add_argument("--cluster", help=cards)
        self.add_argument("--host-memory", help="of each machine, such as 1TB")

    def parse_with_flags(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the parsed plain options, and the words that are dotted flags and their values."""
        from plimsoll.config.flags import split_flags

        rest, flags = split_flags(words)
        return self.parse_args(rest), flags

    def print_help(self, file: object = None) -> None:
        """Print the help."""
        show(self.format_help())


def flags_of(stand_for: Mapping[str, tuple[str, object]], flags: Sequence[str]) -> list[str]:
    """Return dotted flags (`--cluster.nodes=2`) that replace plain options (`--nodes 2`).

    Args:
        stand_for: for each option its dotted flag and its value, or None if it is not given.
        flags: the dotted flags on the command line.

    Raises:
        ConfigError: an option and its flag are both given.
    """
    from json import dumps

    from plimsoll.config.flags import parse_flags

    given = {flag.name for flag in parse_flags(flags)}
    for option, (flag, value) in stand_for.items():
        if value is not None and flag in given:
            raise ConfigError(f"{option} and {flag} set the same key. Give one.")
    return [f"{flag}={dumps(value)}" for flag, value in stand_for.values() if value is not None]


REPLAY_FLAG = "--rollout.replay"
"""The dotted flag of `--replay RUN`."""


class ReaderGone(Exception):
    """Raised if the output's reader has gone, as with `| head -1`; the command ends silently."""


def show(text: str) -> None:
    """Print a command's result. Raises ReaderGone or PlimsollError if it cannot be written.

    A text is made safe, unless a terminal has drawn it.
    """
    try:
        safe = text if isinstance(text, Drawn) else safe_text(text)
        print(safe, file=beneath(sys.stdout), flush=True)
    except BrokenPipeError:
        silence(sys.stdout.fileno())
        raise ReaderGone from None
    except OSError as error:
        silence(sys.stdout.fileno())
        raise PlimsollError(f"Standard output cannot be written: {error.strerror}.") from error
