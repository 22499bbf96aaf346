"""Which job a config file is for, where the command does not say it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from plimsoll.config.flags import apply_flags, parse_flags
from plimsoll.config.load import read_config_text, schema_problems
from plimsoll.config.run import JobConfig
from plimsoll.config.yaml_tree import read_tree
from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll.jobs import JOBS
from plimsoll.spec.job import Job
from plimsoll.spec.load import load_spec
from plimsoll.spec.run_spec import RunSpec, resolve


def load_any(path: str, flags: Sequence[str] = ()) -> RunSpec[Any]:
    """The run of whichever job the file is for: the one that its first line names, such as
    `# dpo: ...`, else the only one that takes all of its keys.

    Raises as `load_spec`; where no job takes the file, with the problems of the one that comes
    nearest, and where several do, ConfigError that asks for the first line.
    """
    return load_spec(JOBS[_job_of(path, flags)], path, flags)


def named_job(text: str) -> str | None:
    """The job that the first line of a config's text names, as config.yaml of a run does."""
    named = re.match(r"#\s*(\w+)", text)
    return named[1] if named and named[1] in JOBS else None


def meant_for(job: str, path: str) -> str:
    """What to add to the problems of a config that was given to the command `job`, where its first
    line names another; else "". Raises ConfigError for a file that cannot be read."""
    named = named_job(read_config_text(path))
    if named in (None, job):
        return ""
    return f"\nIts first line names another job: `plimsoll {named} {path}`?"


def _job_of(path: str, flags: Sequence[str]) -> str:
    text = read_config_text(path)
    if named := named_job(text):
        return named
    tree = apply_flags(read_tree(text, path), parse_flags(flags))
    problems = {
        name: len(list(schema_problems(job.config, tree)))
        for name, job in JOBS.items()
        if job is job_of(job.config)  # not a preset of it, nor a part
    }
    fewest = min(problems.values())
    nearest = [job for job, count in problems.items() if count == fewest]
    if fewest == 0:
        nearest = [job for job in nearest if _agrees(job, path, flags)] or nearest
    if len(nearest) > 1 and fewest == 0:
        raise ConfigError(
            f"{path} could be a config for {' or '.join(nearest)}. Say which in its first line, "
            f"such as `# {nearest[-1]}`."
        )
    return nearest[0]


def _agrees(job: str, path: str, flags: Sequence[str]) -> bool:
    """Whether the keys make sense together for this job; mere conflicts are told later."""
    try:
        load_spec(JOBS[job], path, flags)
    except ConfigError:
        return False
    except SettingsConflict:
        return True
    return True


def spec_of(config: JobConfig) -> RunSpec[Any]:
    """The run of a config that was made in Python, by its type. Agreement between its keys is not
    looked at."""
    return resolve(job_of(type(config)), config)


def job_of(config: type[JobConfig]) -> Job[Any]:
    """The job whose files have this type."""
    return next(job for job in JOBS.values() if job.config is config)
