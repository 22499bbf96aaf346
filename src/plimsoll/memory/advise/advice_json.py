"""Advice as values of JSON, for programs."""

from __future__ import annotations

from typing import Any

from plimsoll.memory.advise.advise import Advice, Cluster, Suggestion


def advice_values(advice: Advice | None) -> dict[str, Any]:
    """The same keys for None, where no advice was asked for."""
    return {
        "suggestions": [_suggestion(one) for one in advice.suggestions] if advice else [],
        "smallest_cluster": _cluster(advice.smallest_cluster) if advice else None,
        "shorter_sequences": _suggestion(advice.shorter) if advice and advice.shorter else None,
    }


def _suggestion(one: Suggestion) -> dict[str, Any]:
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


def _cluster(cluster: Cluster | None) -> dict[str, Any] | None:
    if cluster is None:
        return None
    return {"nodes": cluster.nodes, **_suggestion(cluster.suggestion)}
