"""What TRL's commands and its YAML become, with numbers by hand; and settings at random: none is
lost, whether there is such a one or not."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from accounts import accounted, at, check_told_and_loaded, plain, why
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.config.keys import find_key, keys_of
from plimsoll.config.yaml_tree import read_tree
from plimsoll.convert.launch import find_launches
from plimsoll.convert.outcome import Entry
from plimsoll.convert.result import Converted
from plimsoll.convert.setting import Key
from plimsoll.convert.shown import config_text, table_text
from plimsoll.convert.trl.arguments import settings_of
from plimsoll.convert.trl.convert import convert
from plimsoll.convert.trl.programs import COMMANDS, program
from plimsoll.convert.trl.settings import SETTINGS
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll.jobs import JOBS

Trl = Callable[..., Converted]
BASES = {
    "sft": "--model_name_or_path m --dataset_name d",
    "dpo": "--model_name_or_path m --dataset_name d",
    "kto": "--model_name_or_path m --dataset_name d",
    "reward": "--model_name_or_path m --dataset_name d",
    "orpo": "--model_name_or_path m --dataset_name d",
    "cpo": "--model_name_or_path m --dataset_name d",
    "gkd": "--model_name_or_path m --dataset_name d --teacher_model_name_or_path t --lmbda 0",
    "grpo": "--model_name_or_path m --dataset_name d --reward_funcs accuracy_reward",
    "rloo": "--model_name_or_path m --dataset_name d --reward_funcs accuracy_reward",
}
USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "yo"}
RECIPES = {
    "sft, all weights": (
        "trl sft --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara "
        "--learning_rate 2.0e-5 --num_train_epochs 1 --packing --per_device_train_batch_size 2 "
        "--gradient_accumulation_steps 8 --eos_token '<|im_end|>' --eval_strategy steps "
        "--eval_steps 100 --output_dir Qwen2-0.5B-SFT --push_to_hub"
    ),
    "sft, lora on two machines": (
        "accelerate launch --num_processes 16 --num_machines 2 --mixed_precision bf16 "
        "--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu trl/scripts/sft.py "
        "--model_name_or_path Qwen/Qwen2.5-7B --dataset_name trl-lib/Capybara --use_peft "
        "--lora_r 32 --lora_alpha 16 --lora_target_modules all-linear --assistant_only_loss"
    ),
    "sft, 4 bits": (
        "python trl/scripts/sft.py --model_name_or_path meta-llama/Llama-2-7b-hf --dataset_name "
        "stanfordnlp/imdb --dataset_text_field text --load_in_4bit --use_bnb_nested_quant "
        "--use_peft --lora_r 64 --optim paged_adamw_8bit --max_length 512"
    ),
    "dpo": (
        "trl dpo --model_name_or_path Qwen/Qwen2-0.5B-Instruct --loss_type sigmoid "
        "--dataset_name trl-lib/ultrafeedback_binarized --learning_rate 5.0e-7 "
        "--num_train_epochs 1 --per_device_train_batch_size 2 --max_steps 1000 "
        "--gradient_accumulation_steps 8 --no_remove_unused_columns --num_processes 8 "
        "--accelerate_config zero2"
    ),
    "reward": (
        "torchrun --nproc_per_node 8 -m trl.scripts.reward --model_name_or_path Qwen/Qwen2-0.5B "
        "--dataset_name trl-lib/ultrafeedback_binarized --center_rewards_coefficient 0.01 "
        "--max_length 2048 --learning_rate 1.0e-5 --output_dir rm"
    ),
    "kto": (
        "accelerate launch --num_processes=8 trl/scripts/kto.py --dataset_name "
        "trl-lib/kto-mix-14k --model_name_or_path trl-lib/qwen1.5-1.8b-sft "
        "--per_device_train_batch_size 16 --learning_rate 5e-7 --lr_scheduler_type cosine "
        "--warmup_steps 0.1 --bf16 --desirable_weight 1.33"
    ),
    "grpo, vllm beside": (
        "trl grpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --num_processes 8 "
        "--dataset_name HuggingFaceH4/Polaris-Dataset-53K --use_vllm --vllm_mode colocate "
        "--reward_funcs accuracy_reward think_format_reward --reward_weights 1.0 0.2 "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_generations 16 "
        "--max_completion_length 1024 --beta 0.04 --num_iterations 2 --scale_rewards none"
    ),
    "grpo, transformers": (
        "python trl/scripts/grpo.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name d "
        "--reward_model_name_or_path org/rm --reward_funcs my_rewards.style --loss_type dr_grpo "
        "--gradient_accumulation_steps 4 --log_completions"
    ),
    "rloo": (
        "trl rloo --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name d --num_generations 4 "
        "--reward_funcs accuracy_reward --normalize_advantages false --beta 0.05 --use_peft"
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_every_flag_accounted_for_and_loads(
    name: str, trl: Trl, tmp_path: Path
) -> None:
    found = trl(RECIPES[name])
    assert not any(one.kind == "unknown" for one in found.remarks)
    check_told_and_loaded(found, name, tmp_path)


@pytest.mark.parametrize(
    ("name", "job", "expected"),
    [
        (
            "sft, all weights",
            "sft",
            {
                "batch.sequences": 16,  # 2 * 8 of one process
                "batch.micro_batch_tokens": 2048,
                "data.max_tokens": 1024,
                "data.train.messages": "messages",
                "algorithm.learned_tokens": "all",
                "actor.zero.stage": 0,
                "actor.optimizer.schedule": "linear",
                "run.eval_every": 100,
                "data.eval.split": "test",
            },
        ),
        (
            "sft, lora on two machines",
            "sft",
            {
                "cluster.ranks": 16,
                "cluster.nodes": 2,
                "batch.sequences": 128,
                "actor.zero": {"stage": 3, "optimizer_offload": "cpu"},
                "actor.adapter": {
                    "rank": 32,
                    "alpha": 16.0,
                    "dropout": 0.05,
                    "targets": ("all-linear",),
                },
                "algorithm.learned_tokens": "assistant",
            },
        ),
        (
            "sft, 4 bits",
            "sft",
            {
                "data.train.text": "text",
                "actor.model.quantization": "nf4",
                "actor.optimizer.kind": "adamw_8bit",
                "actor.adapter.targets": ("q_proj", "v_proj"),
                "cluster.ranks": None,  # python starts one process
            },
        ),
        (
            "dpo",
            "dpo",
            {
                "batch.pairs": 128,
                "batch.micro_batch_tokens": 4096,
                "run.steps": 1000,
                "run.epochs": None,
                "actor.zero.stage": 2,
                "algorithm.loss": {"name": "dpo", "options": {"beta": 0.1}},
            },
        ),
        ("reward", "rm", {"cluster.ranks": 8, "batch.pairs": 64, "algorithm.centring": 0.01}),
        (
            "kto",
            "kto",
            {
                "batch.sequences": 128,
                "actor.optimizer.warmup_ratio": 0.1,
                "algorithm.loss.options.desirable_weight": 1.33,
                "data.train.response": "completion",
                "data.shuffle": False,
            },
        ),
        (
            "grpo, vllm beside",
            "grpo",
            {
                "batch.prompts": 4,  # 8 processes * 4 * 2 / 16
                "batch.responses": 16,
                "algorithm.mini_batches": 1,  # one optimizer step
                "algorithm.epochs": 2,
                "run.save_every": 250,  # 500 of its steps
                "rollout.engines": 8,
                "rollout.memory_share": 0.3,
                "algorithm.advantage.name": "dr_grpo",
                "algorithm.kl": {
                    "place": "loss",
                    "estimator": "k3",
                    "coefficient": 0.04,
                    "ratio_corrected": True,
                },
                "algorithm.correction.name": "mask",
                "rewards.accuracy_reward": {"name": "math_answer", "weight": 1.0},
                "rewards.think_format_reward.name": "pattern",
            },
        ),
        (
            "grpo, transformers",
            "grpo",
            {
                "batch.prompts": 4,  # 8 * 4 / 8
                "rollout.engine": "transformers",
                "algorithm.correction": None,
                "algorithm.aggregation": "constant",
                "algorithm.aggregation_tokens": 512,
                "reward_model.role.model.path": "org/rm",
                "rewards.style.name": "my_rewards:style",
            },
        ),
        (
            "rloo",
            "rloo",
            {
                "batch.prompts": 2,
                "batch.responses": 4,
                "algorithm.aggregation_tokens": 1,
                "algorithm.kl.coefficient": 0.05,
                "data.train.reference": "solution",
            },
        ),
    ],
)
def test_what_recipes_become(name: str, job: str, expected: dict[str, object], trl: Trl) -> None:
    found = trl(RECIPES[name])
    assert found.job == job and {key: at(found, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"name": None, "options": {"clip_low": 0.2, "clip_high": 0.2}}),
        ("--epsilon_high 0.28", {"name": None, "options": {"clip_low": 0.2, "clip_high": 0.28}}),
        ("--loss_type cispo --epsilon_high 5", {"name": "cispo", "options": {"cap": 5.0}}),
        (
            "--loss_type sapo",
            {"name": "sapo", "options": {"tau_positive": 1.0, "tau_negative": 1.05}},
        ),
        (
            "--importance_sampling_level sequence --loss_type grpo --epsilon 3e-4",
            {"name": "gspo", "options": {"clip_low": 3e-4, "clip_high": 3e-4}},
        ),
        (
            "--delta 4",
            {"name": None, "options": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 4.0}},
        ),
    ],
)
def test_policy_losses(words: str, expected: dict[str, object], trl: Trl) -> None:
    found = at(trl(f"trl grpo {BASES['grpo']} {words}"), "algorithm.policy_loss")
    assert isinstance(found, dict)
    shown = {key: found.get("options", {}).get(key) for key in expected["options"]}  # type: ignore[attr-defined]
    assert shown == expected["options"] and found.get("name") in (expected["name"], None)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", {"name": "truncate", "options": {"level": "token", "high": 3.0}}),
        ("token_mask", {"name": "icepop", "options": {"low": 0.0, "high": 3.0}}),
        ("sequence_truncate", {"name": "truncate", "options": {"level": "sequence", "high": 3.0}}),
    ],
)
def test_corrections(mode: str, expected: dict[str, object], trl: Trl) -> None:
    words = f"trl grpo {BASES['grpo']} --use_vllm --vllm_importance_sampling_mode {mode}"
    assert at(trl(words), "algorithm.correction") == expected


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("dpo", "--loss_type ipo", {"name": "ipo", "options": {"beta": 0.1, "length_normalised": True}}),  # noqa: E501
        ("dpo", "--loss_type robust", {"name": "robust", "options": {"beta": 0.1, "flip_rate": 0.0}}),  # noqa: E501
        ("dpo", "--loss_type robust --label_smoothing 0.1", {"name": "robust", "options": {"beta": 0.1, "flip_rate": 0.1}}),  # noqa: E501
        ("orpo", "--beta 0.2", {"name": "orpo", "options": {"beta": 0.2}}),
        ("cpo", "--loss_type simpo", {"name": "simpo", "options": {"beta": 0.1, "gamma": 0.5}}),
    ],
)  # fmt: skip
def test_losses_of_pairs(command: str, words: str, expected: dict[str, object], trl: Trl) -> None:
    assert at(trl(f"trl {command} {BASES[command]} {words}"), "algorithm.loss") == expected


@pytest.mark.parametrize("loss", ["sigmoid", "sigmoid_norm", "hinge", "ipo", "sigmoid sft"])
def test_label_smoothing_is_left_out_where_trl_passes_over_it(loss: str, trl: Trl) -> None:
    words = f"trl dpo {BASES['dpo']} --loss_type {loss}"
    found = trl(f"{words} --label_smoothing 0.1")
    assert at(found, "algorithm.loss") == at(trl(words), "algorithm.loss")
    said = why(found, "idle", "label_smoothing")
    assert f"alone, and trains {loss.split()[0]} without it" in said
    assert "No effect here\n  --label_smoothing 0.1: " in table_text(found)


def test_label_smoothing_of_cpo_is_lacking(trl: Trl) -> None:
    found = trl(f"trl cpo {BASES['cpo']} --label_smoothing 0.1")
    assert "TRL's sigmoid does it" in why(found, "lacking", "label_smoothing")
    found = trl(f"trl cpo {BASES['cpo']} --label_smoothing 0")
    assert not any(one.kind == "lacking" for one in found.remarks)


def test_the_kl_of_rloo_is_in_the_reward_of_each_token(trl: Trl) -> None:
    found = trl(f"trl rloo {BASES['rloo']}")  # beta is 0.05 by default
    assert at(found, "algorithm.kl") == {"place": "reward", "coefficient": 0.05}  # by k1
    said = why(found, "check", "algorithm.kl.place")
    assert "whole response off its reward" in said and "each token loses" in said
    found = trl(f"trl rloo {BASES['rloo']} --beta 0")
    assert not any(one.about == "algorithm.kl.place" for one in found.remarks)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--importance_sampling_level sequence --beta 0.04", True),
        ("--importance_sampling_level sequence --beta 0.04 --use_bias_correction_kl false", False),
        ("--importance_sampling_level sequence", False),  # there is no KL
        ("--beta 0.04", False),
    ],
)
def test_ratios_of_sequences_beside_a_kl_are_told(words: str, told: bool, trl: Trl) -> None:
    found = trl(f"trl grpo {BASES['grpo']} {words}")
    said = [one.why for one in found.remarks if one.about == "algorithm.kl.ratio_corrected"]
    assert len(said) == told and all("ratio of its whole response" in one for one in said)


def test_a_limit_of_0_keeps_all_checkpoints(trl: Trl) -> None:
    found = trl(f"trl sft {BASES['sft']} --save_total_limit 0")
    assert at(found, "run.keep_checkpoints") is None
    assert why(found, "same", "save_total_limit") == "it is off"


def test_losses_that_are_added(trl: Trl) -> None:
    words = "--loss_type sigmoid sft --loss_weights 1.0 0.25"
    assert at(trl(f"trl dpo {BASES['dpo']} {words}"), "algorithm.nll_weight") == 0.25
    found = trl(f"trl gkd {BASES['gkd']} --beta 0.5")
    assert found.job == "distill" and at(found, "algorithm.divergence.name") == "jsd"


def test_a_generation_of_several_optimizer_steps(trl: Trl) -> None:
    words = f"trl grpo {BASES['grpo']} --num_processes 2 --per_device_train_batch_size 4"
    found = trl(f"{words} --generation_batch_size 32 --num_generations 8 --max_steps 100")
    assert at(found, "batch.prompts") == 4  # 32 / 8
    assert at(found, "algorithm.mini_batches") == 4  # 32 / (2 * 4)
    assert at(found, "run.steps") == 25
    assert at(found, "batch.micro_batch_tokens") == 4 * (2048 + 512)
    with pytest.raises(ConfigError, match="must be a multiple of the 8 sequences"):
        trl(f"{words} --generation_batch_size 20")
    with pytest.raises(ConfigError, match="does not divide the 8 responses of a generation"):
        trl(f"{words} --num_generations 3")


def test_yaml_is_read_and_flags_win(tmp_path: Path, trl: Trl) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B\n"
        "datasets:\n"
        "  - path: trl-lib/Capybara\n    fraction: 0.7\n"
        "  - path: json\n    data_files: more/rows.jsonl\n    fraction: 0.3\n"
        "learning_rate: 1e-5\nreport_to: [wandb]\nmax_length: null\n"
        "lora_target_modules: [q_proj, k_proj]\nuse_peft: true\nenv: {A: 1}\npakcing: true\n"
    )
    found = trl(f"trl sft --config {file} --learning_rate 3e-5 --num-processes 4")
    assert at(found, "actor.optimizer.learning_rate") == 3e-5
    assert at(found, "data.train") == {
        "Capybara_1": {
            "path": "trl-lib/Capybara",
            "split": "train",
            "messages": "messages",
            "weight": 0.7,
        },
        "rows_2": {"path": "more/rows.jsonl", "messages": "messages", "weight": 0.3},
    }
    assert at(found, "run.loggers") == ("wandb",)
    assert at(found, "actor.adapter.targets") == ("q_proj", "k_proj")
    assert at(found, "data.max_tokens") == 1024 and at(found, "cluster.ranks") == 4
    assert "bounds no length" in why(found, "check", "data.max_tokens")
    assert "did you mean --packing" in why(found, "unknown", "--pakcing true")
    assert f"env of {file}" in {one.about for one in found.remarks}
    with pytest.raises(ConfigError, match=r"gone\.yaml cannot be read: No such file"):
        trl("trl sft --config gone.yaml")


@pytest.mark.parametrize(
    ("command", "row", "expected"),
    [
        ("sft", {"messages": []}, {"messages": "messages"}),
        ("sft", {"prompt": "x", "completion": "y"}, {"prompt": "prompt", "response": "completion"}),
        ("sft", {"text": "x"}, {"text": "text"}),
        ("sft", {"conversations": []}, {"messages": "conversations"}),
        (
            "dpo",
            {"prompt": "x", "chosen": "y", "rejected": "z"},
            {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        ),
        (
            "dpo",
            {"prompt": [USER], "chosen": [SAID], "rejected": [SAID]},
            {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
        ),
        (
            "dpo",
            {"prompt": "x", "chosen": [USER, SAID], "rejected": [USER, SAID]},
            {"chosen": "chosen", "rejected": "rejected"},
        ),
        ("reward", {"chosen": [], "rejected": []}, {"chosen": "chosen", "rejected": "rejected"}),
        (
            "kto",
            {"prompt": [USER], "completion": [SAID], "label": True},
            {"prompt": "prompt", "response": "completion", "label": "label"},
        ),
        (
            "sft",
            {"prompt": [USER], "completion": [SAID], "tools": [{"name": "add"}]},
            {"prompt": "prompt", "response": "completion", "tools": "tools"},
        ),
        ("grpo", {"prompt": "x"}, {"prompt": "prompt", "reference": "solution"}),
        ("grpo", {"prompt": [USER]}, {"prompt": "prompt", "reference": "solution"}),
    ],
)
def test_columns_of_a_file_here(
    command: str, row: dict[str, object], expected: dict[str, str], trl: Trl, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    found = trl(f"trl {command} {BASES[command]} --dataset_name {file}")
    assert at(found, "data.train") == {"path": str(file), "split": "train", **expected}
    assert not any(one.about.startswith("data.train") for one in found.remarks)


@pytest.mark.parametrize(("flag", "learned"), [("", None), ("False", "all")])
def test_of_prompts_and_completions_completions_are_learned(
    flag: str, learned: str | None, trl: Trl, tmp_path: Path
) -> None:
    """As TRL does without the flag; so is the default here."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": [USER], "completion": [SAID]}) + "\n")
    given = f"--completion_only_loss {flag}" if flag else ""
    found = trl(f"trl sft {BASES['sft']} --dataset_name {file} {given}")
    assert at(found, "algorithm.learned_tokens") == learned


