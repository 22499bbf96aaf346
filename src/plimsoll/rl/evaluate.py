"""Held-out prompts answered, and the figures that are told of the answers.

Of each set: mean rewards, pass@k and maj@k. Of a single set they have plain names (`reward`), of
several they begin with the set's (`math/reward`), and the plain ones are means over the sets. Where
the rows name their sources, the same figures follow for each (`math/algebra/reward`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from plimsoll.algorithm.failure import failure
from plimsoll.algorithm.interval import mean_interval
from plimsoll.algorithm.passing import majority, pass_at_k
from plimsoll.cluster.protocol import Cluster
from plimsoll.config.reward import RewardConfig
from plimsoll.config.rl import RlConfig
from plimsoll.records import Prompt, Trajectory
from plimsoll.reward.references import voting_of
from plimsoll.rl.answers import Answering, answers
from plimsoll.rl.failed_groups import FailedGroups
from plimsoll.rl.reward_model import score_by_models
from plimsoll.spec.eval_sets import EvalSet
from plimsoll.spec.run_spec import RunSpec

HeldOut = Mapping[str, Sequence[Prompt]]
Answered = Mapping[str, Sequence[Trajectory]]
"""The responses to a prompt stand together. Both are by the keys of the sets in the config."""

_EVAL_SEED = 2**31 - 1


def evaluate(
    cluster: Cluster,
    spec: RunSpec[RlConfig],
    held_out: HeldOut,
    answering_to: Callable[[str], Answering],
) -> dict[str, float]:
    """The figures of all sets, as `eval/<name>`. answering_to: how a set is answered, by its
    key."""
    found = answer_held_out(cluster, spec, held_out, answering_to)
    return {f"eval/{name}": value for name, value in evaluation_figures(spec, found).items()}


def answer_held_out(
    cluster: Cluster,
    spec: RunSpec[RlConfig],
    held_out: HeldOut,
    answering_to: Callable[[str], Answering],
) -> Answered:
    """Return as many responses to each prompt as its set asks for, with all parts of their rewards.

    Groups are numbered through all sets. Raises PlimsollError as soon as a reward fails.
    """
    found: dict[str, list[Trajectory]] = {}
    groups = 0
    for one in spec.eval_sets:
        answering = answering_to(one.key)
        own = answers(
            cluster,
            held_out[one.key],
            one.responses,
            one.sampling,
            _EVAL_SEED,
            answering,
            FailedGroups(answering.note),
            first_group=groups,
        )
        found[one.key] = score_by_models(own.trajectories, spec, cluster)
        groups += len(held_out[one.key])
    return found


def evaluation_figures(spec: RunSpec[RlConfig], answered: Answered) -> dict[str, float]:
    """Of each set, in the order of the config; of several first the means over them."""
    config, sets = spec.config, spec.eval_sets
    by_set = {one.prefix: _set_figures(config.rewards, one, answered[one.key]) for one in sets}
    plain = ["reward", *config.rewards, *config.scoring_models] if len(by_set) > 1 else []
    means = {name: fmean(own[name] for own in by_set.values()) for name in plain}
    return means | {f"{p}{name}": x for p, own in by_set.items() for name, x in own.items()}


def _set_figures(
    rewards: Mapping[str, RewardConfig], one: EvalSet, found: Sequence[Trajectory]
) -> dict[str, float]:
    figures = mean_rewards(found) | passing(rewards, one, found)
    for source in sorted({t.prompt.source for t in found}) if one.by_source else ():
        of_it = [t for t in found if t.prompt.source == source]
        own = mean_rewards(of_it) | passing(rewards, one, of_it)
        figures |= {f"{source}/{name}": value for name, value in own.items()}
    return figures


def mean_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean reward, and that of each part by its name; each with its 95 % confidence interval
    over prompts, where there are several."""
    values = {"reward": [t.reward for t in trajectories]}
    for i, part in enumerate(trajectories[0].rewards):
        values[part.name] = [t.rewards[i].value for t in trajectories]
    return _means(values, trajectories)


def passing(
    rewards: Mapping[str, RewardConfig], one: EvalSet, found: Sequence[Trajectory]
) -> dict[str, float]:
    """pass@k and maj@k over answers to prompts of a set, with their intervals; nothing where no
    part of the reward tells which responses pass.

    maj@k is the share of prompts whose most frequent answer passes, all responses voting. It is
    left out where the part takes no answers from responses, such as the tests of a program; where
    it does, but no response to a prompt gives one, the prompt counts as failed.
    """
    if one.pass_by is None:
        return {}
    groups = [found[i : i + one.responses] for i in range(0, len(found), one.responses)]
    passed = [[t.part(one.pass_by) >= one.threshold for t in group] for group in groups]
    single = {"pass@1": [float(right) for own in passed for right in own]}
    values = {
        f"pass@{k}": [pass_at_k(one.responses, sum(own), k) for own in passed] for k in one.ks[1:]
    }
    if one.votes and (chosen := _chosen(rewards, one.pass_by, groups)) is not None:
        pairs = zip(passed, chosen, strict=True)
        values[f"maj@{one.responses}"] = [float(i is not None and own[i]) for own, i in pairs]
    figures = _means(single, found) | _means(values, [group[0] for group in groups])
    return {name: min(max(share, 0.0), 1.0) for name, share in figures.items()}


def _chosen(
    rewards: Mapping[str, RewardConfig], part: str, groups: Sequence[Sequence[Trajectory]]
) -> list[int | None] | None:
    """Return for each group which response gives the most frequent answer, if any does; None if
    the part takes no answers."""
    voting = voting_of(rewards, part)
    if voting is None:
        return None
    try:
        return [
            majority([voting.take(t.response_text) for t in group], voting.same) for group in groups
        ]
    except Exception as error:  # it may be one's own
        raise failure(f"What takes the answers of rewards.{part}", error) from error


def _means(values: Mapping[str, Sequence[float]], of: Sequence[Trajectory]) -> dict[str, float]:
    """of: a trajectory for each value, which tells its prompt."""
    prompts = [t.prompt.tokens.tobytes() for t in of]
    figures = {}
    for name, own in values.items():
        figures[name] = fmean(own)
        if (interval := mean_interval(own, prompts)) is not None:
            figures[f"{name}_low"], figures[f"{name}_high"] = interval
    return figures
