"""The rollout half of reinforcement learning alone: sample, score, write down.

    plimsoll sample CONFIG.yaml

Each step samples and scores groups of responses as a step of `plimsoll rl` does, with the actor's
first weights, and writes them as that does. At the end the best of each group, and pairs of the
best and the worst, are written for SFT and DPO. Each step is saved: a run that was stopped or
killed goes on after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rl import RlConfig
from plimsoll.jobs.rl_loop import measure as measure_answers
from plimsoll.reward.score import Scorer, open_rewards
from plimsoll.rl.answers import Answering
from plimsoll.rl.batch import trajectory_metrics
from plimsoll.rl.environments import open_kinds, set_up
from plimsoll.rl.episodes import Environments
from plimsoll.rl.live import drawn_prompts
from plimsoll.rl.reward_model import score_by_models
from plimsoll.rl.sampling import Sampled, normalized, sample
from plimsoll.rl.selected import conversations_of, select
from plimsoll.rl.setup import RlData, RlWork, load_prompt_data, start
from plimsoll.run.counting import counted
from plimsoll.run.files import whole_directory
from plimsoll.run.json_lines import write_rows
from plimsoll.run.readings import Planned
from plimsoll.run.state import RunState
from plimsoll.run.trajectories import read_trajectories, write_trajectories
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.from_data import open_work
from plimsoll.train.loading import load_roles
from plimsoll.train.run_data import epoch_metrics, first_state
from plimsoll.train.saving import finished, restore
from plimsoll.train.session import Session


def run(spec: RunSpec[RlConfig], planned: Planned) -> None:
    """Sample; resumes where `run.resume` says so."""
    kinds = open_kinds(spec.config.environments)
    with open_rewards(spec.config.rewards) as scorer:

        def read(session: Session) -> RlData:
            return load_prompt_data(session, spec, scorer.check_reference)

        def started(data: RlData) -> Cluster:
            return start(spec, data.train)

        with open_work(spec, planned, read, started) as work:
            load_roles(work)
            restore(work.session, work.cluster)
            sample_all(work, scorer, set_up(spec, kinds, scorer))
            for told in write_selected(work):
                work.session.progress.note(told)


def measure(spec: RunSpec[RlConfig], directory: Path) -> dict[str, float]:
    """As `plimsoll rl` measures the model that samples."""
    return measure_answers(spec, directory)


def sample_all(work: RlWork, scorer: Scorer, environments: Environments | None) -> None:
    """The loop."""
    session = work.session
    scorer.restore(session.state.rewards)
    state = first_state(session, work.data)
    session.stop_if_asked(state.step)
    while not finished(session, state):
        found = _sampled(work, scorer, environments, state)
        step = state.step + 1
        trajectories = found.trajectories
        write_trajectories(session.directory.trajectories_path(step), step, trajectories, None)
        state = replace(session.advance(state, found.prompts), rewards=scorer.state())
        metrics = trajectory_metrics(trajectories) | found.metrics
        metrics |= epoch_metrics(work.data.order, state.data_position)
        tokens = sum(len(t.prompt.tokens) + len(t.response_tokens) for t in trajectories)
        session.report(step, metrics, tokens)
        if session.spec.run.keep_checkpoints:
            _save(session, state)
        session.stop_if_asked(step)


def _sampled(
    work: RlWork, scorer: Scorer, environments: Environments | None, state: RunState
) -> Sampled:
    spec, cluster, session = work.spec, work.cluster, work.session
    with session.phase("rollout", cluster):
        progress = session.progress
        answering = Answering(progress.counted(scorer.submit), progress.note, environments)
        drawn = partial(drawn_prompts, work, state)
        found = sample(cluster, spec, drawn, state.step + 1, answering)
        found = normalized(found, scorer)
    if not spec.roles or spec.config.batch.dynamic_sampling is not None:
        return found  # without reward models, or each round was scored by itself
    with session.phase("score", cluster):
        return replace(found, trajectories=score_by_models(found.trajectories, spec, cluster))


def _save(session: Session, state: RunState) -> None:
    """Where the next step goes on; a checkpoint without weights."""
    session.directory.sync_rows()
    with whole_directory(session.directory.checkpoint_path(state.step)) as partial_path:
        state.save(partial_path / "state.json")
    session.directory.prune_checkpoints(session.spec.run.keep_checkpoints)


def write_selected(work: RlWork) -> Iterator[str]:
    """Write `best.jsonl` and `pairs.jsonl` from the trajectories of all steps; gives what to say of
    them."""
    directory = work.session.directory
    steps = map(directory.trajectories_path, range(1, work.spec.steps + 1))
    found = select(map(read_trajectories, steps), conversations_of(work.data.train))
    write_rows(directory.best_path, found.best)
    write_rows(directory.pairs_path, found.pairs)
    groups = counted(found.groups, "group")
    for path, rows, what, why in (
        (directory.best_path, found.best, "best response", "every one was cut off or is empty"),
        (directory.pairs_path, found.pairs, "best and worst", "no two that ended differ in reward"),
    ):
        others = found.groups - len(rows)
        told = f"; of the other {others:,}, {why}" if others else ""
        yield f"{path}: the {what} of {len(rows):,} of {groups}{told}"
