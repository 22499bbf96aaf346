"""From a config file and dotted flags to what they mean."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.config.load import read_config
from plimsoll.config.yaml_tree import Origins
from plimsoll.spec.job import ConfigT, Job
from plimsoll.spec.rules.settings import check_agreement
from plimsoll.spec.run_spec import RunSpec, resolve


def read_spec(
    job: Job[ConfigT], path: str, flags: Sequence[str] = ()
) -> tuple[RunSpec[ConfigT], Origins]:
    """A run of a job, and where each of its keys was written.

    flags: such as `["--run.steps", "10"]`.

    Raises ConfigError (exit code 2) or SettingsConflict (4) with every problem, where it was
    written, and what to write instead.
    """
    config, origins = read_config(job.config, path, flags)
    spec = resolve(job, config)
    check_agreement(spec, origins)
    return spec, origins


def load_spec(job: Job[ConfigT], path: str, flags: Sequence[str] = ()) -> RunSpec[ConfigT]:
    """As `read_spec`, without where keys were written."""
    return read_spec(job, path, flags)[0]
