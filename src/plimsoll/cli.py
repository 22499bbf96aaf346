"""The command `plimsoll`: reads and checks everything before anything heavy is imported.

Exit codes: 0 done; 2 wrong usage, config or input; 3 does not fit; 4 settings that cannot work
together; 130 stopped by Ctrl-C; 1 anything else. Errors are one readable block on stderr;
`--debug` adds the traceback.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TypeVar

from plimsoll import __version__
from plimsoll.errors import ConfigError, PlimsollError

if TYPE_CHECKING:
    from plimsoll.config.base import Settings
    from plimsoll.config.jobs import JobConfig

    ConfigT = TypeVar("ConfigT", bound=JobConfig)

_INTERRUPTED = 130

_HELP = """\
Plimsoll: RLHF that knows its load line.

  plimsoll demo                             the whole story on a CPU, in minutes
  plimsoll sft CONFIG.yaml [--key value]    supervised fine-tuning
  plimsoll ppo CONFIG.yaml [--key value]    proximal policy optimisation

  --dry-run    print the resolved config and what would run where; start nothing
  --debug      show the traceback of an error
  --help       this; `plimsoll ppo --help` lists every key of a config,
               `plimsoll ppo --help actor.zero` those of a section
  --version    print the version

Each key of a config can be given as a flag, such as `--run.steps 100`, which wins over the file.
"""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are Plimsoll's."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. `{self.prog} --help` shows what there is.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code. arguments: default sys.argv[1:]."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if not debug and arguments is None:  # the process is ours
        sys.excepthook = _show_unexpected
    try:
        _dispatch([word for word in words if word != "--debug"])
    except PlimsollError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _dispatch(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(_HELP, end="")
    elif words[0] == "--version":
        print(f"plimsoll {__version__}")
    elif words[0] in _COMMANDS:
        _COMMANDS[words[0]](words[1:])
    else:
        what = "option" if words[0].startswith("-") else "command"
        close = difflib.get_close_matches(words[0], [*_COMMANDS, "--help", "--version"], n=1)
        near = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"There is no {what} {words[0]!r}.{near} Commands: {', '.join(_COMMANDS)}."
        )


def _demo(words: list[str]) -> None:
    parser = _Parser(
        prog="plimsoll demo",
        description="Make a small task and model, SFT it, improve it by PPO, and show how well.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--directory", default="runs/demo", help="where all is written (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of task, model and runs (%(default)s)")
    options = parser.parse_args(words)

    from plimsoll.recipes.demo import run_demo

    run_demo(options.directory, options.seed)


def _sft(words: list[str]) -> None:
    from plimsoll.config.jobs import SftConfig

    config = _job("sft", SftConfig, words)
    if config is not None:
        from plimsoll.recipes.sft import run_sft

        run_sft(config)


def _ppo(words: list[str]) -> None:
    from plimsoll.config.jobs import PpoConfig

    config = _job("ppo", PpoConfig, words)
    if config is not None:
        from plimsoll.recipes.ppo import run_ppo

        run_ppo(config)


_COMMANDS: Mapping[str, Callable[[list[str]], None]] = {"demo": _demo, "sft": _sft, "ppo": _ppo}


def _job(name: str, model: type[ConfigT], words: list[str]) -> ConfigT | None:
    """The checked config that is to run; None where help or a dry run was asked for, and given."""
    from plimsoll.config.flags import split_flags
    from plimsoll.config.load import load_config

    rest, flags = split_flags(words)
    options = _job_options(name, model, rest)
    if options.help is not None:
        print(_job_help(name, model, options.help))
        return None
    config = load_config(model, options.config, flags)

    from plimsoll.recipes.preflight import check_inputs

    check_inputs(config)
    if options.dry_run:
        print(_dry_run(config))
        return None
    return config


def _job_options(name: str, model: type[Settings], words: list[str]) -> argparse.Namespace:
    parser = _Parser(prog=f"plimsoll {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("config", nargs="?")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-h", "--help", nargs="?", const="")
    options, unknown = parser.parse_known_args(words)
    if unknown:
        raise ConfigError(_unknown_option(name, model, unknown[0]))
    if options.config is None and options.help is None:
        raise ConfigError(f"No config file is given. Write `plimsoll {name} CONFIG.yaml`.")
    return options


def _unknown_option(name: str, model: type[Settings], word: str) -> str:
    from plimsoll.config.keys import keys_of

    if not word.startswith("-"):
        return f"One config file is needed, and {word!r} is given too. Flags are --section.key."
    short = word.partition("=")[0].lstrip("-").replace("-", "_")
    flags = [f"--{key.name}" for key in keys_of(model) if key.path[-1] == short]
    close = difflib.get_close_matches(word, ["--dry-run", "--debug", "--help"], n=1)
    near = " or ".join([*close, *flags])
    return f"There is no option {word!r}. " + (
        f"Did you mean {near}?" if near else f"`plimsoll {name} --help` lists all of them."
    )


def _job_help(name: str, model: type[Settings], section: str) -> str:
    from plimsoll.config.describe import describe_keys

    width = min(shutil.get_terminal_size().columns, 100)
    keys = describe_keys(model, section, width)
    if section:
        return keys.lstrip("\n")
    return (
        f"plimsoll {name} CONFIG.yaml [--section.key VALUE ...] [--dry-run] [--debug]\n"
        f"plimsoll {name} --help [SECTION]\n\n"
        f"Example: plimsoll {name} {name}.yaml --run.directory runs/one --run.steps 100\n\n"
        f"The keys, for the file (nested) and as flags. What the file says, a flag overrides.\n"
        f"Relative paths are relative to the current directory.\n{keys}"
    )


def _dry_run(config: JobConfig) -> str:
    from plimsoll.config.describe import dump_config
    from plimsoll.recipes.placement import placement

    return f"{dump_config(config)}\n{placement(config)}\nDry run: nothing was started."


def _show_unexpected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """For what nobody foresaw (Python then ends with exit code 1)."""
    last = traceback.extract_tb(trace)[-1:]
    place = f" at {last[0].filename}:{last[0].lineno}" if last else ""
    print(
        f"error: unexpected {kind.__name__}: {error}{place}\n"
        f"Run the command again with --debug for the traceback.",
        file=sys.stderr,
    )
