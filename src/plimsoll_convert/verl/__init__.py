"""Convert commands of verl 0.9.1, whose settings are overrides of hydra."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plimsoll_convert.launch import Launch, Trainer
from plimsoll_convert.verl.programs import program

if TYPE_CHECKING:
    from plimsoll_convert.writer import Converted


def _convert(launch: Launch, version: str | None, cards: int | None) -> Converted:
    from plimsoll_convert.verl.convert import convert

    return convert(launch, cards)


TRAINER = Trainer(
    name="verl",
    reads="a command of verl 0.9.1 with its overrides",
    example="python3 -m verl.trainer.main_ppo data.train_files=...",
    programs=program,
    missing="none of its words is a program of verl's, such as verl.trainer.main_ppo",
    convert=_convert,
    beside=("main_generation", "main_generation_server", "main_eval"),
    variables={"DEVICE": "gpu"},  # which its own scripts ask the machine for
)
