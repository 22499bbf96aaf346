"""Train the critic to predict the returns of a step's tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.rl import RlConfig
from plimsoll.records import Floats, Pack
from plimsoll.resolve.roles import Role
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.rl.batch import Batch, train_on
from plimsoll.run.state import RunState
from plimsoll.trainer.objectives import ValueObjective, ValueStream

_ROUNDING = 1e-10
"""Rounding in float32 may leave equal numbers a variance of up to this share of their mean square.
"""


def train_critic(
    role: Role,
    batch: Batch,
    values_L: Floats,
    returns_L: Floats,
    spec: RunSpec[RlConfig],
    cluster: Cluster,
    state: RunState,
) -> dict[str, float]:
    """Train a critic on all epochs and mini-batches; return the means of the updates' metrics.

    `values_L` are the critic's values before the step, `returns_L` their targets.
    """
    objective = ValueObjective(spec.config.algorithm.value_clip)
    stream, layout = value_stream(batch, values_L, returns_L), batch.critic_layout
    places = batch, layout, role, spec, cluster, state.step
    return train_on(*places, objective, stream, "value_loss")


def value_stream(
    batch: Batch, values_L: Floats, returns_L: Floats
) -> Callable[[Pack], ValueStream]:
    """Return a function of a pack that gives the returns and old values of its learned tokens."""
    layout = batch.critic_layout
    returns_L, values_L = (batch.layout.move_to(x_L, layout) for x_L in (returns_L, values_L))
    return lambda pack: ValueStream(layout.of_pack(returns_L, pack), layout.of_pack(values_L, pack))


def explained_variance(returns_L: Floats, values_L: Floats) -> dict[str, float]:
    """Return {"explained_variance": share of the returns' variance that the values explain}.

    The result is empty if the returns vary only by rounding, for example if all rewards are 0.
    """
    variance = float(returns_L.var())
    if variance <= _ROUNDING * float(np.square(returns_L).mean()):
        return {}
    return {"explained_variance": 1 - float((returns_L - values_L).var()) / variance}
