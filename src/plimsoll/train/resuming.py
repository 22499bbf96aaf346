"""Compare the settings and the rows of a resumed run with those before.

Changed settings are reported. A checkpoint holds a fingerprint of the rows of each source. Rows
that were added at the end or removed are reported; rows that were replaced are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import xxhash

from plimsoll.config.base import Settings
from plimsoll.config.data import EVALUATED, SourceConfig
from plimsoll.config.keys import dump_config
from plimsoll.config.load import leaves
from plimsoll.config.problems import show
from plimsoll.config.yaml_tree import read_tree
from plimsoll.errors import ConfigError
from plimsoll.records import LabelledResponse, LabelledSteps, Pair, Prompt, Row, Sample
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.numbers import plural
from plimsoll.run.state import RunState, SourceState
from plimsoll.run.stored_logprobs import sequence_key
from plimsoll.train.session import RunSession

Sources = Mapping[str, SourceState]
"""The state of each source, by its key in the config."""
Items = Mapping[str, Sequence[Row | Prompt]]
"""The items of each source, by its key in the config."""

_RESUME_SETTINGS = ("run.resume", "run.edited_rows")
_TOKEN_LIBRARIES = ("tokenizers", "transformers", "jinja2", "datasets", "pyarrow")
_WITHOUT_ROWS = {"weight", *EVALUATED}
"""Settings of a source that do not change its rows."""
_MISSING = object()


def sources_of(spec: RunSpec[Any], items: Items) -> Sources:
    """Return the state of each source: hash of its settings, number and fingerprint of its rows."""
    return {
        key: SourceState(_settings_hash(spec, source), len(items[key]), fingerprint(items[key]))
        for key, source in spec.data.sources().items()
    }


def check_rows(session: RunSession, items: Items, sources: Sources) -> None:
    """Raise ConfigError if rows were edited since the checkpoint; it names their sources.

    With `run.edited_rows: accept` the edited sources are only reported. A source whose settings
    for choosing and tokenizing rows have changed is not compared.
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
    if changes := version_changes(session.state.versions):
        what = f"{what}, and since then changed {', '.join(changes)}"
    raise ConfigError(
        f"{what}: some have other content or another order, though the settings are the same, so "
        f"the run would not be the one that it was. Put the rows back as they were, or the "
        f"tokenizer, template and libraries that made their tokens; --run.edited_rows accept goes "
        f"on with them as they are now; another run.directory begins anew."
    )


def token_versions() -> dict[str, str]:
    """Return the versions of the libraries that read rows and make tokens, by name."""
    return {name: version(name) for name in _TOKEN_LIBRARIES}


def version_changes(before: Mapping[str, str]) -> list[str]:
    """Return each library whose version is not the one of before, as `name: old -> new`."""
    now = token_versions()
    return [f"{n}: {old} -> {now[n]}" for n, old in before.items() if now.get(n, old) != old]


def row_count_changes(state: RunState, learned_from: int, sources: Sources) -> Iterator[str]:
    """Yield a message for each source whose number of rows differs from the checkpoint's.

    `learned_from` is the number of rows to learn from, of all sources together. Older checkpoints
    hold only this number.
    """
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
            else f"the order from here on is that of {plural(now[key], 'row')}, and some of this "
            "epoch may come twice or not at all"
        )
        usable = plural(before[key], "usable row")
        yield f"{key} had {usable}, and has {now[key]:,} now: {follows}"


def fingerprint(items: Sequence[Row | Prompt]) -> str:
    """Return a hash (hexadecimal) of items in their order.

    It covers tokens, loss masks, labels, margins, references and further columns.
    """
    digest = xxhash.xxh3_64()
    for item in items:
        for part in _hashed_parts(item):
            digest.update(part)
    return digest.hexdigest()


def _hashed_parts(item: Row | Prompt) -> tuple[bytes, ...]:
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
            settings = (item.source or None, item.max_new_tokens, item.order_by)
            given = (value for value in settings if value is not None)
            values = (item.text, item.reference, *given, *item.columns.items())
            return (item.tokens.tobytes(), repr(values).encode())
    raise AssertionError(f"{type(item).__name__} is no item of data")


def _begins_with(before: SourceState, now: SourceState, items: Sequence[Row | Prompt]) -> bool:
    """Return whether the items begin with the items from before; assume so if there are fewer."""
    if now.rows <= before.rows:
        return now.rows < before.rows or now.content == before.content
    return fingerprint(items[: before.rows]) == before.content


def _settings_hash(spec: RunSpec[Any], source: SourceConfig) -> str:
    """Return a hash of the settings that choose a source's rows and tokenize them.

    Settings with their default are left out, so a key that a later version adds changes no hash.
    """
    model, other_data = spec.actor.model, {"train", "eval", "shuffle", "date"}
    settings: dict[str, object] = {
        "source": source.model_dump(exclude=_WITHOUT_ROWS, exclude_defaults=True),
        "data": spec.data.model_dump(exclude=other_data, exclude_defaults=True),
        "model": [model.path, model.trust_remote_code],
        "learned": None,
    } | dict(spec.job.rows(spec.config))
    return xxhash.xxh3_64_hexdigest(json.dumps(settings, sort_keys=True).encode())


def changed_settings(before: str, now: Settings) -> list[str]:
    """Return the differences between two resolved configs, each as `key: old -> new`.

    `before` is YAML as `dump_config` writes it. The result is in the order of the new config's
    keys. A key may be missing in `before` because an older version wrote it; then the key counts
    only if its value is not the default.
    """
    old, new = (
        _by_key(read_tree(text, "config.yaml").values) for text in (before, dump_config(now))
    )
    # An empty section that the old config has is one of defaults; one that it lacks is news.
    changed = _by_key(now.model_dump(exclude_defaults=True)).items()
    relevant = [
        *old,
        *(key for key, value in changed if value or not any(o.startswith(f"{key}.") for o in old)),
    ]
    keys = [*new, *(key for key in old if key not in new)]
    return [
        f"{key}: {_value_text(old, key)} -> {_value_text(new, key)}"
        for key in keys
        if key not in _RESUME_SETTINGS and old.get(key, _MISSING) != new.get(key, _MISSING)
        if any(key == set_key or key.startswith(f"{set_key}.") for set_key in relevant)
    ]


def _by_key(tree: Mapping[str, Any]) -> dict[str, object]:
    return {".".join(map(str, path)): value for path, value in leaves(tree).items()}


def _value_text(leaves: Mapping[str, object], key: str) -> str:
    return show(leaves[key]) if key in leaves else "not given"
