"""A plan as JSON for its page, and the settings that the page offers to change.

The verdict is a sentence; each kind of card and host has its phases beside its load line. A run
has a list of controls with their possible values. The texts of changed controls become flags.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.config import yaml_tree
from plimsoll.config.flags import Flag, apply_flags, parse_flags
from plimsoll.config.keys import Key, find_key, keys_of
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import Tree
from plimsoll.errors import ConfigError
from plimsoll.machine.hardware import CARDS
from plimsoll.memory.advise import EFFECT_WORDS, Advice, Suggestion
from plimsoll.memory.contents.stores import Store, Verdict, likely_worst, verdict_of
from plimsoll.memory.levers.levers import in_section, levers_by_rank
from plimsoll.memory.levers.trials import split_key, value_at
from plimsoll.memory.plan import problem_values
from plimsoll.memory.weigh import Plan
from plimsoll.page.memory import describe_place
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.numbers import gigabytes_text
from plimsoll.timeline.levers import Effect, LeverValue

_KINDS: Mapping[Effect, str] = {
    "same": "same learning",
    "rounding": "rounding",
    "adapters": "adapters",
    "shorter": "shorter sequences",
    "machines": "more machines",
}


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
        "problems": problem_values(plan),
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
    """Return a value as YAML; "" for null."""
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


_GROUPS = {
    "cluster": "machines",
    "batch": "batch",
    "data": "batch",
    "rollout": "engines",
    "reference_logprobs": "reference log-probs",
}
"""The group titles of keys outside the sections of roles."""
_GIVEN = (
    *("cluster.hardware", "cluster.host_memory", "cluster.device"),
    *("batch.prompts", "batch.responses", "batch.sequences", "batch.pairs"),
)
"""Keys that only users change, no lever of the planner; each job has some of them."""
_GIVEN_OF_FROZEN = "model.quantization"
"""The key that only users change in the section of a role that only scores."""
_UNSET_WHOLE = re.compile(r"(.*\.adapter)\.rank")
"""Keys that are unset together with their section."""
_RANKS = ("", "8", "16", "32", "64", "128")
"""The proposed ranks of adapters."""
_TYPES = re.compile(r"(integer|number|text|list|mapping|value)\b")
"""The beginning of a type's description if the type has many values."""
_OPEN = re.compile(r"(text|list|mapping|value)\b")
"""The beginning of a type's description if its values may name files."""


@dataclass(frozen=True)
class Control:
    """A key that may be changed."""

    key: str
    group: str
    """The title under which it is shown."""
    label: str
    """Its name in the group."""
    value: str
    """The value of the run, as YAML; "" for null."""
    doc: str
    kind: str
    """The allowed values, in words."""
    choices: tuple[str, ...]
    """All allowed values, if they are few."""
    proposals: tuple[str, ...]
    """Values to choose from if any text is allowed."""
    step: float | None
    """The amount by which a number grows; None if it doubles."""


def controls(spec: RunSpec[Any], changed: Collection[str] = ()) -> tuple[Control, ...]:
    """Return the controls of a run, in the order of the page.

    These keys have a control: the keys of levers that the page offers, the keys that only users
    change, and those of `changed` (keys that answers change) that are numbers or choices. Other
    texts have none, because they may name files.
    """
    known = tuple(keys_of(spec.job.config))
    offered = dict.fromkeys(_offered_keys(spec))
    placed = {key: _group_and_label(spec, key) for key in offered if find_key(known, _path(key))}
    further = [key for key in changed if key not in placed and _is_harmless(known, key)]
    placed |= {key: ("other settings", key) for key in further}
    titles = list(dict.fromkeys(["machines", "batch", *(r.key for r in spec.roles.values())]))
    titles += ["engines", "reference log-probs", "other settings"]
    ordered = sorted(placed.items(), key=lambda item: titles.index(item[1][0]))
    return tuple(_control(spec, known, key, *place) for key, place in ordered)


