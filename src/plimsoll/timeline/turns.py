"""The moments at which ranks and engines on the same cards sleep, if ranks sleep.

Ranks sleep while engines sample and are synchronised, and while a checkpoint is written from their
copies in host memory; then only the actor's weights are awake in a sync. Engines sleep while ranks
load, score and train, and while the final model is gathered.
"""

from __future__ import annotations

from plimsoll.config.cluster import RankSleep
from plimsoll.resolve.roles import RoleName
from plimsoll.timeline.items import Moment

_APART = frozenset({Moment("rollout", "generate"), Moment("save", "write")})
_SYNC = frozenset({Moment("sync", "gather"), Moment("sync", "forward")})


def states_asleep(depth: RankSleep) -> frozenset[Moment]:
    """Return the moments at which ranks have no states on their cards."""
    return frozenset() if depth == "none" else _APART | _SYNC


def weights_asleep(depth: RankSleep, role: RoleName) -> frozenset[Moment]:
    """Return the moments at which ranks have no weights of a role on their cards."""
    if depth != "all":
        return frozenset()
    return _APART if role == "actor" else _APART | _SYNC


def is_for_ranks(moment: Moment) -> bool:
    """Return whether it is a moment of load or save at which engines sleep for ranks that sleep.

    Engines start before the ranks read their models, and sleep from then on.
    """
    is_loading = moment.phase == "load" and moment.instant.split()[0] in ("read", "build")
    return is_loading or moment == Moment("save", "gather")
