"""Which changes to a config would make it fit, ranked by estimated speed, and what each costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from plimsoll.memory.advise.costs import costs_of, shorter_costs
from plimsoll.memory.advise.effects import EFFECTS, ON_MORE_MACHINES, Effect
from plimsoll.memory.advise.moves import filled, grown
from plimsoll.memory.advise.search import faster_states, saving_states, smallest_state
from plimsoll.memory.advise.states import Site, State, in_order
from plimsoll.memory.contents.stores import VERDICTS, Verdict
from plimsoll.memory.plan.plan import Ground
from plimsoll.memory.remedies.changes import Change, Value, value_at
from plimsoll.spec.run_spec import RunSpec

_SHOWN = 8
_MOST_NODES = 256
_STEP = 64
"""Tokens: shorter lengths are multiples of it."""


@dataclass(frozen=True)
class Suggestion:
    """Changes that make a config fit, or one that fits faster.

    effect: on what is learned. device_bytes, host_bytes: of the fullest card (0 without cards) and
    host at its peak. relative_seconds: of a step, over those of the config as written: estimated,
    for ranking. costs: in words. smallest: no other one asks for less.
    """

    changes: tuple[Change, ...]
    effect: Effect
    verdict: Verdict
    device_bytes: int
    host_bytes: int
    relative_seconds: float
    costs: tuple[str, ...]
    smallest: bool = False

    @property
    def flags(self) -> str:
        """To put behind the config on a command line."""
        return " ".join(change.flag for change in self.changes)


@dataclass(frozen=True)
class Cluster:
    """So many nodes of the same hardware, and what changes with them."""

    nodes: int
    suggestion: Suggestion


@dataclass(frozen=True)
class Advice:
    """suggestions: those on as many machines as given first, of these the fastest.
    smallest_cluster: on which the config as written fits; None where there is none. shorter: the
    longest sequences with which it fits as written otherwise; None where it fits, or with none.
    fits: whether the config as written fits, so that suggestions are faster ones."""

    suggestions: tuple[Suggestion, ...]
    smallest_cluster: Cluster | None
    shorter: Suggestion | None
    fits: bool


def advise(spec: RunSpec[Any], ground: Ground) -> Advice:
    """What would make a config fit, or where it does, what would make it faster and still fit.

    ground: of machines alike. Raises ConfigError as `make_plan`.
    """
    site = Site(spec, ground)
    root = site.root
    found = faster_states(site, root) if root.fits else saving_states(site, root)
    by_size = sorted(found, key=lambda state: state.size(root))
    made = [_suggestion(root, state) for state in by_size]
    if made and not root.fits:
        made[0] = replace(made[0], smallest=True)

    def rank(one: Suggestion) -> tuple[bool, float]:
        return one.effect in ON_MORE_MACHINES, one.relative_seconds

    ranked = sorted(_of_each_effect(made), key=rank)
    return Advice(tuple(ranked), _smallest_cluster(site, root), _shorter(site, root), root.fits)


def smallest_change(spec: RunSpec[Any], ground: Ground) -> Suggestion | None:
    """The suggestion that asks for least; None where the config fits or nothing would make it fit.

    What leaves what is learned as it is comes before what rounds it, that before more cards and
    before what trains something else, and that before other machines; among those alike the
    fastest; and last shorter sequences. Raises as `advise`.
    """
    site = Site(spec, ground)
    root = site.root
    if root.fits:
        return None
    state = smallest_state(site, root)
    return replace(_suggestion(root, state), smallest=True) if state else _shorter(site, root)


def _of_each_effect(suggestions: list[Suggestion]) -> list[Suggestion]:
    """As many as are shown, by turns of each effect: those with the fewest changes, and what is
    smallest of all."""
    by_effect = sorted(suggestions, key=lambda one: EFFECTS.index(one.effect))
    turns = [
        (turn, suggestion)
        for _, alike in groupby(by_effect, key=lambda one: one.effect)
        for turn, suggestion in enumerate(sorted(alike, key=_fewest))
    ]
    return [suggestion for _, suggestion in sorted(turns, key=lambda one: one[0])][:_SHOWN]


def _fewest(one: Suggestion) -> tuple[bool, int, float]:
    more = len(one.changes) + VERDICTS.index(one.verdict)
    return not one.smallest, more, one.relative_seconds


def _suggestion(root: State, state: State) -> Suggestion:
    relative = state.seconds / root.seconds
    changes = in_order(state.changes)
    return Suggestion(
        changes,
        state.effect,
        state.plan.verdict,
        max((store.peak.bytes for store in state.plan.devices), default=0),
        max(store.peak.bytes for store in state.plan.hosts),
        relative,
        costs_of(state.spec, changes, relative),
    )


def _smallest_cluster(site: Site, root: State) -> Cluster | None:
    """First ranks on cards that are free; then nodes are doubled until the config as written fits,
    or has ranks without work, and then halved in."""
    if site.spec.cluster.where == "local":
        return None
    hardware = site.ground.hardware

    def at(steps: int) -> State | None:
        nodes = {"cluster.nodes": site.spec.cluster.nodes + steps}
        unplaced = root.has("more-ranks-than-gpus")  # new ranks would leave as many without a card
        move = nodes if unplaced else grown(site.spec, hardware, steps)
        if steps == 0 and not root.fits:
            move = filled(site.spec, hardware)
        return site.with_values(move)

    def enough(steps: int) -> bool:
        state = at(steps)
        return state is not None and (state.fits or state.idles_beside(root))

    fitting = 0
    while not enough(fitting):
        fitting = 2 * fitting or 1
        if fitting > _MOST_NODES:
            return None
    lacking = fitting // 2 if fitting else -site.spec.cluster.nodes
    found = at(_nearest_fitting(fitting, lacking, enough))
    if found is None or not found.fits or found.idles_beside(root):
        return None
    return Cluster(found.spec.cluster.nodes, _suggestion(root, found))


def _nearest_fitting(fitting: int, lacking: int, enough: Callable[[int], bool]) -> int:
    """What fits and is nearest to what does not, by halving what is between."""
    while abs(fitting - lacking) > 1:
        middle = (fitting + lacking) // 2
        fitting, lacking = (middle, lacking) if enough(middle) else (fitting, middle)
    return fitting


def _shorter(site: Site, root: State) -> Suggestion | None:
    """The config with the longest sequences with which it fits, in micro-batches of as many tokens
    as they need at least; None where it fits as it is, or with none.

    Of PPO responses become shorter, and prompts stay.
    """
    sampling = site.spec.sampling
    key = "data.max_tokens" if sampling is None else sampling.longest_key
    written = value_at(site.spec.config, key)
    assert isinstance(written, int)

    def at(length: int) -> State | None:
        state = site.with_values(_lengths(site.spec, key, length - written))
        return state if state is not None and state.fits else None

    if at(written) is not None:
        return None
    steps = _nearest_fitting(0, -(-written // _STEP), lambda steps: at(steps * _STEP) is not None)
    state = at(steps * _STEP) if steps else None
    if state is None:
        return None
    found = _suggestion(root, state)
    return replace(found, costs=shorter_costs(found.changes))


def _lengths(spec: RunSpec[Any], key: str, more: int) -> dict[str, Value]:
    """key: of the length that becomes longer by so much."""
    work, written = spec.workload, value_at(spec.config, key)
    assert isinstance(written, int)
    length, tokens = written + more, min(work.budget, (work.longest + more) * work.together)
    found: dict[str, Value] = {key: length, "batch.micro_batch_tokens": tokens}
    held_out = {} if spec.sampling is None else spec.sampling.held_out
    for key, sampling in held_out.items():
        found[f"{key}.max_new_tokens"] = min(sampling.max_new_tokens, length)
    return found
