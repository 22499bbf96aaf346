"""The table of OpenRLHF's flags: how many each version has, what they are called and default to,
and that each leads to keys that there are."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from plimsoll.config.keys import find_key, keys_of
from plimsoll.convert.launch import Launch
from plimsoll.convert.openrlhf.arguments import FLAGS, known_flags
from plimsoll.convert.openrlhf.convert import convert
from plimsoll.convert.openrlhf.flag import COMMANDS, Flag
from plimsoll.convert.openrlhf.version import RELEASES, Version, given_version, parse_version
from plimsoll.convert.result import Converted, differences
from plimsoll.convert.setting import Key
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.jobs import JOBS

KEYS = tuple(key for job in JOBS.values() for key in keys_of(job.config))


def named(command: str, version: str) -> dict[str, Flag]:
    at = parse_version(version)
    return {name: flag for flag in FLAGS if (name := flag.name(command, at))}


@pytest.mark.parametrize(
    ("version", "counts"),
    [  # add_argument calls of openrlhf/cli/train_*.py at these tags
        ("0.6.0", {"ppo": 109, "sft": 61, "rm": 61, "dpo": 64, "local": 85}),
        ("0.6.1", {"ppo": 110, "sft": 61, "rm": 61, "dpo": 64, "kto": 57, "kd": 57, "prm": 53}),
        ("0.6.4", {"ppo": 115, "sft": 65, "rm": 64, "dpo": 68, "kto": 61, "kd": 61, "prm": 57}),
        ("0.7.5", {"ppo": 120, "sft": 68, "rm": 66, "dpo": 70, "kto": 62, "kd": 62, "prm": 58}),
        ("0.8.0", {"ppo": 122, "sft": 68, "rm": 68, "dpo": 70, "kto": 62, "kd": 62, "prm": 58}),
        ("0.9.0", {"ppo": 136, "sft": 68, "rm": 69, "dpo": 73, "kto": 63, "kd": 65, "prm": 60}),
        ("0.9.10", {"ppo": 141, "sft": 69, "rm": 70, "dpo": 74, "kto": 0, "kd": 0, "prm": 0}),
        ("0.10.1", {"ppo": 144, "sft": 69, "rm": 70, "dpo": 74, "local": 0}),
        ("0.11.0", {"ppo": 164, "sft": 77, "rm": 79, "dpo": 82}),
        ("0.11.2", {"ppo": 167, "sft": 77, "rm": 79, "dpo": 82}),
    ],
)
def test_every_version_has_as_many_flags_as_its_parsers(
    version: str, counts: dict[str, int]
) -> None:
    assert {command: len(named(command, version)) for command in counts} == counts


RENAMED = (
    ("use_kl_estimator_k3", "kl_estimator"),
    ("universal_ckpt", "use_ds_universal_ckpt"),
    ("torch_compile", "deepcompile"),
    ("flash_attn", "attn_implementation"),
    ("bf16", "param_dtype"),
    ("use_icepop", "vllm_is_correction_type"),
    ("prompt_max_len", "max_new_tokens"),
    ("generate_max_len", "max_new_tokens"),
    ("ref_reward_offload", "reward.offload"),
    ("adam_betas", "actor.adam.betas"),
    ("l2", "actor.adam.weight_decay"),
    ("max_norm", "actor.max_norm"),
    ("lr_scheduler", "actor.lr_scheduler"),
    ("lr_warmup_ratio", "actor.lr_warmup_ratio"),
    ("enable_vllm_is_correction", "is_correction_level"),
    ("vllm_is_correction_type", "is_correction_mode"),
)
"""Ids of flags, and of what came in their place: until 0.10.1, at 0.10.2 and at 0.11.2."""


@pytest.mark.parametrize(("older", "newer"), RENAMED)
def test_no_version_has_a_flag_beside_its_newer_spelling(older: str, newer: str) -> None:
    """Whose default would count in place of the flag that was given."""
    flags = {flag.id: flag for flag in FLAGS}
    there = {
        name: {(c, v) for c in COMMANDS for v in RELEASES if flags[name].name(c, v)}
        for name in (older, newer)
    }
    assert there[older] and there[newer] and not there[older] & there[newer]


OF_EACH = {
    "ppo": {"pretrain": "m", "prompt_data": "p", "reward_pretrain": "r"},
    "local": {"pretrain": "m", "prompt_data": "p", "reward_pretrain": "r"},
    "sft": {"pretrain": "m", "dataset": "d", "output_key": "o"},
    "rm": {"pretrain": "m", "dataset": "d"},
    "dpo": {"pretrain": "m", "dataset": "d"},
}


@cache
def made_of(command: str, version: Version, *more: str) -> Converted | None:
    """A command with what it needs, and further words; None if it is refused."""
    given = OF_EACH[command].items()
    names = {flag.id: flag.name(command, version) for flag in known_flags(command)}
    words = [word for flag, value in given for word in (f"--{names[flag]}", value)]
    try:
        return convert(Launch(COMMANDS[command], (*words, *more)), version)
    except PlimsollError:
        return None


@pytest.mark.parametrize("command", OF_EACH)
def test_every_switch_changes_the_config_or_is_told_to_change_nothing(command: str) -> None:
    """In the first version that has it; or it is refused."""
    silent, changing = [], 0
    for flag in known_flags(command):
        if flag.read.kind is not bool:
            continue
        first = next(v for v in RELEASES if flag.name(command, v))
        plain, found = (
            made_of(command, first),
            made_of(command, first, f"--{flag.name(command, first)}"),
        )
        assert plain is not None
        if found is not None and differences(plain, found):
            changing += 1
        elif found is not None and flag.id not in {one.about for one in found.remarks}:
            silent.append(flag.id)
    assert silent == []
    assert changing > 2


def test_ids_and_names_are_of_one_flag() -> None:
    assert [one for one, n in Counter(flag.id for flag in FLAGS).items() if n > 1] == []
    for command in COMMANDS:
        for version in RELEASES:
            names = Counter(flag.name(command, version) for flag in FLAGS)
            assert [name for name, n in names.items() if name and n > 1] == []


@pytest.mark.parametrize(
    ("command", "name", "values"),
    [  # defaults that moved
        ("ppo", "lambd", {"0.6.3": 0.95, "0.6.4": 1.0}),
        ("ppo", "value_clip", {"0.8.1": 0.2, "0.8.2": 0.5}),
        ("ppo", "vllm_gpu_memory_utilization", {"0.6.3": 0.9, "0.6.4": 0.95}),
        ("ppo", "vllm_is_truncated_threshold", {"0.9.0": (2.0,), "0.9.1": (0.5, 5.0)}),
        ("ppo", "micro_train_batch_size", {"0.9.10": 4, "0.10.0": 1}),
        ("ppo", "max_len", {"0.9.7": None, "0.9.8": 2048}),
        ("ppo", "entropy_loss_coef", {"0.8.2": 0.0, "0.8.3": None}),
        ("sft", "max_samples", {"0.6.4": 10**8, "0.7.0": 10**6}),
        ("rm", "eval_split", {"0.6.4": "test", "0.7.4": "train"}),
    ],
)
def test_defaults_that_moved(command: str, name: str, values: dict[str, object]) -> None:
    found = {v: named(command, v)[name].default(command, parse_version(v)) for v in values}
    assert found == values


@pytest.mark.parametrize(
    ("command", "flat", "dotted"),
    [
        ("ppo", "colocate_all_models", "train.colocate_all"),
        ("ppo", "pretrain", "actor.model_name_or_path"),
        ("sft", "pretrain", "model.model_name_or_path"),
        ("ppo", "remote_rm_url", "reward.remote_url"),
        ("dpo", "learning_rate", "adam.lr"),
        ("ppo", "actor_learning_rate", "actor.adam.lr"),
        ("dpo", "ref_offload", "ref.offload"),
        ("rm", "loss", "model.loss_type"),
        ("ppo", "local_rank", "local_rank"),
        ("sft", "lr_scheduler", "lr_scheduler"),
    ],
)
def test_the_names_before_and_after_the_dots(command: str, flat: str, dotted: str) -> None:
    old, new = named(command, "0.10.1"), named(command, "0.10.2")
    assert old[flat].id == new[dotted].id


def test_keys_that_flags_stand_for_are_there() -> None:
    paths = [path for flag in FLAGS if isinstance(flag.becomes, Key) for path in flag.becomes.paths]
    assert len(paths) > 30
    assert [path for path in paths if find_key(KEYS, tuple(path.split("."))) is None] == []


def test_versions_that_are_given() -> None:
    assert given_version("v0.8.2") == given_version("0.8.2.post1") == (0, 8, 2)
    assert given_version("0.8") == (0, 8, 11)
    with pytest.raises(ConfigError, match=r"'0\.5\.9' is no release .* 0\.6\.0 to 0\.11\.2"):
        given_version("0.5.9")
