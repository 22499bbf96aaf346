"""Read the fields of a decoder's config.json, each with its type and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.errors import ConfigError

COUNT = 4096
"""An upper bound for layers, heads and experts."""
WIDTH = 2**20
"""An upper bound for the width of a layer."""
LENGTH = 2**26
"""An upper bound for the vocabulary and the positions."""
_LONGROPE = ("longrope", "su")
"""Names of longrope in config.json; transformers uses the first."""


@dataclass(frozen=True)
class Fields:
    """A config.json with its family's defaults filled in.

    Attributes:
        source: the description of the file in messages.
        values: the value of each field.
    """

    source: str
    values: Mapping[str, object]

    def size(self, name: str, most: int, least: int = 1) -> int:
        """Return a field that is a whole number from `least` to `most`.

        Raises ConfigError if the field is missing, of another type or out of bounds.
        """
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(name, f"is not a whole number from {least} to {most:,}")
        return value

    def size_or_none(self, name: str, most: int) -> int | None:
        """Return a field that is a whole number, or None for null. Raises ConfigError as `size`."""
        return None if self._value(name) is None else self.size(name, most)

    def flag(self, name: str) -> bool:
        """Return a field that is true or false. Raises ConfigError for any other value."""
        value = self._value(name)
        if not isinstance(value, bool):
            raise self.error(name, "is not true or false")
        return value

    def list_or_none(self, name: str) -> list[object] | None:
        """Return a field that is a list or null (None). Raises ConfigError for any other value."""
        value = self._value(name)
        if value is not None and not isinstance(value, list):
            raise self.error(name, "is not a list")
        return value

    def error(self, name: str, why: str) -> ConfigError:
        """Return the error for a field's value; `why` continues it, as "is not a list" does."""
        return ConfigError(
            f"{self.source}: {name} is {self.values[name]!r}, which {why}. "
            "Mend the file, or download the model again."
        )

    def _value(self, name: str) -> object:
        if name not in self.values:
            raise ConfigError(
                f"{self.source}: {name} is missing. Add it, or download the model again."
            )
        return self.values[name]


def longrope_positions(config: Mapping[str, object]) -> int | None:
    """Return the longest sequence that uses longrope's short factors; None without longrope.

    In a longer sequence the angles of all positions change; see `model.checks.check_length`. Only
    Phi-3 has this field outside of its rope settings.
    """
    name, most = "original_max_position_embeddings", config.get("max_position_embeddings")
    original, rope = config.get(name), config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in _LONGROPE:
        original = original or rope.get(name)
    if isinstance(original, int) and isinstance(most, int) and original < most:
        return original
    return None
