"""Convert commands of TRL 1.16: `trl sft`, its scripts, and the YAML files that they read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from plimsoll_convert.launch import Trainer

COMMANDS = {n: n for n in ("sft", "dpo", "kto", "reward", "grpo", "rloo", "orpo", "cpo", "gkd")}
"""Commands that can be converted; the last three are experimental in TRL."""
_SCRIPTS: Mapping[str, str] = {
    "reward_modeling": "reward",
    "gspo": "grpo",
    "ppo_tldr": "ppo",
    "dpo_online": "online_dpo",
}
"""Commands of the scripts that have another name than their command."""
_REFUSED: Mapping[str, str] = {
    "distillation": "the student samples what the teacher corrects; `plimsoll distill` learns on "
    "the rows' responses",
    "ppo": "TRL 1.16 has no PPO any more; begin with `plimsoll init ppo`",
    "prm": "`plimsoll prm` reads lists of steps and of labels: begin with `plimsoll init prm`",
    "vllm-serve": "it trains nothing: Plimsoll starts its engines itself",
    "env": "it trains nothing: `plimsoll doctor` says what is here",
    **dict.fromkeys(
        ("online_dpo", "nash_md", "xpo"),
        "pairs are read, not sampled: `plimsoll init dpo`; or `plimsoll rl`",
    ),
    ".*vlm.*": "images cannot be read",
    **dict.fromkeys(("bco", "tpo", "gold", "sdft", "sdpo", "ssd"), "there is no such method here"),
    "async_grpo": "write it as `trl grpo`, and set rollout.staleness in the config that it becomes",
}
_FOLDERS = re.compile(
    r"(?:.*[/.])?(?:trl|examples)[/.](?:scripts|experimental)[/.](?:\w+[/.])?(\w+)"
)


def find_program(words: Sequence[str]) -> tuple[str, int] | None:
    """Return the program that the first words name, and the number of these words; else None.

    Programs are named as `trl sft`, `trl/scripts/sft.py` or `-m trl.scripts.sft`.
    """
    if os.path.basename(words[0]) == "trl" and len(words) > 1:
        name = words[1]
        # `pip install trl peft` starts no program
        has_flags = any(word.startswith("--") for word in words[2:])
        if name in COMMANDS or name in _REFUSED or (has_flags and not name.startswith("-")):
            return name, 2
    script = _FOLDERS.fullmatch(words[0].removesuffix(".py"))
    return (_SCRIPTS.get(script[1], script[1]), 1) if script else None


TRAINER = Trainer(
    name="TRL",
    reads="a command of TRL 1.16 and its YAML",
    example="trl sft --config sft.yaml",
    programs=find_program,
    commands=COMMANDS,
    refused=_REFUSED,
    missing="it is neither `trl sft`, `trl grpo` and so on nor one of TRL's scripts, such as "
    "trl/scripts/sft.py. What a script of your own sets in Python is not read",
)
