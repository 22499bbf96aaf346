"""All advice for a person, as diffs to paste in 80 columns; and for programs, as values of JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll.memory.advise.advise import Advice
from plimsoll.memory.advise.clusters import Cluster
from plimsoll.memory.advise.effects import ON_MORE_MACHINES
from plimsoll.memory.advise.suggestion import Suggestion
from plimsoll.memory.plan.as_text import wrap_lines
from plimsoll.run.counting import counted, gigabytes

_RANKED = "estimates for ranking, not for timing"


def advice_text(advice: Advice) -> str:
    """Every suggestion, by its number; the smallest clusters; the longest sequences that fit."""
    parts = (_heading, _suggestions, _shorter, _cluster, _other_cards)
    return "\n".join(line for part in parts for line in part(advice))


def _heading(advice: Advice) -> Iterator[str]:
    if advice.suggestions:
        what = "what is faster and fits too" if advice.fits else "what would fit"
        more = {one.effect in ON_MORE_MACHINES for one in advice.suggestions}
        where = ", on the machines given first" if len(more) > 1 else ""
        first = "one answer of each kind, then the others"
        yield wrap_lines(f"{what}{where}: {first}, the fastest first ({_RANKED}):", "  ")
    elif advice.fits:
        yield "nothing that was tried is faster and fits too"
    else:
        yield "nothing that was tried would fit"


def _suggestions(advice: Advice) -> Iterator[str]:
    for number, suggestion in enumerate(advice.numbered, 1):
        if suggestion in advice.suggestions:
            smallest = ", the smallest change" if suggestion.smallest else ""
            yield wrap_lines(
                f"{number}. {suggestion.verdict}{smallest}: {_sizes(suggestion)}", "   "
            )
            yield from change_lines(suggestion)


def change_lines(suggestion: Suggestion) -> Iterator[str]:
    """Its diff, and what it costs."""
    yield from (f"   {line}" for change in suggestion.changes for line in change.lines)
    yield from (wrap_lines(f"     {cost}", "     ") for cost in suggestion.costs)


def _shorter(advice: Advice) -> Iterator[str]:
    one = advice.shorter
    if one is not None:
        what = "with shorter sequences it fits as written otherwise"
        yield wrap_lines(f"{advice.number_of(one)}. {what}: {_sizes(one)}", "   ")
        yield from change_lines(one)


def _cluster(advice: Advice) -> Iterator[str]:
    """How many nodes the config as written needs."""
    cluster = advice.smallest_cluster
    if cluster is not None:
        what = "smallest cluster on which it fits as written"
        yield from _cluster_lines(advice, cluster, what)
    elif advice.suggestions and not advice.fits:
        yield "as written it fits on no number of these machines"


def _other_cards(advice: Advice) -> Iterator[str]:
    if advice.other_cards is not None:
        yield from _cluster_lines(advice, advice.other_cards, "with larger cards")


def _cluster_lines(advice: Advice, cluster: Cluster, what: str) -> Iterator[str]:
    number = advice.number_of(cluster.suggestion)
    nodes = counted(cluster.nodes, "node")
    yield f"{what}: {nodes}" if number is None else f"{number}. {what}: {nodes}"
    yield from (f"   {line}" for c in cluster.suggestion.changes for line in c.lines)


def _sizes(suggestion: Suggestion) -> str:
    card = suggestion.device_bytes
    on_card = f"at most {gigabytes(card)} GB on a card, " if card else "at most "
    return f"{on_card}{gigabytes(suggestion.host_bytes)} GB on a host"


def advice_values(advice: Advice | None) -> dict[str, Any]:
    """The same keys for None, where no advice was asked for."""
    if advice is None:
        advice = Advice((), None, None, fits=False)
    shorter = advice.shorter
    return {
        "answers": [advice.number_of(one) for one in advice.answers],
        "suggestions": [_values(advice, one) for one in advice.suggestions],
        "smallest_cluster": _cluster_values(advice, advice.smallest_cluster),
        "shorter_sequences": None if shorter is None else _values(advice, shorter),
        "other_cards": _cluster_values(advice, advice.other_cards),
    }


def _values(advice: Advice, one: Suggestion) -> dict[str, Any]:
    return {
        "number": advice.number_of(one),
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


def _cluster_values(advice: Advice, cluster: Cluster | None) -> dict[str, Any] | None:
    if cluster is None:
        return None
    return {"nodes": cluster.nodes, **_values(advice, cluster.suggestion)}
