"""List the flags of OpenRLHF: with a counterpart, without a counterpart, and removed ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plimsoll_convert import absences as why
from plimsoll_convert.absences import Absence
from plimsoll_convert.openrlhf.flag import (
    VersionedFlag,
    always,
    by_command,
    flags,
    from_version,
)
from plimsoll_convert.values import (
    BOUNDS,
    COUNT,
    NUMBER,
    PAIR,
    SWITCH,
    TEXT,
    WHOLE,
    WORDS,
    ValueReader,
    one_of,
)

# fmt: off
# ruff: noqa: E501  (a line a reason)

_ALL = "ppo sft rm dpo kto kd"
_OLD_PPO = "ppo@-0.10.1"


def _idle(reason: Absence, of: str, names: str) -> tuple[VersionedFlag, ...]:
    """Return flags without a counterpart. `names`: `FLAT=DOTTED`; either part may be empty."""
    return tuple(replace(flag, absent=reason) for flag in flags(of, WORDS, names))


def _lacking(reason: Absence, of: str, reader: ValueReader, flat: str | None, dotted: str, default: object = None) -> VersionedFlag:
    return VersionedFlag(flat, dotted, of, reader, always(default), absent=reason)


_SAVED = "ppo sft rm dpo kd@0.8.2 kto@0.9.2"
_ROLES = ("", "actor.", "critic.")

_ABSENT: tuple[VersionedFlag, ...] = (
    *_idle(why.PACKED, "ppo sft rm dpo", "packing_samples=ds.packing_samples"),
    *_idle(why.KERNELS, "ppo,sft,rm,dpo,kto,kd@-0.8.9", "flash_attn="),
    *_idle(why.KERNELS, "ppo,sft,rm,dpo,kto,kd@0.8.10", "attn_implementation=ds.attn_implementation"),
    *_idle(why.KERNELS, "ppo sft dpo kto kd", "use_liger_kernel=ds.use_liger_kernel"),
    *_idle(why.KERNELS, "rm", "compute_fp32_loss=model.compute_fp32_loss_enable"),
    *_idle(why.RECORDED, _ALL, "logging_steps=logger.logging_steps use_tensorboard=logger.tensorboard_dir"),
    *_idle(why.RECORDED, _OLD_PPO, "perf="),
    *_idle(why.ALWAYS, "ppo", "enable_prefix_caching=vllm.enable_prefix_caching"),
    VersionedFlag("gradient_checkpointing_use_reentrant", "ppo:actor.gradient_checkpointing_reentrant model.gradient_checkpointing_reentrant", _ALL, absent=why.ENGINE),
    *_idle(why.ENGINE, _ALL, "deepcompile=ds.deepcompile overlap_comm=ds.overlap_comm"),
    *_idle(why.ENGINE, "ppo sft rm dpo", "=ds.experts_implementation"),
    *_idle(why.ENGINE, "ppo", "vllm_sync_backend=vllm.sync_backend vllm_sync_with_ray=vllm.sync_with_ray"),
    *_idle(why.ENGINE, _OLD_PPO, "actor_init_on_gpu="),
    *_idle(why.LAUNCHED, _ALL, "local_rank=local_rank"),
    *_idle(why.LAUNCHED, "ppo", "ref_num_nodes=ref.num_nodes ref_num_gpus_per_node=ref.num_gpus_per_node colocate_actor_ref=train.colocate_actor_ref"),
    *_idle(why.READ_ONCE, "ppo,sft,rm,dpo@0.9.10", "dataloader_num_workers=data.dataloader_num_workers"),
    *_idle(why.SCORED, "ppo", "micro_rollout_batch_size=rollout.micro_batch_size"),
    *_idle(why.SCORED, "ppo@0.8.6", "rollout_max_tokens_per_gpu=rollout.max_tokens_per_gpu"),
    *_idle(why.CHECKPOINTS, _ALL, "ckpt_path=ckpt.path max_ckpt_mem=ckpt.max_mem use_ds_universal_ckpt=ds.use_universal_ckpt"),
    *_idle(why.CHECKPOINTS, _SAVED, "save_hf_ckpt=ckpt.save_hf disable_ds_ckpt=ckpt.disable_ds"),
    *_idle(why.NAMED, _ALL, "wandb_org=logger.wandb.org wandb_group=logger.wandb.group wandb_run_name=logger.wandb.run_name"),
    *_idle(why.OTHER_METHOD, _OLD_PPO, "ptx_coef="),
    *(flag for role in _ROLES for flag in _idle(why.OTHER_METHOD, "ppo" if role else "sft rm dpo", " ".join(f"={role}muon.{name}" for name in ("lr", "momentum", "nesterov", "no_nesterov", "ns_steps")))),
    *_idle(why.OTHER_METHOD, "ppo@0.10.0", "image_key=data.image_key freeze_visual_encoder=actor.freeze_visual_encoder"),
    *_idle(why.OTHER_METHOD, "ppo@0.9.1", "async_queue_size=train.async_queue_size"),
    *_idle(why.OTHER_METHOD, "ppo@0.9.7", "partial_rollout=train.partial_rollout_enable"),
    *_idle(why.UNASKED, "sft@-0.10.1", "train_split="),
    *(_lacking(why.ADAMW.unless("adam"), "ppo" if role else "sft rm dpo", one_of("adam", "muon"), None, f"{role}optim", "adam") for role in _ROLES),
    VersionedFlag("aux_loss_coef", "ppo:actor.aux_loss_coef model.aux_loss_coef", _ALL, NUMBER, always(0.0), why.METHOD.unless(0.0)),
    _lacking(why.ONE_CARD.unless(1), "ppo sft rm dpo", COUNT, "ring_attn_size", "ds.ring_attn_size", 1),
    *_idle(why.OTHER_METHOD, "ppo sft rm dpo", "ring_head_stride=ds.ring_attn_head_stride"),
    _lacking(why.ONE_CARD.unless(1), "ppo sft rm dpo kd@0.8.5", COUNT, "ds_tensor_parallel_size", "ds.tensor_parallel_size", 1),
    _lacking(why.MODEL_FILES, _ALL, SWITCH, "disable_fast_tokenizer", "data.disable_fast_tokenizer"),
    _lacking(why.METHOD, _ALL, SWITCH, "full_determinism", "train.full_determinism_enable"),
    _lacking(why.SYNCHRONOUS, "ppo", SWITCH, "async_train", "train.async_enable"),
    _lacking(Absence("lacking", "log-probs of the trainer are over the whole vocabulary, and so top_p is 1 in training").unless(1.0), "ppo", NUMBER, "top_p", "rollout.top_p", 1.0),
    _lacking(why.TEXT_ONLY.unless(0), "ppo@0.10.0", WHOLE, "max_images_per_prompt", "data.max_images_per_prompt", 0),
    _lacking(why.MODEL_FILES, "ppo", SWITCH, "save_value_network", "critic.save_value_network"),
)

REMOVED: Mapping[str, tuple[str, str]] = {
    "torch_compile": ("0.7.1", "deepcompile"),
    "universal_ckpt": ("0.6.4", "use_ds_universal_ckpt"),
    "use_kl_estimator_k3": ("0.6.1", "kl_estimator"),
    "train_split": ("0.7.0", "dataset_split"),
    "pretrain_data": ("0.7.1", ""),
    "pretrain_data_probs": ("0.7.1", ""),
    "pretrain_split": ("0.7.1", ""),
    "bf16": ("0.9.2", "param_dtype"),
    "flash_attn": ("0.8.10", "attn_implementation"),
    "prompt_max_len": ("0.9.8", "max_len"),
    "generate_max_len": ("0.9.8", "max_new_tokens"),
    "use_icepop": ("0.9.3", "vllm_is_correction_type"),
    "ref_reward_offload": ("0.10.2", "ref_offload"),
    "enable_vllm_is_correction": ("0.11.2", "is_correction_level"),
    "vllm_is_correction_type": ("0.11.2", "is_correction_mode")
}
"""Removed flags: (first version without the flag, its successor) by the flag's name."""


