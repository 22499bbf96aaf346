"""Whether a run that goes on has the settings and reads the rows that it had before.

Other settings are told. A checkpoint holds a fingerprint of what was made of each source's rows:
rows that were added after the others, or taken away, are told; others in the place of those that
were there are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import xxhash

from plimsoll.config.base import Settings
from plimsoll.config.data import EVALUATED, SourceConfig
from plimsoll.config.keys import dump_config
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import read_tree
from plimsoll.errors import ConfigError
from plimsoll.records import LabelledResponse, LabelledSteps, Pair, Prompt, Row, Sample
from plimsoll.run.counting import counted
from plimsoll.run.state import RunState, SourceState
from plimsoll.run.stored_logprobs import sequence_key
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.session import Session

Sources = Mapping[str, SourceState]
Items = Mapping[str, Sequence[Row | Prompt]]
"""What was made of each source's rows. Both are by the sources' keys in the config."""

_OF_EVERY_RESUME = ("run.resume", "run.edited_rows")
_OF_NO_ROW = {"weight", *EVALUATED}
"""Settings of a source that change none of its rows."""
_MISSING = object()


def sources_of(spec: RunSpec[Any], items: Items) -> Sources:
    """What each source gave."""
    return {
        key: SourceState(_asked(spec, source), len(items[key]), fingerprint(items[key]))
        for key, source in spec.data.sources().items()
    }


def check_rows(session: Session, items: Items, sources: Sources) -> None:
    """Hold what was read against what the checkpoint says was read before, where the settings that
    choose and make the rows are the same.

    Raises ConfigError naming the sources whose rows were edited; with `run.edited_rows: accept`
    they are told.
    """
    before, spec = session.state.sources or {}, session.spec
    edited = [
        f"{key} ({spec.data.sources()[key].path})"
        for key, now in sources.items()
        if key in before and before[key].asked == now.asked
        if not _begins_with(before[key], now, items[key])
    ]
    if not edited:
        return
    what = (
        f"the rows of {' and of '.join(edited)} are not those that the run had until step "
        f"{session.state.step}"
    )
    if spec.run.edited_rows == "accept":
        session.progress.note(f"{what}: it goes on with them as they are now")
        return
    raise ConfigError(
        f"{what}: some have other content or another order, though the settings are the same, so "
        f"the run would not be the one that it was. Put the rows back as they were, or the "
        f"tokenizer and template that made their tokens; --run.edited_rows accept goes on with "
        f"them as they are now; another run.directory begins anew."
    )


def changed_counts(state: RunState, learned_from: int, sources: Sources) -> Iterator[str]:
    """What to tell of sources that have more rows or fewer than in a checkpoint's state.
    learned_from: the rows of all that are learned from, which is all that older ones know."""
    whole = "data.train"
    if state.sources is None:
        before, now = {whole: state.data_rows}, {whole: learned_from}
    else:
        before = {key: source.rows for key, source in state.sources.items()}
        now = {key: source.rows for key, source in sources.items()}
    for key in [key for key in before if now.get(key, before[key]) != before[key]]:
        follows = (
            "evaluations are of other rows than before"
            if key.startswith("data.eval")
            else f"the order from here on is that of {counted(now[key], 'row')}, and some of this "
            "epoch may come twice or not at all"
        )
        usable = counted(before[key], "usable row")
        yield f"{key} had {usable}, and has {now[key]:,} now: {follows}"


def fingerprint(items: Sequence[Row | Prompt]) -> str:
    """A hash of what was made of rows, in their order: tokens, which of them are learned, labels,
    margins, references, further columns."""
    found = xxhash.xxh3_64()
    for item in items:
        for part in _parts(item):
            found.update(part)
    return found.hexdigest()


def _parts(item: Row | Prompt) -> tuple[bytes, ...]:
    match item:
        case Sample():
            return (sequence_key(item),)
        case Pair():
            margin = repr(item.margin).encode()
            return (sequence_key(item.chosen), sequence_key(item.rejected), margin)
        case LabelledResponse():
            return (sequence_key(item.sample), b"\1" if item.desirable else b"\0")
        case LabelledSteps():
            return (sequence_key(item.sample), item.labels.tobytes())
        case Prompt():
            own = (item.source or None, item.max_new_tokens, item.order_by)
            given = (value for value in own if value is not None)
            told = (item.text, item.reference, *given, *item.columns.items())
            return (item.tokens.tobytes(), repr(told).encode())
    raise AssertionError(f"{type(item).__name__} is no item of data")


def _begins_with(before: SourceState, now: SourceState, items: Sequence[Row | Prompt]) -> bool:
    """Whether the items that there were are the first of these; of fewer nothing is known."""
    if now.rows <= before.rows:
        return now.rows < before.rows or now.content == before.content
    return fingerprint(items[: before.rows]) == before.content


def _asked(spec: RunSpec[Any], source: SourceConfig) -> str:
    """Of the settings that choose a source's rows and make tokens of them. Defaults are left out:
    a key that a later version adds changes no fingerprint."""
    model, of_all = spec.actor.model, {"train", "eval", "shuffle"}
    settings: dict[str, object] = {
        "source": source.model_dump(exclude=_OF_NO_ROW, exclude_defaults=True),
        "data": spec.data.model_dump(exclude=of_all, exclude_defaults=True),
        "model": [model.path, model.trust_remote_code],
        "learned": None,
    } | dict(spec.job.rows(spec.config))
    return xxhash.xxh3_64_hexdigest(json.dumps(settings, sort_keys=True).encode())


def changed_settings(before: str, now: Settings) -> list[str]:
    """The keys of two resolved configs that differ, as `key: old -> new`, in the new one's order.
    A key that the old one lacks, as an older version wrote it, and that has its default is none.

    before: YAML, as `dump_config` writes it.
    """
    old, new = (
        dict(_leaves(read_tree(text, "config.yaml").values)) for text in (before, dump_config(now))
    )
    # An empty section that the old config has is one of defaults; one that it lacks is news.
    changed = _leaves(now.model_dump(exclude_defaults=True))
    told = [
        *old,
        *(key for key, value in changed if value or not any(o.startswith(f"{key}.") for o in old)),
    ]
    keys = [*new, *(key for key in old if key not in new)]
    return [
        f"{key}: {_text(old, key)} -> {_text(new, key)}"
        for key in keys
        if key not in _OF_EVERY_RESUME and old.get(key, _MISSING) != new.get(key, _MISSING)
        if any(key == one or key.startswith(f"{one}.") for one in told)
    ]


def _leaves(tree: Any, above: str = "") -> Iterator[tuple[str, object]]:
    if not isinstance(tree, Mapping) or not tree:
        yield above, tree
        return
    for name, value in tree.items():
        yield from _leaves(value, f"{above}.{name}" if above else str(name))


def _text(leaves: Mapping[str, object], key: str) -> str:
    return show(leaves[key]) if key in leaves else "not given"
