"""Reward models of a config for `plimsoll serve-reward`: in this process, one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from plimsoll.cluster.protocol import Cluster
from plimsoll.cluster.start import start_cluster
from plimsoll.config.reward import RewardModelConfig
from plimsoll.config.rl import RlConfig
from plimsoll.records import RewardPart, Trajectory
from plimsoll.reward.score import Scored
from plimsoll.rl.reward_model import model_scores
from plimsoll.spec.roles import scoring_role
from plimsoll.spec.run_spec import RunSpec, resolve_changed
from plimsoll.train.loading import load_measured

ServedScore = Callable[[Sequence[Trajectory]], Future[Scored]]
"""Begins to score trajectories, each by itself."""


@contextmanager
def open_models(spec: RunSpec[RlConfig], names: Sequence[str]) -> Iterator[dict[str, ServedScore]]:
    """Yield functions that score trajectories by each of these models."""
    here = spec.written.cluster.model_copy(
        update={"where": "local", "ranks": 1, "critic_ranks": None}
    )
    alone = resolve_changed(spec, {"cluster": here})
    with ThreadPoolExecutor(1) as thread:  # what begins in a thread goes on in it, as torch's do
        cluster = thread.submit(_load_models, alone, names).result()
        try:
            yield {
                name: partial(thread.submit, partial(_score, name, alone, cluster))
                for name in names
            }
        finally:
            thread.submit(cluster.close).result()


def _load_models(spec: RunSpec[RlConfig], names: Sequence[str]) -> Cluster:
    cluster = start_cluster(spec.cluster, ())
    for name in names:
        load_measured(cluster, spec, scoring_role(name))
    return cluster


def _score(
    name: str, spec: RunSpec[RlConfig], cluster: Cluster, trajectories: Sequence[Trajectory]
) -> Scored:
    """Return the trajectories with their scores, or raise ValueError if one cannot be read."""
    model = spec.config.scoring_models[name]
    readable = [_make_readable(trajectory, model) for trajectory in trajectories]
    scores = model_scores(readable, name, spec, cluster) if readable else []
    parts = [(RewardPart(name, score),) for score in scores]
    scored = (replace(t, rewards=rewards) for t, rewards in zip(trajectories, parts, strict=True))
    return Scored(tuple(scored), ())


def _make_readable(trajectory: Trajectory, model: RewardModelConfig) -> Trajectory:
    """Return the trajectory with its prompt as a conversation, if the model renders it itself."""
    prompt = trajectory.prompt
    if model.tokenizer == "own":
        messages = prompt.messages or [{"role": "user", "content": prompt.text}]
        return replace(trajectory, prompt=replace(prompt, messages=messages))
    if not len(prompt.tokens) or not len(trajectory.response_tokens):
        raise ValueError(
            "the model reads the actor's tokens (tokenizer: actor), and prompt_tokens or "
            "response_tokens are missing: ask in Plimsoll's format, or serve it with "
            "tokenizer: own, which reads texts"
        )
    return trajectory