# fmt: off
# ruff: noqa: E501  (a line a flag)

_DATA = "sft rm dpo kto kd"
_CARDS = ValueReader(int, lowest=0)
"""Number of cards or machines of a group; 0 if the command has no such group."""
ESTIMATORS = {
    "gae": "gae",
    "reinforce": "reinforce_pp",
    "rloo": "rloo",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "flash_reinforce": "batch_mean"
}
"""Plimsoll's estimator for each of OpenRLHF's."""
CORRECTIONS = {
    "tis": ("token", "clip"),
    "icepop": ("token", "mask"),
    "seq-mask-tis": ("seq", "mask"),
    "mis": ("seq", "mask")
}
"""(level, mode) of each type of correction; see `Gate`."""

_MODELS = (
    VersionedFlag("pretrain", "ppo:actor.model_name_or_path model.model_name_or_path", _ALL, TEXT, by_command(kto="bigscience/bloomz-1b7")),
    VersionedFlag("bf16", "", "ppo,sft,rm,dpo,kto,kd@-0.9.1", SWITCH),
    VersionedFlag("param_dtype", "ds.param_dtype", "ppo,sft,rm,dpo,kto,kd@0.9.2", one_of("bf16", "fp16"), always("bf16")),
    VersionedFlag("grad_accum_dtype", "ds.grad_accum_dtype", _ALL, TEXT),
    VersionedFlag("gradient_checkpointing", "ppo:actor.gradient_checkpointing_enable model.gradient_checkpointing_enable", _ALL, SWITCH),
    *flags(_ALL, SWITCH, "load_in_4bit=ds.load_in_4bit adam_offload=ds.adam_offload"),
    VersionedFlag("lora_rank", "ds.lora.rank", _ALL, WHOLE, always(0)),
    VersionedFlag("lora_alpha", "ds.lora.alpha", _ALL, COUNT, always(16)),
    VersionedFlag("lora_dropout", "ds.lora.dropout", _ALL, NUMBER, always(0.0)),
    VersionedFlag("target_modules", "ds.lora.target_modules", _ALL, WORDS, always("all-linear")),
    VersionedFlag("zero_stage", "ds.zero_stage", _ALL, WHOLE, always(2)),
    VersionedFlag("zpg", "ds.zpg", _ALL, COUNT, always(1)),
    VersionedFlag("seed", "train.seed", _ALL, WHOLE, always(42)),
    VersionedFlag("critic_pretrain", "critic.model_name_or_path", "ppo", TEXT),
    VersionedFlag("ref_pretrain", "ref.model_name_or_path", "dpo", TEXT),
    VersionedFlag("ref_reward_offload", "", "ppo@-0.10.1", SWITCH),
    VersionedFlag("ref_offload", "ppo:ref.offload dpo:ref.offload", "ppo@0.10.2 dpo kto", SWITCH),
    VersionedFlag(None, "reward.offload", "ppo", SWITCH),
    VersionedFlag("teacher_model", "", "kd", TEXT),
    VersionedFlag("teacher_offload", "", "kd", SWITCH),
    VersionedFlag("enable_ema", "train.enable_ema", "ppo", SWITCH),
    VersionedFlag("ema_beta", "train.ema_beta", "ppo", NUMBER, always(0.992)),
)


