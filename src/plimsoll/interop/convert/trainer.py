"""Describe a trainer whose commands are converted. A further one is a package with a TRAINER."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plimsoll.interop.convert.launch import Launch, Programs

if TYPE_CHECKING:
    from plimsoll.interop.convert.writer import Converted


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer whose commands are converted.

    Attributes:
        name: Name of the trainer.
        reads: What is read, with the versions.
        example: A command.
        programs: Finds its programs in a command.
        missing: Why a command is none of its own.
        convert: Converts a command, with a given version and the cards of a machine.
        versions: An example of `--version`; None if one version is read.
        beside: Programs that a script may start beside the one that trains.
        variables: Variables of its scripts that --set need not give.
    """

    name: str
    reads: str
    example: str
    programs: Programs
    missing: str
    convert: Callable[[Launch, str | None, int | None], Converted]
    versions: str | None = None
    beside: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command of Plimsoll."""
        return f"from-{self.name.lower()}"
