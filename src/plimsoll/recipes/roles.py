"""The reference, loaded in one place for every job that compares the actor with one."""

from __future__ import annotations

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.engine.worker import Worker


def load_reference(
    cluster: Cluster, given: FrozenRole | None, actor: TrainedRole, temperature: float
) -> None:
    """Have all ranks score as the role `reference`: the given model, or the actor's first weights.

    Where the actor trains an adapter these are the actor with its adapter switched off, and no
    second model is loaded. The actor must have been loaded.
    """
    if given is None and actor.adapter is not None:
        cluster.all(Worker.score_without_adapter, "actor", "reference")
    else:
        role = compared_role(given, actor)
        cluster.all(Worker.load_policy, "reference", role, temperature)


def compared_role(given: FrozenRole | None, actor: TrainedRole) -> FrozenRole:
    """What the actor is compared with, as a model of its own."""
    return given or FrozenRole(model=actor.model)
