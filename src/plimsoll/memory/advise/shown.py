"""Advice for a person, as diffs to paste in 80 columns; and for programs, as values of JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll.memory.advise.advise import Advice, Cluster, Suggestion
from plimsoll.memory.advise.effects import ON_MORE_MACHINES
from plimsoll.memory.plan.as_text import wrapped
from plimsoll.run.counting import gigabytes

_RANKED = "estimates for ranking, not for timing"


def advice_text(advice: Advice) -> str:
    """Every suggestion, in their order; the smallest cluster; the longest sequences that fit."""
    parts = (_heading, _suggestions, _cluster, _shorter)
    return "\n".join(line for part in parts for line in part(advice))


def _heading(advice: Advice) -> Iterator[str]:
    if advice.suggestions:
        what = "what is faster and fits too" if advice.fits else "what would fit"
        more = {one.effect in ON_MORE_MACHINES for one in advice.suggestions}
        where = ", on the machines given first" if len(more) > 1 else ""
        yield wrapped(f"{what}{where}, the fastest first ({_RANKED}):", "  ")
    elif advice.fits:
        yield "nothing that was tried is faster and fits too"
    else:
        yield "nothing that was tried would fit"


def _suggestions(advice: Advice) -> Iterator[str]:
    for number, suggestion in enumerate(advice.suggestions, 1):
        smallest = ", the smallest change" if suggestion.smallest else ""
        yield wrapped(f"{number}. {suggestion.verdict}{smallest}: {_sizes(suggestion)}", "   ")
        yield from change_lines(suggestion)


def change_lines(suggestion: Suggestion) -> Iterator[str]:
    """Its diff, and what it costs."""
    yield from (f"   {line}" for change in suggestion.changes for line in change.lines)
    yield from (wrapped(f"     {cost}", "     ") for cost in suggestion.costs)


def _cluster(advice: Advice) -> Iterator[str]:
    """How many nodes the config as written needs."""
    cluster = advice.smallest_cluster
    if cluster is None:
        if advice.suggestions and not advice.fits:
            yield "as written it fits on no number of these machines"
        return
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)}"
    yield f"smallest cluster on which it fits as written: {nodes}"
    yield from (f"   {line}" for c in cluster.suggestion.changes for line in c.lines)


def _shorter(advice: Advice) -> Iterator[str]:
    if advice.shorter is not None:
        yield f"with shorter sequences it fits as written otherwise: {_sizes(advice.shorter)}"
        yield from change_lines(advice.shorter)


def _sizes(suggestion: Suggestion) -> str:
    card = suggestion.device_bytes
    on_card = f"at most {gigabytes(card)} GB on a card, " if card else "at most "
    return f"{on_card}{gigabytes(suggestion.host_bytes)} GB on a host"


def advice_values(advice: Advice | None) -> dict[str, Any]:
    """The same keys for None, where no advice was asked for."""
    return {
        "suggestions": [_values(one) for one in advice.suggestions] if advice else [],
        "smallest_cluster": _cluster_values(advice.smallest_cluster) if advice else None,
        "shorter_sequences": _values(advice.shorter) if advice and advice.shorter else None,
    }


def _values(one: Suggestion) -> dict[str, Any]:
    return {
        "changes": [{"key": c.key, "from": c.before, "to": c.after} for c in one.changes],
        "flags": one.flags,
        "effect": one.effect,
        "smallest": one.smallest,
        "verdict": one.verdict,
        "device_bytes": one.device_bytes,
        "host_bytes": one.host_bytes,
        "relative_seconds": one.relative_seconds,
        "costs": list(one.costs),
    }


def _cluster_values(cluster: Cluster | None) -> dict[str, Any] | None:
    if cluster is None:
        return None
    return {"nodes": cluster.nodes, **_values(cluster.suggestion)}
