"""Roles on their way to the ranks."""

from __future__ import annotations

from typing import Any, Literal

from plimsoll.cluster.protocol import Cluster, ranks_of
from plimsoll.config.engine import FrozenRole
from plimsoll.engine.worker import Worker
from plimsoll.spec.roles import RoleName
from plimsoll.spec.run_spec import RunSpec


def load_role(cluster: Cluster, spec: RunSpec[Any], name: RoleName) -> None:
    """Load a role on all ranks of its group. A reference that is the actor with its adapter
    switched off takes no second model: the actor must have been loaded."""
    role = spec.roles[name]
    if role.without_adapter:
        cluster.all(Worker.score_without_adapter, "actor", name)
        return
    _load(cluster, spec, name, role.settings)


def load_measured(cluster: Cluster, spec: RunSpec[Any], name: RoleName) -> None:
    """Load a role that is only measured, or measured against: the actor divided as in training
    where its weights are."""
    settings = spec.roles[name].settings
    stage: Literal[0, 3] = 3 if spec.actor.zero.stage == 3 else 0
    frozen = settings if isinstance(settings, FrozenRole) else None
    _load(cluster, spec, name, frozen or FrozenRole(model=spec.actor.model, stage=stage))


def _load(cluster: Cluster, spec: RunSpec[Any], name: RoleName, settings: Any) -> None:
    group, seed = ranks_of(cluster, name), spec.run.seed
    match spec.roles[name].head:
        case "policy":
            sampling = spec.sampling
            temperature = 1.0 if sampling is None else sampling.rollout.sampling.temperature
            group.all(Worker.load_policy, name, settings, temperature, seed)
        case "value":
            group.all(Worker.load_value, name, settings, seed)
        case "states":
            group.all(Worker.load_teacher, settings)
