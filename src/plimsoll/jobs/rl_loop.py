"""Reinforcement learning: sample, score, learn, sync.

    plimsoll grpo CONFIG.yaml

Each step samples groups of responses with the current weights, has them scored, estimates each
token's advantage, and takes one or several steps on the policy loss. What is estimated, and which
roles it takes, is the config's; the loop knows no method by name. A step with a single update is
on-policy by construction: the old log-probs are then the ones being differentiated and are not
computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from plimsoll.algorithm.kl import adapt
from plimsoll.cluster.protocol import Cluster
from plimsoll.config.algorithm import KlConfig
from plimsoll.config.problems import refuse
from plimsoll.config.rl import RlConfig
from plimsoll.engine.objectives.policy import PolicyObjective, PolicyStream
from plimsoll.engine.schedule import learning_rate
from plimsoll.records import Floats, Prompt, Trajectory
from plimsoll.reward.references import check_references
from plimsoll.reward.score import Scored, Scorer, open_rewards
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
from plimsoll.rl.layout import MiniBatch
from plimsoll.rl.reward_model import score_by_models
from plimsoll.rl.sampling import (
    Sampled,
    answer_held_out,
    evaluate,
    mean_rewards,
    normalized,
    sample,
)
from plimsoll.rl.setup import (
    RlData,
    first_sync,
    load_prompt_data,
    make_room,
    prompt_loader,
    start,
)
from plimsoll.rollout.protocol import RolloutEngine
from plimsoll.rollout.sync import WeightSync, sync_weights
from plimsoll.run.counter import counting
from plimsoll.run.planned import Planned
from plimsoll.run.state import RunState
from plimsoll.run.trajectories import write_trajectories
from plimsoll.spec.roles import scoring_role
from plimsoll.spec.run_spec import RunSpec, resolve
from plimsoll.train.from_data import Work, open_work
from plimsoll.train.loading import load_measured, load_roles
from plimsoll.train.run_data import epoch_metrics, first_state, load_held_out, row_counts
from plimsoll.train.saving import evaluated, finished, restore, save_model, save_when_due
from plimsoll.train.session import Session, evaluates_first
from plimsoll.train.update import Step

RlWork = Work[RlConfig, Prompt]


def run(spec: RunSpec[RlConfig], planned: Planned) -> None:
    """Train; resumes where `run.resume` says so."""
    with open_rewards(spec.config.rewards) as scorer:
        _train_with(scorer, spec, planned)


def _train_with(scorer: Scorer, spec: RunSpec[RlConfig], planned: Planned) -> None:
    def read(session: Session) -> RlData:
        return load_prompt_data(session, spec, scorer.check_reference)

    def started(data: RlData) -> Cluster:
        return start(spec, (*data.train, *data.eval))

    with open_work(spec, planned, read, started) as work:
        load_roles(work)
        with work.session.phase("sync", work.cluster):
            sync = first_sync(work.cluster, spec, work.data)
        restore(work.session, work.cluster)
        state = train(work, sync, scorer)
        save_model(work.session, work.cluster, state)


def train(work: RlWork, sync: WeightSync, scorer: Scorer) -> RunState:
    """The loop; gives the state after the last step."""
    spec, session, cluster, order = work.spec, work.session, work.cluster, work.data.order
    scorer.restore(session.state.rewards)
    if session.resumed:
        with session.phase("sync", cluster):
            sync_weights(sync, session.state.weight_version)
    session.stop_if_asked(session.state.step)
    state = begin(work, scorer)
    session.stop_if_asked(state.step)
    while not finished(session, state):
        step = state.step + 1
        with session.phase("rollout", cluster):
            counted = session.progress.counted(scorer.submit)
            sampled = sample(cluster, spec, partial(_drawn, work, state), step, counted)
            sampled = normalized(sampled, scorer)
        with session.phase("score", cluster):
            cluster.engines_do(RolloutEngine.sleep)  # only now: they are read awake, as planned
            batch, scores, learnables = learnables_of(work, sampled, state, step)
        critic: dict[str, float] = {}
        if scores.values_L is not None and learnables.returns_L is not None:
            with session.phase("train_critic", cluster):
                columns = (scores.values_L, learnables.returns_L)
                critic = train_critic(batch, *columns, spec, cluster, state)
                critic |= explained_variance(learnables.returns_L, scores.values_L)
        with session.phase("train_actor", cluster):
            actor = train_actor(batch, scores, learnables.advantages_L, spec, cluster, state)
        with session.phase("sync", cluster):
            make_room(cluster, spec)
            proved = sync_weights(sync, step)
        metrics = (
            batch_metrics(batch, scores, state.kl_coefficient)
            | sampled.metrics
            | actor
            | critic
            | {"sync/logprob_gap": proved.gap, "sync/bytes": proved.bytes}
            | epoch_metrics(order, state.data_position + sampled.prompts)
        )
        state = replace(
            session.advance(state, sampled.prompts),
            weight_version=step,
            kl_coefficient=next_kl_coefficient(spec, state, batch, scores),
            rewards=scorer.state(),
        )
        if session.due(spec.run.eval_every, step):
            metrics |= evaluate_actor(work, scorer)
            state = evaluated(session, state, metrics)
        session.report(step, metrics, batch.tokens)
        save_when_due(session, cluster, state)
    return state


def _drawn(work: RlWork, state: RunState, first: int, count: int) -> list[Prompt]:
    """Prompts of the step that follows, from the first on."""
    return work.batch(state.data_position + first, count)


def learnables_of(
    work: RlWork, sampled: Sampled, state: RunState, step: int
) -> tuple[Batch, Scores, Learnables]:
    """Score what was sampled, estimate advantages, and write it down before it is learned from."""
    spec, cluster = work.spec, work.cluster
    trajectories, greedy = sampled.trajectories, sampled.greedy
    if spec.config.batch.dynamic_sampling is None:  # else each round was scored by itself
        trajectories = score_by_models(trajectories, spec, cluster)
    if greedy:
        greedy = score_by_models(greedy, spec, cluster)
    batch = pack_batch(trajectories, spec, cluster.ranks, cluster.critics.ranks, step)
    scores = score(batch, spec, cluster)
    baselines = {t.group: t.reward for t in greedy}
    learnables = estimate_advantages(batch, scores, spec, state.kl_coefficient, baselines)
    if spec.run.keep_trajectories:
        path = work.session.directory.trajectories_path(step)
        write_trajectories(path, step, trajectories, token_scores(batch, scores, learnables))
    return batch, scores, learnables


def begin(work: RlWork, scorer: Scorer) -> RunState:
    """The state before the first step of this run; a new run evaluates what it starts from."""
    state = first_state(work.session, work.data)
    if evaluates_first(work.spec, state):
        work.session.report(0, evaluate_actor(work, scorer), 0)
    return replace(state, kl_coefficient=first_kl_coefficient(work.config.algorithm.kl, state))


def evaluate_actor(work: RlWork, scorer: Scorer) -> dict[str, float]:
    """The mean rewards of the held-out prompts."""
    counted = work.session.progress.counted(scorer.of_held_out().submit)
    with work.session.phase("eval", work.cluster):
        return evaluate(work.cluster, work.spec, work.data.eval, counted)


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
    """The mean of each reward over one answer to each held-out prompt, sampled as `eval_sampling`
    says, with its 95 % confidence interval. The answers are written to the
    directory."""
    with open_rewards(spec.config.rewards) as scorer:
        return _measured_with(scorer.of_held_out(), _with_fewest_ranks(spec), directory)


def _measured_with(scorer: Scorer, spec: RunSpec[RlConfig], directory: Path) -> dict[str, float]:
    if spec.data.eval is not None:
        refuse(check_references(spec.config.rewards, {"data.eval": spec.data.eval}))
    loaded = load_held_out(spec, prompt_loader(spec, scorer.check_reference))
    with (
        closing(start(spec, loaded.items)) as cluster,
        counting("answers", len(loaded.items), sys.stdout) as advance,
    ):
        for part in spec.config.scoring_models:
            load_measured(cluster, spec, scoring_role(part))

        def score(trajectories: Sequence[Trajectory]) -> Future[Scored]:
            scored = scorer.submit(trajectories)
            scored.add_done_callback(lambda _: advance(len(trajectories)))
            return scored

        found = answer_held_out(cluster, spec, loaded.items, score)
    answers = directory / "eval-answers.parquet"
    answers.parent.mkdir(parents=True, exist_ok=True)
    write_trajectories(answers, 0, found, None)
    return (
        mean_rewards(found)
        | {
            "finished": fmean(t.finish_reason == "stop" for t in found),
            "response_tokens": fmean(len(t.response_tokens) for t in found),
        }
        | row_counts(loaded)
    )


def _with_fewest_ranks(spec: RunSpec[RlConfig]) -> RunSpec[RlConfig]:
    """The same with no more ranks than its rewards need."""
    ranks = spec.cluster.ranks if spec.config.scoring_models else 1
    cluster = spec.cluster.model_copy(update={"ranks": ranks, "critic_ranks": None})
    return resolve(spec.job, spec.config.model_copy(update={"cluster": cluster}))
