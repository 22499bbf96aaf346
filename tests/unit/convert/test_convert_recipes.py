"""Every command of OpenRLHF's own scripts: each flag is shown, and the config loads; or it is
refused with the reason. And flags at random: none is lost."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from accounts import at, check_complete, check_loads, known_flags
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.cli import main
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll_convert.launch import Launch, find_launches, programs_of
from plimsoll_convert.openrlhf import COMMANDS, RELEASES, given_version
from plimsoll_convert.openrlhf.convert import convert
from plimsoll_convert.openrlhf.table import VersionedFlag
from plimsoll_convert.writer import Converted

LINES = Path(__file__).with_name("openrlhf_commands.txt").read_text().splitlines()
SCRIPTS = {n: w for n, _, w in (line.partition(": ") for line in LINES if line[0] != "#")}
REFUSED = {
    "0.6.1 train_conditional_llama": "There is nothing to learn: no response",
    "0.6.1 train_rejection_sampling_llama": "There is nothing to learn: no response",
    "0.6.1 train_prm_mistral": "a placeholder token stands after each step",
    "0.6.1 train_ppo_llama": r"removed in 0\.6\.2; its successor is train_ppo_ray",
    # OpenRLHF asserts more than one from 0.6.3 on: every advantage would be 0
    "0.6.1 train_grpo_llama_ray": r"batch\.responses: 1   \(--n_samples_per_prompt 1\)",
    "0.6.1 train_grpo_ray_hybrid_engine": r"batch\.responses: 1   \(--n_samples_per_prompt 1\)",
    "0.11.0 train_vlm_math_hybrid_engine": r"--data\.max_images_per_prompt: 1",
}


def convert_script(name: str) -> Converted:
    """Convert the command of a script; one of 0.6.1 as the version that has its flags."""
    [launch] = find_launches(shlex.split(SCRIPTS[name]), programs_of("openrlhf.cli"))
    version = name.split()[0]
    return convert(launch, None if version == "0.6.1" else given_version(version))


@pytest.mark.parametrize("version", ["0.6.1", "0.8.0", "0.9.0", "0.11.0"])
def test_a_script_shows_every_flag_and_loads_or_says_why_not(version: str, tmp_path: Path) -> None:
    names = [name for name in SCRIPTS if name.startswith(f"{version} ")]
    assert len(names) == {"0.6.1": 25, "0.8.0": 14, "0.9.0": 18, "0.11.0": 12}[version]
    for name in names:
        if name in REFUSED:
            with pytest.raises(ConfigError, match=REFUSED[name]):
                convert_script(name)
        else:
            check_loads(convert_script(name), tmp_path)


EXPECTED: dict[str, tuple[str, dict[str, object]]] = {
    "0.11.0 train_ppo_ray_hybrid_engine": (
        "ppo",
        {
            "cluster.ranks": 8,
            "cluster.critic_ranks": None,
            "batch.micro_batch_tokens": 16384,
            "algorithm.mini_batches": 8,
            "rollout.vllm.sleep_level": 2,
            "algorithm.correction.name": "truncate",
        },
    ),
    "0.11.0 train_ppo_ray_slurm": (
        "ppo",
        {
            "cluster.ranks": 4,
            "cluster.critic_ranks": 4,
            "cluster.nodes": 2,  # 4 + 4 + 4 engines of 2
            "batch.micro_batch_tokens": 8 * 2048,
            "rollout.vllm.memory_share": 0.95,
            "actor.zero.optimizer_offload": "cpu",
        },
    ),
    "0.9.0 train_ppo_llama_ray_70b": (
        "ppo",
        {
            "cluster.ranks": 8,
            "cluster.critic_ranks": 8,
            "cluster.reward_ranks": 4,
            "cluster.nodes": 4,  # 8 + 8 + 4 + 4 engines of 2
        },
    ),
    "0.11.0 train_ppo_with_reward_fn": (
        "ppo",
        {
            "rewards.reward_func.options.path": "/openrlhf/examples/python/reward_func.py",
            "critic.model.path": "OpenRLHF/Llama-3-8b-sft-mixture",
            "cluster.nodes": None,
        },
    ),
    "0.11.0 train_dapo_ray_hybrid_engine": (
        "dapo",
        {
            "algorithm.mini_batches": 8,  # 128 * 8 / 128
            "algorithm.policy_loss.options.clip_high": 0.27,
            "algorithm.kl.place": "loss",
            "batch.dynamic_sampling.high": 1.0,
        },
    ),
    "0.11.0 train_prorlv2_math_hybrid_engine": (
        "rl",
        {
            "algorithm.advantage.name": "reinforce_pp_baseline",
            "data.max_tokens": 1024,  # 9216 - 8192
            "rollout.sampling.max_new_tokens": 8192,
            "algorithm.mini_batches": 8,  # 512 * 16 / 1024
            "run.epochs": 100.0,
            "run.eval_every": 5,
            "data.eval.responses": 4,
            "algorithm.correction.name": "icepop",
            "rewards.reward_func.truncated_factor": 0.0,
        },
    ),
    "0.11.0 train_reinforce_baseline_ray_agent_async": (
        "rl",
        {
            "environments.agent.name": "examples/python/agent_func.py",
            "environments.agent.max_tokens": 64000,
            "data.max_tokens": 10240,  # 74240 - 64000
            "cluster.sequence_parallel": 2,
            "batch.micro_batch_tokens": 37120,  # of the longest sequence, on two ranks
            "rollout.placement": None,
            "algorithm.mini_batches": 1,  # 128 * 8 / 1024
        },
    ),
    "0.11.0 train_sft": (
        "sft",
        {"batch.sequences": 256, "batch.micro_batch_tokens": 4096, "data.train.limit": 500000},
    ),
    "0.11.0 train_rm": (
        "rm",
        {"batch.pairs": 256, "batch.micro_batch_tokens": 16384, "data.chat_template": None},
    ),
    "0.11.0 train_dpo_llama": ("dpo", {"reference.zero.stage": 3, "run.resume": "auto"}),
    "0.6.1 train_kto_llama": (
        "kto",
        {"algorithm.loss.options.beta": 0.1, "batch.sequences": 64},
    ),
    "0.6.1 train_knowledge_distillation": (
        "distill",
        {"algorithm.nll_share": 0.6, "teacher.zero.offload": "cpu"},
    ),
}


def test_what_scripts_become() -> None:
    for name, (job, expected) in EXPECTED.items():
        converted = convert_script(name)
        assert (converted.job, {key: at(converted, key) for key in expected}) == (job, expected)


@pytest.mark.parametrize(
    "name",
    [
        "0.11.0 train_ppo_ray_slurm",
        "0.11.0 train_reinforce_baseline_ray_agent_async",
        "0.11.0 train_sft_mixtral_lora",
        "0.9.0 train_ppo_llama_ray_70b",
    ],
)
def test_a_script_has_a_plan_without_any_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["from-openrlhf", "-o", str(tmp_path / "config.yaml"), "--plan", "--cluster"]
    words += ["8xA100-80GB", "--host-memory", "2TB", "--", *shlex.split(SCRIPTS[name])]
    assert main(words) in (0, 3)  # it fits, or it does not
    assert "verdict: " in capsys.readouterr().out


BASES = {
    "ppo": "--pretrain m --prompt_data p --reward_pretrain r",
    "sft": "--pretrain m --dataset d --output_key o",
    "rm": "--pretrain m --dataset d",
    "dpo": "--pretrain m --dataset d",
    "kto": "--pretrain m --dataset d --output_key o",
    "kd": "--pretrain m --dataset d --teacher_model t",
}
TEXTS = (
    "x",
    "a/b@c,d/e",
    "0.5",
    "Q: {} A:",
    "messages",
    "http://h:1/s,http://k/",
    "f.py",
    "",
    "\n",
)
WORDS = {
    int: st.sampled_from(("-1", "0", "1", "8", "64", "1000", "x")),
    float: st.sampled_from(("-0.5", "0", "0.1", "1", "2.0", "nan", "1e-3")),
    str: st.sampled_from(TEXTS),
}


def values(flag: VersionedFlag) -> st.SearchStrategy[list[str]]:
    if flag.reader.kind is bool:
        return st.just([])
    known = st.sampled_from(flag.reader.among) if flag.reader.among else WORDS[flag.reader.kind]
    most = 3 if flag.reader.most is None else flag.reader.most
    return st.lists(known | WORDS[flag.reader.kind], min_size=flag.reader.least, max_size=most)


@st.composite
def commands(draw: st.DrawFn) -> Launch:
    """A command with flags that its version has, and values that it may not like."""
    command = draw(st.sampled_from(sorted(BASES)))
    flags = known_flags(command)
    version = draw(st.sampled_from([v for v in RELEASES if flags[0].name(command, v)]))
    words = shlex.split(BASES[command]) if version < (0, 10, 2) else []
    there = [flag for flag in flags if flag.name(command, version)]
    for flag in draw(st.lists(st.sampled_from(there), max_size=8)):
        words += [f"--{flag.name(command, version)}", *draw(values(flag))]
    return Launch(COMMANDS[command], tuple(words))


@settings(max_examples=percent(40))
@given(commands())
def test_no_flag_is_lost(launch: Launch) -> None:
    try:
        check_complete(convert(launch))
    except PlimsollError as error:
        assert len(str(error)) > 20


@settings(max_examples=percent(40))
@given(
    st.text(st.sampled_from("abcdegilmnoprstuz._-"), min_size=1, max_size=20),
    st.sampled_from(sorted(BASES)),
)
def test_a_flag_that_there_is_not_is_named(name: str, command: str) -> None:
    words = (*shlex.split(BASES[command]), f"--{name}", "1")
    try:
        convert(Launch(COMMANDS[command], words))
    except PlimsollError as error:
        assert f"--{name.lstrip('-')}" in str(error)
    else:  # it is one, or the beginning of one
        known = [flag.name(command, v) or "" for flag in known_flags(command) for v in RELEASES]
        assert any(flag.startswith(name.lstrip("-")) for flag in known)
