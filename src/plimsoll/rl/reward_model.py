"""The reward models' parts of the reward: whole responses, scored by the training ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.model import ModelConfig
from plimsoll.config.reward import RewardModelConfig, StepsConfig
from plimsoll.config.rl import RlConfig
from plimsoll.data.packing import pack
from plimsoll.data.pieces import Piece
from plimsoll.data.steps import step_pieces
from plimsoll.data.template import Template, make_template
from plimsoll.data.tokenize import tokenize
from plimsoll.engine.worker import Worker
from plimsoll.model.load import load_tokenizer
from plimsoll.model.value import at_marks
from plimsoll.records import Floats, RewardPart, Sample, Trajectory, from_packed
from plimsoll.spec.roles import scoring_role
from plimsoll.spec.run_spec import RunSpec

_TAKEN: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": fmean,
    "product": math.prod,
    "last": lambda scores: scores[-1],
}


def score_by_models(
    trajectories: Sequence[Trajectory], spec: RunSpec[RlConfig], cluster: Cluster
) -> list[Trajectory]:
    """Add each reward model's score to each trajectory's parts."""
    found = list(trajectories)
    for name, model in spec.config.scoring_models.items():
        samples = [_sample(t, model, spec) for t in found]
        scores = _scores(samples, scoring_role(name), spec, cluster)
        found = [
            replace(t, rewards=(*t.rewards, RewardPart(name, _of_response(s, model), model.weight)))
            for t, s in zip(found, scores, strict=True)
        ]
    return found


def _scores(
    samples: Sequence[Sample], role: str, spec: RunSpec[RlConfig], cluster: Cluster
) -> list[Floats]:
    """Of each sample, the scores at its marked tokens."""
    longest = max(len(s.tokens) for s in samples)
    packs = pack(samples, cluster.ranks, max(longest, spec.workload.largest_pack(cluster.ranks)))
    found = cluster.each(Worker.values, [(role, own, at_marks) for own in packs])
    flat = [one for own in packs for one in own]
    return from_packed(flat, [values for own in found for values in own], len(samples))


def _of_response(scores: Floats, model: RewardModelConfig) -> float:
    """One number: the score itself, or what is taken of the steps' probabilities."""
    if model.steps is None:
        return float(scores[-1])
    return _TAKEN[model.steps.take]([1 / (1 + math.exp(-float(score))) for score in scores])


def _sample(trajectory: Trajectory, model: RewardModelConfig, spec: RunSpec[RlConfig]) -> Sample:
    """The conversation, marked where its scores are read: at its last token, as transformers'
    sequence classification does, or at the last token of each step."""
    if model.tokenizer == "actor":
        tokens = np.concatenate([trajectory.prompt.tokens, trajectory.response_tokens])
        return Sample(tokens, np.arange(len(tokens)) == len(tokens) - 1)
    template = _template(model.role.model, model.chat_template)
    pieces = _pieces(trajectory, template, model.steps)
    [(tokens, marks)] = tokenize(template.tokenizer, [pieces], template.begin, None)
    most = model.max_tokens or spec.workload.longest
    tokens, marks = tokens[-most:], marks[-most:]
    if model.steps is None or not marks[1:].any():  # a response may hold no step
        marks = np.arange(len(tokens)) == len(tokens) - 1
    marks[:1] = False  # a sequence's first token is never marked
    return Sample(tokens, marks)


def _pieces(
    trajectory: Trajectory, template: Template, steps: StepsConfig | None
) -> tuple[Piece, ...]:
    """Prompt and response, rendered by the model's own template."""
    prompt, response = trajectory.prompt.messages, trajectory.response_text
    if steps is None:
        return template.render_answer(prompt, [{"role": "assistant", "content": response}])
    parts = [part for part in response.split(steps.separator) if part.strip()]
    return step_pieces(template, prompt, parts or [response], steps.separator)


@cache
def _template_of(path: str, trust_remote_code: bool, chat_template: str | None) -> Template:
    return make_template(load_tokenizer(path, trust_remote_code), chat_template, None)


def _template(model: ModelConfig, chat_template: str | None) -> Template:
    """Read once for each model."""
    return _template_of(model.path, model.trust_remote_code, chat_template)
