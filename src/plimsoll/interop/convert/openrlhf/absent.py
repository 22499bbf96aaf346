"""List the flags of OpenRLHF that have no counterpart, and those of earlier versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plimsoll.interop.convert import absences as why
from plimsoll.interop.convert.absences import Absence
from plimsoll.interop.convert.openrlhf.flag import VersionedFlag, always, flags
from plimsoll.interop.convert.values import COUNT, NUMBER, SWITCH, WHOLE, WORDS, ValueReader, one_of

# fmt: off
# ruff: noqa: E501  (a line a reason)

_ALL = "ppo sft rm dpo kto kd"
_OLD_PPO = "ppo@-0.10.1"


def _idle(reason: Absence, of: str, names: str) -> tuple[VersionedFlag, ...]:
    """Return flags that have no effect. names: `FLAT=DOTTED`, either of which may be empty."""
    return tuple(replace(flag, absent=reason) for flag in flags(of, WORDS, names))


def _lacking(reason: Absence, of: str, reader: ValueReader, flat: str | None, dotted: str, default: object = None) -> VersionedFlag:
    return VersionedFlag(flat, dotted, of, reader, always(default), absent=reason)


_SAVED = "ppo sft rm dpo kd@0.8.2 kto@0.9.2"
_ROLES = ("", "actor.", "critic.")

ABSENT: tuple[VersionedFlag, ...] = (
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
    *(flag for role in ("ref", "reward") for flag in _idle(why.LAUNCHED, "ppo", f"{role}_num_nodes={role}.num_nodes {role}_num_gpus_per_node={role}.num_gpus_per_node")),
    *_idle(why.LAUNCHED, "ppo", "colocate_actor_ref=train.colocate_actor_ref colocate_critic_reward=train.colocate_critic_reward"),
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
    _lacking(Absence("lacking", "optimizer states stay on the cards while engines sample; actor.zero.optimizer_offload: cpu makes room"), "ppo", SWITCH, "deepspeed_enable_sleep", "ds.enable_sleep"),
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
    "vllm_is_correction_type": ("0.11.2", "is_correction_mode"),
}
"""Flags that were removed, with the version that has them no more, and their successor."""
