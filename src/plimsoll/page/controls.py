"""The settings that a page of a plan offers to change: which there are for a run, what they may
become, and the flags that their texts are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plimsoll.config import yaml_tree
from plimsoll.config.flags import Flag, apply_flags, parse_flags
from plimsoll.config.keys import Key, find_key, keys_of
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import Tree
from plimsoll.errors import ConfigError
from plimsoll.machine.hardware import CARDS
from plimsoll.memory.remedies.changes import Value, value_at
from plimsoll.memory.remedies.levers import of_frozen
from plimsoll.spec.roles import Role
from plimsoll.spec.run_spec import RunSpec

_Spec = RunSpec[Any]


@dataclass(frozen=True)
class _Group:
    """Dotted keys of a config. of: the runs for which they mean something."""

    title: str
    keys: tuple[str, ...]
    of: Callable[[_Spec], bool] = lambda spec: True


_MACHINES = (
    *("cluster.hardware", "cluster.nodes", "cluster.host_memory"),
    *("cluster.device", "cluster.ranks"),
)
_ENGINE = ("tensor_parallel", "memory_share", "sleep_level", "max_sequences")
"""In the section of an engine that samples; each engine has some of them."""
_BATCH = (
    *("batch.prompts", "batch.responses", "batch.sequences", "batch.pairs"),
    *("batch.micro_batch_tokens", "data.max_tokens"),
)
"""Each job has some of them."""
_RESPONSE = "rollout.sampling.max_new_tokens"
_FIRST = (
    _Group("machines", _MACHINES),
    _Group("machines", ("cluster.critic_ranks",), lambda spec: "critic" in spec.trained),
    _Group("batch", _BATCH),
)
_TRAINED = (
    *("zero.stage", "zero.optimizer_offload", "zero.parameter_offload"),
    *("model.gradient_checkpointing", "model.activation_offload"),
    *("adapter.rank", "model.quantization"),
)
_FROZEN = ("zero.stage", "zero.offload", "model.quantization")
"""In the section of a role that learns, and of one that only scores."""
_LAST = (
    _Group(
        "reference log-probs",
        ("reference_logprobs.precompute",),
        lambda spec: spec.may_precompute,
    ),
)
_UNSET_WHOLE = re.compile(r"(.*\.adapter)\.rank")
"""Keys whose section is unset where they are."""
_RANKS = ("", "8", "16", "32", "64", "128")
"""Of adapters."""
_TYPES = re.compile(r"(integer|number|text|list|mapping|value)\b")
"""What the words for a key's type begin with, where it takes more than a few values."""
_OPEN = re.compile(r"(text|list|mapping|value)\b")


@dataclass(frozen=True)
class Control:
    """A key that may be changed.

    label: its name in the group. value: what the run has, as YAML; "" for null. kind: what may be
    written, in words. choices: all there are, if they are few. proposals: for a text. step: what a
    number grows by; None where it doubles.
    """

    key: str
    group: str
    label: str
    value: str
    doc: str
    kind: str
    choices: tuple[str, ...]
    proposals: tuple[str, ...]
    step: float | None


def controls(spec: _Spec, changed: Collection[str] = ()) -> tuple[Control, ...]:
    """Return the controls of a run, in the order in which they are shown.

    changed: keys that have one whether they are offered or not, if their values are numbers or a
    choice: answers of the advice change such. A text has none, as it may name a file.
    """
    known = tuple(keys_of(spec.job.config))
    offered = list(_offered(spec))
    shown = {key for *_, key, _ in offered}
    further = [key for key in changed if key not in shown and _is_harmless(known, key)]
    offered += [("other settings", key, key, _value(spec, key)) for key in further]
    return tuple(
        Control(
            *(key, group, label, "" if value is None else show(value), found.doc, found.kind),
            choices=_choices(found),
            proposals=_proposals(spec, key),
            step=0.05 if found.kind.startswith("number") else None,
        )
        for group, label, key, value in offered
        if (found := find_key(known, tuple(key.split("."))))
    )


def _is_harmless(known: Sequence[Key], key: str) -> bool:
    """Whether a key takes numbers or words that the schema names."""
    found = find_key(tuple(known), tuple(key.split(".")))
    words = [] if found is None or found.section else found.kind.split(" | ")
    return bool(words) and not any(map(_OPEN.match, words))


