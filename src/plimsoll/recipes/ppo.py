"""Proximal policy optimisation: sample, score, learn, sync; Schulman et al. 2017.

    plimsoll ppo CONFIG.yaml

Each step samples responses with the current weights, gives every token a reward (the KL from the
reference, and at the end the reward of the whole response), estimates advantages from the
critic's values, and takes a few clipped steps. Departures from the paper: dual clip, KL by k1, k2
or k3, whitening over the whole batch. A step with a single update is on-policy by construction:
the old log-probs are then the ones being differentiated and are not computed again.
"""

from __future__ import annotations

from dataclasses import replace

from plimsoll.algorithm.choice import advantage, policy_loss
from plimsoll.algorithm.kl import adapt
from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.route import ActorRoute
from plimsoll.config.jobs import PpoConfig
from plimsoll.data.order import DataOrder
from plimsoll.engine.schedule import learning_rate
from plimsoll.engine.worker import PolicyObjective, StepResult, Worker
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
    value_streams,
)
from plimsoll.recipes.ppo_setup import ROLES, PpoData, load_prompt_data, load_roles, start
from plimsoll.recipes.sampling import evaluate, probe_sequences, sample
from plimsoll.recipes.session import Session, open_session, rank_memory, total_metrics
from plimsoll.records import Floats
from plimsoll.reward.score import build_rewards
from plimsoll.rollout.sync import prove, sync_weights
from plimsoll.run.state import RunState


def run_ppo(config: PpoConfig) -> None:
    """Run the job that the config describes; resumes where `run.resume` says so."""
    advantage(config.algorithm.advantage)  # a wrong name or option ends the run before it begins
    policy_loss(config.algorithm.policy_loss)
    with open_session("ppo", config) as session:
        with session.clock.phase("data"):
            data = load_prompt_data(session, config)
        with session.clock.phase("load"):
            cluster = start(config, data)
        try:
            with session.clock.phase("load"):
                load_roles(cluster, config)
                session.restore(cluster, ROLES)
            train(session, config, data, cluster)
            with session.clock.phase("save"):
                cluster.all(Worker.save_model, "actor", session.directory.model_path.absolute())
        finally:
            cluster.close()


def train(session: Session, config: PpoConfig, data: PpoData, cluster: Cluster) -> None:
    """The loop."""
    clock = session.clock
    order = DataOrder(len(data.train), config.run.seed, config.data.shuffle)
    scorer = build_rewards(config.rewards)
    route = ActorRoute(cluster, config.batch.micro_batch_tokens)
    state = session.state
    if state.step == 0:
        state = replace(state, kl_coefficient=config.algorithm.kl.coefficient)
    with clock.phase("sync"):
        probe = probe_sequences(data.train, config)
        if session.resumed:
            sync_weights(route, config.rollout.sync, state.weight_version, probe)
        else:
            prove(route, config.rollout.sync.max_logprob_gap, 0, probe)
    if state.step == 0 and config.run.eval_every is not None:
        with clock.phase("eval"):
            before = evaluate(cluster, config, data.eval, scorer)
        session.report(0, before, 0, rank_memory(cluster))
    while state.step < config.run.steps:
        step = state.step + 1
        with clock.phase("rollout"):
            rows = order.indices(state.data_position, config.batch.prompts)
            prompts = [data.train[row] for row in rows]
            trajectories = sample(cluster, config, prompts, step, scorer)
        batch = pack_batch(trajectories, config, cluster.ranks, step)
        with clock.phase("score"):
            scores = score(batch, config, cluster)
            learnables = estimate_advantages(batch, scores, config, state.kl_coefficient)
        with clock.phase("train_critic"):
            critic = train_critic(batch, scores, learnables.returns, config, cluster, state)
        with clock.phase("train_actor"):
            actor = train_actor(batch, scores, learnables.advantages, config, cluster, state)
        with clock.phase("sync"):
            sync = sync_weights(route, config.rollout.sync, step, probe)
        metrics = (
            batch_metrics(batch, scores, learnables)
            | actor
            | critic
            | {"kl_coefficient": state.kl_coefficient, "sync/logprob_gap": sync.gap}
        )
        if session.due(config.run.eval_every, step):
            with clock.phase("eval"):
                metrics |= evaluate(cluster, config, data.eval, scorer)
        if config.run.keep_trajectories:
            means = mean_advantages(learnables)
            session.directory.write_trajectories(step, batch.trajectories, means)
        state = RunState(
            step=step,
            data_position=state.data_position + len(rows),
            weight_version=step,
            kl_coefficient=next_kl_coefficient(config, state, batch, scores),
            seconds=session.seconds(),
        )
        session.report(step, metrics, batch.tokens, rank_memory(cluster))
        session.save_when_due(cluster, ROLES, state)
        session.stop_if_asked(step)


def train_critic(
    batch: Batch,
    scores: Scores,
    returns: list[Floats],
    config: PpoConfig,
    cluster: Cluster,
    state: RunState,
) -> dict[str, float]:
    """All epochs and mini-batches of the critic; the means of their metrics."""
    optimizer = config.critic.optimizer
    updates = config.algorithm.epochs * config.algorithm.mini_batches
    results = []
    for update, mini in batch.schedule(config.algorithm.epochs):
        rate = learning_rate(optimizer, state.step * updates + update, config.run.steps * updates)
        streams = value_streams(mini, scores, returns)
        results.append(
            cluster.each(
                Worker.train_value,
                [
                    (own, own_streams, mini.counts, config.algorithm.value_clip, rate)
                    for own, own_streams in zip(mini.packs, streams, strict=True)
                ],
            )
        )
    metrics = _mean_metrics(results)
    return metrics | {
        "value_loss": metrics.pop("loss"),
        "critic/grad_norm": metrics.pop("grad_norm"),
    }


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
    updates = algorithm.epochs * algorithm.mini_batches
    results = []
    for update, mini in batch.schedule(algorithm.epochs):
        done = state.step * updates + update
        rate = learning_rate(config.actor.optimizer, done, config.run.steps * updates)
        streams = policy_streams(mini, scores, advantages, algorithm.kl.place == "loss")
        results.append(
            cluster.each(
                Worker.train_policy,
                [
                    (own, own_streams, mini.counts, objective, rate)
                    for own, own_streams in zip(mini.packs, streams, strict=True)
                ],
            )
        )
    metrics = _mean_metrics(results)
    return metrics | {
        "actor/loss": metrics.pop("loss"),
        "actor/grad_norm": metrics.pop("grad_norm"),
        "learning_rate": rate,
    }


def next_kl_coefficient(config: PpoConfig, state: RunState, batch: Batch, scores: Scores) -> float:
    """The coefficient of the next step: the same, or moved towards the KL that is aimed at."""
    kl = config.algorithm.kl
    if kl.target is None:
        return state.kl_coefficient
    observed = observed_kl(batch, scores)
    responses = len(batch.trajectories)
    return adapt(state.kl_coefficient, observed, responses, kl.target, kl.horizon)


def _mean_metrics(updates: list[list[StepResult]]) -> dict[str, float]:
    totals = [total_metrics(r) | {"grad_norm": r[0].grad_norm} for r in updates]
    return {name: sum(t[name] for t in totals) / len(totals) for name in totals[0]}
