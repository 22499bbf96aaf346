"""Load the rows of a run: read, tokenize, check, and order them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data.cache import token_versions
from plimsoll.data.loading import UNSEEN, Loaded, Observer
from plimsoll.data.order import MixedOrder, Portion
from plimsoll.data.stored import JoinedRows, column_of
from plimsoll.data.streamed import BlockCounts, StreamedRows
from plimsoll.data.template import Template, make_template
from plimsoll.errors import ConfigError, DataError
from plimsoll.model.load import load_tokenizer
from plimsoll.records import Prompt, Row
from plimsoll.resolve.model_files import read_model_json
from plimsoll.resolve.run_spec import RunSpec
from plimsoll.run.numbers import plural
from plimsoll.run.state import RunState
from plimsoll.train.saving import (
    Items,
    Sources,
    check_rows,
    row_count_changes,
    sources_of,
)
from plimsoll.train.session import RunSession

T = TypeVar("T", bound=Row | Prompt)

LoadRows = Callable[[DataConfig, SourceConfig, Template, Observer], Loaded[T]]
"""A function that reads the rows of one source as items of a kind: samples, pairs, prompts, ..."""


@dataclass(frozen=True)
class RunData(Generic[T]):
    """The rows of a run."""

    train: Sequence[T]
    """The rows to learn from, source after source."""
    held_out: Mapping[str, Sequence[T]]
    """The held-out rows, by the keys of their sets in the config."""
    order: MixedOrder
    """The order in which the rows of `train` are drawn."""
    sources: Sources
    """The state of each source."""

    @property
    def eval(self) -> Sequence[T]:
        """The held-out rows of all sources."""
        return JoinedRows([*self.held_out.values()])


def load_data(session: RunSession, load: LoadRows[T]) -> RunData[T]:
    """Return the rows to learn from and the held-out rows, with the template applied and tokenized.

    `data.on_bad_row` decides whether bad rows are refused, or skipped and listed in the run
    directory. `run.edited_rows` decides whether rows that changed since the run began are refused
    or reported.
    """
    data = session.spec.data
    with session.progress.counting("rows read", None) as advance:
        templates = _templates(session.spec)
        observer = Observer(advance, session.progress.note)
        loaded = _load_all(session.spec, templates, load, observer)
    session.note_bad_rows([row for result in loaded.values() for row in result.bad_rows])
    for key, result in loaded.items():
        if result.cut_rows:
            session.progress.note(
                f"cut {plural(result.cut_rows, 'row')} of {key} to data.max_tokens: "
                f"{data.max_tokens}, as data.over_long: truncate says"
            )
        if result.stripped.rows:
            session.progress.note(
                f"the chat template leaves reasoning of the assistant's earlier turns out of "
                f"{plural(result.stripped.rows, 'row')} of {key}, the first "
                f"{result.stripped.first}: those turns are not learned, and "
                f"the model reads them without it"
            )
        if result.rendered.rows:
            session.progress.note(
                f"{plural(result.rendered.rows, 'row')} of {key}, the first "
                f"{result.rendered.first}, have tokens of the chat template in their text: if "
                f"they are rendered already, they are now rendered twice, and data.chat_template: "
                f"none takes them as they are"
            )
    if data.date is not None and any(template.writes_date for template in templates.values()):
        session.progress.note(
            f"the chat template writes the date: it stays {data.date}, when the run began, unless "
            f"data.date gives another"
        )
    items = {key: result.items for key, result in loaded.items()}
    sources = sources_of(session.spec, items)
    check_rows(session, items, sources)
    for warning in overlap_warnings(data, items):
        session.progress.note(warning)
    train = [items[key] for key in data.train_sources()]
    _begin_streams(session, data, items)
    return RunData(
        train=JoinedRows(train),
        held_out={key: items[key] for key in data.eval_sources()},
        order=_order(data, [len(rows) for rows in train], session.spec.run.seed),
        sources=sources,
    )


def _begin_streams(session: RunSession, data: DataConfig, items: Items) -> None:
    """Have each stream draw items by the run's seed, and note where its blocks end."""
    path = session.directory.streams_path
    if not session.resumed:
        path.unlink(missing_ok=True)
    for number, key in enumerate(data.train_sources()):
        stream = items[key]
        if isinstance(stream, StreamedRows):
            seed = (session.spec.run.seed, number) if data.shuffle else None
            stream.begin(seed, BlockCounts(path, key))


def _templates(spec: RunSpec[Any]) -> dict[str | None, Template]:
    """Return the templates of all sources, by their settings."""
    settings = dict.fromkeys(map(spec.data.template_of, spec.data.sources().values()))
    return {setting: template_of(spec, setting) for setting in settings}


