"""When a role's tensors exist: the instants of a job, and the lives that tensors have in them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Literal

from plimsoll.spec.roles import is_role, load_order
from plimsoll.spec.run_spec import PHASES, Phase
from plimsoll.timeline.items import Moment

INSTANTS: dict[Phase, tuple[str, ...]] = {
    "precompute": ("read", "build", "forward"),
    "rollout": ("generate",),
    "score": ("forward",),
    "train_critic": ("forward_backward", "backward", "reduce", "norm", "step"),
    "train_actor": ("forward_backward", "backward", "reduce", "norm", "step"),
    "sync": ("gather", "forward"),
    "save": ("gather", "write"),
}
"""The instants of each phase but load, which has one per role, in the order they are loaded."""

TrainPhase = Literal["train_critic", "train_actor"]

Life = Literal[
    "always",
    "built",
    "stepped",
    "loading",
    "building",
    "scoring",
    "computing",
    "backward",
    "reducing",
    "training",
    "norming",
    "stepping",
    "sending",
    "saving",
    "writing",
]
"""
always: from the moment the role is loaded. built: from when its engine is built, after it was read.
stepped: from the first optimizer step. loading: while it is read. building: while its engine is
built. scoring: while it scores, the actor also what proves a sync. computing: scoring, and forward
and backward.
backward: of its own training, from the first gradient on. reducing: when a bucket of gradients is
first full and is reduced. training: forward, backward, norm and step. norming: while its gradient
norm is taken, just before its step. stepping: its step. sending, saving: while weights are gathered
to be sent, or saved. writing: while a checkpoint of states is written.
"""


_BEFORE = {
    Moment("precompute", "read"): Moment("load", "read reference"),
    Moment("precompute", "build"): Moment("load", "build reference"),
    Moment("precompute", "forward"): Moment("score", "forward"),
}
"""A reference that scores everything before the actor is loaded: what it does then, and what that
would be beside the actor."""


def job_moments(roles: Sequence[str], phases: Collection[Phase]) -> frozenset[Moment]:
    """All moments of a job that loads these roles and has these phases besides `load`."""
    inside = {Moment(phase, i) for phase in phases if phase != "load" for i in INSTANTS[phase]}
    late = [role for role in roles if not (role == "reference" and "precompute" in phases)]
    return frozenset(inside | {moment for role in late for moment in _load_moments(role)})


def scoring_phase(role: str, moments: frozenset[Moment]) -> Phase:
    """When a role scores, of the job's moments."""
    return "precompute" if _is_before(role, moments) else "score"


def _is_before(role: str, moments: frozenset[Moment]) -> bool:
    return role == "reference" and not moments.isdisjoint(_BEFORE)


def _load_moments(role: str) -> tuple[Moment, Moment]:
    return Moment("load", f"read {role}"), Moment("load", f"build {role}")


@cache  # a search for what fits makes hundreds of plans of the same few lives
def lifetime(
    life: Life, role: str, phase: TrainPhase | None, moments: frozenset[Moment]
) -> frozenset[Moment]:
    """Those of the job's moments at which a role's tensor of that life exists.

    phase: the one that trains the role; None for a frozen role.
    """
    own = moments & _BEFORE.keys() if _is_before(role, moments) else moments - _BEFORE.keys()
    return frozenset(m for m in own if _exists(life, role, phase, _BEFORE.get(m, m)))


def _exists(life: Life, role: str, phase: TrainPhase | None, moment: Moment) -> bool:
    read, build = _load_moments(role)
    own = phase is not None and moment.phase == phase
    backward = own and moment.instant in ("backward", "reduce")
    scoring = moment.phase == "score" or (role == "actor" and moment == Moment("sync", "forward"))
    match life:
        case "always":
            return moment in (read, build) or _later(role, moment)
        case "built":
            return moment == build or _later(role, moment)
        case "stepped":
            return moment.phase != "load"
        case "loading":
            return moment == read
        case "building":
            return moment == build
        case "scoring":
            return scoring
        case "computing":
            return scoring or (own and moment.instant not in ("norm", "step"))
        case "backward":
            return backward
        case "reducing":
            return own and moment.instant == "reduce"
        case "training":
            return own
        case "norming":
            return own and moment.instant == "norm"
        case "stepping":
            return own and moment.instant == "step"
        case "sending":
            return moment == Moment("sync", "gather")
        case "saving":
            return moment.phase == "save" and moment.instant == "gather"
        case "writing":
            return moment.phase == "save" and moment.instant == "write"


def _later(role: str, moment: Moment) -> bool:
    """Whether the role is there for good by then: in every phase after load, and while roles that
    are loaded after it are."""
    if moment.phase != "load":
        return True
    other = moment.instant.split()[-1]
    return is_role(other) and is_role(role) and load_order(other) > load_order(role)


assert set(INSTANTS) == set(PHASES) - {"load"}
