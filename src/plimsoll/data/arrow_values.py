"""Convert values of Arrow's columns to the values that the same rows would have in JSON.

Arrow gives every object of a column the keys of all objects, and fills missing keys with null.
Within turns and tools such a null is padding and is dropped, as a chat template writes every key
that is present: {"town": "T0", "a": null, "b": null} becomes {"town": "T0"}. In other columns nulls
stay, for functions that look a key up.

Text of the extension type arrow.json, which `datasets` writes where objects have different keys, is
parsed. Nulls in such text were in the data, and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import pyarrow as pa

from plimsoll.config.json_text import parse_json

ReadValue = Callable[[Any], object]
"""Converts a value as `to_pylist` gives it. The value is not None."""


def value_reader(
    kind: Any, name: str, without_padding: Collection[str], within: bool = False
) -> ReadValue | None:
    """Return the function that converts a column's values to JSON's; None if they need no change.

    Args:
        kind: the column's Arrow type.
        name: the column's name, dotted for a nested column.
        without_padding: the names of the columns whose objects lose their nulls.
        within: whether the column lies within one of these.
    """
    within = within or name in without_padding
    if isinstance(kind, pa.JsonType):
        return parse_json
    if pa.types.is_struct(kind):
        readers = {
            field.name: value_reader(field.type, f"{name}.{field.name}", without_padding, within)
            for field in kind
        }
        return partial(_read_object, readers, within) if within or any(readers.values()) else None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        read = value_reader(kind.value_type, name, without_padding, within)
        return None if read is None else partial(_read_list, read)
    return None


def _read_object(
    readers: Mapping[str, ReadValue | None], without_nulls: bool, value: Mapping[str, object]
) -> dict[str, object]:
    return {
        name: held if held is None or (read := readers[name]) is None else read(held)
        for name, held in value.items()
        if held is not None or not without_nulls
    }


def _read_list(read: ReadValue, value: list[object]) -> list[object]:
    return [None if held is None else read(held) for held in value]
