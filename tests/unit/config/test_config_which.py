"""Which job a config file is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.config.keys import dump_config
from plimsoll.config.rl import RlConfig
from plimsoll.errors import ConfigError
from plimsoll.jobs.dpo import DpoConfig
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import job_of, load_any
from plimsoll.resolve.load import load_spec

BASE = "run: {directory: out, steps: 3}\nactor: {model: {path: model}}\n"
SFT = BASE + "data: {train: {path: x, prompt: q, response: a}}\n"
DPO = BASE + "data: {train: {path: x, prompt: q, chosen: a, rejected: b}}\n"
PPO = (
    BASE
    + "data: {train: {path: x, prompt: q}}\ncritic: {model: {path: model}}\n"
    + "rewards: {r: {name: length}}\n"
)


def written(folder: Path, text: str) -> str:
    file = folder / "job.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        (SFT, SftConfig),
        (DPO + "algorithm: {nll_weight: 0.1}\n", DpoConfig),
        (PPO, RlConfig),
        ("# sft: imitate\n" + SFT, SftConfig),
        ("#dpo\n" + DPO, DpoConfig),
    ],
)
def test_the_first_line_or_the_keys_say_it(tmp_path: Path, text: str, model: type) -> None:
    assert load_any(written(tmp_path, text)).job.config is model


def test_flags_count_as_keys_do(tmp_path: Path) -> None:
    path = written(tmp_path, DPO)
    config = load_any(path, ["--algorithm.nll_weight", "0.1"]).config
    assert isinstance(config, DpoConfig) and config.algorithm.nll_weight == 0.1


@pytest.mark.parametrize(("text", "model"), [(SFT, SftConfig), (DPO, DpoConfig), (PPO, RlConfig)])
def test_the_config_in_a_run_directory_says_it_too(
    tmp_path: Path, text: str, model: type[SftConfig] | type[DpoConfig] | type[RlConfig]
) -> None:
    config = load_spec(job_of(model), written(tmp_path, text)).config
    assert load_any(written(tmp_path, dump_config(config))).config == config


def test_the_first_line_decides_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"critic"):
        load_any(written(tmp_path, "# ppo\n" + SFT))


def test_the_nearest_job_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.enginess"):
        load_any(written(tmp_path, PPO + "rollout: {enginess: 2}\n"))


def test_a_file_for_several_jobs_needs_a_first_line(tmp_path: Path) -> None:
    text = BASE + "data: {train: {path: x}}\n"
    with pytest.raises(ConfigError, match="sft or rm or prm or dpo"):
        load_any(written(tmp_path, text))
