"""Train the critic to predict the returns of a step's tokens."""

from __future__ import annotations

import numpy as np

from plimsoll.cluster.protocol import Cluster, group_of
from plimsoll.config.rl import RlConfig
from plimsoll.records import RETURNS, VALUES, BatchColumns, Floats
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.rl.batch import Batch, train_on
from plimsoll.rl.layout import MiniBatch
from plimsoll.run.state import RunState
from plimsoll.train.update import OptimizerStep
from plimsoll.trainer.objectives import ValueObjective
from plimsoll.trainer.schedule import learning_rate

_ROUNDING = 1e-10
"""Rounding in float32 may leave equal numbers a variance of up to this share of their mean square.
"""


def train_critic(
    batch: Batch,
    columns: BatchColumns,
    spec: RunSpec[RlConfig],
    cluster: Cluster,
    state: RunState,
) -> dict[str, float]:
    """Train the critic on all epochs and mini-batches; return the means of the updates' metrics.

    `columns` has its values before the step, and their targets.
    """
    algorithm, optimizer = spec.config.algorithm, spec.trained["critic"].optimizer
    minis, own = batch.critic_minis, {column: columns[column] for column in (VALUES, RETURNS)}
    updates = algorithm.epochs * len(minis)
    objective = ValueObjective(algorithm.value_clip)

    def step(mini: MiniBatch) -> OptimizerStep:
        return OptimizerStep(mini.packs, mini.counts, objective, own)

    metrics = train_on(
        batch,
        minis,
        "critic",
        group_of(cluster, "critic"),
        algorithm.epochs,
        step,
        lambda n: learning_rate(optimizer, state.step * updates + n, spec.steps * updates),
    )
    return metrics | {
        "value_loss": metrics.pop("loss"),
        "critic/grad_norm": metrics.pop("grad_norm"),
        "critic/skipped_steps": metrics.pop("skipped_steps"),
    }


def explained_variance(returns_L: Floats, values_L: Floats) -> dict[str, float]:
    """Return {"explained_variance": share of the returns' variance that the values explain}.

    The result is empty if the returns vary only by rounding, for example if all rewards are 0.
    """
    variance = float(returns_L.var())
    if variance <= _ROUNDING * float(np.square(returns_L).mean()):
        return {}
    return {"explained_variance": 1 - float((returns_L - values_L).var()) / variance}
