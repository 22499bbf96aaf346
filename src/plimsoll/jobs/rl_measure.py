"""Reinforcement learning's measure of a model: held-out prompts answered, without training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from itertools import chain
from pathlib import Path
from statistics import fmean

from plimsoll.config.problems import refuse
from plimsoll.config.rl import RlConfig
from plimsoll.records import Trajectory
from plimsoll.reward.references import check_references
from plimsoll.reward.score import Scored, Scorer
from plimsoll.rl.answers import Answering, Submit
from plimsoll.rl.environments import open_kinds, set_up
from plimsoll.rl.evaluate import answer_held_out, evaluation_figures
from plimsoll.rl.setup import prompt_loader, start
from plimsoll.run.counter import Advance, counting
from plimsoll.run.trajectories import write_trajectories
from plimsoll.spec.roles import scoring_role
from plimsoll.spec.run_spec import RunSpec, resolve
from plimsoll.train.loading import load_measured
from plimsoll.train.run_data import load_held_out_sets, row_counts


def measured_with(scorer: Scorer, spec: RunSpec[RlConfig], directory: Path) -> dict[str, float]:
    """The figures, by their names; the answers are written to the directory."""
    spec = _with_fewest_ranks(spec)
    refuse(check_references(spec.config.rewards, spec.data.eval_sources()))
    kinds = open_kinds(spec.config.environments)
    loaded = load_held_out_sets(spec, prompt_loader(spec, scorer.check_reference))
    environments = set_up(spec, kinds, scorer.loop)
    held_out = {key: one.items for key, one in loaded.items()}
    expected = sum(one.responses * len(held_out[one.key]) for one in spec.eval_sets)
    with (
        closing(start(spec, [*chain.from_iterable(held_out.values())])) as cluster,
        counting("answers", expected, sys.stdout) as advance,
    ):
        for part in spec.config.scoring_models:
            load_measured(cluster, spec, scoring_role(part))

        def answering_to(key: str) -> Answering:
            return Answering(_advancing(scorer.of_held_out(key).submit, advance), environments, key)

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

    def counted(trajectories: Sequence[Trajectory]) -> Future[Scored]:
        scored = submit(trajectories)
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
