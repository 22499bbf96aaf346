"""Proximal policy optimisation: sample, score, learn, sync; Schulman et al. 2017.

    plimsoll ppo CONFIG.yaml

Each step samples responses with the current weights, gives every token a reward (the KL from the
reference, and at the end the reward of the whole response), estimates advantages from the
critic's values, and takes a few clipped steps. Departures from the paper: dual clip, KL by k1, k2
or k3, whitening over the whole batch. A step with a single update is on-policy by construction:
the old log-probs are then the ones being differentiated and are not computed again.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from plimsoll.algorithm.choice import advantage, policy_loss
from plimsoll.algorithm.kl import adapt
from plimsoll.cluster.protocol import Cluster
from plimsoll.config.algorithm import KlConfig
from plimsoll.config.jobs import PpoConfig
from plimsoll.engine.objectives.policy import PolicyObjective
from plimsoll.engine.schedule import learning_rate
from plimsoll.recipes.judging import judge
from plimsoll.recipes.leaving import leave_report
from plimsoll.recipes.ppo_batch import (
    Batch,
    Scores,
    batch_metrics,
    estimate_advantages,
    mean_advantages,
    observed_kl,
    pack_batch,
    policy_streams,
    score,
)
from plimsoll.recipes.ppo_critic import foreseen, score_values, train_critic
from plimsoll.recipes.ppo_setup import (
    PpoData,
    first_sync,
    load_prompt_data,
    load_roles,
    make_room,
    start,
)
from plimsoll.recipes.run_data import epoch_metrics, first_state
from plimsoll.recipes.sampling import evaluate, sample
from plimsoll.recipes.saving import evaluated, finished, restore, save_model, save_when_due
from plimsoll.recipes.session import Session, evaluates_first, mean_metrics, open_session
from plimsoll.recipes.update import update
from plimsoll.records import Floats
from plimsoll.reward.score import Scorer, build_rewards
from plimsoll.rollout.protocol import RolloutEngine
from plimsoll.rollout.sync import WeightSync, sync_weights
from plimsoll.run.state import RunState


def run_ppo(config: PpoConfig) -> None:
    """Run the job that the config describes; resumes where `run.resume` says so."""
    # A wrong name or option ends the run before it begins.
    advantage(config.algorithm.advantage)
    policy_loss(config.algorithm.policy_loss)
    scorer = build_rewards(config.rewards)
    with open_session("ppo", config) as session:
        with session.phase("data"):
            data = load_prompt_data(session, config, scorer.check_reference)
        with session.phase("load"):
            cluster = start(config, (*data.train, *data.eval))
        with closing(cluster):
            session.check_nodes(cluster)
            session.stop_if_asked(session.state.step)
            with session.phase("load", cluster):
                load_roles(cluster, config)
            with session.phase("sync", cluster):
                sync = first_sync(cluster, config, data)
            restore(session, cluster)
            state = train(session, config, data, cluster, sync, scorer)
            save_model(session, cluster, state)
    leave_report(session.directory.path)


def train(
    session: Session,
    config: PpoConfig,
    data: PpoData,
    cluster: Cluster,
    sync: WeightSync,
    scorer: Scorer,
) -> RunState:
    """The loop; gives the state after the last step."""
    if session.resumed:
        with session.phase("sync", cluster):
            sync_weights(sync, session.state.weight_version)
    session.stop_if_asked(session.state.step)
    state = begin(session, config, data, cluster, scorer)
    session.stop_if_asked(state.step)
    while not finished(session, state):
        step = state.step + 1
        with session.phase("rollout", cluster):
            rows = data.order.indices(state.data_position, config.batch.prompts)
            prompts = [data.train[row] for row in rows]
            counted = session.progress.counted(scorer)
            trajectories = sample(cluster, config, prompts, step, counted)
        with session.phase("score", cluster):
            cluster.engines_do(RolloutEngine.sleep)  # only now: they are read awake, as planned
            judged = judge(trajectories, config, cluster)
            batch = pack_batch(judged, config, cluster.ranks, cluster.critics.ranks, step)
            scores = score(batch, config, cluster)
            values = score_values(batch, cluster)
            learnables = estimate_advantages(batch, scores, values, config, state.kl_coefficient)
        with session.phase("train_critic", cluster):
            critic = train_critic(batch, values, learnables.returns, config, cluster, state)
        with session.phase("train_actor", cluster):
            actor = train_actor(batch, scores, learnables.advantages, config, cluster, state)
        with session.phase("sync", cluster):
            make_room(cluster, config)
            proved = sync_weights(sync, step)
        metrics = (
            batch_metrics(batch, scores, learnables)
            | foreseen(learnables.returns, values)
            | actor
            | critic
            | {"kl_coefficient": state.kl_coefficient, "sync/logprob_gap": proved.gap}
            | epoch_metrics(data.order, state.data_position + len(rows))
        )
        state = replace(
            session.advance(state, len(rows)),
            weight_version=step,
            kl_coefficient=next_kl_coefficient(config, state, batch, scores),
        )
        if session.due(config.run.eval_every, step):
            metrics |= evaluate_actor(session, config, data, cluster, scorer)
            state = evaluated(session, state, metrics)
        if config.run.keep_trajectories:
            means = mean_advantages(learnables)
            session.directory.write_trajectories(step, batch.trajectories, means)
        session.report(step, metrics, batch.tokens)
        save_when_due(session, cluster, state)
    return state


def begin(
    session: Session, config: PpoConfig, data: PpoData, cluster: Cluster, scorer: Scorer
) -> RunState:
    """The state before the first step of this run; a new run evaluates what it starts from."""
    state = first_state(session, data.order, data.sources)
    if evaluates_first(config, state):
        session.report(0, evaluate_actor(session, config, data, cluster, scorer), 0)
    return replace(state, kl_coefficient=first_kl_coefficient(config.algorithm.kl, state))


def evaluate_actor(
    session: Session, config: PpoConfig, data: PpoData, cluster: Cluster, scorer: Scorer
) -> dict[str, float]:
    """The mean rewards of the held-out prompts."""
    counted = session.progress.counted(scorer.of_held_out())
    with session.phase("eval", cluster):
        return evaluate(cluster, config, data.eval, counted)


def train_actor(
    batch: Batch,
    scores: Scores,
    advantages: list[Floats],
    config: PpoConfig,
    cluster: Cluster,
    state: RunState,
) -> dict[str, float]:
    """All epochs and mini-batches of the actor; the means of their metrics."""
    algorithm = config.algorithm
    if state.step < algorithm.critic_warmup_steps:
        return {}
    objective = PolicyObjective(
        algorithm.policy_loss,
        algorithm.kl.estimator,
        state.kl_coefficient if algorithm.kl.place == "loss" else 0.0,
        algorithm.entropy_bonus,
    )
    results = []
    for number, mini in batch.schedule(algorithm.epochs):
        rate = actor_rate(config, state.step, number)
        streams = policy_streams(mini, scores, advantages, algorithm.kl.place == "loss")
        results.append(update("actor", cluster, mini.packs, streams, mini.counts, objective, rate))
    metrics = mean_metrics(results)
    return metrics | {
        "actor/loss": metrics.pop("loss"),
        "actor/grad_norm": metrics.pop("grad_norm"),
        "actor/skipped_steps": metrics.pop("skipped_steps"),
        "learning_rate": rate,
    }


def actor_rate(config: PpoConfig, step: int, number: int) -> float:
    """The actor's learning rate at an update of a step, both from 0. Its schedule begins with the
    first step that trains it, so that a warm-up is not over before."""
    algorithm = config.algorithm
    updates, first = algorithm.epochs * algorithm.mini_batches, algorithm.critic_warmup_steps
    done, total = (step - first) * updates + number, (config.run.steps - first) * updates
    return learning_rate(config.actor.optimizer, done, total)


def first_kl_coefficient(kl: KlConfig, state: RunState) -> float:
    """The coefficient that a run begins or goes on with: an adaptive one is where it was, a fixed
    one what the config says now."""
    return state.kl_coefficient if state.step > 0 and kl.target is not None else kl.coefficient


def next_kl_coefficient(config: PpoConfig, state: RunState, batch: Batch, scores: Scores) -> float:
    """The coefficient of the next step: the same, or moved towards the KL that is aimed at, once
    the actor learns."""
    kl = config.algorithm.kl
    if kl.target is None or state.step < config.algorithm.critic_warmup_steps:
        return state.kl_coefficient
    observed = observed_kl(scores)
    responses = len(batch.trajectories)
    return adapt(state.kl_coefficient, observed, responses, kl.target, kl.horizon)