def _control(
    spec: RunSpec[Any], known: tuple[Key, ...], key: str, group: str, label: str
) -> Control:
    described = find_key(known, _path(key))
    assert described is not None, key
    role, rest = split_key(spec, key)
    value = value_at(spec.config if role is None else role.settings, rest)
    words = described.kind.removesuffix(" or null").split(" | ")
    has_choices = len(words) > 1 and not any(map(_TYPES.match, words))
    return Control(
        *(key, group, label, _text(value)),
        *(described.doc, described.kind),
        choices=tuple(words) if has_choices else (),
        proposals=_proposals(spec, key),
        step=0.05 if described.kind.startswith("number") else None,
    )


def _path(key: str) -> tuple[str, ...]:
    return tuple(key.split("."))


def _offered_keys(spec: RunSpec[Any]) -> Iterator[str]:
    """Yield the keys that the page offers; some may belong to other jobs."""
    yield from _GIVEN
    for lever in levers_by_rank():
        if lever.control:
            for name in lever.roles(spec):
                section = f"{spec.roles[name].key}." if name else ""
                yield f"{section}{lever.keys[0]}"
    yield from spec.sampling.longest_responses if spec.sampling else ()
    yield from (f"{spec.roles[name].key}.{_GIVEN_OF_FROZEN}" for name in spec.frozen)


def _group_and_label(spec: RunSpec[Any], key: str) -> tuple[str, str]:
    role, label = split_key(spec, key)
    if role is not None:
        return role.key, label
    if spec.sampling and key in spec.sampling.longest_responses:
        return "batch", key.removeprefix("rollout.sampling.").removeprefix("environments.")
    section, _, _ = key.partition(".")
    return _GROUPS.get(section, "other settings"), key.rpartition(".")[2]


def _is_harmless(known: tuple[Key, ...], key: str) -> bool:
    described = find_key(known, _path(key))
    words = [] if described is None or described.section else described.kind.split(" | ")
    return bool(words) and not any(map(_OPEN.match, words))


def _proposals(spec: RunSpec[Any], key: str) -> tuple[str, ...]:
    """Return proposed texts for a key; an empty text unsets the key."""
    if key == "cluster.hardware":
        given = re.match(r"\d+", spec.cluster.hardware or "")
        count = given[0] if given else str(min(spec.cluster.ranks, 8))
        return ("", "cpu", *(f"{count}x{card.name}" for card in CARDS))
    return _RANKS if _UNSET_WHOLE.fullmatch(key) else ()


def flags_from(spec: RunSpec[Any], texts: Mapping[str, str]) -> tuple[Flag, ...]:
    """Return the flags for changed texts, with the keys that must be set together with them.

    `texts` are the new texts of controls by key; an empty text unsets the key. Raises ConfigError
    for a key without a control, and for a text that is no value.
    """
    known = [control.key for control in controls(spec, texts)]
    for key in texts:
        if key not in known:
            raise ConfigError(f"{key} cannot be changed here. These can: {', '.join(known)}.")
    words = []
    for key, text in texts.items():
        whole = _UNSET_WHOLE.fullmatch(key) if not text.strip() else None
        words.append(f"--{whole[1] if whole else key}={text.strip() or 'null'}")
    flags = {flag.path: flag for flag in parse_flags(words)}
    for name, role in spec.roles.items():
        made: dict[str, Any] = {
            ".".join(path[1:]): flag.value for path, flag in flags.items() if path[0] == role.key
        }
        if made and not role.given:
            beside = in_section(spec, name, made)
            flags |= {_path(key): Flag(_path(key), value) for key, value in beside.items()}
    return tuple(flags.values())


def merge_flags(given: Sequence[Flag], made: Sequence[Flag]) -> tuple[Flag, ...]:
    """Return both groups of flags as one; if both set a key, the value of `made` holds."""
    kept = list(given)
    for flag in made:
        above = next((old for old in kept if old.path == flag.path[: len(old.path)]), None)
        kept = [old for old in kept if old.path[: len(flag.path)] != flag.path]
        if above is None or above.path == flag.path:
            kept.append(flag)
        else:  # a section that was given as one value
            tree = apply_flags(Tree({}, {}), [above, flag])
            merged = Flag(above.path, yaml_tree.value_at(tree.values, above.path))
            kept[kept.index(above)] = merged
    return tuple(kept)
