"""Roles as a job declares them, for tests of what any role of a kind has."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.config.engine import FrozenRole, TrainedRole
from plimsoll.jobs import roles

_PATH = {"model": {"path": "model"}}
_TRAINED, _FROZEN = TrainedRole.model_validate(_PATH), FrozenRole.model_validate(_PATH)

ACTOR = roles.actor(_TRAINED, "policy")
CRITIC = replace(roles.critic(_TRAINED), order=1)
REFERENCE = replace(roles.reference(_FROZEN, _TRAINED), order=2)