def _of_role(role: str, rate: float) -> tuple[VersionedFlag, ...]:
    return (
        VersionedFlag(f"{role}_learning_rate", f"{role}.adam.lr", "ppo", NUMBER, always(rate)),
        VersionedFlag(None, f"{role}.adam.betas", "ppo", PAIR, always((0.9, 0.95))),
        VersionedFlag(None, f"{role}.adam.eps", "ppo", NUMBER, always(1e-8)),
        VersionedFlag(None, f"{role}.adam.weight_decay", "ppo", NUMBER, always(0.0)),
        VersionedFlag(None, f"{role}.max_norm", "ppo", NUMBER, always(1.0)),
        VersionedFlag(None, f"{role}.lr_scheduler", "ppo", TEXT, always("cosine_with_min_lr")),
        VersionedFlag(None, f"{role}.lr_warmup_ratio", "ppo", NUMBER, always(0.03)),
        VersionedFlag(None, f"{role}.min_lr_ratio", "ppo", NUMBER, always(0.1)),
    )


_OPTIMIZERS = (
    VersionedFlag("learning_rate", "adam.lr", _DATA, NUMBER, by_command(sft=5e-6, rm=9e-6, dpo=1e-5, kto=1e-5, kd=5e-6)),
    VersionedFlag("adam_betas", "adam.betas", f"ppo@-0.10.1 {_DATA}", PAIR, always((0.9, 0.95))),
    VersionedFlag(None, "adam.eps", "sft rm dpo", NUMBER, always(1e-8)),
    VersionedFlag("l2", "adam.weight_decay", f"ppo@-0.10.1 {_DATA}", NUMBER, always(0.0)),
    VersionedFlag("max_norm", "max_norm", f"ppo@-0.10.1 {_DATA}", NUMBER, always(1.0)),
    VersionedFlag("lr_scheduler", "lr_scheduler", "ppo@0.8.5-0.10.1 sft kd rm,dpo,kto@0.8.5", TEXT, always("cosine_with_min_lr")),
    VersionedFlag("lr_warmup_ratio", "lr_warmup_ratio", f"ppo@-0.10.1 {_DATA}", NUMBER, always(0.03)),
    VersionedFlag("min_lr_ratio", "min_lr_ratio", "sft,rm@0.10.2 dpo@0.8.7", NUMBER, always(0.1)),
    *_of_role("actor", 1e-6),
    *_of_role("critic", 9e-6),
)

