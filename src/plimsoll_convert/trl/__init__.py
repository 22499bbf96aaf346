"""Convert commands of TRL 1.16, and the YAML files that they read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plimsoll_convert.launch import Launch, Trainer
from plimsoll_convert.trl.programs import program

if TYPE_CHECKING:
    from plimsoll_convert.writer import Converted


def _convert(launch: Launch, version: str | None, cards: int | None) -> Converted:
    from plimsoll_convert.trl.convert import convert

    return convert(launch, cards)


TRAINER = Trainer(
    name="TRL",
    reads="a command of TRL 1.16 and its YAML",
    example="trl sft --config sft.yaml",
    programs=program,
    missing="it is neither `trl sft`, `trl grpo` and so on nor one of TRL's scripts, such as "
    "trl/scripts/sft.py. What a script of your own sets in Python is not read",
    convert=_convert,
)
