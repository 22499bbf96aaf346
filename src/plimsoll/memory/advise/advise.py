"""Which changes to a config would make it fit, ranked by estimated speed, and what each costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from plimsoll.config.jobs import JobConfig
from plimsoll.memory.advise.changes import Change, changes_between
from plimsoll.memory.advise.costs import costs_of
from plimsoll.memory.advise.moves import grown
from plimsoll.memory.advise.search import Site, State, faster_states, in_order, saving_states
from plimsoll.memory.machine.hardware import Hardware
from plimsoll.memory.machine.surroundings import Surroundings
from plimsoll.memory.plan.plan import BAND
from plimsoll.memory.plan.stores import VERDICTS, Band, Verdict
from plimsoll.memory.price.overheads import Constants

_SHOWN = 8
_MOST_NODES = 256
_ALTERING = ("adapter.rank", "quantization")


@dataclass(frozen=True)
class Suggestion:
    """Changes that make a config fit, or one that fits faster.

    device_bytes, host_bytes: of the fullest card (0 without cards) and host at its peak.
    relative_seconds: of a step, over those of the config as written: estimated, for ranking.
    costs: in words.
    """

    changes: tuple[Change, ...]
    verdict: Verdict
    device_bytes: int
    host_bytes: int
    relative_seconds: float
    costs: tuple[str, ...]

    @property
    def flags(self) -> str:
        """To put behind the config on a command line."""
        return " ".join(change.flag for change in self.changes)

    @property
    def effort(self) -> int:
        """How much it asks for: changes; other training or other hardware weighs more."""
        heavy = [c for c in self.changes if c.key.endswith((*_ALTERING, "nodes"))]
        return len(self.changes) + 2 * len(heavy) + VERDICTS.index(self.verdict)


@dataclass(frozen=True)
class Cluster:
    """So many nodes of the same hardware, and what changes with them."""

    nodes: int
    suggestion: Suggestion


@dataclass(frozen=True)
class Advice:
    """suggestions: the fastest first. smallest_cluster: on which the config as written fits; None
    where there is none. fits: whether the config as written fits, so that suggestions are faster
    ones."""

    suggestions: tuple[Suggestion, ...]
    smallest_cluster: Cluster | None
    fits: bool


def advise(
    config: JobConfig,
    hardware: Hardware,
    constants: Constants,
    free_disk: int | None = None,
    here: Surroundings | None = None,
    band: Band = BAND,
) -> Advice:
    """What would make a config fit, or where it does, what would make it faster and still fit.

    Parameters, and errors, as `make_plan`'s. hardware: machines alike.
    """
    site = Site(config, hardware, constants, free_disk, here, band, {})
    root = site.root
    found = faster_states(site, root) if _fits(root) else saving_states(site, root)
    ranked = sorted(_least_first(root, found)[:_SHOWN], key=lambda one: one.relative_seconds)
    return Advice(tuple(ranked), _smallest_cluster(site, root), _fits(root))


def smallest_change(
    config: JobConfig,
    hardware: Hardware,
    constants: Constants,
    free_disk: int | None = None,
    here: Surroundings | None = None,
    band: Band = BAND,
) -> Suggestion | None:
    """The suggestion that asks for least; None where the config fits or nothing would make it fit.

    What keeps the training and the hardware as they are is smaller than what does not.
    """
    site = Site(config, hardware, constants, free_disk, here, band, {})
    if _fits(site.root):
        return None
    return next(iter(_least_first(site.root, saving_states(site, site.root))), None)


def _least_first(root: State, states: Iterable[State]) -> list[Suggestion]:
    """Those that ask for least first."""
    suggestions = [_suggestion(root, state) for state in states]
    return sorted(suggestions, key=lambda one: (one.effort, one.relative_seconds))


def _suggestion(root: State, state: State) -> Suggestion:
    relative = state.seconds / root.seconds
    changes = in_order(state.changes)
    return Suggestion(
        changes,
        state.plan.verdict,
        max((store.peak.bytes for store in state.plan.devices), default=0),
        max(store.peak.bytes for store in state.plan.hosts),
        relative,
        costs_of(state.config, changes, relative),
    )


def _smallest_cluster(site: Site, root: State) -> Cluster | None:
    """Nodes are doubled until the config as written fits, or has ranks without work, and then
    halved in."""
    if site.config.cluster.where == "local":
        return None

    def at(steps: int) -> State | None:
        nodes = {"cluster.nodes": site.config.cluster.nodes + steps}
        homeless = root.has("more-ranks-than-gpus")  # new ranks would leave as many without a card
        move = nodes if homeless else grown(site.config, site.hardware, steps)
        return site.tried(frozenset(changes_between(site.config, move)))

    def enough(steps: int) -> bool:
        state = at(steps)
        return state is not None and (_fits(state) or state.idles_beside(root))

    fitting = 0
    while not enough(fitting):
        fitting = 2 * fitting or 1
        if fitting > _MOST_NODES:
            return None
    lacking = fitting // 2 if fitting else -site.config.cluster.nodes
    while fitting - lacking > 1:
        middle = (fitting + lacking) // 2
        fitting, lacking = (middle, lacking) if enough(middle) else (fitting, middle)
    found = at(fitting)
    if found is None or not _fits(found) or found.idles_beside(root):
        return None
    return Cluster(found.config.cluster.nodes, _suggestion(root, found))


def _fits(state: State) -> bool:
    return state.plan.verdict == "fits"
