"""How a training program is started: the program and its flags after `deepspeed`, `torchrun`,
`ray job submit` and such, and what those say of machines and cards."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from plimsoll.convert.expand import Expanded, script_commands
from plimsoll.errors import ConfigError

_CARDS = ("--num_gpus", "--nproc_per_node", "--nproc-per-node", "--num_processes")
_NODES = ("--num_nodes", "--nnodes", "--num_machines")
_SHOWING = ("echo", "printf", "cat")


@dataclass(frozen=True)
class Launch:
    """One start of a program.

    program: its name, such as `train_ppo_ray`. arguments: the words after it. launcher: those
    before it. line: of a script. unknown: words that could not be read, and why. cards: of a
    machine, where the launcher says it; nodes: machines. address: of a Ray cluster's dashboard.
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
        """The launcher's own name, such as `deepspeed`; "" without one."""
        words = [word for word in self.launcher if "=" not in word]
        return os.path.basename(words[0]) if words else ""


Programs = Callable[[Sequence[str]], tuple[str, int] | None]
"""Of the words from some word on: the program that they name and how many words do so; None where
they name none."""


def of_package(package: str) -> Programs:
    """Programs such as `openrlhf.cli.train_sft`, or as a path `openrlhf/cli/train_sft.py`."""

    def named(words: Sequence[str]) -> tuple[str, int] | None:
        dotted = words[0].removesuffix(".py").replace("/", ".")
        found = re.fullmatch(rf"(?:.*\.)?{re.escape(package)}\.(\w+)", dotted)
        return (found[1], 1) if found else None

    return named


def find_launches(words: Sequence[str], programs: Programs) -> list[Launch]:
    """Of a command line, whose shell has expanded it. Nothing where it starts no program."""
    return [*_launches([Expanded(0, tuple(words))], programs)]


def script_launches(path: str, given: Mapping[str, str], programs: Programs) -> list[Launch]:
    """Of a script, in its order. given: values of variables.

    Raises ConfigError where the file cannot be read as a script.
    """
    return [*_launches(script_commands(_script_text(path), path, given), programs)]


def _script_text(path: str) -> str:
    file = Path(path)
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        names = [one.name for one in file.parent.glob("*.sh")] if file.parent.is_dir() else []
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
            if found := programs(words[i:]):
                before = words[:i]
                yield Launch(
                    found[0],
                    words[i + found[1] :],
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
    """From their number, or from the list of those that are used."""
    if number := _number(words, _CARDS):
        return number
    chosen = _value(words, ("--include", "-i"))
    if chosen is not None and ":" in chosen:
        return len(chosen.rpartition(":")[2].split(","))
    visible = _value(words, ("CUDA_VISIBLE_DEVICES",))
    return len(visible.split(",")) if visible else None


def _address(words: Sequence[str]) -> str | None:
    """The host of the cluster that a job is submitted to."""
    if not any(os.path.basename(word) == "ray" for word in words):
        return None
    try:
        return urlsplit(_value(words, ("--address",)) or "").hostname
    except ValueError:
        return None
