"""Convert commands of OpenRLHF 0.8.0 to 0.11.2."""

from __future__ import annotations

from functools import cache

from plimsoll.errors import ConfigError
from plimsoll_convert.launch import Trainer, programs_of

Version = tuple[int, int, int]

RELEASES: tuple[Version, ...] = tuple(
    (0, minor, patch)
    for minor, patches in ((8, 12), (9, 11), (10, 5), (11, 3))
    for patch in range(patches)
)
FIRST, LAST = RELEASES[0], RELEASES[-1]
COMMANDS = {
    **{name: f"train_{name}" for name in ("sft", "rm", "dpo", "kto", "kd")},
    "ppo": "train_ppo_ray",
}
"""Programs that can be converted, by the short name of each in the flags' table."""
_NOTHING = "it trains nothing"
_REFUSED = {
    "serve_rm": f"{_NOTHING}. `plimsoll serve-reward CONFIG` serves a reward model",
    "batch_inference": f"{_NOTHING}. `plimsoll sample CONFIG` samples and scores, `plimsoll eval` "
    "measures",
    "lora_combiner": f"{_NOTHING}. `plimsoll merge ADAPTER --out FOLDER` merges an adapter",
    "interactive_chat": f"{_NOTHING}. `vllm serve` or transformers chat with a run's model",
    "train_ppo": "it was removed in 0.6.2; its successor is train_ppo_ray",
    "train_prm": "it reads text in which a placeholder token stands after each step; `plimsoll "
    "prm` reads lists of steps and of labels: convert the rows, begin with `plimsoll init prm`",
}


@cache
def parse_version(text: str) -> Version:
    """Return the version of a text such as `0.8.2`."""
    major, minor, patch = (int(part) for part in text.split("."))
    return major, minor, patch


def format_version(version: tuple[int, ...]) -> str:
    """Return a version as `0.8.2`."""
    return ".".join(map(str, version))


def given_version(text: str) -> Version:
    """Return the release that `--version` names; for `0.8` the last release of 0.8.

    Raises:
        ConfigError: There is no such release, or it cannot be converted.
    """
    plain = text.lower().removeprefix("v").partition(".post")[0]
    releases = [v for v in RELEASES if f"{format_version(v)}.".startswith(f"{plain}.")]
    if not releases:
        span = f"{format_version(FIRST)} to {format_version(LAST)}"
        raise ConfigError(f"--version {text!r} is not read, but {span}. Leave it out.")
    return releases[-1]


TRAINER = Trainer(
    name="OpenRLHF",
    reads="a command of OpenRLHF 0.8 to 0.11.2",
    example="openrlhf.cli.train_sft --pretrain ...",
    programs=programs_of("openrlhf.cli"),
    commands={program: name for name, program in COMMANDS.items()},
    refused=_REFUSED,
    missing="none of its words is openrlhf.cli.train_..., such as openrlhf.cli.train_ppo_ray",
    versions="0.8.2",
    read_version=given_version,
    beside=("serve_rm", "batch_inference", "lora_combiner", "interactive_chat"),
)
