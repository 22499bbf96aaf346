"""List verl's settings, with the defaults of its configs and the names that they had before.

They are those of verl/trainer/config/ of 0.9.1.
"""

from __future__ import annotations

from plimsoll.config.base import AUTO
from plimsoll.interop.convert.values import (
    BOOL,
    COUNT,
    NUMBER,
    PAIR,
    TEXT,
    WHOLE,
    WORDS,
    Setting,
    ValueReader,
    one_of,
    settings,
)
from plimsoll.interop.convert.verl.absent import ABSENT

# fmt: off
# ruff: noqa: E501  (a line for settings that are alike)

_PPO, _SFT, _ALL = "ppo", "sft", "ppo sft"
_ACTOR, _ROLLOUT, _MODEL, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))


def _under(prefix: str, names: str, reader: ValueReader, default: object = None, of: str = _PPO, *, older: str = "", empty: bool = False, **by_command: object) -> tuple[Setting, ...]:
    """Return settings of one section. older: their earlier sections or names."""
    full = " ".join(f"{prefix}.{name}" for name in names.split())
    return settings(full, of, reader, default, older=older, empty=empty, **by_command)


def _role(of: str, model: str, optim: str, engine: str, rate: float, older: str = "") -> tuple[Setting, ...]:
    """Return the settings of a role that learns. older: the earlier name of the engine's section."""
    return (
        *_under(model, "path", TEXT, "~/models/deepseek-llm-7b-chat", of, older=f"{model}.partial_pretrain"),
        *_under(model, "trust_remote_code enable_activation_offload", BOOL, False, of),
        *_under(model, "enable_gradient_checkpointing", BOOL, True, of),
        *_under(model, "lora_rank", WHOLE, 0, of),
        *_under(model, "lora_alpha", WHOLE, 16, of),
        *_under(model, "target_modules", WORDS, ("all-linear",), of),
        *_under(model, "custom_chat_template", TEXT, None, of),
        *_under(optim, "lr", NUMBER, rate, of),
        *_under(optim, "weight_decay", NUMBER, 0.01, of),
        *_under(optim, "betas", PAIR, (0.9, 0.999), of),
        *_under(optim, "clip_grad", NUMBER, 1.0, of, older=optim.replace("optim", "grad_clip")),
        *_under(optim, "lr_scheduler_type warmup_style lr_scheduler lr_decay_style", TEXT, None, of),
        *_under(optim, "lr_warmup_steps", WHOLE, -1, of, empty=True),
        *_under(optim, "lr_warmup_steps_ratio", NUMBER, 0.0, of, empty=True, older=f"{optim}.warmup_steps_ratio"),
        *_under(optim, "min_lr_ratio", NUMBER, None, of),
        *_under(optim, "optimizer", TEXT, "AdamW", of),
        *_engine(of, engine, older),
    )


def _engine(of: str, engine: str, older: str = "") -> tuple[Setting, ...]:
    defaults = {"param_offload": False, "optimizer_offload": False, "offload_policy": False, "reshard_after_forward": True}
    return tuple(
        setting
        for name, default in {**defaults, "model_dtype": "fp32"}.items()
        for setting in _under(engine, name, TEXT if name == "model_dtype" else BOOL, default, of, older=f"{older}.{name}" if older else "")
    )


