"""Which changes to a config would make it fit, ranked by estimated speed, and what each costs."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from plimsoll.memory.advise.clusters import (
    Cluster,
    nearest_fitting,
    other_cards,
    smallest_cluster,
)
from plimsoll.memory.advise.costs import shorter_costs
from plimsoll.memory.advise.effects import EFFECTS, KINDS, ON_MORE_MACHINES, Kind, kind_of
from plimsoll.memory.advise.search import faster_states, saving_states, smallest_state
from plimsoll.memory.advise.states import Site, State, count_parts, part_of
from plimsoll.memory.advise.suggestion import Suggestion, suggestion_of
from plimsoll.memory.contents.stores import VERDICTS
from plimsoll.memory.plan.plan import Ground
from plimsoll.memory.remedies.changes import Value, value_at
from plimsoll.spec.run_spec import RunSpec

_SHOWN = 8
_ANSWERS = 3
_STEP = 64
"""Tokens: shorter lengths are multiples of it."""


@dataclass(frozen=True)
class Advice:
    """suggestions: those on as many machines as given first, of these the fastest.
    smallest_cluster: on which the config as written fits; None where there is none. shorter: the
    longest sequences with which it fits as written otherwise; None where it fits, or with none.
    fits: whether the config as written fits, so that suggestions are faster ones. answers: on the
    machines given, what asks for least of each kind; risky ones where none fits. other_cards:
    larger ones on which it fits as written, with fewer nodes; None where it fits, or with none."""

    suggestions: tuple[Suggestion, ...]
    smallest_cluster: Cluster | None
    shorter: Suggestion | None
    fits: bool
    answers: tuple[Suggestion, ...] = ()
    other_cards: Cluster | None = None

    @property
    def numbered(self) -> tuple[Suggestion, ...]:
        """All that can be chosen, each once: the answers first, and other machines last."""
        clusters = (self.smallest_cluster, self.other_cards)
        moved = [one.suggestion for one in clusters if one is not None and one.suggestion.changes]
        shorter = [] if self.shorter is None else [self.shorter]
        return tuple(dict.fromkeys([*self.answers, *self.suggestions, *shorter, *moved]))

    def number_of(self, one: Suggestion) -> int | None:
        """By which it is chosen; None where it changes nothing."""
        return self.numbered.index(one) + 1 if one.changes else None


@contextmanager
def _uncollected() -> Iterator[None]:
    """A search keeps all that it makes, so looking for garbage, a fifth of its time, finds none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def advise(spec: RunSpec[Any], ground: Ground) -> Advice:
    """What would make a config fit, or where it does, what would make it faster and still fit.

    ground: of machines alike. Raises ConfigError as `make_plan`.
    """
    site = Site(spec, ground)
    root = site.root
    found = faster_states(site, root) if root.fits else saving_states(site, root)
    by_size = sorted(found, key=lambda state: state.size(root))
    made = [suggestion_of(root, state) for state in by_size]
    if made and not root.fits:
        made[0] = replace(made[0], smallest=True)

    def rank(one: Suggestion) -> tuple[bool, float]:
        return one.effect in ON_MORE_MACHINES, one.relative_seconds

    shown, shorter = _of_each_effect(made), _shorter(site, root)
    by_asked = [one for one in made if one in shown] + ([] if shorter is None else [shorter])
    cluster, others = smallest_cluster(site, root), other_cards(site, root)
    fewer = cluster is None or (others is not None and others.nodes < cluster.nodes)
    return Advice(
        tuple(sorted(shown, key=rank)),
        cluster,
        shorter,
        root.fits,
        one_of_each_kind(by_asked),
        others if fewer else None,
    )


@_uncollected()
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
    return replace(suggestion_of(root, state), smallest=True) if state else _shorter(site, root)


def one_of_each_kind(suggestions: Iterable[Suggestion]) -> tuple[Suggestion, ...]:
    """On the machines given, the first of each of at most three kinds, in the order of the kinds.
    What is risky is left out where anything fits.

    suggestions: what asks for less first.
    """
    here = [(kind, one) for one in suggestions if (kind := kind_of(one.changes)) is not None]
    fitting = [(kind, one) for kind, one in here if one.verdict == "fits"]
    found: dict[Kind, Suggestion] = {}
    for kind, one in fitting or here:
        found.setdefault(kind, one)
    return tuple(found[kind] for kind in KINDS if kind in found)[:_ANSWERS]


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
    more = count_parts({*map(part_of, one.changes)}) + VERDICTS.index(one.verdict)
    return not one.smallest, more, one.relative_seconds


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
    steps = nearest_fitting(0, -(-written // _STEP), lambda steps: at(steps * _STEP) is not None)
    state = at(steps * _STEP) if steps else None
    if state is None:
        return None
    found = suggestion_of(root, state)
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
