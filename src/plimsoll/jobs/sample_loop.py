"""Sample and score responses without learning from them, and write the best for SFT and DPO.

    plimsoll sample CONFIG.yaml

Each step samples and scores groups of responses like a step of `plimsoll rl`, with the actor's
first weights, and writes the same files. At the end two files are written: the best response of
each group, for SFT; and pairs of the best and the worst response, for DPO. Each step is saved, so
a run that was stopped or killed continues after its last step. `plimsoll eval` works as for
`plimsoll rl`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from plimsoll.config.rl import RlConfig
from plimsoll.jobs.rl_loop import measure as measure
from plimsoll.records import Prompt, Trajectory
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.reward.score import Scorer, open_rewards
from plimsoll.rl.batch import trajectory_metrics
from plimsoll.rl.environments import open_kinds, set_up
from plimsoll.rl.episodes import Environments
from plimsoll.rl.live import sample_step
from plimsoll.rl.reward_model import score_by_models
from plimsoll.rl.sampling import Sampled
from plimsoll.rl.setup import RlWork, load_prompt_data, start
from plimsoll.run.json_lines import write_rows
from plimsoll.run.numbers import plural
from plimsoll.run.readings import Planned
from plimsoll.run.state import RunState
from plimsoll.run.trajectories import read_trajectories, write_trajectories
from plimsoll.train.from_data import open_work
from plimsoll.train.loading import load_roles
from plimsoll.train.run_data import epoch_metrics, first_state
from plimsoll.train.saving import is_finished, restore


def run(spec: RunSpec[RlConfig], planned: Planned) -> None:
    """Sample all steps and write the files. `run.resume` decides whether an earlier run goes on."""
    kinds = open_kinds(spec.config.environments)
    with (
        open_rewards(spec.config.rewards) as scorer,
        open_work(
            spec,
            planned,
            lambda session: load_prompt_data(session, session.spec, scorer.references),
            lambda data: start(spec, data.train),
        ) as work,
        work.cluster.reward_hosts() as hosts,
    ):
        load_roles(work)
        restore(work.session, work.cluster)
        sample_all(work, scorer.on_hosts(hosts), set_up(work.spec, kinds, scorer))
        for line in write_selected(work):
            work.session.progress.note(line)


def sample_all(work: RlWork, scorer: Scorer, environments: Environments | None) -> None:
    """Sample and score the steps that are left, and write each step's responses."""
    session = work.session
    scorer.restore(session.state.rewards)
    state = first_state(session, work.data)
    session.directory.remove_trajectories_after(state.step)
    session.stop_if_asked(state.step)
    while not is_finished(session, state):
        samples = _scored_step(work, scorer, environments, state)
        step = state.step + 1
        trajectories = samples.trajectories
        write_trajectories(session.directory.trajectories_path(step), step, trajectories)
        session.journal.keep(lambda key: False)
        state = replace(session.advance(state, samples.prompts), rewards=scorer.state())
        metrics = {
            **trajectory_metrics(trajectories),
            **samples.metrics,
            **epoch_metrics(work.data.order, state.data_position),
        }
        tokens = sum(len(t.prompt.tokens) + len(t.response_tokens) for t in trajectories)
        session.report(step, metrics, tokens)
        if session.spec.run.keep_checkpoints:
            session.checkpoints.write(work.cluster, state)
        session.stop_if_asked(step)


def _scored_step(
    work: RlWork, scorer: Scorer, environments: Environments | None, state: RunState
) -> Sampled:
    spec, cluster = work.spec, work.cluster
    samples = sample_step(work, scorer, environments, state)
    if not spec.roles or spec.config.batch.dynamic_sampling is not None:
        return samples  # no reward models, or each round was scored by itself
    with work.session.phase("score", cluster):
        return replace(samples, trajectories=score_by_models(samples.trajectories, spec, cluster))


def write_selected(work: RlWork) -> Iterator[str]:
    """Write `best.jsonl` and `pairs.jsonl` from all trajectories; yield a message on each file."""
    directory = work.session.directory
    steps = map(directory.trajectories_path, range(1, work.spec.steps + 1))
    kept = select(map(read_trajectories, steps), conversations_of(work.data.train))
    write_rows(directory.best_path, kept.best)
    write_rows(directory.pairs_path, kept.pairs)
    groups = plural(kept.groups, "group")
    for path, rows, what, why in (
        (directory.best_path, kept.best, "best response", "every one was cut off or is empty"),
        (directory.pairs_path, kept.pairs, "best and worst", "no two that ended differ in reward"),
    ):
        others = kept.groups - len(rows)
        reason = f"; of the other {others:,}, {why}" if others else ""
        yield f"{path}: the {what} of {len(rows):,} of {groups}{reason}"


SelectedRow = dict[str, Any]
Conversations = Mapping[int, Sequence[Mapping[str, Any]]]
"""The messages of each prompt, by the prompt's index."""


@dataclass(frozen=True)
class Selected:
    """The selected rows.

    Attributes:
        best: rows with prompt, response and reward.
        pairs: rows with prompt, chosen and rejected response, and their rewards.
        groups: the number of groups that the rows were selected from.
    """

    best: list[SelectedRow]
    pairs: list[SelectedRow]
    groups: int


def conversations_of(prompts: Sequence[Prompt]) -> Conversations:
    """Return the messages of all prompts if a prompt has several turns, else nothing.

    With messages, `select` returns rows of conversations.
    """
    turns = {prompt.index: prompt.messages for prompt in prompts}
    return turns if any(len(messages) > 1 for messages in turns.values()) else {}


def select(steps: Iterable[Sequence[Trajectory]], conversations: Conversations) -> Selected:
    """Return each group's best response, and a pair of best and worst if their rewards differ.

    Among equal rewards the first response is taken. Empty responses and responses that were cut
    off are left out, because a row's response is learned with its end. If `conversations` is not
    empty, a row has `messages` in place of prompt and response, and `chosen` and `rejected` are
    entire conversations.
    """
    groups = [
        list(group)
        for trajectories in steps
        for _, group in groupby(trajectories, key=lambda t: t.group)
    ]
    ended = [
        [t for t in group if t.finish_reason == "stop" and t.response_text.strip()]
        for group in groups
    ]
    best = [max(responses, key=lambda t: t.reward) for responses in ended if responses]
    worst = [min(responses, key=lambda t: t.reward) for responses in ended if responses]
    pairs = [
        _pair(high, low, conversations)
        for high, low in zip(best, worst, strict=True)
        if high.reward > low.reward and high.response_text != low.response_text
    ]
    return Selected([_single(t, conversations) for t in best], pairs, len(groups))


def _single(best: Trajectory, conversations: Conversations) -> SelectedRow:
    if conversations:
        return {"messages": _conversation(best, conversations), "reward": best.reward}
    text = best.response_text
    return {"prompt": best.prompt.text, "response": text, "reward": best.reward}


def _pair(high: Trajectory, low: Trajectory, conversations: Conversations) -> SelectedRow:
    rewards = {"chosen_reward": high.reward, "rejected_reward": low.reward}
    if conversations:
        chosen, rejected = (_conversation(t, conversations) for t in (high, low))
        return {"chosen": chosen, "rejected": rejected, **rewards}
    texts = {"chosen": high.response_text, "rejected": low.response_text}
    return {"prompt": high.prompt.text, **texts, **rewards}


def _conversation(t: Trajectory, conversations: Conversations) -> list[Mapping[str, Any]]:
    return [*conversations[t.prompt.index], {"role": "assistant", "content": t.response_text}]
