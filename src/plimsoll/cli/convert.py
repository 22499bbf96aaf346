"""The commands that make configs of what others' trainers are started with."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.cli.options import Parser, show
from plimsoll.errors import ConfigError

if TYPE_CHECKING:
    from plimsoll.convert.launch import Launch

_PACKAGE = "openrlhf.cli"


def _parser() -> Parser:
    parser = Parser(
        "from-openrlhf",
        usage="plimsoll from-openrlhf SCRIPT.sh [options]\n"
        "       plimsoll from-openrlhf [options] -- openrlhf.cli.train_sft --pretrain ...",
        description="Write the config that means what a command of OpenRLHF 0.6 to 0.11.2 means, "
        "and say what became of each flag. Nothing is executed: a script is read, with its "
        "variables, arrays and here-documents.",
    )
    parser.add_argument("script", nargs="?", help="a shell script; or the command after `--`")
    parser.add_argument("--version", help="of OpenRLHF, such as 0.8.2; default: as the flags say")
    parser.add_argument(
        "-o", "--out", type=expanduser, metavar="FILE", help="where to write the config"
    )
    parser.add_argument("--command", type=int, metavar="N", help="of a script with several, this")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the script"
    )
    parser.add_argument("--plan", action="store_true", help="go on to the plan")
    parser.add_argument("--suggest", action="store_true", help="with what would fit, or be faster")
    parser.add_argument("--cluster", help="the cards of each machine, such as 8xA100-80GB")
    parser.add_argument("--host-memory", help="of each machine, such as 1TB")
    return parser


def from_openrlhf(words: list[str]) -> None:
    at = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:at])
    launch = _launch(options.script, words[at + 1 :], options.set, options.command)

    from plimsoll.convert.openrlhf.convert import convert
    from plimsoll.convert.openrlhf.version import given_version
    from plimsoll.convert.shown import config_text, table_text
    from plimsoll.run.files import write_whole

    version = None if options.version is None else given_version(options.version)
    found = convert(launch, version, _cards(options.cluster))
    text = config_text(found)
    if options.out is not None:
        write_whole(Path(options.out), text)
    else:
        show(text.removesuffix("\n"))
    print(f"{table_text(found)}\n\n{_written(options.out, found.job)}", file=sys.stderr)
    if options.plan or options.suggest:
        flags = {"--cluster": options.cluster, "--host-memory": options.host_memory}
        _plan(text, options.out, flags, options.suggest)


def _cards(cluster: str | None) -> int | None:
    """Of a machine; None where that is not said."""
    from plimsoll.machine.hardware import parse_cluster

    return None if cluster is None else len(parse_cluster(cluster, 1, None).nodes[0].cards) or None


def _written(out: str | None, job: str) -> str:
    if out is None:
        return f"-o FILE writes the config; then `plimsoll {job} FILE --dry-run`."
    return f"{out} is written: `plimsoll {job} {out} --dry-run` checks it with its files."


def _launch(
    script: str | None, command: Sequence[str], given: Sequence[str], number: int | None
) -> Launch:
    """The one command that trains. Raises ConfigError where there is none, or several."""
    from plimsoll.convert.launch import find_launches, script_launches

    if script is not None and command:
        raise ConfigError("A script and a command are given. Give one of them.")
    if script is None and not command:
        raise ConfigError(
            "Neither a script nor a command is given. Write `plimsoll from-openrlhf SCRIPT.sh`, "
            "or `plimsoll from-openrlhf -- openrlhf.cli.train_sft --pretrain ...`."
        )
    if script is None:
        found, where = find_launches(command, _PACKAGE), "The command"
    else:
        found, where = script_launches(script, _variables(given), _PACKAGE), script
    if not found:
        raise ConfigError(
            f"{where} starts no program of OpenRLHF's: none of its words is {_PACKAGE}.train_..., "
            f"such as {_PACKAGE}.train_ppo_ray. What it sources or calls is not read: give that."
        )
    return _chosen(found, where, number)


def _chosen(found: Sequence[Launch], where: str, number: int | None) -> Launch:
    training = [one for one in found if one.program.startswith("train_")] or [*found]
    if number is not None and not 1 <= number <= len(training):
        raise ConfigError(f"--command {number}: {where} has 1 to {len(training)}.")
    if number is None and len(training) > 1:
        listed = "\n".join(
            f"  {i} {one.program} (line {one.line})" for i, one in enumerate(training, 1)
        )
        raise ConfigError(
            f"{where} starts {len(training)} programs that train. Say which by --command N:\n"
            f"{listed}"
        )
    return training[(number or 1) - 1]


def _variables(given: Sequence[str]) -> Mapping[str, str]:
    found = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--set {one!r} is no NAME=VALUE.")
        found[name] = value
    return found


def _plan(text: str, out: str | None, stand_for: Mapping[str, object], suggest: bool) -> None:
    """As `plimsoll plan` of the config."""
    from tempfile import TemporaryDirectory

    from plimsoll.cli.tools import plan

    words = [word for flag, value in stand_for.items() if value for word in (flag, str(value))]
    words += ["--suggest"] if suggest else []
    if out is not None:
        plan([out, *words])
        return
    with TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        file.write_text(text, encoding="utf-8")
        plan([str(file), *words])
