"""Items in the columns of Arrow, in memory or in a mapped file; each is made when it is asked for.

A row of the table holds an item. Tokens of all of its sequences are joined, and so are its loss
masks, a bit for each token. What Arrow has no type for, such as the further columns of a prompt, is
JSON. `key` is a hash of the tokens alone, and tells which rows are the same.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from plimsoll.records import (
    Bools,
    Ints,
    LabelledResponse,
    LabelledSteps,
    Pair,
    Prompt,
    Row,
    Sample,
    TokenIds,
)
from plimsoll.run.stored_logprobs import sequence_key

T = TypeVar("T", covariant=True)

_KINDS: Mapping[str, pa.DataType] = MappingProxyType(
    {
        "key": pa.uint64(),
        "tokens": pa.large_list(pa.int32()),
        "learned": pa.large_list(pa.bool_()),
        "first": pa.int32(),
        "margin": pa.float64(),
        "prompt": pa.uint64(),
        "desirable": pa.bool_(),
        "labels": pa.large_list(pa.float32()),
        "index": pa.int64(),
        "order_by": pa.float64(),
        "rest": pa.large_binary(),
    }
)
"""The type of each column: `first` is the number of tokens of a pair's chosen sequence, `learned`
the loss masks, `prompt` the number that rows of a prompt share."""
_REST = (
    "text", "reference", "source", "columns", "messages", "max_new_tokens", "environment",
    "is_text", "reference_value", "named",
)  # fmt: skip
"""The fields of a prompt that are in its JSON."""


def encode(items: Sequence[Row | Prompt]) -> pa.RecordBatch:
    """Return at least one item, all of a kind, as a row each."""
    rows = [{"key": _key(item), **_values(item)} for item in items]
    kind = {"kind": type(items[0]).__name__}
    schema = pa.schema([(name, _KINDS[name]) for name in rows[0]], kind)
    arrays = [_array([row[field.name] for row in rows], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_large_list(kind):
        return pa.array(values, kind)
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
    joined = pa.array(np.concatenate(values), kind.value_type)
    return pa.LargeListArray.from_arrays(pa.array(offsets), joined)


def _key(item: Row | Prompt) -> int:
    sequences = [item] if isinstance(item, Prompt) else item.samples
    hashes = sorted(xxhash.xxh3_128_digest(s.tokens.data) for s in sequences)
    return xxhash.xxh3_64_intdigest(b"".join(hashes))


def _values(item: Row | Prompt) -> dict[str, object]:
    own: dict[str, object]
    match item:
        case Prompt():
            rest = {name: getattr(item, name) for name in _REST}
            text = json.dumps(rest, ensure_ascii=False, default=_plain)
            encoded = text.encode("utf-8", "surrogatepass")
            own = {"index": item.index, "order_by": item.order_by, "rest": encoded}
            return {"tokens": item.tokens, **own}
        case Sample():
            own = {}
        case Pair():
            own = {"first": len(item.chosen.tokens), "margin": item.margin, "prompt": item.prompt}
        case LabelledResponse():
            own = {"desirable": item.desirable, "prompt": item.prompt}
        case LabelledSteps():
            own = {"labels": item.labels, "prompt": item.prompt}
        case _:
            raise AssertionError(f"{type(item).__name__} is no item of data")
    joined = {
        "tokens": np.concatenate([s.tokens for s in item.samples]),
        "learned": np.concatenate([s.loss_mask for s in item.samples]),
    }
    return {**joined, **own}


def _plain(value: object) -> object:
    """Return a value that JSON does not know, such as a date of Parquet, as templates write it."""
    return dict(value) if isinstance(value, Mapping) else str(value)


Cell = Callable[[str], Any]
"""Returns the value of a row in a column."""


def _prompt(cell: Cell) -> Prompt:
    rest = json.loads(cell("rest").decode("utf-8", "surrogatepass"))
    rest["messages"] = tuple(rest["messages"])
    return Prompt(cell("index"), cell("tokens"), order_by=cell("order_by"), **rest)


def _sample(cell: Cell) -> Sample:
    return Sample(cell("tokens"), cell("learned"))


def _pair(cell: Cell) -> Pair:
    tokens, learned, end = cell("tokens"), cell("learned"), cell("first")
    chosen, rejected = Sample(tokens[:end], learned[:end]), Sample(tokens[end:], learned[end:])
    return Pair(chosen, rejected, margin=cell("margin"), prompt=cell("prompt"))


_DECODE: Mapping[bytes, Callable[[Cell], Any]] = MappingProxyType(
    {
        b"Sample": _sample,
        b"Pair": _pair,
        b"LabelledResponse": lambda cell: LabelledResponse(
            _sample(cell), cell("desirable"), prompt=cell("prompt")
        ),
        b"LabelledSteps": lambda cell: LabelledSteps(
            _sample(cell), cell("labels"), prompt=cell("prompt")
        ),
        b"Prompt": _prompt,
    }
)


class LazyItems(Sequence[T]):
    """Items that are made when they are asked for."""

    @abstractmethod
    def item(self, place: int) -> T:
        """Return an item by its place, from 0."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(len(self))[index]
        return self.item(places) if isinstance(places, int) else [*map(self.item, places)]


