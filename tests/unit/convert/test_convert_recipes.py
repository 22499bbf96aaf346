"""Every command of OpenRLHF's own scripts: each flag is accounted for, and the config loads; or it
is refused with the reason. And flags at random: none is lost."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from accounts import accounted, check_told_and_loaded, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.cli import main
from plimsoll.config.yaml_tree import read_tree, value_at
from plimsoll.convert.apply import FORGOTTEN
from plimsoll.convert.launch import Launch, find_launches, of_package
from plimsoll.convert.openrlhf.arguments import known_flags
from plimsoll.convert.openrlhf.convert import convert
from plimsoll.convert.openrlhf.flag import COMMANDS, Flag
from plimsoll.convert.openrlhf.version import RELEASES, given_version
from plimsoll.convert.outcome import Entry
from plimsoll.convert.shown import config_text, table_text
from plimsoll.errors import ConfigError, PlimsollError

FILE = Path(__file__).with_name("openrlhf_commands.txt")


def _recipes() -> dict[str, str]:
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    return {name: words for name, _, words in (line.partition(": ") for line in lines)}


RECIPES = _recipes()
REFUSED = {
    "0.6.1 train_conditional_llama": "There is nothing to learn: no response",
    "0.6.1 train_rejection_sampling_llama": "There is nothing to learn: no response",
    "0.6.1 train_prm_mistral": "a placeholder token stands after each step",
    # OpenRLHF asserts more than one from 0.6.3 on: every advantage would be 0
    "0.6.1 train_grpo_llama_ray": r"batch\.responses: 1   \(--n_samples_per_prompt 1\)",
    "0.6.1 train_grpo_ray_hybrid_engine": r"batch\.responses: 1   \(--n_samples_per_prompt 1\)",
    "0.11.0 train_vlm_math_hybrid_engine": r"--data\.max_images_per_prompt: 1",
}


def launch_of(name: str) -> Launch:
    [launch] = find_launches(shlex.split(RECIPES[name]), of_package("openrlhf.cli"))
    return launch


def test_all_of_the_scripts_are_there() -> None:
    counts = {
        v: sum(name.startswith(f"{v} ") for name in RECIPES) for v in ("0.6.1", "0.8.0", "0.9.0")
    }
    assert counts == {"0.6.1": 25, "0.8.0": 14, "0.9.0": 18}
    rl = [n for n, words in RECIPES.items() if n.startswith("0.11.0") and "train_ppo_ray" in words]
    assert len(rl) == 8


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in REFUSED])
def test_a_recipe_has_every_flag_accounted_for_and_loads(name: str, tmp_path: Path) -> None:
    found = convert(launch_of(name), given_version(name.split()[0]))
    assert not any(one.why == FORGOTTEN for one in found.remarks)
    text = check_told_and_loaded(found, name, tmp_path)
    assert text.startswith(f"# {found.job}: from OpenRLHF ")


@pytest.mark.parametrize("name", REFUSED)
def test_a_recipe_that_is_refused_says_why(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        convert(launch_of(name), given_version(name.split()[0]))


@pytest.mark.parametrize(
    ("name", "job", "expected"),
    [
        (
            "0.11.0 train_ppo_ray_hybrid_engine",
            "ppo",
            {
                "cluster.ranks": 8,
                "cluster.critic_ranks": None,
                "batch.micro_batch_tokens": 16384,
                "algorithm.mini_batches": 8,
                "rollout.sleep_level": 2,
                "algorithm.correction.name": "truncate",
            },
        ),
        (
            "0.11.0 train_ppo_ray_slurm",
            "ppo",
            {
                "cluster.ranks": 4,
                "cluster.critic_ranks": 4,
                "cluster.nodes": 2,  # 4 + 4 + 4 engines of 2
                "batch.micro_batch_tokens": 8 * 2048,
                "rollout.memory_share": 0.95,
                "actor.zero.optimizer_offload": "cpu",
            },
        ),
        (
            "0.11.0 train_ppo_with_reward_fn",
            "ppo",
            {
                "rewards.reward_func.options.path": "/openrlhf/examples/python/reward_func.py",
                "critic.model.path": "OpenRLHF/Llama-3-8b-sft-mixture",
                "cluster.nodes": None,
            },
        ),
        (
            "0.11.0 train_dapo_ray_hybrid_engine",
            "dapo",
            {
                "algorithm.mini_batches": 8,  # 128 * 8 / 128
                "algorithm.policy_loss.options.clip_high": 0.27,
                "algorithm.kl.place": "loss",
                "batch.dynamic_sampling.high": 1.0,
            },
        ),
        (
            "0.11.0 train_prorlv2_math_hybrid_engine",
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
        (
            "0.11.0 train_reinforce_baseline_ray_agent_async",
            "rl",
            {
                "environments.agent.name": "examples/python/agent_func.py",
                "environments.agent.max_tokens": 64000,
                "data.max_tokens": 10240,  # 74240 - 64000
                "batch.micro_batch_tokens": 74240,  # of the longest sequence
                "rollout.placement": None,
                "algorithm.mini_batches": 1,  # 128 * 8 / 1024
            },
        ),
        (
            "0.11.0 train_sft",
            "sft",
            {"batch.sequences": 256, "batch.micro_batch_tokens": 4096, "data.train.limit": 500000},
        ),
        (
            "0.11.0 train_rm",
            "rm",
            {"batch.pairs": 256, "batch.micro_batch_tokens": 16384, "data.chat_template": None},
        ),
        ("0.11.0 train_dpo_llama", "dpo", {"reference.stage": 3, "run.resume": "auto"}),
        (
            "0.6.1 train_kto_llama",
            "kto",
            {"algorithm.loss.options.beta": 0.1, "batch.sequences": 64},
        ),
        (
            "0.6.1 train_knowledge_distillation",
            "distill",
            {"algorithm.nll_share": 0.6, "teacher.offload": "cpu"},
        ),
    ],
)
def test_what_recipes_become(name: str, job: str, expected: dict[str, object]) -> None:
    found = convert(launch_of(name), given_version(name.split()[0]))
    assert found.job == job
    assert {key: value_at(found.values, key.split(".")) for key in expected} == expected


@pytest.mark.parametrize(
    "name",
    [n for n in RECIPES if n.startswith("0.11.0") and n not in REFUSED]
    + ["0.9.0 train_ppo_llama_ray_70b"],
)
def test_a_recipe_has_a_plan_without_any_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["from-openrlhf", "-o", str(tmp_path / "config.yaml"), "--plan", "--cluster"]
    words += ["8xA100-80GB", "--host-memory", "2TB", "--", *shlex.split(RECIPES[name])]
    assert main(words) in (0, 3)  # it fits, or it does not
    assert "verdict: " in capsys.readouterr().out


BASES = {
    "ppo": "--pretrain m --prompt_data p --reward_pretrain r",
    "sft": "--pretrain m --dataset d --output_key o",
    "rm": "--pretrain m --dataset d",
    "dpo": "--pretrain m --dataset d",
    "kto": "--pretrain m --dataset d --output_key o",
    "kd": "--pretrain m --dataset d --teacher_model t",
    "local": "--pretrain m --prompt_data p --reward_pretrain r",
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


def values(flag: Flag) -> st.SearchStrategy[list[str]]:
    if flag.read.kind is bool:
        return st.just([])
    known = st.sampled_from(flag.read.among) if flag.read.among else WORDS[flag.read.kind]
    most = 3 if flag.read.most is None else flag.read.most
    return st.lists(known | WORDS[flag.read.kind], min_size=flag.read.least, max_size=most)


@settings(max_examples=40, deadline=None)
@given(commands())
def test_no_flag_is_lost(launch: Launch) -> None:
    try:
        found = convert(launch)
    except PlimsollError as error:
        assert len(str(error)) > 20
        return
    assert found.typed - accounted(found) == set()
    text = config_text(found)
    assert plain(read_tree(text, "config").values) == plain(found.values)
    assert all(isinstance(entry, Entry) for entry in found.entries) and table_text(found)


@settings(max_examples=40, deadline=None)
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
        assert any(one.startswith(name.lstrip("-")) for one in known)