_ROWS = (
    *flags("ppo", TEXT, "prompt_data=data.prompt_dataset prompt_data_probs=data.prompt_probs"),
    VersionedFlag("prompt_split", "data.prompt_split", "ppo", TEXT, always("train")),
    *flags(_DATA, TEXT, "dataset=data.dataset dataset_probs=data.dataset_probs"),
    VersionedFlag("dataset_split", "data.dataset_split", _DATA, TEXT, always("train")),
    VersionedFlag("max_samples", "data.max_samples", _ALL, COUNT, by_command(10**6, ppo=10**8)),
    VersionedFlag("input_key", "data.input_key", "ppo sft kto kd", TEXT, always("input")),
    VersionedFlag("output_key", "data.output_key", "sft kto kd", TEXT, by_command(kd="output")),
    VersionedFlag("label_key", "data.label_key", "ppo kto", TEXT, by_command(kto="label")),
    VersionedFlag("prompt_key", "data.prompt_key", "rm dpo", TEXT),
    VersionedFlag("chosen_key", "data.chosen_key", "rm dpo", TEXT, always("chosen")),
    VersionedFlag("rejected_key", "data.rejected_key", "rm dpo", TEXT, always("rejected")),
    VersionedFlag("margin_loss", "model.margin_loss_enable", "rm", SWITCH),
    VersionedFlag("multiturn", "data.multiturn", "sft", SWITCH),
    VersionedFlag("pretrain_mode", "model.pretrain_mode_enable", "sft kd", SWITCH),
    *flags(_ALL, SWITCH, "apply_chat_template=data.apply_chat_template use_ms=use_ms"),
    VersionedFlag("input_template", "data.input_template", _ALL, TEXT, by_command(None, **dict.fromkeys(("sft", "kto", "kd"), "User: {}\nAssistant: "))),
    VersionedFlag("tokenizer_chat_template", "data.tokenizer_chat_template", "sft rm dpo@0.8.11", TEXT),
    VersionedFlag("eval_dataset", "eval.dataset", _ALL, TEXT),
    VersionedFlag("eval_split", "eval.split", _ALL, TEXT, by_command("test", ppo="train", sft="train", rm="train")),
    VersionedFlag("eval_steps", "eval.steps", _ALL, WHOLE, always(-1)),
    VersionedFlag("eval_temperature", "eval.temperature", "ppo", NUMBER, always(0.6)),
    VersionedFlag("eval_n_samples_per_prompt", "eval.n_samples_per_prompt", "ppo", COUNT, always(4)),
    VersionedFlag("best_metric_key", "ckpt.best_metric_key", "ppo@0.9.9", TEXT, always("")),
)

