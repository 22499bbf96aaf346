"""Score responses by reward models, which run on the actor's ranks or on ranks of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean

import numpy as np

from plimsoll.algorithm.figures import sigmoid
from plimsoll.cluster.protocol import Cluster, group_of
from plimsoll.config.reward import RewardModelConfig
from plimsoll.config.rl import RlConfig
from plimsoll.data.packing import pack
from plimsoll.data.template import Template, make_template
from plimsoll.errors import PlimsollError
from plimsoll.model.load import load_tokenizer
from plimsoll.model.policy import at_marks
from plimsoll.records import Floats, RewardPart, Sample, Trajectory
from plimsoll.resolve.roles import Role
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.reward.score import texts_of
from plimsoll.reward.server_forms import conversation_tokens
from plimsoll.train.update import score_packs
from plimsoll.trainer.worker import Worker

_TAKE: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": fmean,
    "product": math.prod,
    "last": lambda scores: scores[-1],
}


def score_by_models(
    trajectories: Sequence[Trajectory], spec: RunSpec[RlConfig], cluster: Cluster
) -> list[Trajectory]:
    """Return the trajectories with each reward model's score added as a part of their rewards."""
    scored = list(trajectories)
    for name, model in spec.config.scoring_models.items():
        scores = model_scores(scored, name, spec, cluster)
        scored = [
            replace(t, rewards=(*t.rewards, RewardPart(name, score, model.weight)))
            for t, score in zip(scored, scores, strict=True)
        ]
    return scored


def model_scores(
    trajectories: Sequence[Trajectory], name: str, spec: RunSpec[RlConfig], cluster: Cluster
) -> list[float]:
    """Return the score of one reward model for each trajectory.

    Raises PlimsollError if a score is not finite; it names model, row, prompt and response.
    """
    model = spec.config.scoring_models[name]
    samples = [_sample(t, model, spec) for t in trajectories]
    all_scores = _scores(samples, spec.scorer_of(name), spec, cluster)
    for trajectory, scores in zip(trajectories, all_scores, strict=True):
        if not np.isfinite(scores).all():
            raise PlimsollError(
                f"The reward model {name!r} ({model.role.model.path}), at row "
                f"{trajectory.prompt.index} (from 0), gave {scores.tolist()}, and a reward must be "
                f"a finite number: its weights hold NaN, or overflow in role.model.dtype "
                f"{model.role.model.dtype}. {texts_of(trajectory)}"
            )
    return [of_response(scores, model) for scores in all_scores]


def _scores(
    samples: Sequence[Sample], role: Role, spec: RunSpec[RlConfig], cluster: Cluster
) -> list[Floats]:
    longest, group = max(len(s.tokens) for s in samples), group_of(cluster, role)
    packs = pack(samples, group.streams, max(longest, spec.workload.largest_pack(group.streams)))
    return score_packs(group, Worker.values_at, role.name, packs, at_marks)


def of_response(scores: Floats, model: RewardModelConfig) -> float:
    """Return one number for a response, from the scores that the model gave for it.

    A model that scores responses gives a single score. A process reward model gives one for each
    step of the solution; `steps.take` (min, mean, ...) reduces their probabilities to a number.
    """
    if model.steps is None:
        return float(scores[-1])
    return _TAKE[model.steps.take](sigmoid(scores).tolist())


def _sample(trajectory: Trajectory, model: RewardModelConfig, spec: RunSpec[RlConfig]) -> Sample:
    """Return the conversation as a sample whose loss mask marks the tokens that are scored.

    These are its last token, as in transformers' sequence classification, or the last token of
    each step of the solution.
    """
    if model.tokenizer == "actor":
        tokens = np.concatenate([trajectory.prompt.tokens, trajectory.response_tokens])
        return Sample(tokens, np.arange(len(tokens)) == len(tokens) - 1)
    of = model.role.model
    template = _template(of.path, of.trust_remote_code, model.chat_template, spec.data.date)
    tokens, marks = conversation_tokens(trajectory, template, model.steps)
    most = model.max_tokens or spec.workload.longest
    tokens, marks = tokens[-most:], marks[-most:]
    if model.steps is None or not marks[1:].any():  # a response may hold no step
        marks = np.arange(len(tokens)) == len(tokens) - 1
    marks[:1] = False  # a sequence's first token is never marked
    return Sample(tokens, marks)


@cache
def _template(
    path: str, trust_remote_code: bool, chat_template: str | None, date: str | None
) -> Template:
    return make_template(load_tokenizer(path, trust_remote_code), chat_template, None, date=date)
