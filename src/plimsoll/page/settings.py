"""The settings of runs side by side, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from plimsoll.page.watched import Watched


def settings(runs: Sequence[Watched]) -> list[dict[str, Any]]:
    """Return every dotted key of the configs with its value in each run as text.

    A value is None if the run lacks the key. `differs` says whether the runs differ in it.
    """
    flat = [dict(_flat(run.settings, "")) for run in runs]
    keys = dict.fromkeys(key for values_of_run in flat for key in values_of_run)
    return [
        {
            "key": key,
            "values": (values := [values_of_run.get(key) for values_of_run in flat]),
            "differs": len(set(values)) > 1,
        }
        for key in keys
    ]


def _flat(values: Any, before: str) -> Iterator[tuple[str, str]]:
    match values:
        case dict() if values:
            for key, value in values.items():
                yield from _flat(value, f"{before}.{key}" if before else str(key))
        case _ if before:
            yield before, values if isinstance(values, str) else json.dumps(values, default=str)
