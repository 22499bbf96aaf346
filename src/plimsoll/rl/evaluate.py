"""Answer held-out prompts, and compute the figures of the answers.

The figures of a set are mean rewards, pass@k and maj@k. A single set has plain names (`reward`).
With several sets, names begin with that of the set (`math/reward`), and plain names are means over
the sets. If the rows name their sources, each source has the figures too (`math/algebra/reward`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from plimsoll.algorithm.figures import majority, mean_interval, pass_at_k
from plimsoll.cluster.protocol import Cluster
from plimsoll.config.reward import RewardConfig
from plimsoll.config.rl import RlConfig
from plimsoll.errors import failure
from plimsoll.records import Prompt, Trajectory
from plimsoll.resolve.eval_sets import EvalSet
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.reward.references import voting_of
from plimsoll.rl.answers import Answering, FailedGroups, answers
from plimsoll.rl.reward_model import score_by_models
from plimsoll.run.numbers import mean

HeldOut = Mapping[str, Sequence[Prompt]]
Answered = Mapping[str, Sequence[Trajectory]]
"""The responses of each set, by its key in the config; responses to one prompt are adjacent."""

_EVAL_SEED = 2**31 - 1


def evaluate(
    cluster: Cluster,
    spec: RunSpec[RlConfig],
    held_out: HeldOut,
    answering_to: Callable[[str], Answering],
) -> dict[str, float]:
    """Answer the prompts of all sets, and return the figures as `eval/<name>`.

    `answering_to` returns how the answers of a set are scored, given the set's key.
    """
    answered = answer_held_out(cluster, spec, held_out, answering_to)
    return {f"eval/{name}": value for name, value in evaluation_figures(spec, answered).items()}


def answer_held_out(
    cluster: Cluster,
    spec: RunSpec[RlConfig],
    held_out: HeldOut,
    answering_to: Callable[[str], Answering],
) -> Answered:
    """Return the responses of each set, with all parts of their rewards.

    The set's config says how many responses each prompt gets. Group numbers continue from set to
    set. Raises PlimsollError as soon as a reward fails.
    """
    answered: dict[str, list[Trajectory]] = {}
    groups = 0
    for eval_set in spec.eval_sets:
        answering = answering_to(eval_set.key)
        set_answers = answers(
            cluster,
            held_out[eval_set.key],
            eval_set.responses,
            eval_set.sampling,
            _EVAL_SEED,
            answering,
            FailedGroups(answering.note),
            first_group=groups,
        )
        answered[eval_set.key] = score_by_models(set_answers.trajectories, spec, cluster)
        groups += len(held_out[eval_set.key])
    return answered


def evaluation_figures(spec: RunSpec[RlConfig], answered: Answered) -> dict[str, float]:
    """Return the figures by name: means over the sets, if several, then those of each set."""
    config, sets = spec.config, spec.eval_sets
    by_set = {
        eval_set.prefix: _set_figures(config.rewards, eval_set, answered[eval_set.key])
        for eval_set in sets
    }
    rewarded = ["reward"] if config.is_rewarded else []
    plain = [*rewarded, *config.rewards, *config.scoring_models] if len(by_set) > 1 else []
    means = {name: mean(figures[name] for figures in by_set.values()) for name in plain}
    return means | {f"{p}{name}": x for p, figures in by_set.items() for name, x in figures.items()}


def _set_figures(
    rewards: Mapping[str, RewardConfig], eval_set: EvalSet, trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    figures = mean_rewards(trajectories) | passing(rewards, eval_set, trajectories)
    for source in sorted({t.prompt.source for t in trajectories}) if eval_set.by_source else ():
        matching = [t for t in trajectories if t.prompt.source == source]
        source_figures = mean_rewards(matching) | passing(rewards, eval_set, matching)
        figures |= {f"{source}/{name}": value for name, value in source_figures.items()}
    return figures


def mean_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of the reward, if a part has a weight, and of each of its parts, by name.

    With several prompts, each mean has a 95 % confidence interval over prompts (`<name>_low`,
    `<name>_high`).
    """
    parts = trajectories[0].rewards
    weighted = any(part.weight for part in parts)
    values = {"reward": [t.reward for t in trajectories]} if weighted else {}
    for i, part in enumerate(parts):
        values[part.name] = [t.rewards[i].value for t in trajectories]
    return _means(values, trajectories)


def passing(
    rewards: Mapping[str, RewardConfig], eval_set: EvalSet, trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    """Return pass@k and maj@k of a set, with 95 % confidence intervals over prompts.

    The result is empty if no part of the reward says which responses pass. maj@k is the share of
    prompts whose most frequent answer passes; all responses vote. A prompt whose responses give no
    answer counts as failed. maj@k is left out if that part of the reward extracts no answers, such
    as one that runs a program's tests.
    """
    if eval_set.pass_by is None:
        return {}
    groups = [
        trajectories[i : i + eval_set.responses]
        for i in range(0, len(trajectories), eval_set.responses)
    ]
    passed = [[t.part(eval_set.pass_by) >= eval_set.threshold for t in group] for group in groups]
    single = {"pass@1": [float(right) for group_passes in passed for right in group_passes]}
    values = {
        f"pass@{k}": [
            pass_at_k(eval_set.responses, sum(group_passes), k) for group_passes in passed
        ]
        for k in eval_set.ks[1:]
    }
    if eval_set.votes and (chosen := _chosen(rewards, eval_set.pass_by, groups)) is not None:
        pairs = zip(passed, chosen, strict=True)
        values[f"maj@{eval_set.responses}"] = [
            float(i is not None and group_passes[i]) for group_passes, i in pairs
        ]
    figures = _means(single, trajectories) | _means(values, [group[0] for group in groups])
    return {name: min(max(share, 0.0), 1.0) for name, share in figures.items()}


def _chosen(
    rewards: Mapping[str, RewardConfig], part: str, groups: Sequence[Sequence[Trajectory]]
) -> list[int | None] | None:
    """Return the index of the response with the most frequent answer in each group.

    None for a group: no response has an answer. None alone: this part extracts no answers.
    """
    voting = voting_of(rewards, part)
    if voting is None:
        return None
    try:
        return [
            majority([voting.take(t.response_text) for t in group], voting.same) for group in groups
        ]
    except Exception as error:  # it may be one's own
        raise failure(f"What takes the answers of rewards.{part}", error) from error


def _means(
    values: Mapping[str, Sequence[float]], trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    """Return the mean of each figure, and its confidence interval over prompts if it has one.

    `values` has, by the figure's name, a value for each trajectory; equal prompts share theirs.
    """
    prompts = [t.prompt.tokens.tobytes() for t in trajectories]
    figures = {}
    for name, numbers in values.items():
        figures[name] = mean(numbers)
        if (interval := mean_interval(numbers, prompts)) is not None:
            figures[f"{name}_low"], figures[f"{name}_high"] = interval
    return figures
