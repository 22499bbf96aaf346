"""Reinforcement learning: sample, score, learn, sync.

    plimsoll grpo CONFIG.yaml

Each step samples groups of responses with the current weights, scores them, estimates each token's
advantage, and takes one or several optimizer steps (updates) on the policy loss. With `--replay
RUN` it reads the responses of an earlier run instead of sampling. The config says how advantages
are estimated and which roles that needs; the loop names no method. A step with a single update is
on-policy by construction: the log-probs of the update itself are the old log-probs, so they are not
computed separately.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean

import numpy as np

from plimsoll.algorithm.ratios import adapt
from plimsoll.cluster.protocol import Cluster, group_of
from plimsoll.config.cluster import NO_OWN_RANKS, OwnNodes
from plimsoll.config.problems import refuse
from plimsoll.config.rl import KlConfig, RlConfig
from plimsoll.data.stored import JoinedRows
from plimsoll.jobs.rl import reward_models
from plimsoll.jobs.roles import CRITIC, TEACHER
from plimsoll.machine.faults import fault_point
from plimsoll.process.threads import beside
from plimsoll.records import RETURNS, VALUES, BatchColumns, Floats, Trajectory
from plimsoll.resolve.run_spec import RunSpec, resolve_changed
from plimsoll.reward.outcome import RewardHosts
from plimsoll.reward.references import check_references
from plimsoll.reward.score import OnFailure, Scored, open_rewards
from plimsoll.rl.answers import Answering
from plimsoll.rl.bad_numbers import check_columns, check_rewards
from plimsoll.rl.batch import (
    Batch,
    batch_metrics,
    estimate_advantages,
    has_kl_loss,
    observed_kl,
    observed_kl_per_token,
    pack_batch,
    policy_columns,
    policy_terms,
    rate_of,
    score_batch,
    token_count,
    train_on,
    trajectory_metrics,
    with_columns,
)
from plimsoll.rl.environments import open_kinds, set_up
from plimsoll.rl.episodes import Submit
from plimsoll.rl.evaluate import answer_held_out, evaluation_figures
from plimsoll.rl.group_journal import is_open
from plimsoll.rl.live import Live
from plimsoll.rl.replay import Replay, load_replay_data
from plimsoll.rl.setup import (
    RlData,
    RlWork,
    load_prompt_data,
    prompt_loader,
    start,
    wake_sleeping_ranks,
)
from plimsoll.rl.source import Experience, Recorded, Revived, Source
from plimsoll.run.displays import Advance, counting
from plimsoll.run.files import explaining_errors
from plimsoll.run.health import BAD_STEPS, BadNumbers
from plimsoll.run.output import tell
from plimsoll.run.readings import Planned
from plimsoll.run.state import RunState
from plimsoll.run.trajectories import StepDraw, write_trajectories
from plimsoll.train.from_data import open_work
from plimsoll.train.loading import load_measured, load_roles
from plimsoll.train.run_data import epoch_metrics, first_state, load_held_out_sets, row_counts
from plimsoll.train.saving import is_finished, record_evaluation, restore, save_model, save_when_due
from plimsoll.train.session import RunSession, evaluates_first, lineage_of
from plimsoll.trainer.objectives import DistillationObjective, PolicyObjective, ValueObjective

_ROUNDING = 1e-10
"""Rounding in float32 may leave equal numbers a variance of up to this share of their mean square.
"""


def run(spec: RunSpec[RlConfig], planned: Planned) -> None:
    """Train the policy. `run.resume` decides whether an earlier run goes on."""
    if spec.engines is None:
        _train(spec, planned, load_replay_data, lambda work, _: Replay.open(work))
        return
    kinds = open_kinds(spec.config.environments)
    with open_rewards(spec.config.rewards, keeps_bad_numbers=True) as scorer:
        load = partial(load_prompt_data, references=scorer.references)

        def open_source(work: RlWork, hosts: RewardHosts | None) -> Source:
            spread = scorer.on_hosts(hosts)
            return Revived(work, Recorded(work, spread, Live.start(work, spread, kinds)))

        _train(spec, planned, load, open_source)


def _train(
    spec: RunSpec[RlConfig],
    planned: Planned,
    load: Callable[[RunSession, RunSpec[RlConfig]], RlData],
    open_source: Callable[[RlWork, RewardHosts | None], Source],
) -> None:
    with open_work(
        spec,
        planned,
        lambda session: load(session, session.spec),
        lambda data: start(spec, JoinedRows([data.train, data.eval])),
    ) as work:
        wake_sleeping_ranks(work.cluster, spec)
        load_roles(work)
        with work.cluster.reward_hosts() as hosts, closing(open_source(work, hosts)) as source:
            if work.session.resumed:
                wake_sleeping_ranks(work.cluster, spec)  # until `begin` sends the restored weights
            restore(work.session, work.cluster)
            state = train(work, source)
        wake_sleeping_ranks(work.cluster, spec)
        save_model(work.session, work.cluster, state)
        work.session.journal.keep(lambda key: False)


def train(work: RlWork, source: Source) -> RunState:
    """Run all steps that are left, and return the state after the last one."""
    spec, session, cluster, order = work.spec, work.session, work.cluster, work.data.order
    source.begin(session.state)
    session.stop_if_asked(session.state.step)
    state = first_evaluated_state(work, source)
    session.stop_if_asked(state.step)
    while not is_finished(session, state):
        step = state.step + 1
        experience = source.draw(state)
        try:
            learned, kl_coefficient = learn(work, experience, source.rewards(), state)
        except BadNumbers as bad:
            record_draw(work, experience, source.rewards(), state)
            leave_out(work, experience, bad.figures, step)
            learned = trajectory_metrics(experience.trajectories) | {BAD_STEPS: 1.0}
            learned, kl_coefficient = {**learned, **experience.metrics}, state.kl_coefficient
        sync_metrics = source.renew(step)
        metrics = {
            **learned,
            **sync_metrics,
            **epoch_metrics(order, state.data_position + experience.prompts),
        }
        state = replace(
            session.advance(state, experience.prompts),
            weight_version=step,
            kl_coefficient=kl_coefficient,
            rewards=source.rewards(),
            unlearned=experience.unlearned,
        )
        if session.is_due(spec.run.eval_every, step):
            metrics |= source.evaluate(step)
            state = record_evaluation(session, state, metrics)
        session.report(step, metrics, token_count(experience.trajectories))
        del experience  # it would be there while the next step's is sampled
        save_when_due(session, cluster, state)
    return state


def learn(
    work: RlWork,
    experience: Experience,
    rewards: Mapping[str, Mapping[str, float]],
    state: RunState,
) -> tuple[dict[str, float], float]:
    """Score a step's trajectories and train on them; return the metrics and next KL coefficient.

    The trajectories are written to disk meanwhile, if the run keeps them, with all that a resumed
    run needs to learn from them again: `rewards` are the running statistics of rewards. Until the
    file is whole the journal holds what was sampled.

    If a gradient is not finite, its update is left out, and the trajectories are written down.
    Raises BadNumbers, before anything is trained, if another number is not finite.
    """
    spec, session, cluster = work.spec, work.session, work.cluster
    with session.phase("score", cluster):
        batch, columns = prepare_batch(work, experience, state)
        computed = {c: entries for c, entries in columns.items() if not c.sampled}
        scored = with_columns(experience.trajectories, batch, computed)
    drawn = replace(experience, trajectories=scored)
    with beside(partial(record_draw, work, drawn, rewards, state)):
        critic_metrics: dict[str, float] = {}
        if VALUES in columns and RETURNS in columns:
            with session.phase("train_critic", cluster):
                critic_metrics = train_critic(batch, columns, spec, cluster, state)
                returns_L, values_L = (np.concatenate(columns[c]) for c in (RETURNS, VALUES))
                critic_metrics |= explained_variance(returns_L, values_L)
        with session.phase("train_actor", cluster):
            actor_metrics = train_actor(batch, columns, spec, cluster, state)
    metrics = {
        **batch_metrics(batch, columns, state.kl_coefficient),
        **experience.metrics,
        **actor_metrics,
        **critic_metrics,
    }
    roles = [role for role in spec.trained if metrics.get(f"{role}/skipped_steps")]
    if roles:
        figures = [f"the loss or the gradient of the {role}" for role in roles]
        leave_out(work, experience, figures, state.step + 1)
        metrics[BAD_STEPS] = 1.0
    return metrics, next_kl_coefficient(spec, state, batch, columns)


def leave_out(work: RlWork, experience: Experience, figures: Sequence[str], step: int) -> None:
    """Write down and count a step with numbers that are not finite.

    Raises PlimsollError if there were too many in a row (`run.max_bad_steps`).
    """
    path = work.session.directory.bad_path(step)
    path.parent.mkdir(exist_ok=True)
    write_trajectories(path, step, experience.trajectories)
    work.session.progress.note(work.session.bad.add(step, figures, path))


def prepare_batch(
    work: RlWork, experience: Experience, state: RunState
) -> tuple[Batch, BatchColumns]:
    """Return a step's packed trajectories, and the columns of their learned tokens.

    Raises BadNumbers if one of the numbers is not finite.
    """
    spec, cluster, step = work.spec, work.cluster, state.step + 1
    trajectories, critic = experience.trajectories, spec.roles.get(CRITIC)
    critics = cluster.streams if critic is None else group_of(cluster, critic).streams
    check_rewards(trajectories)
    batch = pack_batch(trajectories, spec, cluster.streams, critics, step)
    scores = score_batch(batch, spec, cluster)
    check_columns(batch, scores)
    algorithm, baselines = spec.config.algorithm, experience.baselines
    estimated = estimate_advantages(batch, scores, algorithm, state.kl_coefficient, baselines)
    check_columns(batch, estimated)
    return batch, {**scores, **estimated}


def record_draw(
    work: RlWork,
    experience: Experience,
    rewards: Mapping[str, Mapping[str, float]],
    state: RunState,
) -> None:
    """Write what a step drew, if the run keeps trajectories, and forget it in the journal."""
    directory, step = work.session.directory, state.step + 1
    if work.spec.run.keep_trajectories.are_written:
        draw = _draw(work, experience, rewards)
        path = directory.trajectories_path(step)
        fault_point("rollouts.begin", step)
        write_trajectories(path, step, experience.trajectories, draw)
        with explaining_errors(path):
            fault_point("rollouts.write", step, path=path)
            work.session.pruner.prune(step)
    next_place = state.data_position + experience.prompts + len(experience.unlearned)
    left = step, experience.unlearned, next_place, min(directory.checkpoints(), default=-1)
    work.session.journal.keep(lambda key: is_open(key, *left))


def _draw(
    work: RlWork, experience: Experience, rewards: Mapping[str, Mapping[str, float]]
) -> StepDraw:
    return StepDraw(
        lineage_of(work.spec),
        experience.prompts,
        experience.metrics,
        experience.baselines,
        experience.unlearned,
        rewards,
    )


def first_evaluated_state(work: RlWork, source: Source) -> RunState:
    """Return the state before the first step; a new run may evaluate its starting model first."""
    state = first_state(work.session, work.data)
    if evaluates_first(work.spec, state):
        work.session.report(0, source.evaluate(0), 0)
    return replace(state, kl_coefficient=first_kl_coefficient(work.config.algorithm.kl, state))


def train_actor(
    batch: Batch,
    columns: BatchColumns,
    spec: RunSpec[RlConfig],
    cluster: Cluster,
    state: RunState,
) -> dict[str, float]:
    """Train the actor on all epochs and mini-batches; return the means of the updates' metrics.

    The result is empty during the critic's warm-up, in which the actor is not trained.
    """
    algorithm, role = spec.config.algorithm, spec.sender
    if state.step < role.begins:
        return {}
    loss, places = f"{role.name}/loss", (batch, batch.minis, role, spec, cluster, state.step)
    last = len(batch.minis), state.step, spec.workload.updates - 1
    last_rate = {"learning_rate": rate_of(role, spec, *last)}
    if algorithm.distill_divergence is not None:  # the teacher read the packs as they were scored
        distillation = DistillationObjective(algorithm.distill_divergence, 1.0, nll_share=0.0)
        metrics = train_on(*places, distillation, TEACHER, loss)
        divergence = {"teacher_divergence": metrics.pop("divergence")}
        return metrics | last_rate | divergence
    longest = spec.workload.longest - spec.data.max_tokens
    terms = policy_terms(algorithm, longest, state.kl_coefficient)
    objective = PolicyObjective(algorithm.policy_loss, algorithm.correction, terms)
    of_loss = policy_columns(columns, has_kl_loss(algorithm))
    return train_on(*places, objective, of_loss, loss) | last_rate


def train_critic(
    batch: Batch,
    columns: BatchColumns,
    spec: RunSpec[RlConfig],
    cluster: Cluster,
    state: RunState,
) -> dict[str, float]:
    """Train the critic on all epochs and mini-batches; return the means of the updates' metrics.

    `columns` has its values before the step, and their targets.
    """
    objective = ValueObjective(spec.config.algorithm.value_clip)
    own = {column: columns[column] for column in (VALUES, RETURNS)}
    places = batch, batch.critic_minis, spec.roles[CRITIC], spec, cluster, state.step
    return train_on(*places, objective, own, "value_loss")


def explained_variance(returns_L: Floats, values_L: Floats) -> dict[str, float]:
    """Return {"explained_variance": share of the returns' variance that the values explain}.

    The result is empty if the returns vary only by rounding, for example if all rewards are 0.
    """
    variance = float(returns_L.var())
    if variance <= _ROUNDING * float(np.square(returns_L).mean()):
        return {}
    return {"explained_variance": 1 - float((returns_L - values_L).var()) / variance}


def first_kl_coefficient(kl: KlConfig | None, state: RunState) -> float:
    """Return the KL coefficient that a run begins with; 0 without a KL.

    In a resumed run, an adaptive coefficient keeps its value; a fixed coefficient is the config's.
    """
    if kl is None:
        return 0.0
    return state.kl_coefficient if state.step > 0 and kl.adaptive else kl.coefficient


def next_kl_coefficient(
    spec: RunSpec[RlConfig], state: RunState, batch: Batch, columns: BatchColumns
) -> float:
    """Return the next step's KL coefficient.

    It changes only if it is adaptive and the actor is trained (not in the critic's warm-up).
    """
    kl = spec.config.algorithm.kl
    adaptive = None if kl is None else kl.adaptive
    if adaptive is None or state.step < spec.config.algorithm.critic_warmup_steps:
        return state.kl_coefficient
    measure_kl = observed_kl_per_token if adaptive.per == "token" else observed_kl
    observed = measure_kl(batch, columns)
    responses = len(batch.episodes)
    return adapt(state.kl_coefficient, observed, responses, adaptive.target, adaptive.horizon)


def measure(spec: RunSpec[RlConfig], directory: Path) -> dict[str, float]:
    """Answer the held-out prompts, and return the metrics by name.

    The answers are written to `directory`. Without reward models only one rank is started.
    """
    with open_rewards(spec.config.rewards) as scorer:
        spec = _with_fewest_ranks(spec)
        refuse(check_references(spec.config.rewards, spec.data.eval_sources()))
        kinds = open_kinds(spec.config.environments)
        loaded = load_held_out_sets(spec, prompt_loader(spec, scorer.references))
        environments = set_up(spec, kinds, scorer)
        held_out = {key: result.items for key, result in loaded.items()}
        expected = sum(s.responses * len(held_out[s.key]) for s in spec.eval_sets)
        with (
            closing(start(spec, JoinedRows([*held_out.values()]))) as cluster,
            counting("answers", expected, sys.stdout) as advance,
            cluster.reward_hosts() as hosts,
        ):
            scorer = scorer.on_hosts(hosts)
            for part in spec.config.scoring_models:
                load_measured(cluster, spec, spec.scorer_of(part).name)

            def answering_to(key: str) -> Answering:
                submit = _count_scored(scorer.of_held_out(key).submit, advance)
                return Answering(scorer.loop, submit, tell, environments, key)

            answered = answer_held_out(cluster, spec, held_out, answering_to)
    trajectories = [*chain.from_iterable(answered.values())]
    answers = directory / "eval-answers.parquet"
    answers.parent.mkdir(parents=True, exist_ok=True)
    write_trajectories(answers, 0, trajectories)
    return (
        evaluation_figures(spec, answered)
        | {
            "finished": fmean(t.finish_reason == "stop" for t in trajectories),
            "response_tokens": fmean(len(t.response_tokens) for t in trajectories),
        }
        | row_counts(*loaded.values())
    )


def _count_scored(submit: Submit, advance: Advance) -> Submit:
    def submit_counted(trajectories: Sequence[Trajectory], on_failure: OnFailure) -> Future[Scored]:
        scored = submit(trajectories, on_failure)
        scored.add_done_callback(lambda _: advance(len(trajectories)))
        return scored

    return submit_counted


def _with_fewest_ranks(spec: RunSpec[RlConfig]) -> RunSpec[RlConfig]:
    """Return the run without a replay, and with a single rank if it has no reward models.

    Reward models have as many ranks as in training. Engines that share the ranks' cards need a rank
    on each of their cards.
    """
    rollout = spec.config.rollout
    shared = rollout.placement == "shared" and spec.cluster.device == "cuda"
    models = [role.name for role in reward_models(spec.config)]
    shards = max(map(spec.shards_of, models), default=1)
    least = max((*map(spec.ranks_of, models), rollout.all_parts if shared else 1))
    fewest: dict[str, object] = {"rank_sleep": "none", **NO_OWN_RANKS}
    fewest |= {"ranks": -(-least // shards) * shards, "sequence_parallel": shards}
    if spec.cluster.own_nodes.reward is not None:
        fewest["own_nodes"] = OwnNodes()  # those of the reward models would be the actor's
    cluster = spec.written.cluster.model_copy(update=fewest)
    sampling = spec.written.rollout.model_copy(update={"replay": None, "routing": "live"})
    return resolve_changed(spec, {"cluster": cluster, "rollout": sampling})
