"""The rollouts of reinforcement learning alone: sample, score, write down.

    plimsoll sample CONFIG.yaml

Each step samples and scores groups of responses as a step of `plimsoll rl` does, with the actor's
first weights, and writes the same files. At the end the best response of each group, and pairs of
the best and the worst, are written for SFT and DPO. Each step is saved: a run that was stopped or
killed goes on after its last step. `plimsoll eval` measures the model as for `plimsoll rl`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from plimsoll.config.rl import RlConfig
from plimsoll.jobs.rl_loop import measure as measure
from plimsoll.reward.score import Scorer, open_rewards
from plimsoll.rl.answers import Answering
from plimsoll.rl.batch import trajectory_metrics
from plimsoll.rl.environments import open_kinds, set_up
from plimsoll.rl.episodes import Environments
from plimsoll.rl.experience import Experience
from plimsoll.rl.live import drawn_prompts
from plimsoll.rl.reward_model import score_by_models
from plimsoll.rl.sampling import normalize_rewards, sample
from plimsoll.rl.selected import conversations_of, select
from plimsoll.rl.setup import RlWork, load_prompt_data, start
from plimsoll.run.counting import counted
from plimsoll.run.json_lines import write_rows
from plimsoll.run.readings import Planned
from plimsoll.run.state import RunState
from plimsoll.run.trajectories import read_trajectories, write_trajectories
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.from_data import open_work
from plimsoll.train.loading import load_roles
from plimsoll.train.run_data import epoch_metrics, first_state
from plimsoll.train.saving import is_finished, restore, save_checkpoint


def run(spec: RunSpec[RlConfig], planned: Planned) -> None:
    """Sample. `run.resume` decides whether an earlier run goes on."""
    kinds = open_kinds(spec.config.environments)
    with (
        open_rewards(spec.config.rewards) as scorer,
        open_work(
            spec,
            planned,
            lambda session: load_prompt_data(session, spec, scorer.check_reference),
            lambda data: start(spec, data.train),
        ) as work,
    ):
        load_roles(work)
        restore(work.session, work.cluster)
        sample_all(work, scorer, set_up(spec, kinds, scorer))
        for line in write_selected(work):
            work.session.progress.note(line)


def sample_all(work: RlWork, scorer: Scorer, environments: Environments | None) -> None:
    """Sample, score and write all steps that are left."""
    session = work.session
    scorer.restore(session.state.rewards)
    state = first_state(session, work.data)
    session.stop_if_asked(state.step)
    while not is_finished(session, state):
        samples = _sample_step(work, scorer, environments, state)
        step = state.step + 1
        trajectories = samples.trajectories
        write_trajectories(session.directory.trajectories_path(step), step, trajectories, None)
        state = replace(session.advance(state, samples.prompts), rewards=scorer.state())
        metrics = {
            **trajectory_metrics(trajectories),
            **samples.metrics,
            **epoch_metrics(work.data.order, state.data_position),
        }
        tokens = sum(len(t.prompt.tokens) + len(t.response_tokens) for t in trajectories)
        session.report(step, metrics, tokens)
        if session.spec.run.keep_checkpoints:
            save_checkpoint(session, work.cluster, state)
        session.stop_if_asked(step)


def _sample_step(
    work: RlWork, scorer: Scorer, environments: Environments | None, state: RunState
) -> Experience:
    spec, cluster, session = work.spec, work.cluster, work.session
    with session.phase("rollout", cluster):
        progress = session.progress
        answering = Answering(progress.count_calls(scorer.submit), progress.note, environments)
        draw = partial(drawn_prompts, work, state)
        samples = normalize_rewards(sample(cluster, spec, draw, state.step + 1, answering), scorer)
    if not spec.roles or spec.config.batch.dynamic_sampling is not None:
        return samples  # no reward models, or each round was scored by itself
    with session.phase("score", cluster):
        return replace(samples, trajectories=score_by_models(samples.trajectories, spec, cluster))


def write_selected(work: RlWork) -> Iterator[str]:
    """Write `best.jsonl` and `pairs.jsonl` from all trajectories, and yield a line on each file."""
    directory = work.session.directory
    steps = map(directory.trajectories_path, range(1, work.spec.steps + 1))
    kept = select(map(read_trajectories, steps), conversations_of(work.data.train))
    write_rows(directory.best_path, kept.best)
    write_rows(directory.pairs_path, kept.pairs)
    groups = counted(kept.groups, "group")
    for path, rows, what, why in (
        (directory.best_path, kept.best, "best response", "every one was cut off or is empty"),
        (directory.pairs_path, kept.pairs, "best and worst", "no two that ended differ in reward"),
    ):
        others = kept.groups - len(rows)
        reason = f"; of the other {others:,}, {why}" if others else ""
        yield f"{path}: the {what} of {len(rows):,} of {groups}{reason}"
