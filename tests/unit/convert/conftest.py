"""Commands of OpenRLHF, TRL and verl, converted."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from plimsoll.convert.launch import find_launches, of_package
from plimsoll.convert.openrlhf.convert import convert
from plimsoll.convert.openrlhf.version import given_version
from plimsoll.convert.result import Converted
from plimsoll.convert.trl import convert as of_trl
from plimsoll.convert.trl import programs as trl_programs
from plimsoll.convert.verl import convert as of_verl
from plimsoll.convert.verl import programs as verl_programs

Convert = Callable[..., Converted]
BASES = {
    "ppo": "train_ppo_ray --pretrain a/m --prompt_data a/p --reward_pretrain a/r",
    "sft": "train_sft --pretrain a/m --dataset a/d --output_key out",
    "rm": "train_rm --pretrain a/m --dataset a/d",
    "dpo": "train_dpo --pretrain a/m --dataset a/d",
    "kto": "train_kto --pretrain a/m --dataset a/d --output_key out",
    "kd": "train_kd --pretrain a/m --dataset a/d --teacher_model a/t",
    "local": "train_ppo --pretrain a/m --prompt_data a/p --reward_pretrain a/r",
}


@pytest.fixture
def converted() -> Convert:
    """Converts words, or a command of BASES with further words; version: such as `0.8.0`."""

    def run(words: str, version: str | None = None, of: str | None = None) -> Converted:
        text = words if of is None else f"openrlhf.cli.{BASES[of]} {words}"
        [launch] = find_launches(shlex.split(text), of_package("openrlhf.cli"))
        return convert(launch, None if version is None else given_version(version))

    return run


@pytest.fixture
def trl() -> Convert:
    """Converts a command of TRL's."""

    def run(words: str, cards: int | None = None) -> Converted:
        [launch] = find_launches(shlex.split(words), trl_programs.program)
        return of_trl.convert(launch, cards)

    return run


@pytest.fixture
def verl() -> Convert:
    """Converts overrides of verl's; of: the program."""

    def run(words: str, of: str = "python3 -m verl.trainer.main_ppo") -> Converted:
        [launch] = find_launches(shlex.split(f"{of} {words}"), verl_programs.program)
        return of_verl.convert(launch)

    return run
