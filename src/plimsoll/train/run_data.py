"""The rows of a run: what its config names, read, tokenized and put into the order of learning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Generic, TypeVar

import xxhash

from plimsoll.config.data import DataConfig, SourceConfig
from plimsoll.data.loading import Loaded, Seen, unseen
from plimsoll.data.order import MixedOrder, Portion
from plimsoll.data.template import Template, make_template
from plimsoll.errors import ConfigError, DataError
from plimsoll.model.load import load_tokenizer
from plimsoll.records import Prompt, Row
from plimsoll.run.counting import counted
from plimsoll.run.state import RunState
from plimsoll.spec.model_files import read_model_json
from plimsoll.spec.run_spec import RunSpec
from plimsoll.train.resuming import (
    Items,
    Sources,
    changed_counts,
    check_rows,
    sources_of,
)
from plimsoll.train.session import Session

T = TypeVar("T", bound=Row | Prompt)

LoadRows = Callable[[DataConfig, SourceConfig, Template, Seen], Loaded[T]]
"""Reads a source's rows of one kind."""


@dataclass(frozen=True)
class RunData(Generic[T]):
    """train: the rows of all sources to learn from, one source after another. held_out: those held
    out, by the keys of their sets in the config. order: in which those of `train` are drawn.
    sources: what each of them gave."""

    train: tuple[T, ...]
    held_out: Mapping[str, tuple[T, ...]]
    order: MixedOrder
    sources: Sources

    @property
    def eval(self) -> tuple[T, ...]:
        """All that are held out."""
        return tuple(chain.from_iterable(self.held_out.values()))


def load_data(session: Session, load: LoadRows[T]) -> RunData[T]:
    """Read, template and tokenize what to learn from and what is held out (none: nothing).

    Bad rows are refused, or listed in the run directory, as `data.on_bad_row` says; of a run that
    goes on, rows that were edited, as `run.edited_rows` does.
    """
    data = session.spec.data
    with session.progress.counting("rows read", None) as advance:
        loaded = _load_all(session.spec, load, advance)
    session.note_bad_rows([row for one in loaded.values() for row in one.bad_rows])
    for key, one in loaded.items():
        if one.cut_rows:
            session.progress.note(
                f"cut {counted(one.cut_rows, 'row')} of {key} to data.max_tokens: "
                f"{data.max_tokens}, as data.over_long: truncate says"
            )
        if one.stripped is not None:
            session.progress.note(
                f"the chat template leaves reasoning of the assistant's earlier turns out of "
                f"{counted(one.stripped.rows, 'row')} of {key}, the first {one.stripped.first}: "
                f"those turns are not learned, and the model reads them without it"
            )
    items = {key: one.items for key, one in loaded.items()}
    sources = sources_of(session.spec, items)
    check_rows(session, items, sources)
    for same in learned_and_held_out(data, items):
        session.progress.note(same)
    train = [items[key] for key in data.train_sources()]
    return RunData(
        train=tuple(chain.from_iterable(train)),
        held_out={key: items[key] for key in data.eval_sources()},
        order=_order(data, [len(one) for one in train], session.spec.run.seed),
        sources=sources,
    )


def _load_all(spec: RunSpec[Any], load: LoadRows[T], seen: Seen) -> dict[str, Loaded[T]]:
    """Of each source, by its key; one DataError tells the bad rows of all."""
    loaded, refused = {}, []
    sources = spec.data.sources()
    needed = dict.fromkeys(map(spec.data.template_of, sources.values()))
    templates = {given: template_of(spec, given) for given in needed}
    for key, source in sources.items():
        try:
            template = templates[spec.data.template_of(source)]
            loaded[key] = load(spec.data, source, template, seen)
        except DataError as error:
            refused.append(str(error))
    if refused:
        raise DataError("\n".join(refused))
    return loaded


def load_held_out(spec: RunSpec[Any], load: LoadRows[T]) -> Loaded[T]:
    """Read, template and tokenize what is held out, of a job that has one set of it.

    Raises:
        ConfigError: nothing is.
    """
    [loaded] = load_held_out_sets(spec, load).values()
    return loaded


