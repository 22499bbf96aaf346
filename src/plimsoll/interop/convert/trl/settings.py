"""List TRL's settings, with the defaults of its dataclasses.

They are those of trl 1.16 (ScriptArguments, ModelConfig, SFTConfig and so on) and of transformers'
TrainingArguments (5.23).
"""

from __future__ import annotations

from plimsoll.interop.convert.trl.absent import ABSENT
from plimsoll.interop.convert.values import (
    BOOL,
    COUNT,
    NUMBER,
    NUMBERS,
    PAIR,
    TEXT,
    WHOLE,
    WORDS,
    Setting,
    one_of,
    settings,
)

# fmt: off
# ruff: noqa: E501  (a line for settings that are alike)

_ALL = "sft dpo kto reward grpo rloo orpo cpo gkd"
_RL = "grpo rloo"
_OFF = "sft dpo kto reward orpo cpo gkd"
_SFT = "sft gkd"

SETTINGS: tuple[Setting, ...] = (
    # processes
    *settings("num_processes", _ALL, COUNT),
    *settings("num_machines", _ALL, COUNT, 1),
    *settings("zero_stage", _ALL, WHOLE),
    *settings("offload_optimizer_device offload_param_device", _ALL, TEXT),
    *settings("use_fsdp fsdp_offload_params use_cpu", _ALL, BOOL, False),
    *settings("fsdp", _ALL, WORDS),
    *settings("mixed_precision", _ALL, one_of("no", "fp16", "bf16", "fp8")),
    # models
    *settings("model_name_or_path", _ALL, TEXT),
    *settings("dtype", _ALL, TEXT, "float32", older="torch_dtype"),
    *settings("bf16", _ALL, BOOL),
    *settings("fp16 trust_remote_code use_peft use_rslora use_dora load_in_4bit use_bnb_nested_quant", _ALL, BOOL, False),
    *settings("lora_r", _ALL, COUNT, 16),
    *settings("lora_alpha", _ALL, COUNT, 32),
    *settings("lora_dropout", _ALL, NUMBER, 0.05),
    *settings("lora_target_modules", _ALL, WORDS),
    *settings("gradient_checkpointing", _ALL, BOOL, True),
    *settings("activation_offloading", _OFF, BOOL, False),
    *settings("seed", _ALL, WHOLE, 42),
    # optimizer
    *settings("learning_rate", _ALL, NUMBER, 1e-6, sft=2e-5, reward=1e-4, gkd=2e-5),
    *settings("weight_decay", _ALL, NUMBER, 0.0),
    *settings("adam_beta1", _ALL, NUMBER, 0.9),
    *settings("adam_beta2", _ALL, NUMBER, 0.999),
    *settings("adam_epsilon", _ALL, NUMBER, 1e-8),
    *settings("max_grad_norm", _ALL, NUMBER, 1.0),
    *settings("optim", _ALL, TEXT, "adamw_torch_fused"),
    *settings("lr_scheduler_type", _ALL, TEXT, "linear"),
    *settings("lr_scheduler_kwargs", _ALL, TEXT),
    *settings("warmup_steps", _ALL, NUMBER, 0.0),
    *settings("warmup_ratio neftune_noise_alpha", _ALL, NUMBER),
    # batches
    *settings("per_device_train_batch_size", _ALL, COUNT, 8),
    *settings("gradient_accumulation_steps", _ALL, COUNT, 1),
    *settings("num_train_epochs", _ALL, NUMBER, 3.0),
    *settings("max_steps", _ALL, WHOLE, -1),
    *settings("max_length", _OFF, COUNT, 1024, older="max_seq_length", empty=True),
    *settings("max_prompt_length", "grpo rloo dpo orpo cpo kto", COUNT),
    *settings("max_completion_length", _RL, COUNT, 512),
    *settings("truncation_mode", "sft dpo", one_of("keep_start", "keep_end"), "keep_start"),
    *settings("packing", _SFT, BOOL, False),
    *settings("train_sampling_strategy", _ALL, TEXT, "random", kto="sequential"),
    *settings("shuffle_dataset", "sft grpo rloo gkd", BOOL),
    # rows
    *settings("dataset_name dataset_config datasets", _ALL, TEXT),
    *settings("dataset_train_split", _ALL, TEXT, "train"),
    *settings("dataset_test_split", _ALL, TEXT, "test"),
    *settings("dataset_text_field", _SFT, TEXT, "text"),
    *settings("chat_template_path eos_token", "sft reward gkd", TEXT),
    *settings("completion_only_loss", _SFT, BOOL),
    *settings("assistant_only_loss", _SFT, BOOL, False),
    # the run
    *settings("output_dir", _ALL, TEXT, "trainer_output"),
    *settings("save_strategy", _ALL, one_of("no", "steps", "epoch", "best"), "steps"),
    *settings("save_steps", _ALL, NUMBER, 500.0),
    *settings("save_total_limit", _ALL, WHOLE),
    *settings("resume_from_checkpoint metric_for_best_model", _ALL, TEXT),
    *settings("eval_strategy", _ALL, one_of("no", "steps", "epoch"), "no", older="evaluation_strategy"),
    *settings("eval_steps", _ALL, NUMBER),
    *settings("logging_steps", _ALL, NUMBER, 10),
    *settings("load_best_model_at_end", _ALL, BOOL, False),
    *settings("greater_is_better", _ALL, BOOL),
    *settings("report_to", _ALL, WORDS),
    *settings("project", _ALL, TEXT, "huggingface"),
    # losses of rows
    *settings("loss_type", "dpo", WORDS, ("sigmoid",)),
    *settings("loss_weights", "dpo", NUMBERS),
    *settings("loss_type", "cpo", TEXT, "sigmoid"),
    *settings("beta", "dpo kto orpo cpo", NUMBER, 0.1),
    *settings("label_smoothing", "dpo cpo", NUMBER, 0.0),
    *settings("rpo_alpha", "dpo", NUMBER),
    *settings("precompute_ref_log_probs", "dpo kto", BOOL, False),
    *settings("desirable_weight undesirable_weight", "kto", NUMBER, 1.0),
    *settings("center_rewards_coefficient", "reward", NUMBER),
    *settings("cpo_alpha", "cpo", NUMBER, 1.0),
    *settings("simpo_gamma", "cpo", NUMBER, 0.5),
    *settings("teacher_model_name_or_path", "gkd", TEXT),
    *settings("lmbda beta", "gkd", NUMBER, 0.5),
    *settings("temperature", "gkd", NUMBER, 0.9),
    # sampling
    *settings("num_generations", _RL, COUNT, 8, rloo=2),
    *settings("generation_batch_size steps_per_generation num_generations_eval vllm_max_model_length", _RL, COUNT),
    *settings("num_iterations vllm_tensor_parallel_size", _RL, COUNT, 1),
    *settings("temperature top_p", _RL, NUMBER, 1.0),
    *settings("top_k", _RL, WHOLE, 0),
    *settings("min_p", _RL, NUMBER),
    *settings("use_vllm vllm_enable_sleep_mode", _RL, BOOL, False),
    *settings("vllm_mode", _RL, one_of("colocate", "server"), "colocate"),
    *settings("vllm_gpu_memory_utilization", _RL, NUMBER, 0.3),
    # algorithm
    *settings("beta", _RL, NUMBER, 0.0, rloo=0.05),
    *settings("use_bias_correction_kl vllm_importance_sampling_correction", "grpo", BOOL, True),
    *settings("epsilon", _RL, NUMBER, 0.2),
    *settings("epsilon_high", _RL, NUMBER),
    *settings("delta vllm_importance_sampling_clip_min", "grpo", NUMBER),
    *settings("loss_type", "grpo", TEXT, "dapo"),
    *settings("importance_sampling_level", "grpo", one_of("token", "sequence"), "token"),
    *settings("sapo_temperature_pos", "grpo", NUMBER, 1.0),
    *settings("sapo_temperature_neg", "grpo", NUMBER, 1.05),
    *settings("scale_rewards", "grpo", TEXT, "group"),
    *settings("multi_objective_aggregation", "grpo", one_of("sum_then_normalize", "normalize_then_sum"), "sum_then_normalize"),
    *settings("entropy_coef", "grpo", NUMBER, 0.0),
    *settings("vllm_importance_sampling_mode", "grpo", one_of("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"), "sequence_mask"),
    *settings("vllm_importance_sampling_clip_max", "grpo", NUMBER, 3.0, older="vllm_importance_sampling_cap", empty=True),
    # rewards
    *settings("reward_funcs", _RL, WORDS),
    *settings("reward_model_name_or_path", _RL, TEXT),
    *settings("reward_weights", _RL, NUMBERS),
    *settings("reward_clip_range", "rloo", PAIR),
    *ABSENT,
)
