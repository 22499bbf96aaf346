"""Reinforcement learning: what `plimsoll rl` and its presets are. How it runs: rl_loop.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plimsoll.config.base import Choice
from plimsoll.config.rl import REWARD_MODEL, RlConfig
from plimsoll.jobs.figures import measured
from plimsoll.rl.presets import PRESETS
from plimsoll.spec.choices import advantage_needs
from plimsoll.spec.columns import rl_source
from plimsoll.spec.job import Evaluation, Job, Sampling
from plimsoll.spec.panels import alone, both
from plimsoll.spec.roles import Role, learner, reference_of, scoring_role
from plimsoll.spec.rules.sampling import sampled
from plimsoll.spec.workload import Workload


def _roles(config: RlConfig) -> Sequence[Role]:
    warmup = config.algorithm.critic_warmup_steps
    found = [learner("actor", config.actor, "policy", scores=True, begins=warmup)]
    if config.critic is not None and "values_L" in advantage_needs(config.algorithm.advantage):
        found.append(learner("critic", config.critic, "value", scores=True))
    if config.algorithm.kl.place != "none":
        found.append(reference_of(config.reference, config.actor))
    if config.rollout.replay is None:  # what is replayed has its rewards
        found += scoring_roles(config)
    return found


def scoring_roles(config: RlConfig) -> Sequence[Role]:
    """The reward models."""
    found = []
    for name, model in config.scoring_models.items():
        key = name if name == REWARD_MODEL else f"reward_models.{name}"
        found.append(Role(scoring_role(name), model.role, "value", f"{key}.role", scores=True))
    return found


def _workload(config: RlConfig) -> Workload:
    algorithm, batch = config.algorithm, config.batch
    responses = batch.prompts * batch.responses
    return Workload(
        "response",
        -(-responses // algorithm.mini_batches),
        "batch.prompts or batch.responses, or fewer algorithm.mini_batches",
        config.data.max_tokens + config.rollout.sampling.max_new_tokens,
        batch.micro_batch_tokens,
        length_keys="data.max_tokens + rollout.sampling.max_new_tokens",
        mini_batches=algorithm.mini_batches,
        epochs=algorithm.epochs,
        shares_prompts=batch.share_prompts and batch.responses > 1,
    )


def _choices(config: RlConfig) -> Mapping[str, Choice]:
    algorithm = config.algorithm
    found = {"advantage": algorithm.advantage, "policy_loss": algorithm.policy_loss}
    return found if algorithm.correction is None else found | {"correction": algorithm.correction}


def _sampling(config: RlConfig) -> Sampling:
    batch = config.batch
    return Sampling(
        config.rollout, batch.prompts, batch.responses, config.eval_sampling, config.rewards
    )


def _evaluation(config: RlConfig) -> Evaluation:
    parts = [*config.rewards, *config.scoring_models]
    own = {k: v for name in parts for k, v in measured(name, None).items()}
    return Evaluation({**measured("reward", "highest"), **own})


_PANELS = (
    both("Reward", "per response", "reward"),
    alone("KL from the reference", "nats per response", "kl"),
    alone("Length of responses", "tokens per response", "response_tokens"),
    alone("Policy loss", "per token", "policy_loss"),
    alone("Value loss", "per token", "value_loss"),
)

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
    rules=sampled,
    sampling=_sampling,
    panels=_PANELS,
    presets=PRESETS,
)
