"""What every config model has in common: immutable, strict, no unknown keys, documented fields."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from os.path import expanduser
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

from plimsoll.config.secrets import mask_setting

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
EvenInt = Annotated[int, Field(ge=2, multiple_of=2)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
OpenShare = Annotated[float, Field(gt=0, lt=1)]
OverOne = Annotated[float, Field(gt=1)]
FlipRate = Annotated[float, Field(ge=0, lt=0.5)]
"""A share of wrong labels: at a half, labels say nothing."""
WrittenPath = Annotated[str, AfterValidator(expanduser)]
"""A place on the disk, where `~` is the home directory; or else a name on the hub."""

Secret = Annotated[str, PlainSerializer(mask_setting, when_used="json")]
"""A URL that is a secret, or a variable's name: what is written of a config has the URL masked."""

Auto = Literal["auto"]
AUTO: Auto = "auto"
"""The value of keys that `resolve` decides: in a resolved run no key has it."""

RatioLevel = Literal["token", "sequence", "geometric"]
"""The level of an importance ratio: a token, a sequence as the product of its tokens' ratios, or a
sequence as their geometric mean."""

OptionValue = bool | int | float | str | None
"""A value of an option of a pluggable function."""


class Settings(BaseModel):
    """The base of all config models."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        defer_build=True,  # no command uses all settings, and building them takes long
    )

    @model_validator(mode="before")
    @classmethod
    def _complete_choices(cls, values: object) -> object:
        """Return the values; a `Choice` without a name gets its default's name and options.

        Options that are given replace the default's. With a name, that function's defaults hold.
        """
        if not isinstance(values, dict):
            return values
        given = {name: default for name, default in _choices(cls).items() if name in values}
        return values | {name: _complete(default, values[name]) for name, default in given.items()}


class Choice(Settings):
    """A pluggable pure function: a file of Plimsoll's by its name, or a function of one's own.

    Its options are the function's keyword-only parameters; unknown ones are refused.
    """

    name: str
    """The file's name (such as `clip`); or `path/to/file.py:my_function`, or
    `my.module:my_function`."""
    options: dict[str, OptionValue] = {}
    """Keyword arguments of the function. Without a name, they replace those of the default."""


@cache
def _choices(settings: type[Settings]) -> Mapping[str, Choice]:
    """Return the default of each field that is a choice, by the field's name."""
    defaults = {name: field.default for name, field in settings.model_fields.items()}
    return {name: default for name, default in defaults.items() if isinstance(default, Choice)}


def _complete(default: Choice, value: object) -> object:
    if not isinstance(value, dict) or "name" in value:
        return value
    options = value.get("options", {})
    merged = {**default.options, **options} if isinstance(options, dict) else options
    return {**value, "name": default.name, "options": merged}
