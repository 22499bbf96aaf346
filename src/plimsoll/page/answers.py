"""Return the JSON replies to the requests of the page of runs.

A frozen page contains the replies, keyed by the same paths and queries.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from math import inf, isnan, nan
from typing import Any

from plimsoll.config.load import leaves
from plimsoll.errors import ConfigError
from plimsoll.page.curves import BUCKETS, SECTIONS, curves
from plimsoll.page.memory import memory
from plimsoll.page.progress import console, held_out, progress, seconds
from plimsoll.page.samples import ends, group, groups
from plimsoll.page.serve import Query
from plimsoll.page.watched import Watched
from plimsoll.run.numbers import rank
from plimsoll.run.responses import pick_evenly


def settings(runs: Sequence[Watched]) -> list[dict[str, Any]]:
    """Return every dotted key of the configs with its value in each run as text.

    A value is None if the run lacks the key. `differs` says whether the runs differ in it.
    """
    flat = [_texts_by_key(run) for run in runs]
    keys = dict.fromkeys(key for values_of_run in flat for key in values_of_run)
    return [
        {
            "key": key,
            "values": (values := [values_of_run.get(key) for values_of_run in flat]),
            "differs": len(set(values)) > 1,
        }
        for key in keys
    ]


def _texts_by_key(run: Watched) -> dict[str, str]:
    """Return the values of a run's config as text, by dotted key."""
    return {
        ".".join(path): value if isinstance(value, str) else json.dumps(value, default=str)
        for path, value in leaves(run.settings or {}).items()
    }


_OF_SEEDS = ("run.seed", "run.directory")
"""The keys in which runs of one experiment differ that have different seeds."""


def seed_groups(runs: Sequence[Watched]) -> list[int]:
    """Return for each run the place of the first run that has the same settings but for its seed.

    A run whose config cannot be read is alone.
    """
    firsts: dict[object, int] = {}
    groups = []
    for place, run in enumerate(runs):
        flat = frozenset(pair for pair in _texts_by_key(run).items() if pair[0] not in _OF_SEEDS)
        groups.append(firsts.setdefault(flat or place, place))
    return groups


_FROZEN_GROUPS = 8
"""The number of groups of the last step that a frozen page has."""


def answer(runs: Sequence[Watched], name: str, query: Query) -> Any:
    """Return the reply to a request. Raises ConfigError if the requested thing does not exist."""
    if name not in _ANSWERS:
        raise ConfigError(f"There is no {name!r}. There are: {', '.join(_ANSWERS)}.")
    return _ANSWERS[name](runs, query)


def freeze_replies(runs: Sequence[Watched], remarks: Sequence[str]) -> dict[str, Any]:
    """Return the replies to all requests of a frozen page; `remarks` are about memory."""
    replies = {
        "progress": answer(runs, "progress", {}),
        "settings": answer(runs, "settings", {}),
        "seeds": answer(runs, "seeds", {}),
        **{f"curves?section={s}": answer(runs, "curves", {"section": s}) for s in SECTIONS},
    }
    for place, run in enumerate(runs):
        for name in ("held-out", "seconds", "memory", "pictures", "console"):
            replies[f"{name}?run={place}"] = answer(runs, name, {"run": str(place)})
        replies[f"memory?run={place}"]["remarks"] = list(remarks)
        replies |= _samples(run, place)
    return replies


def _samples(run: Watched, place: int) -> dict[str, Any]:
    """Return the replies about the samples of the last step.

    They have the best and worst responses with their groups. They also have a few other groups,
    each of a different prompt, spread evenly over the rewards.
    """
    overview = groups(run, None)
    step = overview["step"]
    if step is None:
        return {f"groups?run={place}": overview}
    best_and_worst = ends(run, step)
    needed = {response["group"] for end in ("best", "worst") for response in best_and_worst[end]}
    by_prompt = {summary["prompt"]: summary for summary in reversed(overview["groups"])}
    ordered = sorted(by_prompt.values(), key=lambda summary: -rank(summary["reward"]))
    needed |= {ordered[at]["group"] for at in pick_evenly(len(ordered), _FROZEN_GROUPS)}
    summaries = [summary for summary in overview["groups"] if summary["group"] in needed]
    return {
        f"groups?run={place}": {**overview, "steps": [step], "groups": summaries},
        f"ends?run={place}&step={step}": best_and_worst,
        **{f"group?run={place}&step={step}&group={n}": group(run, step, n) for n in needed},
    }


def pictures(run: Watched) -> list[dict[str, str]]:
    """Return the titles of a run's own pictures, with the pictures as data URLs."""
    path, title = run.run.calibration_path, "Calibration: do predicted probabilities come true?"
    if not path.is_file():
        return []
    picture = b64encode(path.read_bytes()).decode()
    return [{"title": title, "source": f"data:image/svg+xml;base64,{picture}"}]


def _curves(runs: Sequence[Watched], query: Query) -> Any:
    section = query.get("section")
    if section not in SECTIONS:
        raise ConfigError(f"There is no section {section!r}. There are: {', '.join(SECTIONS)}.")
    steps = (_number(query, "from", -inf), _number(query, "to", inf))
    return curves(runs, section, steps, BUCKETS)


def _run(runs: Sequence[Watched], query: Query) -> Watched:
    place = _number(query, "run", 0)
    if place not in range(len(runs)):
        raise ConfigError(f"There is no run {query['run']}. There are 0 to {len(runs) - 1}.")
    return runs[int(place)]


def _step(query: Query) -> int | None:
    return _count(query, "step") if "step" in query else None


def _number(query: Query, name: str, default: float) -> float:
    try:
        number = float(query.get(name, default))
    except ValueError:
        number = nan
    if isnan(number):
        raise ConfigError(f"{name} {query[name]!r} is no number.")
    return number


def _count(query: Query, name: str) -> int:
    number = _number(query, name, 0)
    if not number.is_integer():
        raise ConfigError(f"{name} {query[name]!r} is no whole number.")
    return int(number)


_ANSWERS: Mapping[str, Callable[[Sequence[Watched], Query], Any]] = {
    "progress": lambda runs, query: list(map(progress, runs)),
    "settings": lambda runs, query: settings(runs),
    "seeds": lambda runs, query: seed_groups(runs),
    "curves": _curves,
    "held-out": lambda runs, query: held_out(_run(runs, query)),
    "seconds": lambda runs, query: seconds(_run(runs, query)),
    "memory": lambda runs, query: memory(_run(runs, query)),
    "pictures": lambda runs, query: pictures(_run(runs, query)),
    "console": lambda runs, query: console(_run(runs, query)),
    "groups": lambda runs, query: groups(_run(runs, query), _step(query)),
    "ends": lambda runs, query: ends(_run(runs, query), _step(query) or 0),
    "group": lambda runs, query: group(
        _run(runs, query), _step(query) or 0, _count(query, "group")
    ),
}
