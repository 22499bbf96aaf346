"""Find the training program in a command or script, what its launcher says, and its trainer.

A launcher is `deepspeed`, `torchrun`, `ray job submit` and the like; it says how many machines and
cards there are. A further trainer is a package with a TRAINER.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from plimsoll.errors import ConfigError
from plimsoll.interop.convert.shell import Expanded, script_commands

if TYPE_CHECKING:
    from plimsoll.interop.convert.writer import Converted


_CARDS = ("--num_gpus", "--nproc_per_node", "--nproc-per-node", "--num_processes")
_NODES = ("--num_nodes", "--nnodes", "--num_machines")
_SHOWING = ("echo", "printf", "cat")


@dataclass(frozen=True)
class Launch:
    """One start of a program.

    Attributes:
        program: Its name, such as `train_ppo_ray`.
        arguments: The words after the name.
        launcher: The words before the name.
        line: Line of the script.
        unknown: Words that could not be read, and why.
        cards: Cards of a machine, if the launcher says it.
        nodes: Machines, if the launcher says it.
        address: Host of the Ray cluster to which the job is submitted.
    """

    program: str
    arguments: tuple[str, ...]
    launcher: tuple[str, ...] = ()
    line: int = 0
    unknown: tuple[str, ...] = ()
    cards: int | None = None
    nodes: int | None = None
    address: str | None = None

    @property
    def started_by(self) -> str:
        """The name of the launcher, such as `deepspeed`; "" without one."""
        words = [word for word in self.launcher if "=" not in word]
        return os.path.basename(words[0]) if words else ""


Programs = Callable[[Sequence[str]], tuple[str, int] | None]
"""A function from words to the program that the first of them name, and how many words name it;
None if they name none."""


def programs_of(package: str) -> Programs:
    """Return the programs of a package, as `package.name` or as `package/name.py`."""

    def program(words: Sequence[str]) -> tuple[str, int] | None:
        dotted = words[0].removesuffix(".py").replace("/", ".")
        match = re.fullmatch(rf"(?:.*\.)?{re.escape(package)}\.(\w+)", dotted)
        return (match[1], 1) if match else None

    return program


def find_launches(words: Sequence[str], programs: Programs) -> list[Launch]:
    """Return the programs that a command line starts, which a shell has expanded."""
    return [*_launches([Expanded(0, tuple(words))], programs)]


def script_launches(path: str, given: Mapping[str, str], programs: Programs) -> list[Launch]:
    """Return the programs that a script starts, in its order. given: values of variables.

    Raises:
        ConfigError: The file cannot be read as a script.
    """
    return [*_launches(script_commands(_script_text(path), path, given), programs)]


def _script_text(path: str) -> str:
    file = Path(path)
    try:
        return file.read_text(encoding="utf-8")
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


def _launches(commands: Sequence[Expanded], programs: Programs) -> Iterator[Launch]:
    for command in commands:
        words = command.words
        if os.path.basename(words[0]) in _SHOWING:
            continue
        for i in range(len(words)):
            if program := programs(words[i:]):
                before = words[:i]
                yield Launch(
                    program[0],
                    words[i + program[1] :],
                    before,
                    command.line,
                    command.unknown,
                    _cards(before),
                    _number(before, _NODES),
                    _address(before),
                )
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


def _cards(words: Sequence[str]) -> int | None:
    """Return the cards of a machine, from their number or from a list of them."""
    if number := _number(words, _CARDS):
        return number
    selected = _value(words, ("--include", "-i"))
    if selected is not None and ":" in selected:
        return len(selected.rpartition(":")[2].split(","))
    visible = _value(words, ("CUDA_VISIBLE_DEVICES",))
    return len(visible.split(",")) if visible else None


def _address(words: Sequence[str]) -> str | None:
    """Return the host of the cluster to which a job is submitted."""
    if not any(os.path.basename(word) == "ray" for word in words):
        return None
    try:
        return urlsplit(_value(words, ("--address",)) or "").hostname
    except ValueError:
        return None


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
