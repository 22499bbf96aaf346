"""The roles that several jobs load: the actor, and the reference that it is compared with."""

from __future__ import annotations

from plimsoll.cluster.protocol import Cluster
from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.engine.worker import Worker
from plimsoll.recipes.from_data import ConfigT, RowT, Work


def load_actor(work: Work[ConfigT, RowT]) -> None:
    """Load the policy that learns from data on all ranks."""
    actor, seed = work.config.actor, work.config.run.seed
    with work.session.phase("load", work.cluster):
        work.cluster.all(Worker.load_policy, "actor", actor, 1.0, seed)


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
