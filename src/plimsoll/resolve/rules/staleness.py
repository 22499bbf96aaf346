"""Rules about a run that samples while it learns (`rollout.staleness`)."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.problems import Problem, Section
from plimsoll.config.rl import RlConfig
from plimsoll.resolve.choices import advantage_needs, needs_sampler


def check_staleness(config: RlConfig) -> Iterator[Problem]:
    """Yield problems of a config whose steps learn from responses of older weights."""
    at, rollout = Section("", config), config.rollout
    if rollout.staleness == 0:
        return
    yield from _correction(at, config)
    if rollout.replay is not None:  # nothing is sampled
        return
    wait = "rollout.staleness: 0 (engines and ranks take turns)"
    given = f"With rollout.staleness: {rollout.staleness} engines sample while the ranks train"
    if config.cluster.where == "local":
        why = f"{given}, and this is one process."
        yield at.conflict("cluster.where", why, f"cluster.where: ray, or {wait}", "staleness-cards")
    if rollout.placement == "shared":
        why = f"{given}: the same cards would do both, and nothing would be faster."
        fix = f"rollout.placement: own, with a card for each engine, or {wait}"
        yield at.conflict("rollout.placement", why, fix, "staleness-cards")
    if config.actor.adapter is not None and rollout.engine.takes_adapter_alone:
        why = f"{given}, and an engine has room for one adapter: requests that began with an "
        why += "older one would lose it."
        key = f"rollout.{rollout.engine_name}.adapter"
        yield at.conflict(key, why, f"{key}: merged, or {wait}", "staleness-adapter")
    if "greedy_S" in advantage_needs(config.algorithm.advantage):
        why = "It compares with greedy responses of the weights that learn, and these are not "
        why += f"sampled before they exist ({given.lower()})."
        fix = f"another advantage, such as rloo, or {wait}"
        yield at.conflict("algorithm.advantage", why, fix, "staleness-groups")
    dynamic = config.batch.dynamic_sampling
    if dynamic is not None and dynamic.oversampling > 1:
        why = f"{given}: further groups are in flight anyway, and nothing would read it."
        fix = "batch.dynamic_sampling.oversampling: 1"
        yield at.conflict("batch.dynamic_sampling.oversampling", why, fix, "staleness-groups")


def _correction(at: Section, config: RlConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.correction is None and not needs_sampler(algorithm.policy_loss):
        why = f"rollout.staleness: {config.rollout.staleness} lets a step learn from responses of "
        why += "older weights, and without a correction it would take them for its own."
        fix = "algorithm.correction: {name: truncate}, or rollout.staleness: 0"
        yield at.conflict("rollout.staleness", why, fix, "staleness-correction")
