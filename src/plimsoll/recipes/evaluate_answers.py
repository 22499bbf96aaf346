"""A model measured by what it answers: engines sample, rewards judge."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from statistics import fmean

from plimsoll.config.jobs import RlJobConfig
from plimsoll.config.problems import refuse
from plimsoll.recipes.chosen import check_references
from plimsoll.recipes.judging import load_judge
from plimsoll.recipes.ppo_setup import prompt_loader, start
from plimsoll.recipes.run_data import load_held_out, row_counts
from plimsoll.recipes.sampling import answer_held_out, mean_rewards
from plimsoll.records import Trajectory
from plimsoll.reward.score import build_rewards
from plimsoll.run.counter import counting
from plimsoll.run.trajectories import write_trajectories


def measure_answers(config: RlJobConfig, answers: Path) -> dict[str, float]:
    """The mean of each reward over one answer to each held-out prompt, sampled as `eval_sampling`
    says, with its 95 % confidence interval. answers: the Parquet file to write them to."""
    scorer, config = build_rewards(config.rewards).of_held_out(), _with_fewest_ranks(config)
    if config.data.eval is not None:
        refuse(check_references(config.rewards, {"data.eval": config.data.eval}))
    loaded = load_held_out(config, prompt_loader(config, scorer.check_reference))
    with (
        closing(start(config, loaded.items)) as cluster,
        counting("answers", len(loaded.items), sys.stdout) as advance,
    ):
        load_judge(cluster, config)

        def score(trajectory: Trajectory) -> Trajectory:
            scored = scorer(trajectory)
            advance(1)
            return scored

        found = answer_held_out(cluster, config, loaded.items, score)
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


def _with_fewest_ranks(config: RlJobConfig) -> RlJobConfig:
    """The same with no more ranks than its rewards need."""
    ranks = config.cluster.ranks if config.reward_model is not None else 1
    cluster = config.cluster.model_copy(update={"ranks": ranks, "critic_ranks": None})
    return config.model_copy(update={"cluster": cluster})
