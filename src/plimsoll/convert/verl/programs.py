"""verl's programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plimsoll.convert.launch import of_package
from plimsoll.errors import ConfigError

COMMANDS: Mapping[str, str] = {
    "main_ppo": "ppo",
    "main_ppo_v0": "ppo",
    "main_ppo_sync": "ppo",
    "sft_trainer": "sft",
    "sft_trainer_ray": "sft",
    "fsdp_sft_trainer": "sft",
}
"""What is read, by the names that the table has for them."""
_REFUSED: Mapping[str, str] = {
    "main_generation": "`plimsoll sample CONFIG` samples and scores",
    "main_generation_server": "`plimsoll sample CONFIG` samples and scores",
    "main_eval": "`plimsoll eval CONFIG` measures",
    "fully_async_main": "a step samples, then learns; nothing is sampled by older weights: give "
    "the command of verl.trainer.main_ppo",
    "main_dapo": "give the command of verl.trainer.main_ppo: DAPO is its settings",
}
_PACKAGES = (
    "verl.trainer",
    "verl.experimental.fully_async_policy",
    "verl.experimental.one_step_off_policy",
    "recipe.dapo",
)


def program(words: Sequence[str]) -> tuple[str, int] | None:
    """Of `verl.trainer.main_ppo`, or as a path."""
    for package in _PACKAGES:
        found = of_package(package)(words)
        if found is not None and (found[0] in COMMANDS or found[0] in _REFUSED):
            return ("fully_async_main", 1) if "experimental" in package else found
    return None


def command_named(name: str) -> str:
    """Raises ConfigError for what is not read, with the reason."""
    if name in COMMANDS:
        return COMMANDS[name]
    raise ConfigError(f"{name} of verl is not read: {_REFUSED[name]}.")
