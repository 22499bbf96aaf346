"""Held-out rows that are also trained on: evaluations on them measure what was memorised.

Rows are compared by their tokens alone: the same text with another label, margin or reference is
the same row, and so is a pair with its responses swapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import xxhash

from plimsoll.config.data import DataConfig
from plimsoll.records import LabelledResponse, LabelledSteps, Pair, Prompt, Sample, TokenIds
from plimsoll.run.counting import counted
from plimsoll.train.edited_rows import Items


def learned_and_held_out(data: DataConfig, items: Items) -> Iterator[str]:
    """A warning for each source to learn from that also has some of the held-out rows."""
    held_out = items.get("data.eval", ())
    if data.eval is None or not held_out:
        return
    times = Counter(map(_key, held_out))
    total = counted(len(held_out), "prompt" if isinstance(held_out[0], Prompt) else "row")
    for name, source in data.train_sources().items():
        shared = sum(times[key] for key in times.keys() & map(_key, items[name]))
        if shared:
            yield (
                f"data.eval ({data.eval.path}) shares {shared:,} of its {total} with {name} "
                f"({source.path}): on these, evaluations measure what was memorised. Take them out "
                "of one of the two"
            )


def _key(item: object) -> bytes:
    match item:
        case Sample() | Prompt():
            return _hash(item.tokens)
        case Pair():
            return b"".join(sorted((_hash(item.chosen.tokens), _hash(item.rejected.tokens))))
        case LabelledResponse() | LabelledSteps():
            return _hash(item.sample.tokens)
    raise AssertionError(f"{type(item).__name__} is no item of data")


def _hash(tokens: TokenIds) -> bytes:
    return xxhash.xxh3_128_digest(tokens.data)