def test_columns_of_a_file_that_cannot_be_read(trl: Trl, tmp_path: Path) -> None:
    file = tmp_path / "gone.parquet"
    file.write_text("no Parquet")
    found = trl(f"trl sft {BASES['sft']} --dataset_name {file}")
    assert at(found, "data.train.messages") == "messages"


def test_configs_of_accelerate_and_of_deepspeed(tmp_path: Path, trl: Trl) -> None:
    accelerate, deepspeed = tmp_path / "a.yaml", tmp_path / "ds.json"
    accelerate.write_text(
        "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_offload_params: true}\n"
    )
    found = trl(f"accelerate launch --config_file {accelerate} trl/scripts/dpo.py {BASES['dpo']}")
    zero = {"stage": 3, "optimizer_offload": "cpu", "parameter_offload": "cpu"}
    assert at(found, "cluster.ranks") == 4 and at(found, "actor.zero") == zero
    assert at(found, "reference") == {"model": {"path": "m"}, "stage": 3}
    held = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    deepspeed.write_text(json.dumps(held))
    found = trl(f"trl sft {BASES['sft']} --deepspeed {deepspeed}", 2)
    assert at(found, "actor.zero") == {"stage": 1, "optimizer_offload": "cpu"}
    assert at(found, "cluster.ranks") == 2  # the cards of --cluster
    found = trl(
        f"accelerate launch --config_file x/deepspeed_zero3.yaml trl/scripts/sft.py {BASES['sft']}"
    )
    assert at(found, "cluster.ranks") == 8 and at(found, "actor.zero.stage") == 3
    found = trl(f"trl sft {BASES['sft']} --deepspeed gone.json")
    assert "not there" in why(found, "check", "--deepspeed gone.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trl ppo --model_name_or_path m", "TRL 1.16 has no PPO any more"),
        ("trl sftt --x", "'sftt' is no program of TRL's that is read: sft, dpo"),
        ("accelerate launch examples/scripts/dpo_vlm.py --x", "images cannot be read"),
        ("trl sft --dataset_name d", "--model_name_or_path is needed"),
        ("trl sft --model_name_or_path m", "--dataset_name .* is needed"),
        ("trl grpo --model_name_or_path m --dataset_name d", "Nothing scores the responses"),
        (f"trl grpo {BASES['grpo']} --loss_type vespo", "--loss_type vespo: not supported: known"),
        (f"trl grpo {BASES['grpo']} --scale_rewards batch", "scaled by their group, or not"),
        (f"trl grpo {BASES['grpo']} --top_entropy_quantile 0.2", "all tokens are learned from"),
        (f"trl grpo {BASES['grpo']} --reward_funcs nothing", "TRL has no such function: accuracy"),
        (f"trl dpo {BASES['dpo']} --loss_type bco_pair", "there is one loss of pairs"),
        (f"trl gkd {BASES['gkd']} --lmbda 0.5", "sampled from the student"),
        (f"trl sft {BASES['sft']} --optim adafactor", "weights are trained by AdamW"),
        (f"trl sft {BASES['sft']} --lr_scheduler_type polynomial", "no such schedule here"),
        (f"trl sft {BASES['sft']} --max_length x", r"--max_length: x\n      It must be a who"),
        (f"trl sft {BASES['sft']} --packing maybe", "It must be true or false"),
        (f"trl sft {BASES['sft']} --learning_rate", "It takes a value, and none follows"),
        (f"trl sft {BASES['sft']} --learning_rate 1 2", "It takes 1 word: quote the value"),
        (f"trl kto {BASES['kto']} --loss_type apo_zero_unpaired", "KTO is KTO's own loss"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_reason(words: str, message: str, trl: Trl) -> None:
    with pytest.raises(ConfigError, match=message):
        trl(words)


def test_flags_that_there_are_not_are_named_with_what_is_near(trl: Trl) -> None:
    found = trl(f"trl sft {BASES['sft']} --pakcing --num_generations 4 --quux 1")
    assert "did you mean --packing" in why(found, "unknown", "--pakcing")
    assert "trl grpo and rloo has" in why(found, "unknown", "--num_generations 4")
    assert why(found, "unknown", "--quux 1").endswith("has no such setting")
    assert "# left out: --pakcing: trl sft of TRL 1.16 has no" in config_text(found)
    assert "Not known, and left out\n  --pakcing:" in table_text(found)


def test_programs_are_found_where_they_are_started() -> None:
    assert find_launches(["pip", "install", "trl", "peft"], program) == []
    assert find_launches(["accelerate", "launch", "train_grpo.py", "--beta", "0"], program) == []
    starts = ("uv run trl sft", "python -m trl.scripts.sft", "torchrun a/trl/scripts/sft.py")
    for words in (f"{start} --x" for start in starts):
        [found] = find_launches(words.split(), program)
        assert (found.program, found.arguments) == ("sft", ("--x",))


def test_a_token_is_never_shown(trl: Trl) -> None:
    found = trl(f"trl sft {BASES['sft']} --hub_token SECRET")
    assert "SECRET" not in f"{found.shown}{config_text(found)}{table_text(found)}"


def test_every_name_is_of_one_setting_and_leads_to_keys_that_there_are() -> None:
    keys = tuple(key for job in JOBS.values() for key in keys_of(job.config))
    for command in COMMANDS:
        names = [name for one in settings_of(command) for name in (one.name, *one.older)]
        assert sorted({name for name in names if names.count(name) > 1}) == []
    paths = {path for s in SETTINGS if isinstance(s.becomes, Key) for path in s.becomes.paths}
    assert [path for path in paths if find_key(keys, tuple(path.split("."))) is None] == []


VALUES = (
    "None",
    "None",
    "-1",
    "0",
    "1",
    "8",
    "64",
    "0.5",
    "1e-5",
    "nan",
    "x",
    "a/b",
    "",
    "true",
    "None",
    "\n",
    "[]",
)


@st.composite
def commands(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    """A command with settings that it has, or nearly has, and values that it may not like."""
    command = draw(st.sampled_from(sorted(BASES)))
    words = ["trl", command, *shlex.split(BASES[command])]
    names = st.sampled_from([one.name for one in settings_of(command)])
    made_up = st.text(st.sampled_from("abcdegilmnoprstuz_-"), min_size=1, max_size=12)
    choices = [*VALUES, *(w for one in settings_of(command) for w in one.read.among)]
    for name in draw(st.lists(names | names | made_up, max_size=8)):
        words += [f"--{name}", *draw(st.lists(st.sampled_from(choices), max_size=2))]
    return command, tuple(words)


@settings(max_examples=60, deadline=None)
@given(commands())
def test_no_setting_is_lost(made: tuple[str, tuple[str, ...]]) -> None:
    command, words = made
    [launch] = find_launches(words, program)
    try:
        found = convert(launch)
    except PlimsollError as error:
        assert len(str(error)) > 20
        return
    assert found.typed - accounted(found) == set()
    told = {one.about.split()[0].split("=")[0] for one in found.remarks if one.kind == "unknown"}
    known = {name for one in settings_of(command) for name in (one.name, *one.older)}
    for word in words:
        name = word.lstrip("-").replace("-", "_")
        if word.startswith("--") and name not in known:  # it is named, or the beginning of one
            begun = {n for n in known if name and n.startswith(name)}
            assert f"--{name}" in told or begun or name.removeprefix("no_") in known
    assert plain(read_tree(config_text(found), "config").values) == plain(found.values)
    assert all(isinstance(entry, Entry) for entry in found.entries) and table_text(found)
