"""Values of Arrow's columns, as the same rows in JSON would have them.

Arrow gives every object of a column the keys of all of them, and fills what an object lacks with
null. Within turns and tools such a null is padding and is left out, as a chat template writes what
is there: of {"town": "T0", "a": null, "b": null} it is {"town": "T0"}. In other columns nulls stay,
for functions that look a key up.

Text of the extension type arrow.json, which `datasets` writes where objects have different keys, is
parsed. Its nulls were written by somebody, and stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import pyarrow as pa

Read = Callable[[Any], object]
"""Takes a value as `to_pylist` gives it, which is not None."""


def value_reader(
    kind: Any, name: str, without_padding: Collection[str], within: bool = False
) -> Read | None:
    """Return what turns a column's values into those of JSON; None if they are so already.

    Args:
        kind: the column's Arrow type.
        name: the column's name, dotted for a column within columns.
        without_padding: the names of the columns whose objects are freed of nulls.
        within: whether the column lies within one of these.
    """
    within = within or name in without_padding
    if isinstance(kind, pa.JsonType):
        return json.loads
    if pa.types.is_struct(kind):
        readers = {
            field.name: value_reader(field.type, f"{name}.{field.name}", without_padding, within)
            for field in kind
        }
        return partial(_object, readers, within) if within or any(readers.values()) else None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        read = value_reader(kind.value_type, name, without_padding, within)
        return None if read is None else partial(_list, read)
    return None


def _object(
    readers: Mapping[str, Read | None], without_nulls: bool, value: Mapping[str, object]
) -> dict[str, object]:
    return {
        name: held if held is None or (read := readers[name]) is None else read(held)
        for name, held in value.items()
        if held is not None or not without_nulls
    }


def _list(read: Read, value: list[object]) -> list[object]:
    return [None if held is None else read(held) for held in value]