def _load_all(
    spec: RunSpec[Any],
    templates: Mapping[str | None, Template],
    load: LoadRows[T],
    observer: Observer,
) -> dict[str, Loaded[T]]:
    """Return the rows of each source, by its key; one DataError lists bad rows of all sources."""
    loaded, refused = {}, []
    sources = spec.data.sources()
    for key, source in sources.items():
        try:
            template = templates[spec.data.template_of(source)]
            loaded[key] = load(spec.data, source, template, observer)
        except DataError as error:
            refused.append(str(error))
    if refused:
        raise DataError("\n".join(refused))
    return loaded


def load_held_out(spec: RunSpec[Any], load: LoadRows[T]) -> Loaded[T]:
    """Return the held-out rows of a job with one evaluation set; ConfigError if none is given."""
    [loaded] = load_held_out_sets(spec, load).values()
    return loaded


def load_held_out_sets(spec: RunSpec[Any], load: LoadRows[T]) -> dict[str, Loaded[T]]:
    """Return the held-out rows of each set, by its key; ConfigError if no set is given."""
    if spec.data.eval is None:
        raise ConfigError(
            "data.eval is not given, so there is nothing to measure on. Give data.eval.path and "
            "its columns, in the config or as flags."
        )
    loaded = {}
    for key, source in spec.data.eval_sources().items():
        template = template_of(spec, spec.data.template_of(source))
        loaded[key] = load(spec.data, source, template, UNSEEN)
    return loaded


def row_counts(*loaded: Loaded[T]) -> dict[str, float]:
    """Return the numbers of rows that are used, skipped as bad, and cut as too long, by name."""
    return {
        "rows": sum(len(result.items) for result in loaded),
        "skipped_rows": sum(len(result.bad_rows) for result in loaded),
        "cut_rows": sum(result.cut_rows for result in loaded),
    }


def template_of(spec: RunSpec[Any], chat_template: str | None) -> Template:
    """Return the run's template; `chat_template` has a value that `data.chat_template` may have."""
    data, model = spec.data, spec.actor.model
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    vocabulary = read_model_json(model.path).get("vocab_size")
    return make_template(tokenizer, chat_template, data.system, vocabulary, data.date)


def _order(data: DataConfig, rows: Sequence[int], seed: int) -> MixedOrder:
    if isinstance(data.train, SourceConfig):
        weights = {"": 1.0}
    else:
        weights = {name: source.weight for name, source in data.train.items()}
    portions = (Portion(n, r, w) for (n, w), r in zip(weights.items(), rows, strict=True))
    return MixedOrder(tuple(portions), seed, data.shuffle)


def first_state(session: RunSession, data: RunData[T]) -> RunState:
    """Return the state that the run begins with, with the counts and fingerprints of its rows.

    If the run is resumed, rows that were added or removed since the checkpoint are reported.
    """
    now = sum(portion.rows for portion in data.order.portions)
    if session.resumed:
        for change in row_count_changes(session.state, now, data.sources):
            session.progress.note(change)
    return replace(session.state, data_rows=now, sources=data.sources, versions=token_versions())


def epoch_metrics(order: MixedOrder, position: int) -> dict[str, float]:
    """Return how many epochs of the data were seen by `position` of the order, by metric name.

    The name is `epoch`, or `epoch/<name>` for each of several sources.
    """
    epochs = order.epochs(position)
    return {f"epoch/{name}" if name else "epoch": epoch for name, epoch in epochs.items()}


def repeat_warnings(order: MixedOrder, rows_per_step: int) -> Iterator[str]:
    """Yield a warning for each source with fewer rows than one step draws from it."""
    for portion in order.portions:
        drawn = rows_per_step * order.share(portion)
        if portion.rows < drawn:
            yield (
                f"{portion.key} has {plural(portion.rows, 'usable row')}, and a step draws "
                f"{drawn:,.0f} of them: each step sees some more than once"
            )


def overlap_warnings(data: DataConfig, items: Items) -> Iterator[str]:
    """Yield a warning for each training source that shares rows with a held-out set.

    Only tokens are compared. So two rows are the same even if their labels, margins or references
    differ, and a pair is the same as with its responses swapped.
    """
    for key, source in data.eval_sources().items():
        if items.get(key):
            yield from _overlaps(data, items, key, source.path)


def _overlaps(data: DataConfig, items: Items, key: str, path: str) -> Iterator[str]:
    held_out = items[key]
    keys = column_of(held_out, "key")
    total = plural(len(held_out), "prompt" if isinstance(held_out[0], Prompt) else "row")
    for name, source in data.train_sources().items():
        shared = int(np.isin(keys, column_of(items[name], "key")).sum())
        if shared:
            yield (
                f"{key} ({path}) shares {shared:,} of its {total} with {name} "
                f"({source.path}): on these, evaluations measure what was memorised. Take them out "
                "of one of the two"
            )
