"""Convert commands of verl 0.9.1, whose settings are overrides of hydra."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from plimsoll_convert.launch import Trainer, programs_of

COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("main_ppo", "main_ppo_v0", "main_ppo_sync"), "ppo"),
    **dict.fromkeys(("sft_trainer", "sft_trainer_ray", "fsdp_sft_trainer"), "sft"),
}
"""Programs that can be converted, with the short name of each in the settings' table."""
_REFUSED: Mapping[str, str] = {
    "main_generation(_server)?": "`plimsoll sample CONFIG` samples and scores",
    "main_eval": "`plimsoll eval CONFIG` measures",
    "fully_async_main": "give the command of verl.trainer.main_ppo, and set rollout.staleness in "
    "the config that it becomes",
    "main_dapo": "give the command of verl.trainer.main_ppo: DAPO is its settings",
}
_READ = "|".join([*COMMANDS, *_REFUSED])
_PACKAGES = (
    "verl.trainer",
    "verl.experimental.fully_async_policy",
    "verl.experimental.one_step_off_policy",
    "recipe.dapo",
)


def find_program(words: Sequence[str]) -> tuple[str, int] | None:
    """Return the program that the first word names, and 1; None if it names none of verl's.

    The word is a module such as `verl.trainer.main_ppo`, or its path.
    """
    for package in _PACKAGES:
        match = programs_of(package)(words)
        if match is not None and re.fullmatch(_READ, match[0]):
            return ("fully_async_main", 1) if "experimental" in package else match
    return None


TRAINER = Trainer(
    name="verl",
    reads="a command of verl 0.9.1 with its overrides",
    example="python3 -m verl.trainer.main_ppo data.train_files=...",
    programs=find_program,
    commands=COMMANDS,
    refused=_REFUSED,
    missing="none of its words is a program of verl's, such as verl.trainer.main_ppo",
    beside=("main_generation", "main_generation_server", "main_eval"),
    variables={"DEVICE": "gpu"},  # which its own scripts ask the machine for
)