def load_held_out_sets(spec: RunSpec[Any], load: LoadRows[T]) -> dict[str, Loaded[T]]:
    """Read, template and tokenize what is held out, by the keys of its sets.

    Raises:
        ConfigError: nothing is.
    """
    if spec.data.eval is None:
        raise ConfigError(
            "data.eval is not given, so there is nothing to measure on. Give data.eval.path and "
            "its columns, in the config or as flags."
        )
    loaded = {}
    for key, source in spec.data.eval_sources().items():
        template = template_of(spec, spec.data.template_of(source))
        loaded[key] = load(spec.data, source, template, unseen)
    return loaded


def row_counts(*loaded: Loaded[T]) -> dict[str, float]:
    """How many of the held-out rows are used, left out as bad, and cut as too long."""
    return {
        "rows": sum(len(one.items) for one in loaded),
        "skipped_rows": sum(len(one.bad_rows) for one in loaded),
        "cut_rows": sum(one.cut_rows for one in loaded),
    }


def template_of(spec: RunSpec[Any], given: str | None) -> Template:
    """How rows become tokens. given: as `data.chat_template`."""
    data, model = spec.data, spec.actor.model
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    vocabulary = read_model_json(model.path).get("vocab_size")
    return make_template(tokenizer, given, data.system, vocabulary)


def _order(data: DataConfig, rows: Sequence[int], seed: int) -> MixedOrder:
    if isinstance(data.train, SourceConfig):
        weights = {"": 1.0}
    else:
        weights = {name: source.weight for name, source in data.train.items()}
    portions = (Portion(n, r, w) for (n, w), r in zip(weights.items(), rows, strict=True))
    return MixedOrder(tuple(portions), seed, data.shuffle)


def first_state(session: Session, data: RunData[T]) -> RunState:
    """What a run begins with or goes on from; rows that have come or gone in between are told."""
    now = sum(portion.rows for portion in data.order.portions)
    if session.resumed:
        for changed in changed_counts(session.state, now, data.sources):
            session.progress.note(changed)
    return replace(session.state, data_rows=now, sources=data.sources)


def epoch_metrics(order: MixedOrder, position: int) -> dict[str, float]:
    """How often the data have been seen: `epoch`, or of several sources `epoch/<name>`."""
    epochs = order.epochs(position)
    return {f"epoch/{name}" if name else "epoch": epoch for name, epoch in epochs.items()}


def repeats(order: MixedOrder, rows_per_step: int) -> Iterator[str]:
    """What to tell of sources that have fewer rows than a step draws of them."""
    for portion in order.portions:
        drawn = rows_per_step * order.share(portion)
        if portion.rows < drawn:
            yield (
                f"{portion.key} has {counted(portion.rows, 'usable row')}, and a step draws "
                f"{drawn:,.0f} of them: each step sees some more than once"
            )


def learned_and_held_out(data: DataConfig, items: Items) -> Iterator[str]:
    """A warning for each source to learn from that also has some of the held-out rows of a set.

    Rows are compared by their tokens alone: the same text with another label, margin or reference
    is the same row, and so is a pair with its responses swapped.
    """
    for key, source in data.eval_sources().items():
        if items.get(key):
            yield from _shared(data, items, key, source.path)


def _shared(data: DataConfig, items: Items, key: str, path: str) -> Iterator[str]:
    held_out = items[key]
    times = Counter(map(_key, held_out))
    total = counted(len(held_out), "prompt" if isinstance(held_out[0], Prompt) else "row")
    for name, source in data.train_sources().items():
        shared = sum(times[own] for own in times.keys() & map(_key, items[name]))
        if shared:
            yield (
                f"{key} ({path}) shares {shared:,} of its {total} with {name} "
                f"({source.path}): on these, evaluations measure what was memorised. Take them out "
                "of one of the two"
            )


def _key(item: Row | Prompt) -> bytes:
    read = [item] if isinstance(item, Prompt) else item.samples
    return b"".join(sorted(xxhash.xxh3_128_digest(one.tokens.data) for one in read))
