"""What TRL's commands and its YAML become, with numbers by hand; and settings at random: none is
lost, whether there is such a one or not."""

# ruff: noqa: E501  (a line a case)

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accounts import about, at, check_complete, check_loads, unread
from examples import percent
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.errors import ConfigError, PlimsollError
from plimsoll_convert.launch import find_launches
from plimsoll_convert.settings import settings_of
from plimsoll_convert.trl import COMMANDS, find_program
from plimsoll_convert.trl.convert import convert
from plimsoll_convert.trl.table import SETTINGS
from plimsoll_convert.writer import Converted, config_text, table_text

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
COMMANDS_OF = {
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
        "--lora_r 32 --lora_alpha 16 --lora_target_modules all-linear --assistant_only_loss "
        "--lora_modules_to_save embed_tokens lm_head"
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


EXPECTED: dict[str, tuple[str, dict[str, object]]] = {
    "sft, all weights": (
        "sft",
        {
            "batch.sequences": 16,
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
    "sft, lora on two machines": (
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
                "modules_to_save": ("embed_tokens", "lm_head"),
            },
            "algorithm.learned_tokens": "assistant",
        },
    ),
    "sft, 4 bits": (
        "sft",
        {
            "data.train.text": "text",
            "actor.model.quantization": "nf4",
            "actor.optimizer.kind": "adamw_8bit",
            "actor.adapter.targets": ("q_proj", "v_proj"),
            "cluster.ranks": None,
        },
    ),
    "dpo": (
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
    "reward": ("rm", {"cluster.ranks": 8, "batch.pairs": 64, "algorithm.centring": 0.01}),
    "kto": (
        "kto",
        {
            "batch.sequences": 128,
            "actor.optimizer.warmup_ratio": 0.1,
            "algorithm.loss.options.desirable_weight": 1.33,
            "data.train.response": "completion",
            "data.shuffle": False,
        },
    ),
    "grpo, vllm beside": (
        "grpo",
        {
            "batch.prompts": 4,
            "batch.responses": 16,
            "algorithm.mini_batches": 1,
            "algorithm.epochs": 2,
            "run.save_every": 250,
            "rollout.engines": 8,
            "rollout.vllm.memory_share": 0.3,
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
    "grpo, transformers": (
        "grpo",
        {
            "batch.prompts": 4,
            "rollout.transformers": {},
            "algorithm.correction": None,
            "algorithm.aggregation": "constant",
            "algorithm.aggregation_tokens": 512,
            "reward_model.role.model.path": "org/rm",
            "rewards.style.name": "my_rewards:style",
        },
    ),
    "rloo": (
        "rloo",
        {
            "batch.prompts": 2,
            "batch.responses": 4,
            "algorithm.aggregation_tokens": 1,
            "algorithm.kl.coefficient": 0.05,
            "data.train.reference": "solution",
        },
    ),
}


@pytest.mark.parametrize("name", COMMANDS_OF)
def test_a_command_shows_every_flag_and_loads(name: str, trl: Trl, tmp_path: Path) -> None:
    config = trl(COMMANDS_OF[name])
    assert about(config, "unknown") == set()
    check_loads(config, tmp_path)
    job, expected = EXPECTED[name]
    assert (config.job, {key: at(config, key) for key in expected}) == (job, expected)


Case = tuple[str, str, dict[str, Any]]
CASES: tuple[Case, ...] = (
    # policy losses
    ("grpo", "", {"algorithm.policy_loss": {"options": {"clip_low": 0.2, "clip_high": 0.2}}}),
    ("grpo", "--epsilon_high 0.28 --delta 4", {"algorithm.policy_loss.options": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 4.0}}),
    ("grpo", "--loss_type cispo --epsilon_high 5", {"job": "cispo", "algorithm.policy_loss.options": {"cap": 5.0}}),
    ("grpo", "--loss_type cispo", {"check": "algorithm.policy_loss.options.cap"}),
    ("grpo", "--loss_type sapo", {"algorithm.policy_loss": {"name": "sapo", "options": {"tau_positive": 1.0, "tau_negative": 1.05}}}),
    ("grpo", "--importance_sampling_level sequence --loss_type grpo --epsilon 3e-4 --delta 4", {"job": "gspo", "algorithm.policy_loss.options": {"clip_low": 3e-4, "clip_high": 3e-4}, "lacking": "delta"}),
    ("grpo", "--multi_objective_aggregation normalize_then_sum", {"algorithm.advantage": {"name": "gdpo", "options": {"delta": 1e-4}}}),
    # corrections
    ("grpo", "--use_vllm --vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_clip_min 0.1", {"algorithm.correction": {"name": "truncate", "options": {"level": "token", "high": 3.0}}, "lacking": "vllm_importance_sampling_clip_min"}),
    ("grpo", "--use_vllm --vllm_importance_sampling_mode token_mask", {"algorithm.correction": {"name": "icepop", "options": {"low": 0.0, "high": 3.0}}}),
    ("grpo", "--use_vllm --vllm_importance_sampling_mode sequence_truncate", {"algorithm.correction.options": {"level": "sequence", "high": 3.0}}),
    ("grpo", "--use_vllm --vllm_importance_sampling_correction false --vllm_mode server", {"algorithm.correction": None, "rollout.placement": "own", "check": "rollout.engines"}),
    ("grpo", "--use_vllm --num_processes 8 --vllm_tensor_parallel_size 2 --vllm_enable_sleep_mode", {"rollout.engines": 4, "rollout.vllm.tensor_parallel": 2, "rollout.vllm.sleep_level": 2}),
    # losses of pairs
    ("dpo", "--loss_type ipo", {"algorithm.loss": {"name": "ipo", "options": {"beta": 0.1, "length_normalised": True}}}),
    ("dpo", "--loss_type robust --label_smoothing 0.1", {"algorithm.loss": {"name": "robust", "options": {"beta": 0.1, "flip_rate": 0.1}}}),
    ("dpo", "--loss_type sigmoid sft --loss_weights 2.0 0.5 --rpo_alpha 3", {"algorithm.nll_weight": 0.25, "check": "algorithm.loss.name"}),
    *(("dpo", f"--loss_type {loss} --label_smoothing 0.1", {"algorithm.loss.options.label_smoothing": None, "idle": "label_smoothing"}) for loss in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "sigmoid sft")),
    ("orpo", "--beta 0.2", {"algorithm.loss": {"name": "orpo", "options": {"beta": 0.2}}}),
    ("cpo", "--loss_type simpo", {"algorithm.loss": {"name": "simpo", "options": {"beta": 0.1, "gamma": 0.5}}}),
    ("cpo", "--label_smoothing 0.1 --cpo_alpha 2", {"algorithm.loss": {"name": "cpo", "options": {"beta": 0.1, "alpha": 2.0}}, "lacking": "label_smoothing"}),
    ("gkd", "--beta 0.25 --temperature 2", {"job": "distill", "algorithm.divergence": {"name": "jsd", "options": {"beta": 0.25}}, "algorithm.temperature": 2.0}),
    ("gkd", "--neftune_noise_alpha 5 --beta 1", {"algorithm.divergence": {"name": "reverse_kl"}, "lacking": "neftune_noise_alpha"}),
    ("sft", "--neftune_noise_alpha 5", {"algorithm.neftune_alpha": 5.0}),
    # KL
    ("rloo", "", {"algorithm.kl": {"coefficient": 0.05}, "check": "algorithm.kl.place"}),
    ("rloo", "--beta 0 --num_iterations 2 --reward_clip_range -1 1", {"algorithm.kl": "none", "check": "algorithm.policy_loss.name", "rewards.accuracy_reward.clip": (-1.0, 1.0)}),
    ("grpo", "--importance_sampling_level sequence --beta 0.04", {"check": "algorithm.kl.ratio_corrected"}),
    ("grpo", "--importance_sampling_level sequence --beta 0.04 --use_bias_correction_kl false", {"unchecked": "algorithm.kl.ratio_corrected"}),
    # roles
    ("sft", "--dtype bfloat16 --activation_offloading --gradient_checkpointing false", {"actor.model.dtype": "bfloat16", "actor.model.activation_offload": "cpu", "actor.model.gradient_checkpointing": True, "check": "actor.zero.state_dtype"}),
    ("sft", "--bf16 false", {"actor.model.dtype": "float32"}),
    ("sft", "--fp16", {"actor.model.dtype": None, "lacking": "fp16"}),
    ("sft", "--use_fsdp --fsdp full_shard offload --offload_param_device nvme", {"actor.zero": {"stage": 3, "optimizer_offload": "cpu", "parameter_offload": "cpu"}, "lacking": "offload_param_device"}),
    ("grpo", "--use_peft --lora_dropout 0.1", {"actor.adapter.dropout": None, "check": "actor.adapter.dropout", "lacking": "lora_dropout"}),
    ("gkd", "--zero_stage 3", {"teacher": {"model": {"path": "t"}, "zero": {"stage": 3}}}),
    ("sft", "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr\": 5e-6}' --warmup_steps 10", {"actor.optimizer": {"learning_rate": 2e-5, "beta2": 0.999, "schedule": "cosine", "warmup_steps": 10, "final_ratio": 0.25}}),
    ("sft", "--lr_scheduler_kwargs '{}' --lr_scheduler_type constant", {"lacking": "lr_scheduler_kwargs"}),
    ("sft", "--num_machines 2 --num_processes 4", {"cluster": {"ranks": 4, "nodes": 2}, "check": "cluster.address"}),
    # rows, lengths, and what is kept
    ("grpo", "--max_prompt_length 300 --use_vllm --vllm_max_model_length 1000", {"data.max_tokens": 300, "data.over_long": "truncate"}),
    ("grpo", "--use_vllm --vllm_max_model_length 1000", {"data.max_tokens": 488}),
    ("sft", "--truncation_mode keep_end --eos_token x --chat_template_path org/m", {"lacking": "truncation_mode chat_template_path", "idle": "eos_token"}),
    ("sft", "--chat_template_path t.jinja", {"data.chat_template": "t.jinja"}),
    ("sft", "--completion_only_loss true", {"data.train.response": "completion"}),
    ("sft", "--save_total_limit 0 --save_strategy epoch --eval_strategy epoch", {"run.keep_checkpoints": None, "check": "run.save_every run.eval_every"}),
    ("sft", "--load_best_model_at_end --eval_strategy steps --metric_for_best_model eval_perplexity --greater_is_better false", {"run.best": {"metric": "eval/perplexity", "goal": "lowest"}, "check": "run.best.metric"}),
    ("grpo", "--eval_strategy steps --resume_from_checkpoint true", {"data.eval.responses": 8, "eval_sampling": {"temperature": 1.0}, "run.resume": "auto"}),
    ("sft", "--report_to wandb,comet_ml --project p", {"run.loggers": ("wandb",), "run.logger_project": "p", "lacking": "report_to"}),
    # a generation of several optimizer steps
    ("grpo", "--num_processes 2 --per_device_train_batch_size 4 --generation_batch_size 32 --num_generations 8 --max_steps 100", {
        "batch.prompts": 4,  # 32 / 8
        "algorithm.mini_batches": 4,  # 32 / (2 * 4)
        "run.steps": 25,
        "batch.micro_batch_tokens": 4 * (2048 + 512),
    }),
)  # fmt: skip


def test_settings_become_keys(trl: Trl) -> None:
    """`job` is the command; `idle`, `lacking` and `check` are what remarks are about."""
    for command, words, expected in CASES:
        config = trl(f"trl {command} {BASES[command]} {words}")
        for key, value in expected.items():
            if key in ("idle", "lacking", "check"):
                assert set(str(value).split()) <= about(config, key), (words, config.remarks)
            elif key == "unchecked":
                assert value not in about(config, "check"), words
            else:
                assert (config.job if key == "job" else at(config, key)) == value, (words, key)


def test_a_setting_that_only_old_versions_have_brings_their_defaults(trl: Trl) -> None:
    """They are GRPOConfig's of TRL 0.14 to 0.16."""
    words = "trl grpo --model_name_or_path m --dataset_name d --reward_funcs a.b --use_vllm"
    old, new = trl(f"{words} --vllm_device auto"), trl(words)
    assert old.about == "TRL before 1.0, trl grpo" and "--vllm_device" in old.version_note
    assert at(old, "algorithm.kl.coefficient") == 0.04 and at(new, "algorithm.kl") is None
    assert at(old, "rollout.sampling.max_new_tokens") == 256
    assert at(old, "rollout.sampling.temperature") == 0.9
    assert at(old, "algorithm.aggregation") == "sequences"
    assert at(old, "algorithm.correction") is None
    given = trl(f"{words} --vllm_device auto --beta 0.1")
    assert at(given, "algorithm.kl.coefficient") == 0.1 and new.about == "TRL 1.16, trl grpo"


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
    config = trl(f"trl sft --config {file} --learning_rate 3e-5 --num-processes 4")
    assert at(config, "actor.optimizer.learning_rate") == 3e-5
    assert at(config, "data.train") == {
        "Capybara": {
            "path": "trl-lib/Capybara",
            "split": "train",
            "messages": "messages",
            "weight": 0.7,
        },
        "rows": {"path": "more/rows.jsonl", "messages": "messages", "weight": 0.3},
    }
    assert at(config, "run.loggers") == ("wandb",)
    assert at(config, "actor.adapter.targets") == ("q_proj", "k_proj")
    assert at(config, "data.max_tokens") == 1024 and at(config, "cluster.ranks") == 4
    assert "data.max_tokens" in about(config, "check")
    assert "--pakcing true" in about(config, "unknown")
    assert f"env of {file}" in about(config, "check")
    with pytest.raises(ConfigError, match=r"gone\.yaml cannot be read: No such file"):
        trl("trl sft --config gone.yaml")


ROWS: tuple[tuple[str, dict[str, object], dict[str, str]], ...] = (
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
)


def test_columns_of_a_file_here(trl: Trl, tmp_path: Path) -> None:
    for i, (command, row, expected) in enumerate(ROWS):
        file = tmp_path / f"rows{i}.jsonl"
        file.write_text(json.dumps(row) + "\n")
        config = trl(f"trl {command} {BASES[command]} --dataset_name {file}")
        assert at(config, "data.train") == {"path": str(file), "split": "train", **expected}
        assert not any(key.startswith("data.train") for key in about(config, "check"))
    file = tmp_path / "gone.parquet"
    file.write_text("no Parquet")
    config = trl(f"trl sft {BASES['sft']} --dataset_name {file}")
    assert at(config, "data.train.messages") == "messages"


def test_of_prompts_and_completions_completions_are_learned(trl: Trl, tmp_path: Path) -> None:
    """TRL does so without the flag; so it is the default here."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": [USER], "completion": [SAID]}) + "\n")
    words = f"trl sft {BASES['sft']} --dataset_name {file}"
    assert at(trl(words), "algorithm.learned_tokens") is None
    assert at(trl(f"{words} --completion_only_loss False"), "algorithm.learned_tokens") == "all"


def test_configs_of_accelerate_and_of_deepspeed(tmp_path: Path, trl: Trl) -> None:
    accelerate, deepspeed = tmp_path / "a.yaml", tmp_path / "ds.json"
    accelerate.write_text(
        "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_offload_params: true}\n"
    )
    config = trl(f"accelerate launch --config_file {accelerate} trl/scripts/dpo.py {BASES['dpo']}")
    zero = {"stage": 3, "optimizer_offload": "cpu", "parameter_offload": "cpu"}
    assert at(config, "cluster.ranks") == 4 and at(config, "actor.zero") == zero
    assert at(config, "reference") == {"model": {"path": "m"}, "zero": {"stage": 3}}
    held = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    deepspeed.write_text(json.dumps(held))
    config = trl(f"trl sft {BASES['sft']} --deepspeed {deepspeed}", 2)
    assert at(config, "actor.zero") == {"stage": 1, "optimizer_offload": "cpu"}
    assert at(config, "cluster.ranks") == 2  # the cards of --cluster
    config = trl(
        f"accelerate launch --config_file x/deepspeed_zero3.yaml trl/scripts/sft.py {BASES['sft']}"
    )
    assert at(config, "cluster.ranks") == 8 and at(config, "actor.zero.stage") == 3
    accelerate.write_text(
        "num_processes: 8\nparallelism_config: {parallelism_config_sp_size: 4, "
        "parallelism_config_sp_backend: deepspeed}\n"
    )
    sizes = "--max_length 1000 --per_device_train_batch_size 2 --gradient_accumulation_steps 3"
    words = f"trl/scripts/sft.py {BASES['sft']} {sizes}"
    config = trl(f"accelerate launch --config_file {accelerate} {words}")
    assert at(config, "cluster") == {"ranks": 8, "sequence_parallel": 4}
    assert at(config, "batch") == {"sequences": 2 * 3 * 2, "micro_batch_tokens": 500}
    flags = "--num_processes 2 --parallelism_config_cp_size 2 --parallelism_config_cp_backend torch"
    config = trl(f"accelerate launch {flags} {words}")
    assert at(config, "cluster") == {"ranks": 2, "sequence_parallel": 2}
    config = trl(f"trl sft {BASES['sft']} --deepspeed gone.json")
    assert "--deepspeed gone.json" in about(config, "check")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trl ppo --model_name_or_path m", "TRL 1.16 has no PPO any more"),
        ("trl sftt --x", "sftt is no program of TRL's"),
        ("accelerate launch examples/scripts/dpo_vlm.py --x", "images cannot be read"),
        ("trl sft --dataset_name d", "--model_name_or_path is needed"),
        ("trl sft --model_name_or_path m", "--dataset_name is needed"),
        ("trl grpo --model_name_or_path m --dataset_name d", "Nothing scores the responses"),
        (f"trl grpo {BASES['grpo']} --loss_type vespo", "--loss_type vespo: not supported: known"),
        (f"trl grpo {BASES['grpo']} --scale_rewards batch", "known are group"),
        (f"trl grpo {BASES['grpo']} --top_entropy_quantile 0.2", "has no such method"),
        (f"trl grpo {BASES['grpo']} --reward_funcs nothing", "TRL has no such function: accuracy"),
        (f"trl dpo {BASES['dpo']} --loss_type bco_pair", "not supported: known"),
        (f"trl gkd {BASES['gkd']} --lmbda 0.5", "the student samples"),
        (f"trl sft {BASES['sft']} --optim adafactor", "weights are trained by AdamW"),
        (f"trl sft {BASES['sft']} --lr_scheduler_type polynomial", "no such schedule here"),
        (f"trl sft {BASES['sft']} --max_length x", r"--max_length: x\n      It must be a who"),
        (f"trl sft {BASES['sft']} --packing maybe", "It must be true or false"),
        (f"trl sft {BASES['sft']} --learning_rate", "It takes a value, and none follows"),
        (f"trl sft {BASES['sft']} --learning_rate 1 2", "It takes 1 word: quote the value"),
        (f"trl sft {BASES['sft']} --learning_rate None", "It must be a number"),
        (f"trl sft {BASES['sft']} --lr_scheduler_kwargs x", "it is no JSON"),
        (f"trl sft {BASES['sft']} --lr_scheduler_type cosine_with_min_lr", "needs --lr_scheduler_kwargs"),
        (f"trl sft {BASES['sft']} --datasets '[]'", "must be a list of mappings"),
        (f"trl sft {BASES['sft']} --datasets '[1]'", "must be a list of mappings"),
        (f"trl sft {BASES['sft']} --datasets '[{{}}]'", "number 1 has none"),
        (f"trl sft {BASES['sft']} --datasets x", "must be a list of mappings"),
        (f"trl dpo {BASES['dpo']} --loss_weights 1 2", "1 numbers are needed"),
        (f"trl dpo {BASES['dpo']} --loss_weights 0", "sigmoid needs a weight over 0"),
        (f"trl cpo {BASES['cpo']} --loss_type ipo", "known are sigmoid"),
        (f"trl grpo {BASES['grpo']} --reward_weights 1 2", "one number is needed for each"),
        (f"trl grpo {BASES['grpo']} --loss_type sapo --importance_sampling_level sequence", "not supported"),
        (f"trl grpo {BASES['grpo']} --generation_batch_size 20", "must be a multiple of the 8 sequences"),
        (f"trl grpo {BASES['grpo']} --num_generations 3", "does not divide the 8 responses"),
        (f"trl grpo {BASES['grpo']} --gradient_accumulation_steps 3 --steps_per_generation 4", "one must be a multiple"),
        ("trl gkd --model_name_or_path m --dataset_name d --lmbda 0", "--teacher_model_name_or_path is needed"),
        (f"trl kto {BASES['kto']} --loss_type apo_zero_unpaired", "has no such method"),
    ],
)  # fmt: skip
def test_settings_without_a_counterpart_are_refused_with_the_reason(
    words: str, message: str, trl: Trl
) -> None:
    with pytest.raises(ConfigError, match=message):
        trl(words)


def test_flags_that_there_are_not_are_named_with_what_is_near(trl: Trl) -> None:
    config = trl(
        f"trl sft {BASES['sft']} --pakcing --num_generations 4 --quux 1 --hub_token SECRET"
    )
    text = config_text(config)
    assert about(config, "unknown") == {"--pakcing", "--num_generations 4", "--quux 1"}
    assert re.search(r"# left out: --pakcing: trl sft .*1\.16.* --packing\b", text)
    assert re.search("--num_generations 4: .*trl grpo and rloo", text)
    assert re.search(r"^Not known.*\n  --pakcing:", table_text(config), re.MULTILINE)
    assert "SECRET" not in f"{config.shown}{text}{table_text(config)}"


def test_programs_are_found_where_they_are_started() -> None:
    assert find_launches(["pip", "install", "trl", "peft"], find_program) == []
    assert (
        find_launches(["accelerate", "launch", "train_grpo.py", "--beta", "0"], find_program) == []
    )
    starts = ("uv run trl sft", "python -m trl.scripts.sft", "torchrun a/trl/scripts/sft.py")
    for words in (f"{start} --x" for start in starts):
        [config] = find_launches(words.split(), find_program)
        assert (config.program, config.arguments) == ("sft", ("--x",))


def test_every_name_is_of_one_setting_and_is_read() -> None:
    for command in COMMANDS:
        names = [
            name
            for setting in settings_of(SETTINGS, command)
            for name in (setting.name, *setting.older)
        ]
        assert sorted({name for name in names if names.count(name) > 1}) == []
    assert unread(SETTINGS, "plimsoll_convert.trl", ("table.py",)) == []


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
    names = st.sampled_from([setting.name for setting in settings_of(SETTINGS, command)])
    made_up = st.text(st.sampled_from("abcdegilmnoprstuz_-"), min_size=1, max_size=12)
    choices = [
        *VALUES,
        *(w for setting in settings_of(SETTINGS, command) for w in setting.reader.among),
    ]
    for name in draw(st.lists(names | names | made_up, max_size=8)):
        words += [f"--{name}", *draw(st.lists(st.sampled_from(choices), max_size=2))]
    return command, tuple(words)


@settings(max_examples=percent(60))
@given(commands())
def test_no_setting_is_lost(made: tuple[str, tuple[str, ...]]) -> None:
    command, words = made
    [launch] = find_launches(words, find_program)
    try:
        config = convert(launch)
    except PlimsollError as error:
        assert len(str(error)) > 20
        return
    check_complete(config)
    unknown = {text.split()[0].split("=")[0] for text in about(config, "unknown")}
    known = {
        name
        for setting in settings_of(SETTINGS, command)
        for name in (setting.name, *setting.older)
    }
    for word in words:
        name = word.lstrip("-").replace("-", "_")
        if word.startswith("--") and name not in known:  # it is named, or the beginning of one
            begun = {n for n in known if name and n.startswith(name)}
            assert f"--{name}" in unknown or begun or name.removeprefix("no_") in known