_BATCHES = (
    VersionedFlag("max_len", "data.max_len", _ALL, COUNT, by_command(2048, ppo=from_version(None, "0.9.8", 2048), rm=512, dpo=512)),
    *flags("ppo@-0.9.7", COUNT, "prompt_max_len= generate_max_len=", 1024),
    VersionedFlag("max_new_tokens", "rollout.max_new_tokens", "ppo@0.9.8", COUNT),
    VersionedFlag("train_batch_size", "train.batch_size", _ALL, COUNT, always(128)),
    VersionedFlag("micro_train_batch_size", "train.micro_batch_size", _ALL, COUNT, by_command(8, ppo=from_version(4, "0.10.0", 1), rm=1)),
    VersionedFlag("use_dynamic_batch", "train.dynamic_batch_enable", "ppo@0.8.6", SWITCH),
    VersionedFlag("train_max_tokens_per_gpu", "train.max_tokens_per_gpu", "ppo@0.8.6", COUNT, always(16192)),
    VersionedFlag("max_epochs", "train.max_epochs", _ALL, COUNT, by_command(1, sft=2)),
    *flags("ppo", COUNT, "num_episodes=train.num_episodes n_samples_per_prompt=rollout.n_samples_per_prompt", 1),
    VersionedFlag("rollout_batch_size", "rollout.batch_size", "ppo", COUNT, always(1024)),
    VersionedFlag("vllm_generate_batch_size", "rollout.vllm_generate_batch_size", "ppo@0.8.1", COUNT),
    VersionedFlag("dynamic_filtering", "algo.dynamic_filtering_enable", "ppo@0.8.1", SWITCH),
    VersionedFlag("dynamic_filtering_reward_range", "algo.dynamic_filtering_range", "ppo@0.8.1", PAIR, always((0.0, 1.0))),
)


def _group(role: str) -> tuple[VersionedFlag, ...]:
    return (
        VersionedFlag(f"{role}_num_nodes", f"{role}.num_nodes", "ppo", _CARDS, always(1)),
        VersionedFlag(f"{role}_num_gpus_per_node", f"{role}.num_gpus_per_node", "ppo", _CARDS, always(8)),
    )


_ENGINES = (
    *_group("actor"),
    *_group("critic"),
    *_group("reward"),
    *flags("ppo", SWITCH, "colocate_all_models=train.colocate_all colocate_critic_reward=train.colocate_critic_reward vllm_enable_sleep=vllm.enable_sleep deepspeed_enable_sleep=ds.enable_sleep enforce_eager=vllm.enforce_eager"),
    VersionedFlag("vllm_num_engines", "vllm.num_engines", "ppo", WHOLE),
    VersionedFlag("vllm_tensor_parallel_size", "vllm.tensor_parallel_size", "ppo", COUNT, always(1)),
    VersionedFlag("vllm_gpu_memory_utilization", "vllm.gpu_memory_utilization", "ppo", NUMBER, always(0.95)),
    VersionedFlag("temperature", "rollout.temperature", "ppo", NUMBER, always(1.0)),
)

