"""Read a config file and dotted flags, check them, and return the run that they describe."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.config.load import read_tree_of, validate, with_preset
from plimsoll.config.yaml_tree import Origins, Tree
from plimsoll.resolve.job import ConfigT, Job
from plimsoll.resolve.rules.settings import check_agreement
from plimsoll.resolve.run_spec import RunSpec, resolve


def read_spec(
    job: Job[ConfigT], path: str, flags: Sequence[str] = ()
) -> tuple[RunSpec[ConfigT], Origins]:
    """Return the run that a config file describes, and where each key was written.

    `flags` are arguments such as `["--run.steps", "10"]`.

    Raises:
        ConfigError: (exit code 2) a key is wrong by itself.
        SettingsConflict: (exit code 4) all problems are between keys.

    Either error lists every problem, where it was written, and what to write instead.
    """
    return spec_of(job, read_tree_of(path, flags))


def spec_of(job: Job[ConfigT], tree: Tree) -> tuple[RunSpec[ConfigT], Origins]:
    """Return the result of `read_spec` for a config that is a tree in memory."""
    tree = with_preset(tree, job.presets, job.preset)
    spec = resolve(job, validate(job.config, tree))
    check_agreement(spec, tree.origins)
    return spec, tree.origins


def load_spec(job: Job[ConfigT], path: str, flags: Sequence[str] = ()) -> RunSpec[ConfigT]:
    """Return only the run from `read_spec`."""
    return read_spec(job, path, flags)[0]