def _offered(spec: _Spec) -> Iterator[tuple[str, str, str, Value]]:
    """Group, label, key and value; some keys may be of other jobs or engines."""
    yield from _in_groups(spec, _FIRST)
    longest = [_RESPONSE, *spec.sampling.longest_responses] if spec.sampling else []
    for key in dict.fromkeys(longest):
        label = key.removeprefix("rollout.sampling.").removeprefix("environments.")
        yield "batch", label, key, _value(spec, key)
    for role in spec.roles.values():
        for key in _keys_of(role):
            yield role.key, key, f"{role.key}.{key}", value_at(role.settings, key)
    if spec.engines is not None:
        settings = [f"{spec.engines.engine_name}.{key}" for key in _ENGINE]
        engines = tuple(f"rollout.{key}" for key in ("placement", "engines", *settings))
        yield from _in_groups(spec, [_Group("engines", engines)])
    yield from _in_groups(spec, _LAST)


def _in_groups(spec: _Spec, groups: Sequence[_Group]) -> Iterator[tuple[str, str, str, Value]]:
    for group in groups:
        for key in group.keys if group.of(spec) else ():
            yield group.title, key.rpartition(".")[2], key, _value(spec, key)


def _value(spec: _Spec, key: str) -> Value:
    try:
        return value_at(spec.config, key)
    except AttributeError:  # a key of other jobs or engines
        return None


def _keys_of(role: Role) -> Sequence[str]:
    if role.without_adapter:
        return ()
    return _TRAINED if role.trained else _FROZEN


def _choices(key: Key) -> tuple[str, ...]:
    words = key.kind.removesuffix(" or null").split(" | ")
    return tuple(words) if len(words) > 1 and not any(map(_TYPES.match, words)) else ()


def _proposals(spec: _Spec, key: str) -> tuple[str, ...]:
    """Texts that may be chosen; an empty one unsets the key."""
    if key == "cluster.hardware":
        given = re.match(r"\d+", spec.cluster.hardware or "")
        count = given[0] if given else str(min(spec.cluster.ranks, 8))
        return ("", "cpu", *(f"{count}x{card.name}" for card in CARDS))
    return _RANKS if _UNSET_WHOLE.fullmatch(key) else ()


def flags_from(spec: _Spec, texts: Mapping[str, str]) -> tuple[Flag, ...]:
    """What changed texts of a run's controls set; with what must stand beside them.

    texts: by key; an empty one unsets the key. Raises ConfigError for a key without a control, and
    for a text that is no value.
    """
    known = [control.key for control in controls(spec, texts)]
    for key in texts:
        if key not in known:
            raise ConfigError(f"{key} cannot be changed here. These can: {', '.join(known)}.")
    words = [f"--{name}={text}" for name, text in map(_named, texts.items())]
    found = {flag.path: flag for flag in parse_flags(words)}
    for name, role in spec.roles.items():
        own: dict[str, Any] = {
            ".".join(path[1:]): flag.value for path, flag in found.items() if path[0] == role.key
        }
        if own and not role.given:
            beside = [(tuple(k.split(".")), v) for k, v in of_frozen(spec, name, own).items()]
            found |= {path: Flag(path, value) for path, value in beside}
    return tuple(found.values())


def _named(one: tuple[str, str]) -> tuple[str, str]:
    key, text = one
    whole = _UNSET_WHOLE.fullmatch(key)
    return (whole[1] if whole and not text.strip() else key), text.strip() or "null"


def laid_over(given: Sequence[Flag], made: Sequence[Flag]) -> tuple[Flag, ...]:
    """Flags with others over them: of a key that both set, those of `made` hold."""
    kept = list(given)
    for flag in made:
        above = next((one for one in kept if one.path == flag.path[: len(one.path)]), None)
        kept = [one for one in kept if one.path[: len(flag.path)] != flag.path]
        if above is None or above.path == flag.path:
            kept.append(flag)
        else:  # a section that was given as one value
            tree = apply_flags(Tree({}, {}), [above, flag])
            merged = Flag(above.path, yaml_tree.value_at(tree.values, above.path))
            kept[kept.index(above)] = merged
    return tuple(kept)
