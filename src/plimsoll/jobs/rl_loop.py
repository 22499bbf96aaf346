"""Reinforcement learning: sample, score, learn, sync.

    plimsoll grpo CONFIG.yaml

Each step samples groups of responses with the current weights (or reads those that an earlier run
stored: `--replay RUN`), has them scored, estimates each token's advantage, and takes one or several
steps on the policy loss. What is estimated, and which roles it takes, is the config's; the loop
knows no method by name. A step with a single update is on-policy by construction: the old log-probs
are then the ones being differentiated and are not computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from plimsoll.algorithm.kl import adapt
from plimsoll.cluster.protocol import Cluster
from plimsoll.config.algorithm import KlConfig
from plimsoll.config.rl import RlConfig
from plimsoll.engine.objectives.policy import PolicyObjective, PolicyStream
from plimsoll.engine.schedule import learning_rate
from plimsoll.jobs.rl_measure import measured_with
from plimsoll.records import Floats
from plimsoll.reward.score import open_rewards
from plimsoll.rl.batch import (
    Batch,
    Learnables,
    Scores,
    batch_metrics,
    estimate_advantages,
    observed_kl,
    pack_batch,
    policy_stream,
    score,
    token_scores,
    train_on,
)
from plimsoll.rl.critic import explained_variance, train_critic
from plimsoll.rl.experience import Experience, Source
from plimsoll.rl.layout import MiniBatch
from plimsoll.rl.live import Live
from plimsoll.rl.replay import Replay, load_replay_data
from plimsoll.rl.setup import (
    RlData,
    RlWork,
    load_prompt_data,
    start,
)
from plimsoll.run.planned import Planned
from plimsoll.run.state import RunState
from plimsoll.run.trajectories import write_trajectories
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.from_data import open_work
from plimsoll.train.loading import load_roles
from plimsoll.train.run_data import epoch_metrics, first_state
from plimsoll.train.saving import evaluated, finished, restore, save_model, save_when_due
from plimsoll.train.session import Session, evaluates_first
from plimsoll.train.update import Step


def run(spec: RunSpec[RlConfig], planned: Planned) -> None:
    """Train; resumes where `run.resume` says so."""
    if spec.engines is None:
        _train(spec, planned, load_replay_data, Replay.open)
        return
    with open_rewards(spec.config.rewards) as scorer:
        load = partial(load_prompt_data, check_reference=scorer.check_reference)
        _train(spec, planned, load, partial(Live.start, scorer=scorer))


def _train(
    spec: RunSpec[RlConfig],
    planned: Planned,
    load: Callable[[Session, RunSpec[RlConfig]], RlData],
    open_source: Callable[[RlWork], Source],
) -> None:
    def read(session: Session) -> RlData:
        return load(session, spec)

    def started(data: RlData) -> Cluster:
        return start(spec, (*data.train, *data.eval))

    with open_work(spec, planned, read, started) as work:
        load_roles(work)
        source = open_source(work)
        restore(work.session, work.cluster)
        state = train(work, source)
        save_model(work.session, work.cluster, state)


def train(work: RlWork, source: Source) -> RunState:
    """The loop; gives the state after the last step."""
    spec, session, cluster, order = work.spec, work.session, work.cluster, work.data.order
    source.begin(session.state)
    session.stop_if_asked(session.state.step)
    state = begin(work, source)
    session.stop_if_asked(state.step)
    while not finished(session, state):
        step = state.step + 1
        experience = source.draw(state)
        with session.phase("score", cluster):
            batch, scores, learnables = learnables_of(work, experience, state)
        critic: dict[str, float] = {}
        if scores.values_L is not None and learnables.returns_L is not None:
            with session.phase("train_critic", cluster):
                columns = (scores.values_L, learnables.returns_L)
                critic = train_critic(batch, *columns, spec, cluster, state)
                values_L, returns_L = map(batch.layout.in_order, columns)
                critic |= explained_variance(returns_L, values_L)
        with session.phase("train_actor", cluster):
            actor = train_actor(batch, scores, learnables.advantages_L, spec, cluster, state)
        renewed = source.renew(step)
        metrics = {
            **batch_metrics(batch, scores, state.kl_coefficient),
            **experience.metrics,
            **actor,
            **critic,
            **renewed,
            **epoch_metrics(order, state.data_position + experience.prompts),
        }
        state = replace(
            session.advance(state, experience.prompts),
            weight_version=step,
            kl_coefficient=next_kl_coefficient(spec, state, batch, scores),
            rewards=source.rewards(),
        )
        if session.due(spec.run.eval_every, step):
            metrics |= source.evaluate()
            state = evaluated(session, state, metrics)
        session.report(step, metrics, batch.tokens)
        save_when_due(session, cluster, state)
    return state


def learnables_of(
    work: RlWork, experience: Experience, state: RunState
) -> tuple[Batch, Scores, Learnables]:
    """Pack and score what a step learns from, estimate advantages, and write it down before it is
    learned from."""
    spec, cluster, step = work.spec, work.cluster, state.step + 1
    trajectories = experience.trajectories
    batch = pack_batch(trajectories, spec, cluster.ranks, cluster.critics.ranks, step)
    scores = score(batch, spec, cluster)
    baselines = {t.group: t.reward for t in experience.greedy}
    learnables = estimate_advantages(batch, scores, spec, state.kl_coefficient, baselines)
    if spec.run.keep_trajectories:
        path = work.session.directory.trajectories_path(step)
        write_trajectories(path, step, trajectories, token_scores(batch, scores, learnables))
    return batch, scores, learnables


def begin(work: RlWork, source: Source) -> RunState:
    """The state before the first step of this run; a new run evaluates what it starts from."""
    state = first_state(work.session, work.data)
    if evaluates_first(work.spec, state):
        work.session.report(0, source.evaluate(), 0)
    return replace(state, kl_coefficient=first_kl_coefficient(work.config.algorithm.kl, state))


def train_actor(
    batch: Batch,
    scores: Scores,
    advantages_L: Floats,
    spec: RunSpec[RlConfig],
    cluster: Cluster,
    state: RunState,
) -> dict[str, float]:
    """All epochs and mini-batches of the actor; the means of their metrics."""
    algorithm = spec.config.algorithm
    if state.step < algorithm.critic_warmup_steps:
        return {}
    with_reference = algorithm.kl.place == "loss"
    objective = PolicyObjective(
        algorithm.policy_loss,
        algorithm.correction,
        algorithm.aggregation,
        constant=algorithm.aggregation_tokens or spec.config.rollout.sampling.max_new_tokens,
        kl_estimator=algorithm.kl.estimator,
        kl_coefficient=state.kl_coefficient if with_reference else 0.0,
        ratio_corrected=algorithm.kl.ratio_corrected,
        entropy_bonus=algorithm.entropy_bonus,
    )
    stream = policy_stream(batch, scores, advantages_L, with_reference)

    def step(mini: MiniBatch) -> Step[PolicyStream]:
        return Step(mini.packs, mini.counts, objective, stream)

    rate = partial(actor_rate, spec, state.step)
    metrics = train_on(batch, batch.layout, "actor", cluster, algorithm.epochs, step, rate)
    return metrics | {
        "actor/loss": metrics.pop("loss"),
        "actor/grad_norm": metrics.pop("grad_norm"),
        "actor/skipped_steps": metrics.pop("skipped_steps"),
        "learning_rate": rate(spec.workload.updates - 1),
    }


def actor_rate(spec: RunSpec[RlConfig], step: int, number: int) -> float:
    """The actor's learning rate at an update of a step, both from 0. Its schedule begins with the
    first step that trains it, so that a warm-up is not over before."""
    algorithm = spec.config.algorithm
    updates, first = algorithm.epochs * algorithm.mini_batches, algorithm.critic_warmup_steps
    done, total = (step - first) * updates + number, (spec.steps - first) * updates
    return learning_rate(spec.actor.optimizer, done, total)


def first_kl_coefficient(kl: KlConfig, state: RunState) -> float:
    """The coefficient that a run begins or goes on with: an adaptive one is where it was, a fixed
    one what the config says now."""
    return state.kl_coefficient if state.step > 0 and kl.target is not None else kl.coefficient


def next_kl_coefficient(
    spec: RunSpec[RlConfig], state: RunState, batch: Batch, scores: Scores
) -> float:
    """The coefficient of the next step: the same, or moved towards the KL that is aimed at, once
    the actor learns."""
    kl = spec.config.algorithm.kl
    if kl.target is None or state.step < spec.config.algorithm.critic_warmup_steps:
        return state.kl_coefficient
    observed = observed_kl(batch, scores)
    responses = len(batch.trajectories)
    return adapt(state.kl_coefficient, observed, responses, kl.target, kl.horizon)


def measure(spec: RunSpec[RlConfig], directory: Path) -> dict[str, float]:
    """The figures of the held-out prompts, answered as each of their sets says. The answers are
    written to the directory."""
    with open_rewards(spec.config.rewards) as scorer:
        return measured_with(scorer, spec, directory)
