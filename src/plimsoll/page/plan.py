"""A plan as JSON for its page: the verdict in a sentence, and of each kind of card and host its
phases against the load line.
"""

from __future__ import annotations

from typing import Any

from plimsoll.config.problems import show
from plimsoll.memory.advise.advise import Advice
from plimsoll.memory.advise.effects import kind_of
from plimsoll.memory.advise.suggestion import Suggestion
from plimsoll.memory.contents.stores import Store, Verdict, likely_worst, verdict_of
from plimsoll.memory.plan.plan import Plan
from plimsoll.memory.remedies.changes import Value
from plimsoll.page.memory import describe_place
from plimsoll.run.counting import gigabytes_text

_ELSEWHERE = "more or other machines"
_OF_PROBLEMS = ("severity", "code", "what", "why", "fix")


def describe_plan(plan: Plan) -> dict[str, Any]:
    """All that is shown of it. says: what decides the verdict. peaks: bytes of the fullest card and
    host."""
    return {
        "verdict": plan.verdict,
        "says": _decisive(plan),
        "peaks": peaks(plan),
        "places": [_place(store, plan) for store in plan.stores],
        "problems": [{key: getattr(one, key) for key in _OF_PROBLEMS} for one in plan.problems],
    }


def describe_advice(advice: Advice) -> dict[str, Any]:
    """Return what would make a plan fit, or, where it fits, what would be faster: the answers on
    the machines given, then other machines. changes: of keys, from a text to a text; an empty one
    unsets the key. seconds: of a step, over those of the config as it is."""
    clusters = [one.suggestion for one in (advice.smallest_cluster, advice.other_cards) if one]
    answers = [_answer(one, kind_of(one.changes) or _ELSEWHERE) for one in advice.answers]
    answers += [_answer(one, _ELSEWHERE) for one in clusters if one.changes]
    return {"fits": advice.fits, "answers": answers}


def _answer(one: Suggestion, kind: str) -> dict[str, Any]:
    sizes = {"card": one.device_bytes, "host": one.host_bytes}
    return {
        "kind": kind,
        "verdict": one.verdict,
        "peaks": {name: size for name, size in sizes.items() if size},
        "seconds": one.relative_seconds,
        "costs": list(one.costs),
        "changes": [
            {"key": change.key, "before": _text(change.before), "after": _text(change.after)}
            for change in one.changes
        ],
    }


def _text(value: Value) -> str:
    return "" if value is None else show(value)


def peaks(plan: Plan) -> dict[str, int]:
    """Bytes of the fullest card and of the fullest host; without cards, of the host alone."""
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
    found = describe_place(store.name, store.capacity, predicted)
    likely = {use.moment.phase: round(likely_worst(use, plan.band)) for use in store.phases}
    phases = [one | {"likely": likely[one["name"]]} for one in found["phases"]]
    says, verdict = _says(store, plan), verdict_of(store, plan.band)
    return found | {"phases": phases, "says": says, "verdict": verdict}
