"""Find the training program in a command or script, and read the words of its launcher.

A launcher is a program such as `deepspeed`, `torchrun` or `ray job submit`. Its words may give the
numbers of machines and cards. To support another trainer, add a package with a TRAINER and a module
`convert`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from plimsoll.errors import ConfigError
from plimsoll_convert.shell import Expanded, script_commands

_CARDS = ("--num_gpus", "--nproc_per_node", "--nproc-per-node", "--num_processes")
_NODES = ("--num_nodes", "--nnodes", "--num_machines")


@dataclass(frozen=True)
class Launch:
    """One start of a program.

    Attributes:
        program: Name of the program, such as `train_ppo_ray`.
        arguments: The words after the name.
        launcher: The words before the name.
        line: Line of the script.
        unknown: Words that could not be read, each with the reason.
    """

    program: str
    arguments: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    line: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def started_by(self) -> str:
        """The name of the launcher, such as `deepspeed`; "" if there is no launcher."""
        words = [word for word in self.launcher if "=" not in word]
        return os.path.basename(words[0]) if words else ""

    @property
    def cards(self) -> int | None:
        """The number of cards per machine; None if the launcher does not say it."""
        if number := _number(self.launcher, _CARDS):
            return number
        selected = _value(self.launcher, ("--include", "-i"))
        if selected is not None and ":" in selected:
            return len(selected.rpartition(":")[2].split(","))
        visible = _value(self.launcher, ("CUDA_VISIBLE_DEVICES",))
        return len(visible.split(",")) if visible else None

    @property
    def nodes(self) -> int | None:
        """The number of machines; None if the launcher does not say it."""
        return _number(self.launcher, _NODES)

    @property
    def address(self) -> str | None:
        """The host of the Ray cluster to which the job is submitted, or None."""
        if not any(os.path.basename(word) == "ray" for word in self.launcher):
            return None
        try:
            return urlsplit(_value(self.launcher, ("--address",)) or "").hostname
        except ValueError:
            return None


Programs = Callable[[Sequence[str]], tuple[str, int] | None]
"""Takes the words of a command; returns the program that the first words name, and the number of
these words. Returns None if they name no program."""


def programs_of(package: str) -> Programs:
    """Return a `Programs` function that finds `package.NAME` and `package/NAME.py`."""

    def program(words: Sequence[str]) -> tuple[str, int] | None:
        dotted = words[0].removesuffix(".py").replace("/", ".")
        match = re.fullmatch(rf"(?:.*\.)?{re.escape(package)}\.(\w+)", dotted)
        return (match[1], 1) if match else None

    return program


def find_launches(words: Sequence[str], programs: Programs) -> list[Launch]:
    """Return the program starts in a command line that a shell has already expanded."""
    return [*_launches([Expanded(0, tuple(words))], programs)]


def script_launches(path: str, given: Mapping[str, str], programs: Programs) -> list[Launch]:
    """Return the program starts in a script, in order. `given` has values of shell variables.

    Raises:
        ConfigError: The file cannot be read as a script.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        names = [path.name for path in file.parent.glob("*.sh")] if file.parent.is_dir() else []
        close = difflib.get_close_matches(file.name, names, n=1)
        near = f" Did you mean {file.with_name(close[0])}?" if close else ""
        raise ConfigError(
            f"{path}: there is no such script.{near} A command itself is written after `--`."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}. Give a shell script.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    return [*_launches(script_commands(text, path, given), programs)]


def _launches(commands: Sequence[Expanded], programs: Programs) -> Iterator[Launch]:
    for command in commands:
        words = command.words
        for i in range(len(words)):
            if program := programs(words[i:]):
                name, length = program
                arguments = words[i + length :]
                yield Launch(name, arguments, words[:i], command.line, command.unknown)
                break


def _number(words: Sequence[str], names: Sequence[str]) -> int | None:
    value = _value(words, names)
    return int(value) if value is not None and value.isdigit() and int(value) > 0 else None


def _value(words: Sequence[str], names: Sequence[str]) -> str | None:
    for i, word in enumerate(words):
        name, equals, after = word.partition("=")
        if name in names:
            return after if equals else next(iter(words[i + 1 :]), None)
    return None


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer whose commands are converted.

    Attributes:
        name: Name of the trainer.
        reads: The programs and versions that can be converted, for the help.
        example: An example of a command.
        programs: Finds the trainer's programs in a command.
        commands: The programs that can be converted, with the short name of each in the table.
        refused: The programs that cannot, as regular expressions, with the end of the message.
        missing: The end of the message about a command without a program of the trainer.
        versions: An example of `--version`; None if only one version is read.
        read_version: Reads the text of `--version`.
        beside: Programs that a script may start in addition to the training program.
        variables: Shell variables of the trainer's scripts that --set need not give.
    """

    name: str
    reads: str
    example: str
    programs: Programs
    commands: Mapping[str, str]
    refused: Mapping[str, str]
    missing: str
    versions: str | None = None
    read_version: Callable[[str], object] = str
    beside: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The name of Plimsoll's command that converts this trainer's commands."""
        return f"from-{self.name.lower()}"

    def short_name(self, program: str) -> str:
        """Return the short name of a program in the trainer's table.

        Raises:
            ConfigError: There is no such program, or it cannot be converted.
        """
        if program in self.commands:
            return self.commands[program]
        for pattern, why in self.refused.items():
            if re.fullmatch(pattern, program):
                raise ConfigError(f"{program} of {self.name} is not read: {why}.")
        known = [*self.commands, *self.refused]
        near = propose(difflib.get_close_matches(program, known, n=1))
        raise ConfigError(
            f"{program} is no program of {self.name}'s that is read{near or '.'} Read are: "
            f"{', '.join(self.commands)}. A script that sets its own arguments in Python is not "
            "read: give the command that means the same."
        )


def propose(names: Sequence[str]) -> str:
    """Return "; did you mean A or B?" for the names that are close to an unknown one."""
    return f"; did you mean {' or '.join(names)}?" if names else ""
