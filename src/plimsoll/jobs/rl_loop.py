"""Reinforcement learning: sample, score, learn, sync.

    plimsoll grpo CONFIG.yaml

Each step samples groups of responses with the current weights (or reads those that an earlier run
stored: `--replay RUN`), has them scored, estimates each token's advantage, and takes one or several
steps on the policy loss. What is estimated, and which roles it takes, is the config's; the loop
knows no method by name. A step with a single update is on-policy by construction: the old log-probs
are then the ones being differentiated and are not computed again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean

from plimsoll.algorithm.kl import adapt
from plimsoll.algorithm.policy_objective import PolicyTerms
from plimsoll.cluster.protocol import Cluster
from plimsoll.config.algorithm import KlConfig
from plimsoll.config.problems import refuse
from plimsoll.config.rl import RlConfig
from plimsoll.engine.objectives import PolicyObjective, PolicyStream
from plimsoll.engine.schedule import learning_rate
from plimsoll.records import Floats, Trajectory
from plimsoll.reward.references import check_references
from plimsoll.reward.score import OnFailure, Scored, Scorer, open_rewards
from plimsoll.rl.answers import Answering
from plimsoll.rl.batch import (
    Batch,
    Learnables,
    Scores,
    batch_metrics,
    estimate_advantages,
    observed_kl,
    observed_kl_per_token,
    pack_batch,
    policy_stream,
    score,
    token_scores,
    train_on,
)
from plimsoll.rl.critic import explained_variance, train_critic
from plimsoll.rl.environments import open_kinds, set_up
from plimsoll.rl.episodes import Submit
from plimsoll.rl.evaluate import answer_held_out, evaluation_figures
from plimsoll.rl.experience import Experience, Source
from plimsoll.rl.layout import MiniBatch
from plimsoll.rl.live import Live
from plimsoll.rl.replay import Replay, load_replay_data
from plimsoll.rl.setup import (
    RlData,
    RlWork,
    load_prompt_data,
    prompt_loader,
    start,
)
from plimsoll.run.displays import Advance, counting
from plimsoll.run.output import tell
from plimsoll.run.readings import Planned
from plimsoll.run.state import RunState
from plimsoll.run.trajectories import write_trajectories
from plimsoll.spec.roles import scoring_role
from plimsoll.spec.run_spec import RunSpec, resolve
from plimsoll.train.from_data import open_work
from plimsoll.train.loading import load_measured, load_roles
from plimsoll.train.run_data import epoch_metrics, first_state, load_held_out_sets, row_counts
from plimsoll.train.saving import evaluated, finished, restore, save_model, save_when_due
from plimsoll.train.session import Session, evaluates_first
from plimsoll.train.update import Step


def run(spec: RunSpec[RlConfig], planned: Planned) -> None:
    """Train; resumes where `run.resume` says so."""
    if spec.engines is None:
        _train(spec, planned, load_replay_data, Replay.open)
        return
    kinds = open_kinds(spec.config.environments)
    with open_rewards(spec.config.rewards) as scorer:
        load = partial(load_prompt_data, check_reference=scorer.check_reference)
        _train(spec, planned, load, partial(Live.start, scorer=scorer, kinds=kinds))


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
    kl = algorithm.kl or KlConfig()
    with_reference = algorithm.kl is not None and kl.place == "loss"
    terms = PolicyTerms(
        algorithm.aggregation,
        constant=algorithm.aggregation_tokens or spec.workload.longest - spec.data.max_tokens,
        kl_estimator=kl.estimator,
        kl_coefficient=state.kl_coefficient if with_reference else 0.0,
        ratio_corrected=kl.ratio_corrected,
        entropy_bonus=algorithm.entropy_bonus,
    )
    objective = PolicyObjective(algorithm.policy_loss, algorithm.correction, terms)
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


def first_kl_coefficient(kl: KlConfig | None, state: RunState) -> float:
    """Return the coefficient that a run begins or goes on with: an adaptive one is where it was, a
    fixed one what the config says now; 0 without a KL."""
    if kl is None:
        return 0.0
    return state.kl_coefficient if state.step > 0 and kl.adaptive else kl.coefficient


def next_kl_coefficient(
    spec: RunSpec[RlConfig], state: RunState, batch: Batch, scores: Scores
) -> float:
    """The coefficient of the next step: the same, or moved towards the KL that is aimed at, once
    the actor learns."""
    kl = spec.config.algorithm.kl
    adaptive = None if kl is None else kl.adaptive
    if adaptive is None or state.step < spec.config.algorithm.critic_warmup_steps:
        return state.kl_coefficient
    observe = observed_kl_per_token if adaptive.per == "token" else observed_kl
    observed = observe(batch, scores)
    responses = len(batch.episodes)
    return adapt(state.kl_coefficient, observed, responses, adaptive.target, adaptive.horizon)


def measure(spec: RunSpec[RlConfig], directory: Path) -> dict[str, float]:
    """The figures of the held-out prompts, answered as each of their sets says. The answers are
    written to the directory."""
    with open_rewards(spec.config.rewards) as scorer:
        return measured_with(scorer, spec, directory)


def measured_with(scorer: Scorer, spec: RunSpec[RlConfig], directory: Path) -> dict[str, float]:
    """The figures, by their names; the answers are written to the directory."""
    spec = _with_fewest_ranks(spec)
    refuse(check_references(spec.config.rewards, spec.data.eval_sources()))
    kinds = open_kinds(spec.config.environments)
    loaded = load_held_out_sets(spec, prompt_loader(spec, scorer.check_reference))
    environments = set_up(spec, kinds, scorer)
    held_out = {key: one.items for key, one in loaded.items()}
    expected = sum(one.responses * len(held_out[one.key]) for one in spec.eval_sets)
    with (
        closing(start(spec, [*chain.from_iterable(held_out.values())])) as cluster,
        counting("answers", expected, sys.stdout) as advance,
    ):
        for part in spec.config.scoring_models:
            load_measured(cluster, spec, scoring_role(part))

        def answering_to(key: str) -> Answering:
            submit = _advancing(scorer.of_held_out(key).submit, advance)
            return Answering(submit, tell, environments, key)

        answered = answer_held_out(cluster, spec, held_out, answering_to)
    found = [*chain.from_iterable(answered.values())]
    answers = directory / "eval-answers.parquet"
    answers.parent.mkdir(parents=True, exist_ok=True)
    write_trajectories(answers, 0, found, None)
    return (
        evaluation_figures(spec, answered)
        | {
            "finished": fmean(t.finish_reason == "stop" for t in found),
            "response_tokens": fmean(len(t.response_tokens) for t in found),
        }
        | row_counts(*loaded.values())
    )


def _advancing(submit: Submit, advance: Advance) -> Submit:
    """The same, and what is scored is counted."""

    def counted(trajectories: Sequence[Trajectory], on_failure: OnFailure) -> Future[Scored]:
        scored = submit(trajectories, on_failure)
        scored.add_done_callback(lambda _: advance(len(trajectories)))
        return scored

    return counted


def _with_fewest_ranks(spec: RunSpec[RlConfig]) -> RunSpec[RlConfig]:
    """The same with no more ranks than its rewards need, and with engines."""
    ranks = spec.cluster.ranks if spec.config.scoring_models else 1
    cluster = spec.cluster.model_copy(update={"ranks": ranks, "critic_ranks": None})
    rollout = spec.config.rollout.model_copy(update={"replay": None})
    own = {"cluster": cluster, "rollout": rollout}
    return resolve(spec.job, spec.config.model_copy(update=own))
