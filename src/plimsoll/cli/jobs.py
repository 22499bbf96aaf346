"""The commands that train: `plimsoll JOB CONFIG.yaml`.

Everything is checked and planned before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
from typing import TYPE_CHECKING, Any

from plimsoll.cli.options import REPLAY_FLAG, Parser, flags_of, show
from plimsoll.config.secrets import mask_urls
from plimsoll.errors import ConfigError
from plimsoll.run.output import say

if TYPE_CHECKING:
    from plimsoll.memory.weigh import Plan
    from plimsoll.resolve.job import Job
    from plimsoll.resolve.run_spec import RunSpec


def run_job(name: str, words: list[str]) -> None:
    """Run `plimsoll NAME` with these words."""
    from plimsoll.jobs import JOBS

    spec = _checked(JOBS[name], words)
    if spec is not None:
        from plimsoll.commands.run import run

        run(*spec)


def _checked(job: Job[Any], words: list[str]) -> tuple[RunSpec[Any], Plan | str] | None:
    """Return the checked run and its plan; or print help or the dry run, and return None.

    The plan is a text if the run cannot be planned.
    """
    from plimsoll.config.flags import split_flags
    from plimsoll.jobs.which import meant_job, other_job_hint
    from plimsoll.resolve.load import read_spec

    rest, flags = split_flags(words)
    options = _job_options(job, rest)
    if options.help is not None:
        show(_job_help(job, options.help))
        return None
    flags += flags_of({"--replay": (REPLAY_FLAG, options.replay)}, flags)
    typed, job = job.name, meant_job(job.name, options.config, flags)
    try:
        spec, origins = read_spec(job, options.config, flags)
    except ConfigError as error:
        raise ConfigError(f"{error}{other_job_hint(typed, options.config)}") from error

    from plimsoll.commands.preflight import check_inputs, check_rows
    from plimsoll.run.phases import tell_of_run

    if not options.dry_run:
        tell_of_run(spec.run, spec.cluster, is_open=False)
    check_inputs(spec, origins)
    if options.dry_run:
        check_rows(spec, origins)
    from plimsoll.commands.planning import plan_run, refuse_conflicts, require_fit, warnings_of

    plan = plan_run(spec)
    if options.dry_run:
        show(_dry_run(spec, plan))
        return None
    if isinstance(plan, str):
        say(plan)
        return spec, plan
    refuse_conflicts(plan.problems)
    if not options.force:
        require_fit(plan)
    for warning in warnings_of(plan):
        say(warning)
    return spec, plan


def _job_options(job: Job[Any], words: list[str]) -> argparse.Namespace:
    parser = Parser(job.name, add_help=False)
    parser.add_argument("config", nargs="?")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--replay")
    parser.add_argument("-h", "--help", nargs="?", const="")
    options, unknown = parser.parse_known_args(words)
    if unknown:
        raise ConfigError(_unknown_option(job, unknown[0]))
    if options.config is None and options.help is None:
        raise ConfigError(f"No config file is given. Write `plimsoll {job.name} CONFIG.yaml`.")
    return options


def _unknown_option(job: Job[Any], word: str) -> str:
    from plimsoll.config.keys import keys_of

    if not word.startswith("-"):
        word = mask_urls(repr(word))
        return f"One config file is needed, and {word} is given too. Flags are --section.key."
    short = word.partition("=")[0].lstrip("-").replace("-", "_")
    keys = [key for key in keys_of(job.config) if len(key.path) > 1]  # a section has no value
    flags = [f"--{key.name}" for key in keys if key.path[-1] == short]
    close = difflib.get_close_matches(
        word, ["--dry-run", "--force", "--replay", "--debug", "--help"], n=1
    )
    near = " or ".join([*close, *flags])
    return f"There is no option {mask_urls(repr(word))}. " + (
        f"Did you mean {near}?" if near else f"`plimsoll {job.name} --help` lists all of them."
    )


def _job_help(job: Job[Any], section: str) -> str:
    from plimsoll.config.keys import describe_keys

    width = min(shutil.get_terminal_size().columns, 100)
    name, keys, preset = job.name, describe_keys(job.config, section, width), _set_by_preset(job)
    if section:
        inside = [line for line in preset if line.strip().startswith(f"{section}.")]
        preset_text = "\n".join([f"`plimsoll {name}` sets, in place of defaults:", *inside, ""])
        return (preset_text if inside else "") + keys.lstrip("\n")
    preset_text = "\n".join(["It is `plimsoll rl` with these defaults:", *preset, "", ""])
    return (
        f"plimsoll {name} CONFIG.yaml [--section.key VALUE ...]\n"
        f"    [--dry-run] [--force] [--debug]\n"
        f"plimsoll {name} --help [SECTION]\n\n"
        f"Example: plimsoll {name} {name}.yaml --run.directory runs/one --run.steps 100\n\n"
        f"{preset_text if preset else ''}"
        f"The keys, for the file (nested) and as flags. What the file says, a flag\n"
        f"overrides. Relative paths are relative to the current directory.\n{keys}"
    )


def _set_by_preset(job: Job[Any]) -> list[str]:
    """Return the help's lines about the preset of a command; empty if it has no preset.

    Each value of the preset has a line, and so has each value that differs in its paper.
    """
    from plimsoll.config.load import leaves
    from plimsoll.config.problems import show as written

    if job.preset is None:
        return []
    preset = job.presets[job.preset]
    values = leaves(preset.values)
    lines = [f"  {'.'.join(path)}: {written(value)}" for path, value in values.items()]
    papers = leaves({} if preset.paper is None else preset.paper({}))
    return lines + [
        f"  {'.'.join(path)}: {written(value)}   (with --variant paper)"
        for path, value in papers.items()
        if path not in values or values[path] != value
    ]


def _dry_run(spec: RunSpec[Any], plan: Plan | str) -> str:
    from plimsoll.commands.placement import placement
    from plimsoll.commands.planning import render_short_plan
    from plimsoll.config.keys import dump_config
    from plimsoll.config.load import KEY, render_preset

    values = spec.config.model_dump(mode="json")
    name = values.get(KEY)
    preset = "" if name is None else f"{render_preset(name, spec.job.presets, values)}\n\n"
    memory = plan if isinstance(plan, str) else render_short_plan(plan)
    return (
        f"{dump_config(spec.config)}\n{placement(spec)}\n{preset}Memory\n{memory}\n\n"
        "Dry run: nothing was started."
    )
