"""The engines there are, one line each, and the sections of the config that they bring.

An engine is a folder. Its `config.py` holds the settings of the engine; TRAINED and FROZEN (of a
trainer engine) or SAMPLING (of a rollout engine) name them. In a config they stand under the
engine's name, so that a setting of one engine cannot be given for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import Field, create_model, model_validator

from plimsoll.config.base import PositiveInt, Settings

TRAINER_ENGINES: tuple[str, ...] = ("plimsoll.trainer.zero",)
"""The engines that train; the first is the default."""
ROLLOUT_ENGINES: tuple[str, ...] = ("plimsoll.sampler.vllm", "plimsoll.sampler.transformers")
"""The engines that sample; the first is the default."""

EngineT = TypeVar("EngineT", bound=Settings)


class RolloutEngineConfig(Settings):
    """The interface of the settings of every rollout engine."""

    max_sequences: PositiveInt = 256
    """Sequences that one engine works on at once."""

    @property
    def degrees(self) -> Mapping[str, int]:
        """GPUs (or CPU processes) over which an engine is divided, by the keys that set them."""
        return {}

    @property
    def parts(self) -> int:
        """GPUs (or CPU processes) per engine."""
        return prod(self.degrees.values())

    @property
    def card_share(self) -> float:
        """The share of a card's memory that the engine takes at its start; 0 if it grows."""
        return 0

    @property
    def has_front(self) -> bool:
        """Whether a process besides the engine's parts on cards takes the requests."""
        return False

    def rounds_as(self, dtype: str) -> str:
        """Return the coarsest format of numbers in an engine of this dtype."""
        return dtype

    def stage_of(self, part: int) -> int:
        """Return the number of the stage (consecutive layers) that a part of an engine is in."""
        return 0

    @property
    def sleep_key(self) -> str | None:
        """The key that makes the engine free memory while the ranks train; None if none does."""
        return None

    @property
    def sleeps(self) -> bool:
        """Whether the engine frees memory while the ranks train."""
        return self.sleep_key is not None

    @property
    def forgets_weights(self) -> bool:
        """Whether the engine drops its weights when it sleeps, so that each sync must bring all."""
        return False

    @property
    def as_published(self) -> bool:
        """Whether weights come by the names and in the layout of a model's files.

        Otherwise they have those of transformers' modules.
        """
        return False

    @property
    def takes_adapter_alone(self) -> bool:
        """Whether the actor's adapter goes to the engine without its base model."""
        return False

    @property
    def returns_routing(self) -> bool:
        """Whether the engine can say which experts it took for each token."""
        return False


class HasEngine(Settings):
    """A section of the config with an engine.

    One of its keys is the engine's name, with the engine's settings below. Without such a key it is
    the default engine with default settings.
    """

    engine_types: ClassVar[Mapping[str, type[Settings]]] = {}
    """The settings of each engine, by the engine's name."""
    engine_folders: ClassVar[Mapping[str, str]] = {}
    """The package of each engine, by the engine's name."""

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

    def engine_value(self, file: str, default: Any = None) -> Any:
        """Return the value of a file in the engine's folder; see `folder_value`."""
        return folder_value(self.engine_folders[self.engine_name], file, default)

    def settings_of(self, kind: type[EngineT]) -> EngineT:
        """Return the engine's settings, which must be of this type."""
        settings = self.engine_settings
        assert isinstance(settings, kind), f"{self.engine_name} has no {kind.__name__}"
        return settings

    def with_engine(self, settings: Settings) -> Self:
        """Return a copy of the section with the engine that has these settings, and no other."""
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


def folder_value(package: str, file: str, default: Any = None) -> Any:
    """Return the constant of a file in an engine's folder, such as RULES of rules.py.

    The constant has the name of the file. Callers declare its type. If the folder lacks the file,
    return the default; a file without a default must be there.
    """
    if default is not None and find_spec(f"{package}.{file}") is None:
        return default
    return getattr(import_module(f"{package}.{file}"), file.upper())


def with_engines(
    packages: Sequence[str], kind: Literal["TRAINED", "FROZEN", "SAMPLING"]
) -> Callable[[type[HasEngineT]], type[HasEngineT]]:
    """Return a decorator that gives a section a key for each of these engines."""
    settings = {name_of(p): getattr(import_module(f"{p}.config"), kind) for p in packages}

    def add_keys(section: type[HasEngineT]) -> type[HasEngineT]:
        """Return the section with the keys."""
        keys: dict[str, Any] = {
            name: (section_type | None, Field(default=None, description=section_type.__doc__))
            for name, section_type in settings.items()
        }
        made: type[HasEngineT] = create_model(
            section.__name__,
            __base__=section,
            __module__=section.__module__,
            __doc__=section.__doc__,
            **keys,
        )
        made.engine_types = settings
        made.engine_folders = {name_of(package): package for package in packages}
        return made

    return add_keys