def part_of(ends: Sequence[int], place: int) -> tuple[int, int]:
    """Return the part of a whole that has a place, and the place within it.

    `ends` has the place after the last one of each part.
    """
    number = bisect_right(ends, place)
    return number, place - (ends[number - 1] if number else 0)


class StoredRows(LazyItems[T]):
    """The items of a source, as rows of a table; each access makes the item anew."""

    def __init__(self, batches: Sequence[pa.RecordBatch], fingerprint: str) -> None:
        """Hold batches of `encode`, and what `fingerprint_of` says of their items."""
        self.table = pa.Table.from_batches(batches)
        self.fingerprint = fingerprint
        self._decode = _DECODE[self.table.schema.metadata[b"kind"]]
        self._ends = [*accumulate(batch.num_rows for batch in batches)]

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def item(self, place: int) -> T:
        """Return the item of a row."""
        number, row = part_of(self._ends, place)

        def cell(name: str) -> Any:
            values = self.table.column(name).chunk(number)
            if not isinstance(values, pa.LargeListArray):
                return values[row].as_py()
            start, end = (values.offsets[row + i].as_py() for i in (0, 1))
            view = values.values.slice(start, end - start).to_numpy(zero_copy_only=False)
            return view.copy()  # torch takes no array that cannot be written to

        item: T = self._decode(cell)
        return item


class JoinedRows(LazyItems[T]):
    """The items of several sources, one source after the other."""

    def __init__(
        self, parts: Sequence[Sequence[T]], change: Callable[[int, T], T] | None = None
    ) -> None:
        """Join sources.

        Args:
            parts: the items of each source.
            change: takes the number of an item among all of them, and the item; returns the item as
                it is here.
        """
        self.parts = parts
        self._change = change
        self._ends = [*accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def item(self, place: int) -> T:
        """Return the item of a source, as it is here."""
        number, within = part_of(self._ends, place)
        item = self.parts[number][within]
        return item if self._change is None else self._change(place, item)


def number_prompt(index: int, prompt: Prompt) -> Prompt:
    """Return the prompt with its number among those of several sources."""
    return replace(prompt, index=index)


def _tables(items: Sequence[Row | Prompt]) -> Iterator[pa.Table]:
    """Yield the items as tables; those that a job's own code made, too."""
    if isinstance(items, JoinedRows):
        for part in items.parts:
            yield from _tables(part)
    elif isinstance(items, StoredRows):
        yield items.table
    elif items:
        yield pa.Table.from_batches([encode(items)])


def column_of(items: Sequence[Row | Prompt], name: str) -> NDArray[Any]:
    """Return a column of all items as an array, without making the items; nulls are NaN."""
    columns = [table.column(name).to_numpy() for table in _tables(items)]
    return np.concatenate(columns) if columns else np.zeros(0)


def token_counts(items: Sequence[Row | Prompt]) -> Ints:
    """Return the number of tokens of each item, all of its sequences together."""
    counts = [pc.list_value_length(t.column("tokens")).to_numpy() for t in _tables(items)]
    return np.concatenate(counts) if counts else np.zeros(0, np.int64)


def learned_tokens(items: Sequence[Row]) -> Iterator[TokenIds]:
    """Yield the learned tokens of all items, those of some rows at a time."""
    for table in _tables(items):
        for batch in table.to_batches():
            flat = (batch.column(name).flatten() for name in ("tokens", "learned"))
            tokens, learned = (values.to_numpy(zero_copy_only=False) for values in flat)
            mask: Bools = learned
            yield tokens[mask]


def hashed_parts(items: Iterable[Row | Prompt]) -> Iterator[bytes]:
    """Yield the bytes that a fingerprint of items is a hash of."""
    for item in items:
        yield from _hashed_parts(item)


def fingerprint(items: Iterable[Row | Prompt]) -> str:
    """Return a hash (hexadecimal) of items in their order.

    It covers tokens, loss masks, labels, margins, references and further columns.
    """
    if isinstance(items, StoredRows):
        return items.fingerprint
    digest = xxhash.xxh3_64()
    for part in hashed_parts(items):
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
