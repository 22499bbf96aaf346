"""Held-out rows that are also trained on: evaluations on them measure what was memorised.

Rows are compared by their tokens alone: the same text with another label, margin or reference is
the same row, and so is a pair with its responses swapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import xxhash

from plimsoll.config.data import DataConfig
from plimsoll.records import Prompt, Row
from plimsoll.run.counting import counted
from plimsoll.train.resuming import Items


def learned_and_held_out(data: DataConfig, items: Items) -> Iterator[str]:
    """A warning for each source to learn from that also has some of the held-out rows of a set."""
    for key, held_out in data.eval_sources().items():
        if items.get(key):
            yield from _shared(data, items, key, held_out.path)


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
