"""The commands that train: `plimsoll JOB CONFIG.yaml`, with the name of a job. All is checked,
and planned, before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from plimsoll.cli.options import Parser, show
from plimsoll.errors import ConfigError

if TYPE_CHECKING:
    from plimsoll.config.base import Settings
    from plimsoll.config.jobs import JobConfig
    from plimsoll.memory.plan.plan import Plan


RECIPES: Mapping[str, str] = {
    "sft": "sft:run_sft",
    "distill": "distill:run_distill",
    "rm": "reward_model:run_rm",
    "prm": "process_reward:run_prm",
    "dpo": "preference:run_dpo",
    "kto": "kto:run_kto",
    "ppo": "ppo:run_ppo",
}
"""By the name of a job's command: the file in recipes/ and its function that runs the job."""


def run_job(name: str, words: list[str]) -> None:
    """The command of the job of this name."""
    config = _checked(name, words)
    if config is not None:
        file, function = RECIPES[name].split(":")
        vars(import_module(f"plimsoll.recipes.{file}"))[function](config)


def _checked(name: str, words: list[str]) -> JobConfig | None:
    """The checked config that is to run; None where help or a dry run was asked for, and given."""
    from plimsoll.config.flags import split_flags
    from plimsoll.config.load import read_config
    from plimsoll.config.which import JOBS, meant_for

    model = JOBS[name]
    rest, flags = split_flags(words)
    options = _job_options(name, model, rest)
    if options.help is not None:
        show(_job_help(name, model, options.help))
        return None
    try:
        config, origins = read_config(model, options.config, flags)
    except ConfigError as error:
        raise ConfigError(f"{error}{meant_for(name, options.config)}") from error

    from plimsoll.recipes.preflight import check_inputs

    check_inputs(config, origins)
    from plimsoll.recipes.planning import plan_run, refuse_conflicts, require_fit, warnings_of

    plan = plan_run(config)
    if options.dry_run:
        show(_dry_run(config, plan))
        return None
    if isinstance(plan, str):
        print(plan, file=sys.stderr)
        return config
    refuse_conflicts(plan.problems)
    if not options.force:
        require_fit(plan)
    for warning in warnings_of(plan):
        print(warning, file=sys.stderr)
    return config


def _job_options(name: str, model: type[Settings], words: list[str]) -> argparse.Namespace:
    parser = Parser(prog=f"plimsoll {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("config", nargs="?")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--force", action="store_true")
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
    keys = [key for key in keys_of(model) if len(key.path) > 1]  # a section has no value
    flags = [f"--{key.name}" for key in keys if key.path[-1] == short]
    close = difflib.get_close_matches(word, ["--dry-run", "--force", "--debug", "--help"], n=1)
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
        f"plimsoll {name} CONFIG.yaml [--section.key VALUE ...]\n"
        f"    [--dry-run] [--force] [--debug]\n"
        f"plimsoll {name} --help [SECTION]\n\n"
        f"Example: plimsoll {name} {name}.yaml --run.directory runs/one --run.steps 100\n\n"
        f"The keys, for the file (nested) and as flags. What the file says, a flag\n"
        f"overrides. Relative paths are relative to the current directory.\n{keys}"
    )


def _dry_run(config: JobConfig, plan: Plan | str) -> str:
    from plimsoll.config.describe import dump_config
    from plimsoll.recipes.placement import placement
    from plimsoll.recipes.planning import shown_plan

    memory = plan if isinstance(plan, str) else shown_plan(plan)
    return (
        f"{dump_config(config)}\n{placement(config)}\nMemory\n{memory}\n\n"
        "Dry run: nothing was started."
    )
