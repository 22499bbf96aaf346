"""Rules about advantages, policy losses and corrections: what else a config needs for them.

A run that samples while it learns (`rollout.staleness`) needs a correction.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import get_args

from plimsoll.config.problems import Problem, Section
from plimsoll.config.rl import RlConfig
from plimsoll.resolve.choices import (
    AdvantageNeed,
    advantage_needs,
    is_known,
    needs_sampler,
    unknown_needs,
)


def check_advantage(config: RlConfig) -> Iterator[Problem]:
    """Yield problems of the advantage and its inputs, of the policy loss and its aggregation."""
    if is_known("advantage", config.algorithm.advantage):
        yield from _critic(config)
        yield from _groups(config)
    yield from _losses(config)


def _critic(config: RlConfig) -> Iterator[Problem]:
    at, name = Section("", config), config.algorithm.advantage.name
    takes_values = "values_L" in advantage_needs(config.algorithm.advantage)
    if takes_values and config.critic is None:
        why = f"algorithm.advantage: {name} takes the values of a critic, and there is none."
        fix = "critic.model.path: MODEL (often the actor's), or an advantage without a critic, "
        fix += "such as algorithm.advantage.name: grpo (`plimsoll grpo`)"
        yield at.invalid("critic", why, fix, "critic-needed")
    if not takes_values and config.critic is not None:
        why = f"algorithm.advantage: {name} takes no values: the critic would learn for nobody."
        fix = "leave critic out, or algorithm.advantage.name: gae"
        yield at.conflict("critic", why, fix, "critic-unused")
    yield from _critic_steps(config, takes_values)


def _critic_steps(config: RlConfig, takes_values: bool) -> Iterator[Problem]:
    at, algorithm = Section("algorithm", config.algorithm), config.algorithm
    sequences = config.batch.prompts * config.batch.responses
    batches = algorithm.critic_mini_batches
    if batches is not None and (batches % algorithm.mini_batches or sequences % batches):
        why = f"It must be a multiple of algorithm.mini_batches ({algorithm.mini_batches}) and "
        why += f"divide the {sequences} trajectories of a step (batch.prompts * batch.responses)."
        fix = f"algorithm.critic_mini_batches: {algorithm.mini_batches}"
        yield at.invalid("critic_mini_batches", why, fix, "mini-batches")
    if takes_values:
        return
    for key, value in (
        ("critic_mini_batches", batches),
        ("critic_warmup_steps", algorithm.critic_warmup_steps),
    ):
        if value:
            why = f"algorithm.advantage: {algorithm.advantage.name} has no critic."
            yield at.conflict(key, why, f"leave algorithm.{key} out", "critic-unused")


def _groups(config: RlConfig) -> Iterator[Problem]:
    at, choice = Section("", config), config.algorithm.advantage
    needs, responses = advantage_needs(choice), config.batch.responses
    if "group_S" in needs and responses < 2:
        why = f"algorithm.advantage: {choice.name} compares the responses to a prompt with one "
        why += "another; one alone would always have the advantage 0, and nothing be learned."
        fix = "batch.responses: 8, or an advantage without groups: reinforce_pp, batch_mean, gae"
        yield at.invalid("batch.responses", why, fix, "group-of-one")
    if config.batch.dynamic_sampling is not None and responses < 2:
        why = "The rewards of a group of one response are always equal, so every group would be "
        why += "replaced."
        fix = "batch.responses: 8, or leave batch.dynamic_sampling out"
        yield at.conflict("batch.dynamic_sampling", why, fix, "group-of-one")
    yield from _dynamic_part(config)
    rollout, sleep_key = config.rollout, config.rollout.engine.sleep_key
    if config.batch.dynamic_sampling and config.scoring_models and sleep_key is not None:
        why = "Reward models would score each round of samples before the engines sleep, on the "
        why += "same cards."
        fix = f"leave rollout.{rollout.engine_name}.{sleep_key} out, or no "
        fix += "batch.dynamic_sampling or reward models"
        yield at.conflict("batch.dynamic_sampling", why, fix, "dynamic-awake")
    for name in unknown_needs(choice):
        known = get_args(AdvantageNeed)
        why = f"The estimator has the positional parameter {name!r}, and there is none to give. "
        why += f"Known: {', '.join(known)}; options are keyword-only."
        near = get_close_matches(name, known, n=1)
        fix = f"call it {near[0]}, or " if near else ""
        fix += f"put {name} after a `*`, as an option"
        yield at.invalid("algorithm.advantage.name", why, fix, "advantage-needs")


def _dynamic_part(config: RlConfig) -> Iterator[Problem]:
    dynamic, parts = config.batch.dynamic_sampling, config.parts
    if dynamic is None or dynamic.by is None or dynamic.by in parts:
        return
    fix = f"one of {', '.join(parts)}, or leave it out for their weighted sum"
    near = get_close_matches(dynamic.by, parts, n=1)
    fix = f"did you mean {near[0]}? Else {fix}" if near else fix
    at = Section("batch.dynamic_sampling", dynamic)
    yield at.invalid("by", "It is no part of the reward.", fix, "reward-name")


def _losses(config: RlConfig) -> Iterator[Problem]:
    at, algorithm = Section("algorithm", config.algorithm), config.algorithm
    if algorithm.correction is not None and needs_sampler(algorithm.policy_loss):
        why = f"algorithm.policy_loss: {algorithm.policy_loss.name} takes the sampler's log-probs "
        why += "itself; the difference would be made up for twice."
        fix = "algorithm.correction: null, or another algorithm.policy_loss"
        yield at.conflict("correction", why, fix, "corrected-twice")
    if algorithm.aggregation_tokens is not None and algorithm.aggregation != "constant":
        why = f"algorithm.aggregation: {algorithm.aggregation} divides by no constant."
        fix = "algorithm.aggregation: constant, or leave algorithm.aggregation_tokens out"
        yield at.conflict("aggregation_tokens", why, fix, "aggregation-unused")
    if algorithm.policy_loss.name == "reinforce" and algorithm.epochs * algorithm.mini_batches > 1:
        why = "It knows no old policy, so from a step's second update on its gradient is of a "
        why += "policy that sampled nothing."
        fix = "algorithm.policy_loss.name: clip, or one algorithm.epochs and mini_batches"
        yield at.conflict("policy_loss", why, fix, "reinforce-several")
    kl = algorithm.kl
    if kl is not None and kl.ratio_corrected and kl.place != "loss":
        why = f"algorithm.kl.place: {kl.place} has no gradient to correct."
        fix = "algorithm.kl.place: loss, or leave algorithm.kl.ratio_corrected out"
        yield at.conflict("kl.ratio_corrected", why, fix, "kl-unused")


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
