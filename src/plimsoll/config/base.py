"""What every config model has in common: immutable, strict, no unknown keys, documented fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]

OptionValue = bool | int | float | str | None
"""What an option of a pluggable function may be."""


class Settings(BaseModel):
    """The base of all config models."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Choice(Settings):
    """A pluggable pure function: by the name of a file of Plimsoll's, or by import path.

    Its options are the function's keyword-only parameters; unknown ones are refused.
    """

    name: str
    """The file's name (such as `clip`), or an import path `my.module:my_function`."""
    options: dict[str, OptionValue] = {}
    """Keyword arguments of the function."""
