"""The commands that make configs of what others' trainers are started with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.cli.options import Parser, show
from plimsoll.errors import ConfigError

if TYPE_CHECKING:
    from plimsoll.convert.launch import Launch, Programs
    from plimsoll.convert.result import Converted


@dataclass(frozen=True)
class _Trainer:
    """Whose commands are read. reads: which of them, with the versions. example: of a command.
    programs: how they are found among a command's words. convert: of a command, a version that was
    given, and the cards of a machine. missing: why a command is none of them. versions: an example
    of `--version`; None where one version is read. beside: programs that a script may call beside
    the one that trains. variables: of its scripts, where --set does not say them."""

    name: str
    reads: str
    example: str
    programs: Callable[[], Programs]
    convert: Callable[[Launch, str | None, int | None], Converted]
    missing: str
    versions: str | None = None
    beside: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        return f"from-{self.name.lower()}"


def _openrlhf_programs() -> Programs:
    from plimsoll.convert.launch import of_package

    return of_package("openrlhf.cli")


def _openrlhf(launch: Launch, version: str | None, cards: int | None) -> Converted:
    from plimsoll.convert.openrlhf.convert import convert
    from plimsoll.convert.openrlhf.version import given_version

    return convert(launch, None if version is None else given_version(version), cards)


def _trl_programs() -> Programs:
    from plimsoll.convert.trl.programs import program

    return program


def _trl(launch: Launch, version: str | None, cards: int | None) -> Converted:
    from plimsoll.convert.trl.convert import convert

    return convert(launch, cards)


def _verl_programs() -> Programs:
    from plimsoll.convert.verl.programs import program

    return program


def _verl(launch: Launch, version: str | None, cards: int | None) -> Converted:
    from plimsoll.convert.verl.convert import convert

    return convert(launch, cards)


_OPENRLHF = _Trainer(
    "OpenRLHF",
    "a command of OpenRLHF 0.6 to 0.11.2",
    "openrlhf.cli.train_sft --pretrain ...",
    _openrlhf_programs,
    _openrlhf,
    "none of its words is openrlhf.cli.train_..., such as openrlhf.cli.train_ppo_ray",
    "0.8.2",
    ("serve_rm", "batch_inference", "lora_combiner", "interactive_chat"),
)
_TRL = _Trainer(
    "TRL",
    "a command of TRL 1.16 and its YAML",
    "trl sft --config sft.yaml",
    _trl_programs,
    _trl,
    "it is neither `trl sft`, `trl grpo` and so on nor one of TRL's scripts, such as "
    "trl/scripts/sft.py. What a script of your own sets in Python is not read",
)
_VERL = _Trainer(
    "verl",
    "a command of verl 0.9.1 with its overrides",
    "python3 -m verl.trainer.main_ppo data.train_files=...",
    _verl_programs,
    _verl,
    "none of its words is a program of verl's, such as verl.trainer.main_ppo",
    beside=("main_generation", "main_generation_server", "main_eval"),
    variables={"DEVICE": "gpu"},  # which its own scripts ask the machine for
)


def from_openrlhf(words: list[str]) -> None:
    _from(_OPENRLHF, words)


def from_trl(words: list[str]) -> None:
    _from(_TRL, words)


def from_verl(words: list[str]) -> None:
    _from(_VERL, words)


def _parser(trainer: _Trainer) -> Parser:
    parser = Parser(
        trainer.command,
        usage=f"plimsoll {trainer.command} SCRIPT.sh [options]\n"
        f"       plimsoll {trainer.command} [options] -- {trainer.example}",
        description=f"Write the config that means what {trainer.reads} means, "
        "and say what became of each setting. Nothing is executed: a script is read, with its "
        "variables, arrays and here-documents.",
    )
    parser.add_argument("script", nargs="?", help="a shell script; or the command after `--`")
    if trainer.versions is not None:
        told = f"of {trainer.name}, such as {trainer.versions}; default: as the flags say"
        parser.add_argument("--version", help=told)
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
    parser.add_argument("--suggest", action="store_true", help="with what would fit, or be faster")
    parser.add_argument("--cluster", help="the cards of each machine, such as 8xA100-80GB")
    parser.add_argument("--host-memory", help="of each machine, such as 1TB")
    parser.set_defaults(version=None)
    return parser


def _from(trainer: _Trainer, words: list[str]) -> None:
    at = words.index("--") if "--" in words else len(words)
    options = _parser(trainer).parse_args(words[:at])
    launch = _launch(trainer, options.script, words[at + 1 :], options.set, options.command)

    from plimsoll.convert.shown import config_text, table_text
    from plimsoll.run.files import write_whole

    found = trainer.convert(launch, options.version, _cards(options.cluster))
    planned = options.plan or options.suggest
    if planned and options.cluster is None:
        _check_cards_here(found)
    text = config_text(found)
    if options.out is not None:
        write_whole(Path(options.out), text)
    else:
        show(text.removesuffix("\n"))
    print(f"{table_text(found)}\n\n{_written(options.out, found.job)}", file=sys.stderr)
    if planned:
        flags = {"--cluster": options.cluster, "--host-memory": options.host_memory}
        _plan(text, options.out, flags, options.suggest)


def _cards(cluster: str | None) -> int | None:
    """Of a machine; None where that is not said."""
    from plimsoll.machine.hardware import parse_cluster

    return None if cluster is None else len(parse_cluster(cluster, 1, None).nodes[0].cards) or None


def _check_cards_here(found: Converted) -> None:
    """Raise ConfigError if this machine has fewer cards than the command takes: it is another one
    that the command is for."""
    from plimsoll.convert.result import cards_of_machine
    from plimsoll.machine.hardware import find_machine
    from plimsoll.run.counting import counted

    needed, here = cards_of_machine(found), len(find_machine().cards)
    if here < needed:
        raise ConfigError(
            f"A plan is asked for without --cluster. The command takes {counted(needed, 'card')} "
            f"of each machine, and this machine has {here or 'none'}: a plan for it says nothing "
            f"of the command. Say what cards they are, such as --cluster {needed}xA100-80GB."
        )


def _written(out: str | None, job: str) -> str:
    if out is None:
        return f"-o FILE writes the config; then `plimsoll {job} FILE --dry-run`."
    return f"{out} is written: `plimsoll {job} {out} --dry-run` checks it with its files."


def _launch(
    trainer: _Trainer,
    script: str | None,
    command: Sequence[str],
    given: Sequence[str],
    number: int | None,
) -> Launch:
    """The one command that trains. Raises ConfigError where there is none, or several."""
    from plimsoll.convert.launch import find_launches, script_launches

    if script is not None and command:
        raise ConfigError("A script and a command are given. Give one of them.")
    if script is None and not command:
        raise ConfigError(
            f"Neither a script nor a command is given. Write `plimsoll {trainer.command} "
            f"SCRIPT.sh`, or `plimsoll {trainer.command} -- {trainer.example}`."
        )
    if script is not None and script.endswith((".yaml", ".yml", ".json")):
        raise ConfigError(
            f"{script} is no shell script. Give the command that reads it: `plimsoll "
            f"{trainer.command} -- {trainer.example}`."
        )
    if script is None:
        found, where = find_launches(command, trainer.programs()), "The command"
    else:
        variables = {**trainer.variables, **_variables(given)}
        found, where = script_launches(script, variables, trainer.programs()), script
    if not found:
        raise ConfigError(
            f"{where} starts no program of {trainer.name}'s: {trainer.missing}. What it sources or "
            "calls is not read: give that."
        )
    return _chosen(trainer, found, where, number)


def _chosen(trainer: _Trainer, found: Sequence[Launch], where: str, number: int | None) -> Launch:
    training = [one for one in found if one.program not in trainer.beside] or [*found]
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
        if not equals or not (name.isidentifier() or name.isdigit()):
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
