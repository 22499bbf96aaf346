"""The fields of a model's config.json, each read with its type and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.errors import ConfigError

COUNT = 4096
"""More layers, heads or experts than any model has."""
WIDTH = 2**20
"""A wider layer than any model has."""
LENGTH = 2**26
"""A larger vocabulary, and more positions, than any model has."""
_LONGROPE = ("longrope", "su")
"""Names of it in config.json, of which transformers makes the first."""


@dataclass(frozen=True)
class Fields:
    """A config.json with its family's defaults filled in. source: what messages call it."""

    source: str
    values: Mapping[str, object]

    def size(self, name: str, most: int, least: int = 1) -> int:
        """A whole number; ConfigError where it is missing, of another type, or out of bounds."""
        value = self._value(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(name, f"is not a whole number from {least} to {most:,}")
        return value

    def size_or_none(self, name: str, most: int) -> int | None:
        """A whole number, or None for null; ConfigError as `size`."""
        return None if self._value(name) is None else self.size(name, most)

    def flag(self, name: str) -> bool:
        """ConfigError for anything but true and false."""
        value = self._value(name)
        if not isinstance(value, bool):
            raise self.error(name, "is not true or false")
        return value

    def list_or_none(self, name: str) -> list[object] | None:
        """ConfigError for anything but a list and null."""
        value = self._value(name)
        if value is not None and not isinstance(value, list):
            raise self.error(name, "is not a list")
        return value

    def error(self, name: str, why: str) -> ConfigError:
        """What is wrong with the value of a field, such as "is not a list"."""
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
    """Of a config.json with longrope (Phi-3, which alone has the field outside of its rope), the
    tokens that its short factors are for. In a longer sequence the angles of all positions are
    others; see `model.checks.check_length`."""
    name, most = "original_max_position_embeddings", config.get("max_position_embeddings")
    original, rope = config.get(name), config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in _LONGROPE:
        original = original or rope.get(name)
    if isinstance(original, int) and isinstance(most, int) and original < most:
        return original
    return None
