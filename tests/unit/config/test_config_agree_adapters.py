"""Adapters and quantised models: what cannot work is refused, with a way out that does."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.config.rl import RlConfig
from plimsoll.config.run import JobConfig
from plimsoll.errors import PlimsollError
from plimsoll.jobs.dpo import DpoConfig
from plimsoll.jobs.sft import SftConfig
from plimsoll.jobs.which import job_of
from plimsoll.resolve.load import load_spec

DATA = "data: {train: {path: rows.jsonl, prompt: p, response: r}}\n"
PAIRS = "data: {train: {path: rows.jsonl, prompt: p, chosen: c, rejected: r}}\n"
PROMPTS = "data: {train: {path: rows.jsonl, prompt: p}}\n"
COMMON = "run: {directory: out, steps: 3}\nactor: {model: {path: m}}\n"
JOBS: dict[type[JobConfig], str] = {
    SftConfig: COMMON + DATA,
    DpoConfig: COMMON + PAIRS,
    RlConfig: COMMON + PROMPTS + "critic: {model: {path: m}}\nrewards: {a: {name: length}}\n",
}
NF4 = "--actor.model.quantization=nf4"
ADAPTER = "--actor.adapter.rank=8"
DORA = "--actor.adapter.dora=true"
OFFLOADED = "--reference.model.path=m --reference.zero.offload=cpu"
SEPARATE = f"{ADAPTER} --rollout.vllm.adapter=separate"
TARGETS = "--actor.adapter.targets=[q_proj]"
EXPERTS = "--actor.adapter.targets=[q_proj,experts]"
STAGE_2 = "--actor.zero.stage=2"
ACTORS, CRITICS = "--actor.adapter.dropout", "--critic.adapter.dropout"

# (job, flags that contradict, the key that is told, exit code, flags that mend it)
CASES: list[tuple[type[JobConfig], str, str, int, str]] = [
    (SftConfig, NF4, "actor.model.quantization", 4, ADAPTER),
    (DpoConfig, NF4, "actor.model.quantization", 4, ADAPTER),
    (RlConfig, NF4, "actor.model.quantization", 4, ADAPTER),
    (
        RlConfig,
        "--critic.model.quantization=nf4",
        "critic.model.quantization",
        4,
        "--critic.adapter.rank=8",
    ),
    (SftConfig, "--actor.adapter.targets=[]", "actor.adapter.targets", 2, TARGETS),
    (SftConfig, f"{NF4} {DORA} --actor.zero.stage=3", "actor.adapter.dora", 4, STAGE_2),
    (SftConfig, f"{EXPERTS} {ACTORS}=0.1", "actor.adapter.dropout", 4, f"{ACTORS}=0"),
    (SftConfig, f"{EXPERTS} {DORA}", "actor.adapter.dora", 4, TARGETS),
    (SftConfig, f"{EXPERTS} --actor.adapter.rank=12", "actor.adapter.rank", 4, ADAPTER),
    (RlConfig, f"{ACTORS}=0.1", "actor.adapter.dropout", 4, f"{ACTORS}=0"),
    (RlConfig, f"{CRITICS}=0.1", "critic.adapter.dropout", 4, f"{CRITICS}=0"),
    *(
        (
            RlConfig,
            f"{SEPARATE} {flag}",
            "rollout.vllm.adapter",
            4,
            "--rollout.vllm.adapter=merged",
        )
        for flag in (
            "--actor.adapter.modules_to_save=[lm_head]",
            NF4,
            DORA,
            "--actor.adapter.rank=1000",
            "--rollout.placement=shared --rollout.vllm.sleep_level=2",
        )
    ),
    (RlConfig, "--rollout.vllm.adapter=separate", "rollout.vllm.adapter", 4, ADAPTER),
    (
        DpoConfig,
        f"{OFFLOADED} --reference.model.quantization=nf4",
        "reference.zero.offload",
        4,
        "--reference.zero.offload=none",
    ),
    (
        RlConfig,
        "--reward_model.role.model.path=m --reward_model.role.model.quantization=nf4 "
        "--reward_model.role.zero.offload=cpu",
        "reward_model.role.zero.offload",
        4,
        "--reward_model.role.zero.offload=none",
    ),
]

ALLOWED: list[tuple[type[JobConfig], str]] = [
    (SftConfig, f"{NF4} {ADAPTER} --actor.zero.stage=3 --actor.zero.parameter_offload=cpu"),
    (SftConfig, f"{DORA} --actor.zero.stage=3"),
    (SftConfig, f"{NF4} {DORA} --actor.zero.stage=2"),
    (SftConfig, "--actor.adapter.dropout=0.1"),
    (SftConfig, f"{EXPERTS} {NF4} --actor.adapter.rslora=true --actor.zero.stage=3"),
    (DpoConfig, f"{NF4} {ADAPTER} --actor.adapter.dropout=0.1"),
    (DpoConfig, OFFLOADED),
    (RlConfig, f"{NF4} {ADAPTER} --actor.zero.stage=3"),
    (RlConfig, f"{SEPARATE} --rollout.placement=shared --rollout.vllm.sleep_level=1"),
]


def load(job: type[JobConfig], flags: str, home: Path) -> JobConfig:
    path = home / "job.yaml"
    path.write_text(JOBS[job])
    last = {flag.partition("=")[0]: flag for flag in flags.split()}  # a flag may be there once
    config: JobConfig = load_spec(job_of(job), str(path), list(last.values())).config
    return config


@pytest.mark.parametrize(("job", "flags", "key", "code", "mended"), CASES)
def test_contradictions_are_refused_with_a_way_out(
    job: type[JobConfig], flags: str, key: str, code: int, mended: str, tmp_path: Path
) -> None:
    with pytest.raises(PlimsollError) as refusal:
        load(job, flags, tmp_path)
    assert refusal.value.exit_code == code
    assert str(refusal.value).startswith("1 problem") and f"  {key}: " in str(refusal.value)
    assert "      -> " in str(refusal.value)
    load(job, f"{flags} {mended}", tmp_path)


@pytest.mark.parametrize(("job", "flags"), ALLOWED)
def test_what_works_is_let_through(job: type[JobConfig], flags: str, tmp_path: Path) -> None:
    load(job, flags, tmp_path)
