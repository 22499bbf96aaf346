"""Convert commands of OpenRLHF, TRL and verl."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from plimsoll_convert.launch import find_launches, programs_of
from plimsoll_convert.openrlhf import given_version
from plimsoll_convert.openrlhf.convert import convert
from plimsoll_convert.trl import convert as of_trl
from plimsoll_convert.trl import find_program as find_trl
from plimsoll_convert.verl import convert as of_verl
from plimsoll_convert.verl import find_program as find_verl
from plimsoll_convert.writer import Converted

Convert = Callable[..., Converted]
BASES = {
    "ppo": "train_ppo_ray --pretrain a/m --prompt_data a/p --reward_pretrain a/r",
    "sft": "train_sft --pretrain a/m --dataset a/d --output_key out",
    "rm": "train_rm --pretrain a/m --dataset a/d",
    "dpo": "train_dpo --pretrain a/m --dataset a/d",
    "kto": "train_kto --pretrain a/m --dataset a/d --output_key out",
    "kd": "train_kd --pretrain a/m --dataset a/d --teacher_model a/t",
}


@pytest.fixture
def converted() -> Convert:
    """Convert words, or a command of BASES with further words; version: such as `0.8.0`."""

    def run(words: str, version: str | None = None, of: str | None = None) -> Converted:
        text = words if of is None else f"openrlhf.cli.{BASES[of]} {words}"
        [launch] = find_launches(shlex.split(text), programs_of("openrlhf.cli"))
        return convert(launch, None if version is None else given_version(version))

    return run


@pytest.fixture
def trl() -> Convert:
    """Convert a command of TRL."""

    def run(words: str, cards: int | None = None) -> Converted:
        [launch] = find_launches(shlex.split(words), find_trl)
        return of_trl.convert(launch, cards)

    return run


@pytest.fixture
def verl() -> Convert:
    """Convert overrides of verl; of: the program."""

    def run(words: str, of: str = "python3 -m verl.trainer.main_ppo") -> Converted:
        [launch] = find_launches(shlex.split(f"{of} {words}"), find_verl)
        return of_verl.convert(launch)

    return run
