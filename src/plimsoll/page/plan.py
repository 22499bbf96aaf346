"""A plan as JSON for its page: the verdict in a sentence, and of each kind of card and host its
phases against the load line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll.config.problems import show
from plimsoll.memory.advise.advise import Advice, Suggestion
from plimsoll.memory.advise.as_text import EFFECT_WORDS
from plimsoll.memory.contents.stores import Store, Verdict, likely_worst, verdict_of
from plimsoll.memory.weigh import Plan
from plimsoll.page.memory import place
from plimsoll.run.counting import gigabytes_text
from plimsoll.timeline.levers import Effect, Value

_KINDS: Mapping[Effect, str] = {
    "same": "same learning",
    "rounding": "rounding",
    "adapters": "adapters",
    "shorter": "shorter sequences",
    "machines": "more machines",
}
_OF_PROBLEMS = ("severity", "code", "what", "why", "fix")


def plan_shown(plan: Plan) -> dict[str, Any]:
    """Return all that is shown of a plan: what decides the verdict, bytes of the fullest card and
    host, every place, and all problems."""
    return {
        "verdict": plan.verdict,
        "says": _decisive(plan),
        "peaks": peaks(plan),
        "places": [_place(store, plan) for store in plan.stores],
        "problems": [{key: getattr(one, key) for key in _OF_PROBLEMS} for one in plan.problems],
    }


def advice_shown(advice: Advice) -> dict[str, Any]:
    """Return the answers that would make a plan fit. changes: of keys, from a text to a text; an
    empty one unsets the key."""
    return {"fits": advice.fits, "answers": [_answer(one) for one in advice.answers]}


def _answer(one: Suggestion) -> dict[str, Any]:
    sizes = {"card": one.device_bytes, "host": one.host_bytes}
    return {
        "kind": _KINDS[one.effect],
        "verdict": one.verdict,
        "peaks": {name: size for name, size in sizes.items() if size},
        "costs": [EFFECT_WORDS[one.effect], *one.costs],
        "changes": [
            {"key": change.key, "before": _text(change.before), "after": _text(change.after)}
            for change in one.changes
        ],
    }


def _text(value: Value) -> str:
    return "" if value is None else show(value)


def peaks(plan: Plan) -> dict[str, int]:
    """Return the bytes of the fullest card and of the fullest host; without cards, of the host."""
    found = {"card": plan.devices, "host": plan.hosts}
    return {name: max(s.peak.bytes for s in stores) for name, stores in found.items() if stores}


def _decisive(plan: Plan) -> str:
    """Of the card or host that is nearest its line among those with the plan's verdict; where none
    has it, the first error."""
    deciding = [s for s in plan.stores if s.capacity and verdict_of(s, plan.band) == plan.verdict]
    if deciding:
        nearest = max(deciding, key=lambda s: s.peak.bytes / (s.capacity or 1))
        return f"{nearest.name}: {_says(nearest, plan)}."
    errors = [problem.what for problem in plan.problems if problem.severity == "error"]
    return next(iter(errors), "No card or host of known size.")


def _says(store: Store, plan: Plan) -> str:
    """By how much it fits, or does not, and when."""
    peak, verdict = store.peak, verdict_of(store, plan.band)
    if store.capacity is None:
        held = f"{gigabytes_text(peak.bytes)} in {peak.moment}"
        return f"{held}; how much it has is not known: set cluster.host_memory"
    held = f"{gigabytes_text(peak.bytes)} of {gigabytes_text(store.capacity)} in {peak.moment}"
    room = gigabytes_text(abs(store.capacity - peak.bytes))
    said: dict[Verdict, str] = {
        "does not fit": f"{room} over the load line",
        "risky": f"{room} free, less than the prediction may be off by ({plan.band.share:.0%})",
        "fits": f"{room} free",
    }
    return f"{held}, {said[verdict]}"


def _place(store: Store, plan: Plan) -> dict[str, Any]:
    """As the page of runs has it. likely: bytes of each phase if the prediction is as much too low
    as its band says."""
    predicted = [
        {"phase": use.moment.phase, "role": item.role, "item": item.name}
        | {"bytes": item.bytes, "formula": item.formula}
        for use in store.phases
        for item in use.items
    ]
    found = place(store.name, store.capacity, predicted)
    likely = {use.moment.phase: round(likely_worst(use, plan.band)) for use in store.phases}
    phases = [one | {"likely": likely[one["name"]]} for one in found["phases"]]
    says, verdict = _says(store, plan), verdict_of(store, plan.band)
    return found | {"phases": phases, "says": says, "verdict": verdict}
