"""Convert commands and scripts of other trainers to configs, such as `plimsoll from-openrlhf`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.cli.options import Parser, show
from plimsoll.errors import ConfigError
from plimsoll.run.output import say

if TYPE_CHECKING:
    from plimsoll_convert.launch import Launch, Trainer
    from plimsoll_convert.writer import Converted


def _parser(trainer: Trainer) -> Parser:
    parser = Parser(
        trainer.command,
        usage=f"plimsoll {trainer.command} SCRIPT.sh [options]\n"
        f"       plimsoll {trainer.command} [options] -- {trainer.example}",
        description=f"Write the config that means what {trainer.reads} means, "
        "and say what became of each setting. bash runs a script in a sandbox, in which it "
        "finds no file of this machine and starts no program.",
    )
    parser.add_argument("script", nargs="?", help="a shell script; or the command after `--`")
    if trainer.versions is not None:
        text = f"of {trainer.name}, such as {trainer.versions}; default: as the flags say"
        parser.add_argument("--version", help=text)
    parser.add_argument(
        "-o", "--out", type=expanduser, metavar="FILE", help="where to write the config"
    )
    parser.add_argument("--command", type=int, metavar="N", help="of a script with several, this")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the script"
    )
    parser.add_argument(
        "--plan", action="store_true", help="go on to the plan, on the cards of --cluster"
    )
    parser.add_argument("--suggest", action="store_true", help="with what would make it fit")
    parser.add_argument("--cluster", help="the cards of each machine, such as 8xA100-80GB")
    parser.add_argument("--host-memory", help="of each machine, such as 1TB")
    parser.set_defaults(version=None)
    return parser


def _convert_from(system: str, words: list[str]) -> None:
    """Run `plimsoll from-SYSTEM` with these words."""
    trainer: Trainer = import_module(f"plimsoll_convert.{system}").TRAINER
    at = words.index("--") if "--" in words else len(words)
    options = _parser(trainer).parse_args(words[:at])
    launch = _launch(trainer, options, words[at + 1 :])

    from plimsoll.machine.hardware import find_machine, parse_cluster
    from plimsoll.run.files import write_whole
    from plimsoll.run.numbers import plural
    from plimsoll_convert.writer import cards_of_machine, config_text, table_text

    cards = None
    if options.cluster is not None:
        cards = len(parse_cluster(options.cluster, 1, None).node.cards) or None
    version = {}
    if options.version is not None:
        version = {"version": trainer.read_version(options.version)}
    convert = import_module(f"plimsoll_convert.{system}.convert").convert
    converted: Converted = convert(launch, cards=cards, **version)
    planned = options.plan or options.suggest
    if planned and options.cluster is None:
        needed, here = cards_of_machine(converted), len(find_machine().cards)
        if here < needed:
            takes = f"the command takes {plural(needed, 'card')} of each machine"
            why = f"A plan needs --cluster: {takes}, and here are {here or 'none'}"
            raise ConfigError(f"{why}. Give them, such as --cluster {needed}xA100-80GB.")
    text = config_text(converted)
    job, out = converted.job, options.out
    if out is not None:
        write_whole(Path(out), text)
        remark = f"{out} is written: `plimsoll {job} {out} --dry-run` checks it with its files."
    else:
        show(text.removesuffix("\n"))
        remark = f"-o FILE writes the config; then `plimsoll {job} FILE --dry-run`."
    say(f"{table_text(converted)}\n\n{remark}")
    if planned:
        _plan(text, options)


def _launch(trainer: Trainer, options: Namespace, command: Sequence[str]) -> Launch:
    """Return the training command in the script or in `command`.

    Raises ConfigError if there is none, or if there are several and `--command` chooses none.
    """
    script: str | None = options.script
    from plimsoll_convert.launch import find_launches, script_launches

    example = f"`plimsoll {trainer.command} -- {trainer.example}`"
    if (script is None) == (not command):
        how = f"`plimsoll {trainer.command} SCRIPT.sh`, or {example}"
        raise ConfigError(f"Give a script or a command, one of them. Write {how}.")
    if script is not None and script.endswith((".yaml", ".yml", ".json")):
        raise ConfigError(f"{script} is no script. Give the command that reads it: {example}.")
    if script is None:
        launches, where = find_launches(command, trainer.programs), "The command"
    else:
        variables = dict(trainer.variables)
        for text in options.set:
            name, equals, value = text.partition("=")
            if not equals or not (name.isidentifier() or name.isdigit()):
                raise ConfigError(f"--set {text!r} is no NAME=VALUE.")
            variables[name] = value
        launches, where = script_launches(script, variables, trainer.programs), script
    if not launches:
        why = f"{trainer.missing}. What it sources or calls is not read: give that"
        raise ConfigError(f"{where} starts no program of {trainer.name}'s: {why}.")
    training = [launch for launch in launches if launch.program not in trainer.beside] or launches
    number: int | None = options.command
    if number is not None and not 1 <= number <= len(training):
        raise ConfigError(f"--command {number}: {where} has 1 to {len(training)}.")
    if number is None and len(training) > 1:
        listed = (f"\n  {i} {t.program} (line {t.line})" for i, t in enumerate(training, 1))
        many = f"{where} starts {len(training)} programs that train"
        raise ConfigError(f"{many}. Say which by --command N:{''.join(listed)}")
    return training[(number or 1) - 1]


def _plan(text: str, options: Namespace) -> None:
    """Print the plan of the config, as `plimsoll plan` does."""
    from tempfile import TemporaryDirectory

    from plimsoll.cli.tools import plan

    given = {"--cluster": options.cluster, "--host-memory": options.host_memory}
    words = [word for flag, value in given.items() if value for word in (flag, value)]
    words += ["--suggest"] if options.suggest else []
    with TemporaryDirectory() as folder:
        file = Path(folder, "config.yaml")
        file.write_text(text, encoding="utf-8")
        plan([options.out or str(file), *words])


from_openrlhf = partial(_convert_from, "openrlhf")
from_trl = partial(_convert_from, "trl")
from_verl = partial(_convert_from, "verl")
"""The entry points of `plimsoll.commands`."""
