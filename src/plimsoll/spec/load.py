"""From a config file and dotted flags to what they mean."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.config.load import read_tree_of, validate, with_preset
from plimsoll.config.yaml_tree import Origins, Tree
from plimsoll.spec.job import ConfigT, Job
from plimsoll.spec.rules.settings import check_agreement
from plimsoll.spec.run_spec import RunSpec, resolve


def read_spec(
    job: Job[ConfigT], path: str, flags: Sequence[str] = ()
) -> tuple[RunSpec[ConfigT], Origins]:
    """Return a run of a job, and where each of its keys was written.

    `flags` are arguments such as `["--run.steps", "10"]`.

    Raises:
        ConfigError: (exit code 2) a key is wrong by itself.
        SettingsConflict: (exit code 4) all problems are between keys. Either has every problem,
            where it was written, and what to write instead.
    """
    return spec_of(job, read_tree_of(path, flags))


def spec_of(job: Job[ConfigT], tree: Tree) -> tuple[RunSpec[ConfigT], Origins]:
    """Return the same as `read_spec` for a config that is read already, or was made."""
    tree = with_preset(tree, job.presets, job.preset)
    spec = resolve(job, validate(job.config, tree))
    check_agreement(spec, tree.origins)
    return spec, tree.origins


def load_spec(job: Job[ConfigT], path: str, flags: Sequence[str] = ()) -> RunSpec[ConfigT]:
    """Return the run of `read_spec`, without where keys were written."""
    return read_spec(job, path, flags)[0]
