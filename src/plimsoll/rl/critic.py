"""PPO's critic: it scores a step's trajectories, and learns what they returned."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rl import RlConfig
from plimsoll.engine.objectives.value import ValueObjective, ValueStream
from plimsoll.engine.schedule import learning_rate
from plimsoll.engine.worker import Worker
from plimsoll.records import Floats, Pack, to_packed
from plimsoll.rl.batch import Batch, MiniBatch, by_trajectory, train_on
from plimsoll.run.state import RunState
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.update import Step

_ROUNDING = 1e-10
"""Of a mean square, what float32 may leave of numbers that are all the same, and more."""


def score_values(batch: Batch, cluster: Cluster) -> list[Floats]:
    """Of each response token of each trajectory."""
    return by_trajectory(batch, cluster, Worker.values, "critic")


def train_critic(
    batch: Batch,
    values: list[Floats],
    returns: list[Floats],
    spec: RunSpec[RlConfig],
    cluster: Cluster,
    state: RunState,
) -> dict[str, float]:
    """All epochs and mini-batches of the critic; the means of their metrics."""
    optimizer, updates = spec.config.critic.optimizer, spec.workload.updates
    objective = ValueObjective(spec.config.algorithm.value_clip)

    def step(mini: MiniBatch) -> Step[ValueStream]:
        stream = value_stream(mini, values, returns)
        return Step(mini.critic_packs, mini.counts, objective, stream)

    metrics = train_on(
        batch,
        "critic",
        cluster,
        spec.config.algorithm.epochs,
        step,
        lambda n: learning_rate(optimizer, state.step * updates + n, spec.steps * updates),
    )
    return metrics | {
        "value_loss": metrics.pop("loss"),
        "critic/grad_norm": metrics.pop("grad_norm"),
        "critic/skipped_steps": metrics.pop("skipped_steps"),
    }


def value_stream(
    mini: MiniBatch, values: list[Floats], returns: list[Floats]
) -> Callable[[Pack], ValueStream]:
    """What the value loss needs beside each pack of a mini-batch."""
    own_returns = [returns[i] for i in mini.members]
    old = [values[i] for i in mini.members]
    return lambda pack: ValueStream(to_packed(pack, own_returns), to_packed(pack, old))


def explained_variance(returns: list[Floats], values: list[Floats]) -> dict[str, float]:
    """The critic's share of the returns' variance; nothing where they do not vary but for rounding,
    as where no response has earned anything yet."""
    returns_L, values_L = np.concatenate(returns), np.concatenate(values)
    variance = float(returns_L.var())
    if variance <= _ROUNDING * float(np.square(returns_L).mean()):
        return {}
    return {"explained_variance": 1 - float((returns_L - values_L).var()) / variance}