_ALGORITHM = (
    VersionedFlag("advantage_estimator", "algo.advantage.estimator", "ppo", one_of(*ESTIMATORS), always("gae")),
    *flags("ppo", NUMBER, "gamma=algo.advantage.gamma lambd=algo.advantage.lambd", 1.0),
    *flags("ppo", SWITCH, "no_advantage_std_norm=algo.advantage.no_std_norm use_kl_loss=algo.kl.use_loss"),
    VersionedFlag("value_clip", "critic.value_clip", "ppo", NUMBER, from_version(0.2, "0.8.2", 0.5)),
    VersionedFlag("freezing_actor_steps", "critic.freezing_steps", "ppo", WHOLE, always(-1)),
    VersionedFlag("policy_loss_type", "actor.policy_loss_type", "ppo@0.8.8", one_of("ppo", "gspo"), always("ppo")),
    VersionedFlag("eps_clip", "actor.eps_clip", "ppo", NUMBER, always(0.2)),
    VersionedFlag("eps_clip_low_high", "actor.eps_clip_low_high", "ppo@0.8.2", PAIR),
    VersionedFlag("dual_clip", "actor.dual_clip", "ppo@0.8.6", NUMBER),
    VersionedFlag("loss_agg_mode", "actor.loss_agg_mode", "ppo@0.11.2", one_of("token-mean", "seq-mean-token-mean"), always("token-mean")),
    VersionedFlag("entropy_loss_coef", "actor.entropy_coef", "ppo", NUMBER, from_version(0.0, "0.8.3", None)),
    VersionedFlag("enable_vllm_is_correction", "algo.advantage.is_correction_enable", "ppo@0.8.9-0.11.1", SWITCH),
    VersionedFlag("use_icepop", "", "ppo@0.9.1-0.9.2", SWITCH),
    VersionedFlag("vllm_is_correction_type", "algo.advantage.is_correction_type", "ppo@0.9.3-0.11.1", one_of(*CORRECTIONS), always("tis")),
    VersionedFlag("is_correction_level", "algo.advantage.is_correction_level", "ppo@0.11.2", one_of("off", "token", "seq"), always("off")),
    VersionedFlag("is_correction_mode", "algo.advantage.is_correction_mode", "ppo@0.11.2", one_of("mask", "clip"), always("mask")),
    VersionedFlag("is_correction_gating", "algo.advantage.is_correction_gating", "ppo@0.11.2", one_of("ratio", "binary_kl", "tv"), always("ratio")),
    VersionedFlag("vllm_is_truncated_threshold", "algo.advantage.is_correction_threshold", "ppo@0.8.9", BOUNDS, from_version((2.0,), "0.9.1", (0.5, 5.0))),
    VersionedFlag("init_kl_coef", "algo.kl.init_coef", "ppo", NUMBER, always(0.01)),
    VersionedFlag("kl_estimator", "algo.kl.estimator", "ppo", one_of("k1", "k2", "k3"), always("k1")),
    VersionedFlag("kl_target", "algo.kl.target", "ppo", NUMBER),
    VersionedFlag("kl_horizon", "algo.kl.horizon", "ppo", WHOLE, always(10000)),
    VersionedFlag("kl_unbiased_gradient", "algo.kl.unbiased_gradient", "ppo@0.11.1", SWITCH),
    VersionedFlag("loss", "model.loss_type", "rm", TEXT, always("sigmoid")),
    VersionedFlag("beta", "model.beta", "dpo kto", NUMBER, by_command(dpo=0.1, kto=0.01)),
    VersionedFlag("ipo", "model.ipo_enable", "dpo", SWITCH),
    *flags("dpo", NUMBER, "label_smoothing=model.label_smoothing nll_loss_coef=model.nll_loss_coef", 0.0),
    *flags("kto", NUMBER, "desirable_loss_weight= undesirable_loss_weight=", 1.0),
    VersionedFlag("kd_coef", "", "kd", NUMBER, always(0.4)),
)

_REWARDS = (
    *flags("ppo", TEXT, "reward_pretrain=reward.model_name_or_path remote_rm_url=reward.remote_url agent_func_path=train.agent_func_path"),
    VersionedFlag("normalize_reward", "reward.normalize_enable", "ppo", SWITCH),
    VersionedFlag("reward_clip_range", "reward.clip_range", "ppo", PAIR, always((-10.0, 10.0))),
    VersionedFlag("overlong_buffer_len", "reward.overlong_buffer_len", "ppo@0.8.7", NUMBER),
    VersionedFlag("overlong_penalty_factor", "reward.overlong_penalty_factor", "ppo@0.8.7", NUMBER, always(1.0)),
    VersionedFlag("stop_properly_penalty_coef", "reward.stop_properly_penalty_coef", "ppo@0.9.2", NUMBER),
    VersionedFlag("value_head_prefix", "ds.value_head_prefix", "ppo rm", TEXT, always("score")),
)

_RUN = (
    VersionedFlag("save_path", "ckpt.output_dir", _ALL, TEXT, always("./ckpt")),
    VersionedFlag("save_steps", "ckpt.save_steps", _ALL, WHOLE, always(-1)),
    VersionedFlag("max_ckpt_num", "ckpt.max_num", _ALL, COUNT, always(3)),
    VersionedFlag("load_checkpoint", "ckpt.load_enable", _ALL, SWITCH),
    VersionedFlag("use_wandb", "logger.wandb.key", _ALL, TEXT),
    VersionedFlag("wandb_project", "logger.wandb.project", _ALL, TEXT, by_command("openrlhf_train_dpo", ppo="openrlhf_train_ppo", sft="openrlhf_train_sft", kd="openrlhf_train_sft", rm="openrlhf_train_rm")),
)

FLAGS: tuple[VersionedFlag, ...] = (*_MODELS, *_ROWS, *_BATCHES, *_OPTIMIZERS, *_RUN, *_ENGINES, *_ALGORITHM, *_REWARDS, *_ABSENT)
