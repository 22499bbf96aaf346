"""The job of `plimsoll rl` and its presets: reinforcement learning. rl_loop.py runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plimsoll.config.base import Choice
from plimsoll.config.rl import RlConfig
from plimsoll.config.run import Goal
from plimsoll.jobs.roles import actor, critic, reference, reward_model, teacher
from plimsoll.resolve.choices import advantage_needs
from plimsoll.resolve.columns import rl_source
from plimsoll.resolve.eval_sets import eval_sets
from plimsoll.resolve.job import (
    SOURCE,
    Evaluation,
    Job,
    Names,
    Panel,
    Sampling,
    Workload,
    alone,
    both,
    with_interval,
)
from plimsoll.resolve.roles import Role
from plimsoll.resolve.rules.sampling import check_learning
from plimsoll.rl.presets import PRESETS


def _roles(config: RlConfig) -> Sequence[Role]:
    warmup = config.algorithm.critic_warmup_steps
    roles = [actor(config.actor, "policy", scores=True, begins=warmup)]
    if config.critic is not None and "values_L" in advantage_needs(config.algorithm.advantage):
        roles.append(critic(config.critic))
    if config.algorithm.kl is not None:
        roles.append(reference(config.reference, config.actor))
    if config.rollout.replay is None:  # replayed trajectories have their rewards
        roles += reward_models(config)
    if config.teacher is not None:
        whole = config.algorithm.distill_divergence is not None
        roles.append(teacher(config.teacher, "states" if whole else "policy"))
    return roles


def reward_models(config: RlConfig) -> Sequence[Role]:
    """Return the roles of the reward models."""
    roles = [reward_model(part, model.role) for part, model in config.scoring_models.items()]
    return sorted(roles, key=lambda role: role.name)


def _workload(config: RlConfig) -> Workload:
    algorithm, batch = config.algorithm, config.batch
    responses = batch.prompts * batch.responses
    sampling = _sampling(config)
    key = sampling.longest_key
    return Workload(
        "response",
        -(-responses // algorithm.mini_batches),
        "batch.prompts or batch.responses, or fewer algorithm.mini_batches",
        config.data.max_tokens + sampling.longest_responses[key],
        batch.micro_batch_tokens,
        length_keys=f"data.max_tokens + {key}",
        mini_batches=algorithm.mini_batches,
        epochs=algorithm.epochs,
        shares_prompts=batch.share_prompts and batch.responses > 1,
    )


def _choices(config: RlConfig) -> Mapping[str, Choice]:
    algorithm = config.algorithm
    choices = {"advantage": algorithm.advantage, "policy_loss": algorithm.policy_loss}
    others = {"correction": algorithm.correction, "divergence": algorithm.distill_divergence}
    return choices | {kind: choice for kind, choice in others.items() if choice is not None}


def _sampling(config: RlConfig) -> Sampling:
    batch = config.batch
    return Sampling(
        config.rollout,
        batch.prompts,
        batch.responses,
        config.rewards,
        eval_sets(config),
        config.environments,
    )


def _evaluation(config: RlConfig) -> Evaluation:
    """Return the metrics of each evaluation set; several sets also have means (plain names)."""
    plain: Names = {"reward": "highest"} if config.is_rewarded else {}
    plain = {**plain, **dict.fromkeys(config.parts)}
    sets = eval_sets(config)
    goals = _with_intervals(plain) if not sets else {**plain} if len(sets) > 1 else {}
    for eval_set in sets:
        set_goals = _with_intervals({**plain, **dict.fromkeys(eval_set.passing, "highest")})
        sources = [f"{eval_set.prefix}{SOURCE}/"] if eval_set.by_source else []
        for prefix in (eval_set.prefix, *sources):
            goals |= {f"{prefix}{name}": goal for name, goal in set_goals.items()}
    return Evaluation(goals)


def _with_intervals(names: Names) -> dict[str, Goal | None]:
    return {k: v for name, goal in names.items() for k, v in with_interval(name, goal).items()}


JOB = Job(
    name="rl",
    summary="reinforcement learning, any of these presets",
    config=RlConfig,
    roles=_roles,
    workload=_workload,
    columns=rl_source,
    evaluation=_evaluation,
    loop="plimsoll.jobs.rl_loop",
    choices=_choices,
    rules=check_learning,
    sampling=_sampling,
    panels=(
        both("Reward", "per response", "reward"),
        alone("KL from the reference", "nats per response", "kl"),
        alone("Divergence from the teacher", "nats per token", "teacher_divergence"),
        alone("Length of responses", "tokens per response", "response_tokens"),
        alone("Policy loss", "per token", "policy_loss"),
        alone("Value loss", "per token", "value_loss"),
        Panel("Age of tokens", "versions", {"staleness/mean": "mean", "staleness/max": "oldest"}),
        Panel("Idle", "share of time", {"idle/engines": "engines", "idle/ranks": "ranks"}),
    ),
    start={"actor.optimizer.learning_rate": 1e-6, "rollout.sampling.max_new_tokens": 512},
    presets=PRESETS,
)
