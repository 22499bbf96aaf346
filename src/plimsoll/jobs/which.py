"""Find the job that a config file belongs to, for commands that do not name the job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from plimsoll.config.flags import apply_flags, parse_flags
from plimsoll.config.load import read_config_text, read_tree_of, schema_problems
from plimsoll.config.run import JobConfig
from plimsoll.config.yaml_tree import Tree, read_tree
from plimsoll.errors import ConfigError, SettingsConflict
from plimsoll.jobs import JOBS
from plimsoll.resolve.job import Job
from plimsoll.resolve.load import load_spec
from plimsoll.resolve.run_spec import RunSpec, resolve


def load_any(path: str, flags: Sequence[str] = ()) -> RunSpec[Any]:
    """Return the run that a config file describes; the job is found from the file.

    If the first line names a job, such as `# dpo: ...`, it is this job. Otherwise it is the only
    job whose schema accepts all keys of the file.

    Raises:
        ConfigError, SettingsConflict: as `load_spec`. If no job accepts the file, the problems are
            those for the job with the fewest. If several jobs accept it, the error asks for a first
            line that names the job.
    """
    return load_spec(JOBS[_find_job(path, flags)], path, flags)


def named_job(text: str) -> str | None:
    """Return the job that the first line of a config's text names; None if it names none."""
    match = re.match(r"#\s*(\w+)", text)
    return match[1] if match and match[1] in JOBS else None


def other_job_hint(job: str, path: str) -> str:
    """Return a hint if the config's first line names another job than the command, else ""."""
    named = named_job(read_config_text(path))
    if named in (None, job):
        return ""
    return f"\nIts first line names another job: `plimsoll {named} {path}`?"


def _find_job(path: str, flags: Sequence[str]) -> str:
    text = read_config_text(path)
    tree = apply_flags(read_tree(text, path), parse_flags(flags))
    if named := named_job(text):
        return _meant(named, tree)
    problems = {
        name: len(list(schema_problems(job.config, tree)))
        for name, job in JOBS.items()
        if job is job_of(job.config)  # not a preset of a job, nor a part of one
    }
    fewest = min(problems.values())
    nearest = [job for job, count in problems.items() if count == fewest]
    if fewest == 0:
        nearest = [job for job in nearest if _settings_agree(job, path, flags)] or nearest
    if len(nearest) > 1 and fewest == 0:
        raise ConfigError(
            f"{path} could be a config for {' or '.join(nearest)}. Say which in its first line, "
            f"such as `# {nearest[-1]}`."
        )
    return nearest[0]


ON_POLICY = "opd"


def meant_job(command: str, path: str, flags: Sequence[str]) -> Job[Any]:
    """Return the job of a command: `distill` on prompts, which engines answer, is `opd`."""
    return JOBS[_meant(command, read_tree_of(path, flags))]


def _meant(name: str, tree: Tree) -> str:
    return ON_POLICY if name == "distill" and "rollout" in tree.values else name


def _settings_agree(job: str, path: str, flags: Sequence[str]) -> bool:
    try:
        load_spec(JOBS[job], path, flags)
    except ConfigError:
        return False
    except SettingsConflict:
        return True
    return True


def spec_of(config: JobConfig) -> RunSpec[Any]:
    """Return the run that a config object describes, without checking that its keys agree."""
    return resolve(job_of(type(config)), config)


def job_of(config: type[JobConfig]) -> Job[Any]:
    """Return the job whose configs have this type."""
    return next(job for job in JOBS.values() if job.config is config)
