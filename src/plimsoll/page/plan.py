"""A plan as JSON for its page.

The verdict is a sentence; each kind of card and host has its phases beside its load line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll.config.problems import show
from plimsoll.memory.advise import EFFECT_WORDS, Advice, Suggestion
from plimsoll.memory.contents.stores import Store, Verdict, likely_worst, verdict_of
from plimsoll.memory.weigh import Plan
from plimsoll.page.memory import describe_place
from plimsoll.run.numbers import gigabytes_text
from plimsoll.timeline.levers import Effect, LeverValue

_KINDS: Mapping[Effect, str] = {
    "same": "same learning",
    "rounding": "rounding",
    "adapters": "adapters",
    "shorter": "shorter sequences",
    "machines": "more machines",
}
_OF_PROBLEMS = ("severity", "code", "what", "why", "fix")


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON for its page.

    `says` is the sentence that explains the verdict. `peaks` are the bytes of the fullest card and
    host.
    """
    return {
        "verdict": plan.verdict,
        "says": _decisive(plan),
        "peaks": peaks(plan),
        "places": [_place(store, plan) for store in plan.stores],
        "problems": [
            {key: getattr(problem, key) for key in _OF_PROBLEMS} for problem in plan.problems
        ],
    }


def describe_advice(advice: Advice) -> dict[str, Any]:
    """Return the planner's advice as JSON: answers that would make a plan fit.

    `changes` give the text of a key before and after; an empty text means unset.
    """
    return {"fits": advice.fits, "answers": [_answer(answer) for answer in advice.answers]}


def _answer(suggestion: Suggestion) -> dict[str, Any]:
    sizes = {"card": suggestion.device_bytes, "host": suggestion.host_bytes}
    return {
        "kind": _KINDS[suggestion.effect],
        "verdict": suggestion.verdict,
        "peaks": {name: size for name, size in sizes.items() if size},
        "costs": [EFFECT_WORDS[suggestion.effect], *suggestion.costs],
        "changes": [
            {"key": change.key, "before": _text(change.before), "after": _text(change.after)}
            for change in suggestion.changes
        ],
    }


def _text(value: LeverValue) -> str:
    return "" if value is None else show(value)


def peaks(plan: Plan) -> dict[str, int]:
    """Return the bytes of the fullest card and host; of the host alone if there are no cards."""
    by_kind = {"card": plan.devices, "host": plan.hosts}
    return {name: max(s.peak.bytes for s in stores) for name, stores in by_kind.items() if stores}


def _decisive(plan: Plan) -> str:
    """Return the sentence that explains the plan's verdict.

    It is about the fullest card or host with this verdict. If none has this verdict, the sentence
    is the first error.
    """
    deciding = [s for s in plan.stores if s.capacity and verdict_of(s, plan.band) == plan.verdict]
    if deciding:
        nearest = max(deciding, key=lambda s: s.peak.bytes / (s.capacity or 1))
        return f"{nearest.name}: {_says(nearest, plan)}."
    errors = [problem.what for problem in plan.problems if problem.severity == "error"]
    return next(iter(errors), "No card or host of known size.")


def _says(store: Store, plan: Plan) -> str:
    peak, verdict = store.peak, verdict_of(store, plan.band)
    if store.capacity is None:
        held = f"{gigabytes_text(peak.bytes)} in {peak.moment}"
        return f"{held}; how much it has is not known: set cluster.host_memory"
    held = f"{gigabytes_text(peak.bytes)} of {gigabytes_text(store.capacity)} in {peak.moment}"
    room = gigabytes_text(abs(store.capacity - peak.bytes))
    explanations: dict[Verdict, str] = {
        "does not fit": f"{room} over the load line",
        "risky": f"{room} free, less than the prediction may be off by ({plan.band.share:.0%})",
        "fits": f"{room} free",
    }
    return f"{held}, {explanations[verdict]}"


def _place(store: Store, plan: Plan) -> dict[str, Any]:
    """Return a card or host as JSON, like `describe_place`, with its verdict and likely bytes.

    `likely` are the bytes of a phase if the prediction is too low by the whole error band.
    """
    predicted = [
        {"phase": use.moment.phase, "role": item.role, "item": item.name}
        | {"bytes": item.bytes, "formula": item.formula}
        for use in store.phases
        for item in use.items
    ]
    values = describe_place(store.name, store.capacity, predicted)
    likely = {use.moment.phase: round(likely_worst(use, plan.band)) for use in store.phases}
    phases = [phase | {"likely": likely[phase["name"]]} for phase in values["phases"]]
    says, verdict = _says(store, plan), verdict_of(store, plan.band)
    return values | {"phases": phases, "says": says, "verdict": verdict}
