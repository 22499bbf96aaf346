"""Prompts to scored trajectories, for training and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from plimsoll.algorithm.interval import mean_interval
from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rl import RlConfig
from plimsoll.config.rollout import SamplingConfig
from plimsoll.records import Ints, Prompt, Trajectory
from plimsoll.rl.reward_model import score_by_model
from plimsoll.rollout.protocol import Request, derive_seeds
from plimsoll.spec.run_spec import RunSpec

Scorer = Callable[[Sequence[Trajectory]], list[Trajectory]]

_EVAL_SEED = 2**31 - 1


def sample(
    cluster: Cluster, spec: RunSpec[RlConfig], prompts: Sequence[Prompt], step: int, scorer: Scorer
) -> list[Trajectory]:
    """Responses to a step's prompts, each scored as it comes, in the prompts' order."""
    seed = int(np.random.SeedSequence([spec.run.seed, step]).generate_state(1)[0])
    return _answers(
        cluster, prompts, spec.config.batch.responses, spec.config.rollout.sampling, seed, scorer
    )


def evaluate(
    cluster: Cluster, spec: RunSpec[RlConfig], prompts: Sequence[Prompt], scorer: Scorer
) -> dict[str, float]:
    """The mean reward, and of each part, over one response to each held-out prompt, with their
    intervals."""
    found = answer_held_out(cluster, spec, prompts, scorer)
    return {f"eval/{name}": value for name, value in mean_rewards(found).items()}


def answer_held_out(
    cluster: Cluster, spec: RunSpec[RlConfig], prompts: Sequence[Prompt], scorer: Scorer
) -> list[Trajectory]:
    """One response to each held-out prompt, with all parts of its reward."""
    sampling = spec.config.eval_sampling or spec.config.rollout.sampling
    return score_by_model(
        _answers(cluster, prompts, 1, sampling, _EVAL_SEED, scorer), spec, cluster
    )


def mean_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean reward, and that of each part by its name; each with its 95 % confidence interval
    over prompts, where there are several."""
    values = {"reward": [t.reward for t in trajectories]}
    for i, part in enumerate(trajectories[0].rewards):
        values[part.name] = [t.rewards[i].value for t in trajectories]
    prompts = [t.prompt.tokens.tobytes() for t in trajectories]
    metrics = {}
    for name, own in values.items():
        metrics[name] = fmean(own)
        if (interval := mean_interval(own, prompts)) is not None:
            metrics[f"{name}_low"], metrics[f"{name}_high"] = interval
    return metrics


def probe_sequences(prompts: Sequence[Prompt], spec: RunSpec[RlConfig]) -> list[Ints]:
    """The token sequences that weight syncs are proved with: the first prompts of the data that
    have two tokens, as the log-prob of a sequence's first is not known; where none has, two prompts
    of one token after each other."""
    long_enough = [p.tokens for p in prompts if len(p.tokens) > 1]
    pair = np.concatenate([prompts[0].tokens, prompts[-1].tokens])
    probe = (long_enough or [pair])[: spec.config.rollout.sync.probe_sequences]
    return [tokens.astype(np.int64) for tokens in probe]


def _answers(
    cluster: Cluster,
    prompts: Sequence[Prompt],
    responses: int,
    sampling: SamplingConfig,
    seed: int,
    scorer: Scorer,
) -> list[Trajectory]:
    size = max(1, cluster.responses_per_request() // responses)
    parts = [tuple(prompts[i : i + size]) for i in range(0, len(prompts), size)]
    seeds = derive_seeds(seed, len(parts))
    requests = [Request(p, responses, sampling, s) for p, s in zip(parts, seeds, strict=True)]
    found = {}
    for place, done in cluster.generate(requests):
        grouped = [replace(t, group=place * size + i // responses) for i, t in enumerate(done)]
        found[place] = scorer(grouped)
    return [trajectory for place in sorted(found) for trajectory in found[place]]
