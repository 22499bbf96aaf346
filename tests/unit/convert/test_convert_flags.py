"""The table of OpenRLHF's flags over its versions, and how words become its settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
from accounts import known_flags, unread

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll_convert.launch import Launch
from plimsoll_convert.openrlhf import (
    COMMANDS,
    LAST,
    RELEASES,
    Version,
    given_version,
    parse_version,
)
from plimsoll_convert.openrlhf.convert import convert
from plimsoll_convert.openrlhf.table import FLAGS, REMOVED, VersionedFlag
from plimsoll_convert.writer import Converted, differences

Convert = Callable[..., Converted]
COUNTS = {  # add_argument calls of openrlhf/cli/train_*.py at these tags
    "0.8.0": {"ppo": 122, "sft": 68, "rm": 68, "dpo": 70, "kto": 62, "kd": 62},
    "0.9.0": {"ppo": 136, "sft": 68, "rm": 69, "dpo": 73, "kto": 63, "kd": 65},
    "0.9.10": {"ppo": 141, "sft": 69, "rm": 70, "dpo": 74, "kto": 0, "kd": 0},
    "0.10.1": {"ppo": 144, "sft": 69, "rm": 70, "dpo": 74},
    "0.11.0": {"ppo": 164, "sft": 77, "rm": 79, "dpo": 82},
    "0.11.2": {"ppo": 167, "sft": 77, "rm": 79, "dpo": 82},
}
RENAMED = (
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
"""Ids of flags, and of what came in their place."""
MOVED: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("ppo", "value_clip", {"0.8.1": 0.2, "0.8.2": 0.5}),
    ("ppo", "vllm_is_truncated_threshold", {"0.9.0": (2.0,), "0.9.1": (0.5, 5.0)}),
    ("ppo", "micro_train_batch_size", {"0.9.10": 4, "0.10.0": 1}),
    ("ppo", "max_len", {"0.9.7": None, "0.9.8": 2048}),
    ("ppo", "entropy_loss_coef", {"0.8.2": 0.0, "0.8.3": None}),
)
DOTTED = {
    ("ppo", "colocate_all_models"): "train.colocate_all",
    ("ppo", "pretrain"): "actor.model_name_or_path",
    ("sft", "pretrain"): "model.model_name_or_path",
    ("ppo", "remote_rm_url"): "reward.remote_url",
    ("dpo", "learning_rate"): "adam.lr",
    ("ppo", "actor_learning_rate"): "actor.adam.lr",
    ("dpo", "ref_offload"): "ref.offload",
    ("rm", "loss"): "model.loss_type",
    ("ppo", "local_rank"): "local_rank",
    ("sft", "lr_scheduler"): "lr_scheduler",
}


def named(command: str, version: str) -> dict[str, VersionedFlag]:
    at = parse_version(version)
    return {name: flag for flag in FLAGS if (name := flag.name(command, at))}


def test_every_version_has_as_many_flags_as_its_parsers() -> None:
    counted = {v: {c: len(named(c, v)) for c in counts} for v, counts in COUNTS.items()}
    assert counted == COUNTS


def test_no_version_has_a_flag_beside_its_newer_spelling() -> None:
    """The default of the newer spelling would count in place of the flag that was given."""
    flags = {flag.id: flag for flag in FLAGS}
    for names in RENAMED:
        old, new = (
            {(c, v) for c in COMMANDS for v in RELEASES if flags[name].name(c, v)} for name in names
        )
        assert old and new and not old & new, names


def test_defaults_and_names_that_moved() -> None:
    for command, name, values in MOVED:
        flags = {v: named(command, v)[name] for v in values}
        defaults = {v: f.setting(command, parse_version(v)).default for v, f in flags.items()}
        assert defaults == values
    for (command, flat), dotted in DOTTED.items():
        assert named(command, "0.10.1")[flat].id == named(command, "0.10.2")[dotted].id


def test_ids_and_names_are_of_one_flag_and_read() -> None:
    assert [id for id, n in Counter(flag.id for flag in FLAGS).items() if n > 1] == []
    for command in COMMANDS:
        for version in RELEASES:
            names = Counter(flag.name(command, version) for flag in FLAGS)
            assert [name for name, n in names.items() if name and n > 1] == []
    settings = [flag.setting("ppo", LAST) for flag in FLAGS]
    assert unread(settings, "plimsoll_convert.openrlhf", ("table.py",)) == []
    assert unread(settings, "plimsoll_convert.trl", ())  # the search finds what is missing


OF_EACH = {
    "ppo": {"pretrain": "m", "prompt_data": "p", "reward_pretrain": "r"},
    "sft": {"pretrain": "m", "dataset": "d", "output_key": "o"},
    "rm": {"pretrain": "m", "dataset": "d"},
    "dpo": {"pretrain": "m", "dataset": "d"},
}


@cache
def made_of(command: str, version: Version, *more: str) -> Converted | None:
    """Return a command with what it needs and further words, converted; None if it is refused."""
    names = {flag.id: flag.name(command, version) for flag in known_flags(command)}
    words = [w for flag, value in OF_EACH[command].items() for w in (f"--{names[flag]}", value)]
    try:
        return convert(Launch(COMMANDS[command], (*words, *more)), version)
    except PlimsollError:
        return None


@pytest.mark.parametrize("command", OF_EACH)
def test_every_switch_changes_the_config_or_has_a_remark(command: str) -> None:
    """In the first version that has it; or it is refused."""
    silent, changing = [], 0
    for flag in known_flags(command):
        if flag.reader.kind is not bool:
            continue
        first = next(v for v in RELEASES if flag.name(command, v))
        without, with_it = (
            made_of(command, first),
            made_of(command, first, f"--{flag.name(command, first)}"),
        )
        assert without is not None
        if with_it is not None and differences(without, with_it):
            changing += 1
        elif with_it is not None and flag.id not in {remark.about for remark in with_it.remarks}:
            silent.append(flag.id)
    assert silent == [] and changing > 2


def test_versions_that_are_given() -> None:
    assert given_version("v0.8.2") == given_version("0.8.2.post1") == (0, 8, 2)
    assert given_version("0.8") == (0, 8, 11)
    for old in ("0.6.1", "0.7"):
        with pytest.raises(ConfigError, match=rf"'{old}' is not read, but 0\.8\.0 to 0\.11\.2"):
            given_version(old)


def test_the_version_is_found_by_the_flags(converted: Convert) -> None:
    config = converted("--flash_attn --agent_func_path a.py", of="ppo")  # 0.8.0 to 0.8.9
    assert config.about == "OpenRLHF 0.8.9, train_ppo_ray"
    assert "--version 0.8.0 would mean" in config.version_note
    assert "algorithm.value_clip: 0.2" in config.version_note
    config = converted("--flash_attn --agent_func_path a.py", "0.8.0", of="ppo")
    assert config.about == "OpenRLHF 0.8.0, train_ppo_ray" and config.version_note == ""


@pytest.mark.parametrize(
    ("words", "version", "message"),
    [
        ("--vllm_enable_is_correction", None, "did you mean --enable_vllm_is_correction"),
        ("--learning_rat 1 --learning_rates 2", None, "^2 problems"),
        ("--beta 0.1", None, "train_dpo and train_kto has"),
        ("--flash_attn", "0.9.0", r"removed in 0\.8\.10; .* --attn_implementation"),
        ("--use_kl_estimator_k3", None, r"removed in 0\.6\.1; its successor is --kl_estimator"),
        ("--pretrain_data d", None, r"removed in 0\.7\.1, and has no successor"),
        ("--bf16", "0.11.0", r"removed in 0\.9\.2; its successor is --ds\.param_dtype"),
        ("--async_queue_size 2", "0.9.0", r"from 0\.9\.1 to 0\.10\.1, and this is 0\.9\.0"),
        ("--actor_num 3", None, "--actor_num_gpus_per_node or --actor_nu"),
        ("--zero_stage three", None, "--zero_stage: three\n      It must be a whole number"),
        ("--zero_stage", None, "It takes a value, and none follows"),
        ("--load_in_4bit 3", None, "--load_in_4bit: 3\n      It takes no words"),
        ("--kl_estimator k4", None, "It must be one of k1, k2, k3"),
        ("--gamma nan", None, "It must be a finite number"),
        ("--train_batch_size 0", None, "It must be 1 or more"),
        ("--adam_betas 0.9", None, "It takes 2 values, and 1 follows"),
    ],
)
def test_wrong_flags_are_named_with_what_is_near(
    words: str, version: str | None, message: str, converted: Convert
) -> None:
    with pytest.raises(ConfigError, match=message):
        converted(words, version, of="ppo")


def test_removed_flags_have_successors_that_there_are() -> None:
    ids = {flag.id for flag in FLAGS}
    assert {successor for _, successor in REMOVED.values() if successor} <= ids
