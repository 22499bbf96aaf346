"""The engines there are, one line each, and the sections of the config that they bring.

An engine is a folder. Its `config.py` holds the settings of the engine; TRAINED and FROZEN (of a
trainer engine) or SAMPLING (of a rollout engine) name them. In a config they stand under the
engine's name, so that what one engine alone knows cannot be said of another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from math import prod
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import Field, create_model, model_validator

from plimsoll.config.base import PositiveInt, Settings

TRAINER_ENGINES: tuple[str, ...] = ("plimsoll.engine.zero",)
"""The engines that train; the first is the default."""
ROLLOUT_ENGINES: tuple[str, ...] = ("plimsoll.rollout.vllm", "plimsoll.rollout.transformers")
"""The engines that sample; the first is the default."""

EngineT = TypeVar("EngineT", bound=Settings)


class RolloutEngineConfig(Settings):
    """What the settings of every rollout engine have."""

    max_sequences: PositiveInt = 256
    """Sequences that one engine works on at once."""

    @property
    def degrees(self) -> Mapping[str, int]:
        """Over how many GPUs (or CPU processes) an engine is divided, by the keys that say so."""
        return {}

    @property
    def parts(self) -> int:
        """GPUs (or CPU processes) per engine."""
        return prod(self.degrees.values())

    @property
    def has_front(self) -> bool:
        """Whether the engine's parts on cards are other processes than the one that is asked."""
        return False

    def stage_of(self, part: int) -> int:
        """Return the number of the stage, of consecutive layers, that a part of an engine is of."""
        return 0

    @property
    def sleeps(self) -> bool:
        """Whether the engine gives memory up while the ranks train."""
        return False

    @property
    def takes_adapter_alone(self) -> bool:
        """Whether the actor's adapter goes to the engine without its base model."""
        return False


class HasEngine(Settings):
    """A section of the config with an engine: one of its keys is the engine's name, with the
    engine's settings below. Without such a key it is the default engine with default settings."""

    engine_types: ClassVar[Mapping[str, type[Settings]]] = {}
    """The settings of each engine, by the engine's name."""

    @model_validator(mode="before")
    @classmethod
    def _add_default_engine(cls, values: object) -> object:
        if not isinstance(values, dict) or not cls.engine_types:
            return values
        if any(values.get(name) is not None for name in cls.engine_types):
            return values
        return {**values, next(iter(cls.engine_types)): {}}

    @property
    def engine_names(self) -> tuple[str, ...]:
        """The names of the engines whose settings are given; the rules refuse more than one."""
        return tuple(name for name in self.engine_types if getattr(self, name) is not None)

    @property
    def engine_name(self) -> str:
        """The name of the engine."""
        return self.engine_names[0]

    @property
    def engine_settings(self) -> Settings:
        """The settings of the engine."""
        return cast(Settings, getattr(self, self.engine_name))

    def settings_of(self, kind: type[EngineT]) -> EngineT:
        """Return the engine's settings, which are of this type."""
        settings = self.engine_settings
        assert isinstance(settings, kind), f"{self.engine_name} has no {kind.__name__}"
        return settings

    def with_engine(self, settings: Settings) -> Self:
        """Return the section with another engine's settings, or with other ones of its engine."""
        chosen = {
            name: settings if type(settings) is kind else None
            for name, kind in self.engine_types.items()
        }
        assert any(chosen.values()), f"no engine has settings of {type(settings).__name__}"
        return self.model_copy(update=chosen)


HasEngineT = TypeVar("HasEngineT", bound=HasEngine)


def name_of(package: str) -> str:
    """Return the name of the engine of a package: its last part."""
    return package.rpartition(".")[2]


def package_of(name: str, packages: Sequence[str]) -> str:
    """Return the package of the engine of this name."""
    return next(package for package in packages if name_of(package) == name)


def with_engines(
    packages: Sequence[str], kind: Literal["TRAINED", "FROZEN", "SAMPLING"]
) -> Callable[[type[HasEngineT]], type[HasEngineT]]:
    """Return a decorator that gives a section a key for each of these engines."""
    settings = {name_of(p): getattr(import_module(f"{p}.config"), kind) for p in packages}

    def add_keys(section: type[HasEngineT]) -> type[HasEngineT]:
        keys: dict[str, Any] = {
            name: (own | None, Field(default=None, description=own.__doc__))
            for name, own in settings.items()
        }
        made: type[HasEngineT] = create_model(
            section.__name__,
            __base__=section,
            __module__=section.__module__,
            __doc__=section.__doc__,
            **keys,
        )
        made.engine_types = settings
        return made

    return add_keys
