"""PPO's critic: it scores a step's trajectories, and learns what they returned."""

from __future__ import annotations

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rl import PpoConfig
from plimsoll.engine.objectives.value import ValueObjective, ValueStream
from plimsoll.engine.schedule import learning_rate
from plimsoll.engine.worker import Worker
from plimsoll.records import Floats, to_packed
from plimsoll.rl.batch import Batch, MiniBatch, by_trajectory, train_on
from plimsoll.run.state import RunState
from plimsoll.spec.run_spec import RunSpec

_ROUNDING = 1e-10
"""Of a mean square, what float32 may leave of numbers that are all the same, and more."""


def score_values(batch: Batch, cluster: Cluster) -> list[Floats]:
    """Of each response token of each trajectory."""
    return by_trajectory(batch, cluster, Worker.values, "critic")


def train_critic(
    batch: Batch,
    values: list[Floats],
    returns: list[Floats],
    spec: RunSpec[PpoConfig],
    cluster: Cluster,
    state: RunState,
) -> dict[str, float]:
    """All epochs and mini-batches of the critic; the means of their metrics."""
    optimizer, updates = spec.config.critic.optimizer, spec.workload.updates
    metrics = train_on(
        batch,
        "critic",
        cluster,
        spec.config.algorithm.epochs,
        ValueObjective(spec.config.algorithm.value_clip),
        lambda mini: value_streams(mini, values, returns),
        lambda n: learning_rate(optimizer, state.step * updates + n, spec.run.steps * updates),
    )
    return metrics | {
        "value_loss": metrics.pop("loss"),
        "critic/grad_norm": metrics.pop("grad_norm"),
        "critic/skipped_steps": metrics.pop("skipped_steps"),
    }


def value_streams(
    mini: MiniBatch, values: list[Floats], returns: list[Floats]
) -> list[list[ValueStream]]:
    """What the value loss needs beside the packs of a mini-batch, by rank."""
    own_returns = [returns[i] for i in mini.members]
    old = [values[i] for i in mini.members]
    return [
        [ValueStream(to_packed(p, own_returns), to_packed(p, old)) for p in own]
        for own in mini.critic_packs
    ]


def foreseen(returns: list[Floats], values: list[Floats]) -> dict[str, float]:
    """The critic's share of the returns' variance; nothing where they do not vary but for rounding,
    as where no response has earned anything yet."""
    returns_L, values_L = np.concatenate(returns), np.concatenate(values)
    variance = float(returns_L.var())
    if variance <= _ROUNDING * float(np.square(returns_L).mean()):
        return {}
    return {"value_explained": 1 - float((returns_L - values_L).var()) / variance}
