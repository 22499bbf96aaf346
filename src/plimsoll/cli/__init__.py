"""The command `plimsoll`."""

from plimsoll.cli.command import main

__all__ = ["main"]
