"""Convert commands of OpenRLHF 0.8.0 to 0.11.2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plimsoll_convert.launch import Launch, Trainer, programs_of

if TYPE_CHECKING:
    from plimsoll_convert.writer import Converted


def _convert(launch: Launch, version: str | None, cards: int | None) -> Converted:
    from plimsoll_convert.openrlhf.convert import convert
    from plimsoll_convert.openrlhf.flag import given_version

    return convert(launch, None if version is None else given_version(version), cards)


TRAINER = Trainer(
    name="OpenRLHF",
    reads="a command of OpenRLHF 0.8 to 0.11.2",
    example="openrlhf.cli.train_sft --pretrain ...",
    programs=programs_of("openrlhf.cli"),
    missing="none of its words is openrlhf.cli.train_..., such as openrlhf.cli.train_ppo_ray",
    convert=_convert,
    versions="0.8.2",
    beside=("serve_rm", "batch_inference", "lora_combiner", "interactive_chat"),
)