SETTINGS: tuple[Setting, ...] = (
    # rows
    *settings("data.train_files", _ALL, WORDS, ("~/data/rlhf/gsm8k/train.parquet",), sft=("~/data/gsm8k/train.parquet",)),
    *settings("data.val_files", _ALL, WORDS, ("~/data/rlhf/gsm8k/test.parquet",), sft=None),
    *settings("data.train_max_samples data.val_max_samples", _ALL, WHOLE, -1),
    *settings("data.prompt_key", _ALL, TEXT, "prompt", sft=None),
    *settings("data.reward_fn_key", _PPO, TEXT, "data_source"),
    *settings("data.messages_key", _SFT, TEXT, "messages", older="data.multiturn.messages_key"),
    *settings("data.response_key", _SFT, TEXT),
    *settings("data.prompt_dict_keys data.response_dict_keys", _SFT, WORDS),
    *settings("data.tools_key", _SFT, TEXT, "tools", older="data.multiturn.tools_key"),
    *settings("data.max_prompt_length data.max_response_length", _PPO, COUNT, 512),
    *settings("data.max_length", _SFT, COUNT, 1024),
    *settings("data.truncation", _ALL, one_of("error", "left", "right", "middle"), "error"),
    *settings("data.filter_overlong_prompts", _PPO, BOOL, False),
    *settings("data.train_batch_size", _ALL, COUNT, 1024, sft=256),
    *settings("data.gen_batch_size", _PPO, COUNT),
    *settings("data.micro_batch_size_per_gpu", _SFT, COUNT, 4, older="data.micro_batch_size"),
    *settings("data.max_token_len_per_gpu", _SFT, COUNT, 8192),
    *settings("data.use_dynamic_bsz", _SFT, BOOL, True),
    *settings("data.shuffle", _PPO, BOOL, True),
    # models
    *_role(_PPO, _MODEL, f"{_ACTOR}.optim", f"{_ACTOR}.fsdp_config", 1e-6),
    *_role(_PPO, "critic.model", "critic.optim", "critic.fsdp", 1e-5, "critic.model.fsdp_config"),
    *_role(_SFT, "model", "optim", "engine", 1e-3),
    *_engine(_PPO, f"{_REF}.fsdp_config"),
    *_under(_REF, "model.path", TEXT),
    # batches
    *_under(_ACTOR, "ppo_mini_batch_size", COUNT, 256),
    *_under(_ACTOR, "ppo_micro_batch_size_per_gpu", COUNT, older=f"{_ACTOR}.ppo_micro_batch_size"),
    *_under(_ACTOR, "use_dynamic_bsz", BOOL, False),
    *_under(_ACTOR, "ppo_max_token_len_per_gpu", COUNT, 16384),
    *_under(_ACTOR, "ppo_epochs", COUNT, 1),
    *_under(_ROLLOUT, "n", COUNT, 1),
    *settings("critic.ppo_mini_batch_size", _PPO, COUNT),
    *settings("algorithm.filter_groups.enable", _PPO, BOOL, False),
    *settings("algorithm.filter_groups.metric", _PPO, TEXT),
    *settings("algorithm.filter_groups.max_num_gen_batches", _PPO, WHOLE, 0),
    # the run
    *settings("trainer.n_gpus_per_node", _ALL, COUNT, 8, sft=1),
    *settings("trainer.nnodes", _ALL, COUNT, 1),
    *settings("trainer.total_epochs", _ALL, COUNT, 30, sft=4),
    *settings("trainer.total_training_steps", _ALL, COUNT),
    *settings("trainer.save_freq trainer.test_freq", _ALL, TEXT, -1),
    *settings("trainer.project_name", _ALL, TEXT, "verl_examples", sft="gsm8k-sft"),
    *settings("trainer.experiment_name", _ALL, TEXT, "gsm8k", sft="test"),
    *settings("trainer.default_local_dir trainer.resume_from_path", _ALL, TEXT),
    *settings("trainer.max_actor_ckpt_to_keep", _ALL, WHOLE, older="trainer.max_ckpt_to_keep"),
    *settings("trainer.resume_mode", _ALL, one_of(AUTO, "disable", "resume_path"), AUTO),
    *settings("trainer.logger", _ALL, WORDS, ("console", "wandb")),
    *settings("trainer.seed", _SFT, WHOLE, 1),
    # engines
    *_under(_ROLLOUT, "name", TEXT, "vllm"),
    *_under(_ROLLOUT, "tensor_model_parallel_size", COUNT, 2),
    *_under(_ROLLOUT, "pipeline_model_parallel_size", COUNT, 1),
    *_under(_ROLLOUT, "gpu_memory_utilization", NUMBER, 0.5),
    *_under(_ROLLOUT, "free_cache_engine", BOOL, True),
    *_under(_ROLLOUT, "dtype", TEXT, "bfloat16"),
    *_under(_ROLLOUT, "temperature top_p val_kwargs.top_p", NUMBER, 1.0),
    *_under(_ROLLOUT, "top_k val_kwargs.top_k", WHOLE, -1),
    *_under(_ROLLOUT, "max_num_seqs", COUNT, 256),
    *_under(_ROLLOUT, "enforce_eager", BOOL),
    *_under(_ROLLOUT, "max_num_batched_tokens", COUNT),
    *_under(_ROLLOUT, "val_kwargs.n", COUNT, 1),
    *_under(_ROLLOUT, "val_kwargs.do_sample", BOOL, False),
    *_under(_ROLLOUT, "val_kwargs.temperature", NUMBER, 0.0),
    # algorithm
    *settings("algorithm.adv_estimator", _PPO, TEXT, "gae"),
    *settings("algorithm.gamma algorithm.lam", _PPO, NUMBER, 1.0),
    *settings("algorithm.norm_adv_by_std_in_grpo", _PPO, BOOL, True),
    *settings("algorithm.use_kl_in_reward", _PPO, BOOL, False),
    *settings("algorithm.kl_penalty", _PPO, TEXT, "kl"),
    *settings("algorithm.kl_ctrl.type", _PPO, one_of("fixed", "adaptive"), "fixed"),
    *settings("algorithm.kl_ctrl.kl_coef", _PPO, NUMBER, 0.001),
    *settings("algorithm.kl_ctrl.horizon", _PPO, COUNT, 10000),
    *settings("algorithm.kl_ctrl.target_kl", _PPO, NUMBER, 0.1),
    *_under(_ACTOR, "use_kl_loss", BOOL, False),
    *_under(_ACTOR, "kl_loss_coef", NUMBER, 0.001),
    *_under(_ACTOR, "kl_loss_type", TEXT, "low_var_kl"),
    *_under(_ACTOR, "entropy_coeff", NUMBER, 0.0),
    *_under(_ACTOR, "clip_ratio", NUMBER, 0.2),
    *_under(_ACTOR, "clip_ratio_low clip_ratio_high", NUMBER, 0.2, empty=True),
    *_under(_ACTOR, "clip_ratio_c", NUMBER, 3.0, empty=True),
    *_under(_ACTOR, "tau_pos", NUMBER, 1.0, older=f"{_ACTOR}.policy_loss.tau_pos"),
    *_under(_ACTOR, "tau_neg", NUMBER, 1.05, older=f"{_ACTOR}.policy_loss.tau_neg"),
    *_under(_ACTOR, "policy_loss.loss_mode", TEXT, "vanilla"),
    *_under(_ACTOR, "loss_agg_mode", TEXT, "token-mean"),
    *_under(_ACTOR, "loss_scale_factor", COUNT),
    *_under(_ACTOR, "tis_imp_ratio_cap", NUMBER),
    *settings("algorithm.rollout_correction.rollout_is", _PPO, TEXT),
    *settings("algorithm.rollout_correction.rollout_is_threshold", _PPO, TEXT, "2.0"),
    *settings("algorithm.rollout_correction.bypass_mode", _PPO, BOOL, False),
    *settings("critic.cliprange_value", _PPO, NUMBER, 0.5, empty=True),
    *settings("trainer.critic_warmup", _PPO, WHOLE, 0),
    # rewards
    *settings("reward.custom_reward_function.path", _PPO, TEXT, older="custom_reward_function.path"),
    *settings("reward.custom_reward_function.name", _PPO, TEXT, "compute_score", older="custom_reward_function.name"),
    *settings("reward.reward_manager.name", _PPO, TEXT, "naive", older="reward_model.reward_manager"),
    *settings("reward.reward_model.enable", _PPO, BOOL, False, older="reward_model.enable"),
    *settings("reward.reward_model.model_path", _PPO, TEXT, older="reward_model.model.path reward.reward_model.model.path"),
    *settings("reward_model.model.trust_remote_code", _PPO, BOOL),
    *settings("reward.reward_kwargs.overlong_buffer_cfg.enable", _PPO, BOOL, False, older="reward_model.reward_kwargs.overlong_buffer_cfg.enable reward_model.overlong_buffer.enable"),
    *settings("reward.reward_kwargs.overlong_buffer_cfg.len", _PPO, COUNT, older="reward_model.reward_kwargs.overlong_buffer_cfg.len reward_model.overlong_buffer.len"),
    *settings("reward.reward_kwargs.overlong_buffer_cfg.penalty_factor", _PPO, NUMBER, 1.0, older="reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor reward_model.overlong_buffer.penalty_factor"),
    *settings("reward.reward_kwargs.max_resp_len", _PPO, COUNT, older="reward_model.reward_kwargs.max_resp_len"),
    *ABSENT,
)
