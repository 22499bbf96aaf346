"""What must agree in a config that learns from the trajectories of another run, or only samples
some."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.problems import Problem, Section
from plimsoll.config.rl import RlConfig
from plimsoll.spec.choices import advantage_needs


def replayed(config: RlConfig) -> Iterator[Problem]:
    """Settings that would need engines."""
    at = Section("", config)
    if config.run.eval_every is not None:
        why = "A replay (rollout.replay) starts no engine that could answer held-out prompts."
        fix = "run.eval_every: null, and `plimsoll eval` of the run afterwards"
        yield at.conflict("run.eval_every", why, fix, "replay-without-engines")
    if "greedy_S" in advantage_needs(config.algorithm.advantage):
        why = "It compares with greedy responses, which are not among the trajectories of a run "
        why += "(rollout.replay)."
        fix = "another advantage, such as rloo, or leave rollout.replay out"
        yield at.conflict("algorithm.advantage", why, fix, "replay-without-engines")


def without_learning(config: RlConfig) -> Iterator[Problem]:
    """Settings of `plimsoll sample` that only a run which learns can follow."""
    at = Section("", config)
    if config.rollout.replay is not None:
        why = "plimsoll sample learns nothing, and it samples by itself."
        fix = "leave rollout.replay out, or plimsoll rl"
        yield at.conflict("rollout.replay", why, fix, "replay-without-engines")
    if config.rollout.sleep_level > 0:
        why = "plimsoll sample trains nothing that engines would make room for."
        yield at.conflict("rollout.sleep_level", why, "rollout.sleep_level: 0", "sleep-not-shared")
