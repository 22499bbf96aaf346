"""List verl's settings, with the defaults of its configs and their earlier names.

The source is verl/trainer/config/ of 0.9.1, and for an older program the config of that program.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from plimsoll.config.base import AUTO
from plimsoll.config.secrets import MASK, is_secret
from plimsoll.config.yaml_tree import read_value as read_yaml
from plimsoll.config.yaml_tree import write_value
from plimsoll.errors import ConfigError
from plimsoll_convert import absences as why
from plimsoll_convert.absences import Absence
from plimsoll_convert.launch import Launch, propose
from plimsoll_convert.rules import adapter_targets, sleep_level
from plimsoll_convert.settings import (
    BOOL,
    COUNT,
    NUMBER,
    PAIR,
    TEXT,
    WHOLE,
    WORDS,
    Assignment,
    Convert,
    Options,
    Remark,
    Setting,
    ValueReader,
    absent,
    by_name,
    join_words,
    not_negative,
    one_of,
    or_none,
    read_settings,
    settings,
    settings_of,
    unchanged,
)
from plimsoll_convert.verl import TRAINER

# fmt: off
# ruff: noqa: E501  (a line a reason)

_PPO, _SFT, _ALL = "ppo", "sft", "ppo sft"
_ACTOR, _ROLLOUT, _MODEL, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))
_MODELS = {_MODEL: _PPO, "critic.model": _PPO, "model": _SFT}
_OPTIMS = {f"{_ACTOR}.optim": _PPO, "critic.optim": _PPO, "optim": _SFT}
_ENGINES = {f"{_ACTOR}.fsdp_config": _PPO, f"{_REF}.fsdp_config": _PPO, "critic.fsdp": _PPO, "critic.model.fsdp_config": _PPO, "engine": _SFT}
ULYSSES = "ulysses_sequence_parallel_size"
_OWN_EXPERTS = Absence("lacking", "the experts of the trainer's own scoring are not replayed").unless("disabled", "R3")
_ONE_CARD = why.ONE_CARD.unless(None, 1, -1, False)
_SINGLE_TURN = why.TOOLS.unless(None, "single_turn_agent")


def _absent_under(reason: Absence, prefix: str, names: str, *reading: object, of: str = _PPO) -> tuple[Setting, ...]:
    full = " ".join(f"{prefix}.{name}" for name in names.split())
    return absent(reason, {of: full}, *reading)  # type: ignore[arg-type]  # a reader and a default


def _of_roles() -> tuple[Setting, ...]:
    rows: list[Setting] = []
    for model, of in _MODELS.items():
        rows += _absent_under(why.METHOD, model, "lora_adapter_path exclude_modules", of=of)
        rows += _absent_under(why.PACKED, model, "use_remove_padding", of=of)
        rows += _absent_under(why.KERNELS, model, "use_fused_kernels use_liger", of=of)
        rows += _absent_under(why.UNASKED, model, "use_shm strategy torch_dtype tokenizer_path hf_config_path external_lib", of=of)
    for optim, of in _OPTIMS.items():
        rows += _absent_under(why.UNASKED, optim, "total_training_steps num_cycles min_lr min_lr_factor lr_warmup_init init_lr_ratio lr_decay_steps lr_wsd_decay_style lr_wsd_decay_steps zero_indexed_step master_weights store_param_remainders exp_avg_dtype exp_avg_sq_dtype optimizer_impl", of=of)
    for engine, of in _ENGINES.items():
        rows += _absent_under(why.ENGINE, engine, "dtype mixed_precision.param_dtype mixed_precision.reduce_dtype mixed_precision.buffer_dtype forward_prefetch use_orig_params entropy_checkpointing entropy_from_logits_with_chunking pad_to_length forward_only use_no_sync_for_gradient_accumulation use_torch_compile seed entropy_from_logits_chunk_size pad_to_length_bucket full_determinism strategy wrap_policy.min_num_params wrap_policy.transformer_layer_cls_to_wrap", of=of)
        rows += _absent_under(_ONE_CARD, engine, "fsdp_size", WHOLE, of=of)
    return tuple(rows)


_ABSENT: tuple[Setting, ...] = (
    *_of_roles(),
    *absent(why.ENGINE, {_ALL: f"{_ACTOR}.strategy {_REF}.strategy critic.strategy strategy model_engine engine model optim actor@actor_rollout_ref.actor {_ACTOR}.model_engine --config-name", _PPO: f"{_ACTOR}.use_torch_compile {_REF}.use_torch_compile actor_rollout_ref.nccl_timeout"}),
    *absent(why.KERNELS, {_ALL: f"{_ACTOR}.entropy_from_logits_with_chunking {_REF}.entropy_from_logits_with_chunking {_ACTOR}.entropy_checkpointing {_REF}.entropy_checkpointing {_ACTOR}.use_fused_kernels"}),
    *absent(why.PACKED, {_ALL: f"{_ACTOR}.use_remove_padding {_ACTOR}.pad_to_length {_REF}.pad_to_length use_remove_padding trainer.balance_batch"}),
    *absent(why.UNASKED, {_PPO: f"{_ACTOR}.data_loader_seed {_ACTOR}.freeze_vision_tower actor_rollout_ref.hybrid_engine {_ACTOR}.load_weight data.seed critic.enable critic.loss_agg_mode {_ACTOR}.calculate_entropy {_ACTOR}.calculate_sum_pi_squared algorithm.filter_groups.max_inflight_gen_batches", _SFT: "data.enable_thinking_key data.enable_thinking_default"}),
    *absent(why.READ_ONCE, {_ALL: "data.val_batch_size data.filter_overlong_prompts_workers data.dataloader_num_workers data.num_workers data.return_raw_chat data.return_raw_input_ids data.return_full_prompt data.return_multi_modal_inputs data.use_shm data.validation_shuffle data.trust_remote_code data.balance_dp_token data.ignore_input_ids_mismatch data.need_tools_kwargs data.continuous_token.enable data.tokenizer data.pad_mode data.image_patch_size data.prompt_type data.val_score_key data.continuous_token.model_family"}),
    *absent(why.SCORED, {_PPO: " ".join(f"critic.{name}" for name in ["ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu", "forward_micro_batch_size", "forward_micro_batch_size_per_gpu", "ppo_epochs", "ppo_infer_max_token_len_per_gpu", "ppo_infer_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_infer_use_dynamic_bsz", "shuffle"])}),
    *(s for section in (_REF, _ROLLOUT) for s in _absent_under(why.SCORED, section, "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu log_prob_use_dynamic_bsz")),
    *_absent_under(why.SCORED, _ACTOR, "shuffle use_prefix_grouper"),
    *_absent_under(why.ENGINE, _ROLLOUT, "mode load_format layered_summon multi_stage_wake_up disable_log_stats skip_tokenizer_init scheduling_policy logprobs_mode checkpoint_engine.update_weights_bucket_megabytes checkpoint_engine.backend cudagraph_capture_sizes use_fire_sampling nnodes n_gpus_per_node update_weights_bucket_megabytes over_sample_rate limit_images quantization swap_space skip_rollout skip_dump_dir enable_chunked_prefill agent.num_workers max_model_len prompt_length response_length do_sample"),
    *_absent_under(why.ALWAYS, _ROLLOUT, "calculate_log_probs enable_prefix_caching"),
    *absent(why.SCORED, {_PPO: "reward.num_workers reward_model.num_workers reward_model.max_length reward_model.micro_batch_size_per_gpu reward_model.micro_batch_size reward_model.forward_max_token_len_per_gpu reward_model.use_reward_loop reward_model.launch_reward_fn_async reward_model.use_dynamic_bsz reward_model.model.use_remove_padding reward_model.model.input_tokenizer reward.reward_manager.source reward_model.model.external_lib reward_model.strategy"}),
    *absent(why.RECORDED, {_PPO: "reward.reward_kwargs.overlong_buffer_cfg.log reward_model.reward_kwargs.overlong_buffer_cfg.log reward_model.overlong_buffer.log trainer.rollout_data_dir trainer.validation_data_dir", _ALL: "trainer.log_val_generations trainer.val_before_train trainer.val_only"}),
    *absent(why.CHECKPOINTS, {_ALL: "trainer.default_hdfs_dir trainer.checkpoint_callback_class trainer.del_local_ckpt_after_load trainer.remove_previous_ckpt_in_save critic.checkpoint.save_contents checkpoint.save_contents checkpoint.load_contents", _PPO: "trainer.max_critic_ckpt_to_keep"}),
    *absent(why.LAUNCHED, {_ALL: "trainer.device trainer.esi_redundant_time trainer.use_legacy_worker_impl trainer.profile_interval trainer.profile_steps trainer.use_v1 trainer.use_distillation", _PPO: "trainer.ray_wait_register_center_timeout"}),
    *absent(why.TEXT_ONLY.unless(None, "null"), {_ALL: "data.image_key data.video_key data.audio_key data.videos_key data.images_key"}, TEXT),
    *absent(why.ROWS, {_ALL: "data.custom_cls.path data.custom_cls.name data.sampler.class_path data.sampler.class_name data.datagen.path data.datagen.name"}, TEXT),
    *absent(why.TOOLS, {_PPO: "data.tool_config_path data.function_tool_path"}, TEXT),
    *_absent_under(why.ONE_CARD.unless(None, 1), _ROLLOUT, "data_parallel_size expert_parallel_size moe_tensor_parallel_size", WHOLE),
    *_absent_under(why.SAMPLING, _ROLLOUT, "ignore_eos", BOOL, False),
    *_absent_under(why.SAMPLING.unless(1.0), _ROLLOUT, "repetition_penalty", NUMBER, 1.0),
    *_absent_under(why.TOOLS, _ROLLOUT, "multi_turn.enable", BOOL, False),
    *_absent_under(_SINGLE_TURN, _ROLLOUT, "agent.default_agent_loop", TEXT, "single_turn_agent"),
    *_absent_under(why.TOOLS, _ROLLOUT, "agent.agent_loop_config_path agent.custom_async_server.path agent.custom_async_server.name", TEXT),
    *_absent_under(why.METHOD, "algorithm.rollout_correction", "rollout_is_batch_normalize", BOOL, False),
    *_absent_under(why.METHOD, "algorithm.rollout_correction", "rollout_rs rollout_rs_threshold rollout_rs_threshold_lower rollout_token_veto_threshold loss_type", TEXT),
    *absent(Absence("lacking", "a run goes on from run.directory", harmless=()), {_ALL: "trainer.resume_from_path"}, TEXT),
    *absent(why.NO_METHOD, {_PPO: "distillation.enabled algorithm.use_pf_ppo"}, BOOL, False),
    *absent(why.METHOD, {_PPO: "algorithm.gdpo_reward_keys"}, WORDS),
    *absent(_OWN_EXPERTS, {_PPO: " ".join(f"{_ACTOR}.{engine}router_replay.mode" for engine in ("", "megatron.", "veomni."))}, TEXT, "disabled"),
    *absent(Absence("lacking", "programs are run by the rule `code`"), {_PPO: "reward.sandbox_fusion.url reward_model.sandbox_fusion.url sandbox_fusion.url"}, TEXT),
    *absent(why.NO_METHOD, {_PPO: "reward.reward_manager.module.path reward.reward_manager.module.name"}, TEXT),
    *absent(why.SYNCHRONOUS.unless(None, "sync"), {_PPO: "trainer.v1.trainer_mode"}, TEXT, "sync"),
)


FAMILIES: tuple[tuple[tuple[str, ...], Absence], ...] = (
    ((f"{_ACTOR}.megatron.", f"{_REF}.megatron.", "critic.megatron.", "engine.virtual_", "engine.tensor_", "engine.pipeline_", "engine.context_", "engine.expert_"), _ONE_CARD),
    ((*(f"{section}.{engine}." for section in (_ACTOR, _REF, "critic") for engine in ("veomni", "torchtitan", "mindspeed", "engine")), "engine.", f"{_ACTOR}.optim.override_optimizer_config.", "optim.override_optimizer_config.", "critic.optim.override_optimizer_config.", f"{_ROLLOUT}.engine_kwargs."), why.ENGINE),
    (("global_profiler.", f"{_ACTOR}.profiler.", f"{_REF}.profiler.", f"{_ROLLOUT}.profiler.", "critic.profiler.", "reward_model.profiler.", "profiler.", f"{_ROLLOUT}.trace.", f"{_ROLLOUT}.prometheus.", "hydra."), why.RECORDED),
    ((f"{_ROLLOUT}.multi_turn.", f"{_ROLLOUT}.disaggregation.", f"{_ROLLOUT}.mtp.", "distillation.", f"{_ACTOR}.policy_loss.", "algorithm.pf_ppo."), why.OTHER_METHOD),
    ((f"{_ACTOR}.checkpoint.",), why.CHECKPOINTS),
    ((f"{_MODEL}.override_config.", "critic.model.override_config.", "model.override_config."), why.MODEL_FILES),
    ((f"{_MODEL}.fused_kernel_options.",), why.KERNELS),
    ((f"{_MODEL}.mtp.", "model.mtp.", f"{_MODEL}.lora.", f"{_ACTOR}.qat."), why.METHOD),
    (("reward.reward_model.rollout.", "reward_model.rollout.", "reward.reward_model.", "reward_model.megatron.", "reward_model.model.fsdp_config.", "ray_kwargs.", "ray_init.", "transfer_queue.", "trainer.v1.", "async_training.", "skip."), why.LAUNCHED),
    (("data.apply_chat_template_kwargs.", "data.mm_processor_kwargs."), why.TEMPLATE),
    (("reward.reward_kwargs.", "reward_model.reward_kwargs.", "custom_reward_function.reward_kwargs.", "reward.custom_reward_function.reward_kwargs."), Absence("lacking", "options of a reward function go under rewards.<name>.options")),
)
"""Families of settings: (prefixes of names, reason why these settings have no counterpart)."""


def _under(prefix: str, names: str | Mapping[str, object], reader: ValueReader, default: object = None, of: str = _PPO, *, empty: bool = False, convert: Convert = unchanged) -> tuple[Setting, ...]:
    """Return settings of one section."""
    by_name = dict.fromkeys(names.split(), default) if isinstance(names, str) else names
    full = {f"{prefix}.{name}": value for name, value in by_name.items()}
    return settings(full, of, reader, empty=empty, convert=convert)


def _role(of: str, model: str, optim: str, engine: str, role: str, rate: float, older: str = "") -> tuple[Setting, ...]:
    """Return the settings of a role that learns. `older` is the engine section's earlier name."""
    return (
        *_under(model, f"path|{model}.partial_pretrain", TEXT, "~/models/deepseek-llm-7b-chat", of),
        *_under(model, {f"trust_remote_code:{role}.model.trust_remote_code": False, f"enable_activation_offload:{role}.model.activation_offload=cpu": False, f"enable_gradient_checkpointing:{role}.model.gradient_checkpointing": True}, BOOL, of=of),
        *_under(model, {"tiled_mlp.enabled": False}, BOOL, of=of),
        *_under(model, {"tiled_mlp.num_shards": 4}, COUNT, of=of),
        *_under(model, f"lora_rank:{role}.adapter.rank", WHOLE, 0, of),
        *_under(model, f"lora_alpha:{role}.adapter.alpha", WHOLE, 16, of, convert=float),
        *_under(model, f"target_modules:{role}.adapter.targets", WORDS, ("all-linear",), of, convert=adapter_targets),
        *_under(model, "custom_chat_template", TEXT, None, of),
        *_under(optim, {f"lr:{role}.optimizer.learning_rate": rate, f"weight_decay:{role}.optimizer.weight_decay": 0.01, "min_lr_ratio": None}, NUMBER, of=of),
        *_under(optim, f"betas:{role}.optimizer.beta1[0]+{role}.optimizer.beta2[1]", PAIR, (0.9, 0.999), of),
        *_under(optim, f"clip_grad|{optim.replace('optim', 'grad_clip')}:{role}.optimizer.max_grad_norm", NUMBER, 1.0, of),
        *_under(optim, "lr_scheduler_type warmup_style lr_scheduler lr_decay_style", TEXT, None, of),
        *_under(optim, "lr_warmup_steps", WHOLE, -1, of, empty=True),
        *_under(optim, f"lr_warmup_steps_ratio|{optim}.warmup_steps_ratio", NUMBER, 0.0, of, empty=True),
        *_under(optim, "optimizer", TEXT, "AdamW", of),
        *_engine(of, engine, older),
    )


def _engine(of: str, engine: str, older: str = "") -> tuple[Setting, ...]:
    made = (
        *_under(engine, {"param_offload": False, "optimizer_offload": False, "offload_policy": False, "reshard_after_forward": True}, BOOL, of=of),
        *_under(engine, "model_dtype", TEXT, "fp32", of),
    )
    return tuple(replace(setting, older=(setting.name.replace(engine, older),)) for setting in made) if older else made


SETTINGS: tuple[Setting, ...] = (
    # rows
    *settings("data.train_files", _ALL, WORDS, ("~/data/rlhf/gsm8k/train.parquet",), sft=("~/data/gsm8k/train.parquet",)),
    *settings("data.val_files", _ALL, WORDS, ("~/data/rlhf/gsm8k/test.parquet",), sft=None),
    *settings("data.train_max_samples data.val_max_samples", _ALL, WHOLE, -1),
    *settings("data.prompt_key", _ALL, TEXT, "prompt", sft=None),
    *settings("data.reward_fn_key", _PPO, TEXT, "data_source"),
    *settings({"data.messages_key|data.multiturn.messages_key": "messages", "data.response_key": None, "data.tools_key|data.multiturn.tools_key": "tools"}, _SFT, TEXT),
    *settings("data.prompt_dict_keys data.response_dict_keys", _SFT, WORDS),
    *settings({"data.max_prompt_length:data.max_tokens": 512, "data.max_response_length:rollout.sampling.max_new_tokens+eval_sampling.max_new_tokens": 512, "data.gen_batch_size": None}, _PPO, COUNT),
    *settings({"data.max_length:data.max_tokens": 1024, "data.micro_batch_size_per_gpu": 4, "data.micro_batch_size": None, "data.max_token_len_per_gpu": 8192}, _SFT, COUNT),
    *settings("data.truncation", _ALL, one_of("error", "left", "right", "middle"), "error"),
    *settings({"data.filter_overlong_prompts": False, "data.shuffle:data.shuffle": True}, _PPO, BOOL),
    *settings("data.train_batch_size", _ALL, COUNT, 1024, sft=256),
    *settings({"data.multiturn.enable": None, "data.use_dynamic_bsz": True}, _SFT, BOOL),
    # models
    *_role(_PPO, _MODEL, f"{_ACTOR}.optim", f"{_ACTOR}.fsdp_config", "actor", 1e-6),
    *_role(_PPO, "critic.model", "critic.optim", "critic.fsdp", "critic", 1e-5, "critic.model.fsdp_config"),
    *_role(_SFT, "model", "optim", "engine", "actor", 1e-3),
    *_engine(_PPO, f"{_REF}.fsdp_config"),
    *_under(_REF, "model.path", TEXT),
    # batches
    *_under(_ACTOR, {"ppo_mini_batch_size": 256, "ppo_micro_batch_size_per_gpu": None, "ppo_micro_batch_size": None, "ppo_max_token_len_per_gpu": 16384, "ppo_epochs:algorithm.epochs": 1}, COUNT),
    *_under(_ACTOR, "use_dynamic_bsz", BOOL, False),
    *_under(_ROLLOUT, "n:batch.responses", COUNT, 1),
    *_under(_ROLLOUT, {"enable_rollout_routing_replay:rollout.routing=sampled": False}, BOOL),
    *settings("critic.ppo_mini_batch_size", _PPO, COUNT),
    *_under(_ACTOR, f"{ULYSSES}|{_ACTOR}.fsdp_config.{ULYSSES}", COUNT, 1, empty=True),
    *_under(_REF, f"{ULYSSES}|{_REF}.fsdp_config.{ULYSSES}", COUNT, empty=True),
    *_under("critic", f"{ULYSSES}|critic.fsdp.{ULYSSES}|critic.model.fsdp_config.{ULYSSES}", COUNT, empty=True),
    *settings(f"{ULYSSES}|engine.{ULYSSES}", _SFT, COUNT, 1, empty=True),
    *settings("algorithm.filter_groups.enable", _PPO, BOOL, False),
    *settings("algorithm.filter_groups.metric", _PPO, TEXT),
    *settings("algorithm.filter_groups.max_num_gen_batches", _PPO, WHOLE, 0),
    # the run
    *settings("trainer.n_gpus_per_node", _ALL, COUNT, 8, sft=1),
    *settings({"trainer.nnodes": 1, "trainer.total_training_steps:run.steps": None}, _ALL, COUNT),
    *settings("trainer.total_epochs", _ALL, COUNT, 30, sft=4),
    *settings({"trainer.save_freq": -1, "trainer.test_freq": -1, "trainer.default_local_dir": None}, _ALL, TEXT),
    *settings("trainer.project_name", _ALL, TEXT, "verl_examples", sft="gsm8k-sft"),
    *settings("trainer.experiment_name", _ALL, TEXT, "gsm8k", sft="test"),
    *settings("trainer.max_actor_ckpt_to_keep|trainer.max_ckpt_to_keep", _ALL, WHOLE),
    *settings("trainer.resume_mode", _ALL, one_of(AUTO, "disable", "resume_path"), AUTO),
    *settings("trainer.logger", _ALL, WORDS, ("console", "wandb")),
    *settings("trainer.seed:run.seed", _SFT, WHOLE, 1),
    # engines
    *_under(_ROLLOUT, {"name": "vllm", "dtype": "bfloat16"}, TEXT),
    *_under(_ROLLOUT, {"enforce_eager:rollout.vllm.arguments.enforce_eager": None, "val_kwargs.do_sample": False}, BOOL),
    *_under(_ROLLOUT, {"tensor_model_parallel_size:rollout.vllm.tensor_parallel": 2, "pipeline_model_parallel_size:rollout.vllm.pipeline_parallel": 1, "max_num_seqs:rollout.vllm.max_sequences": 256, "max_num_batched_tokens:rollout.vllm.arguments.max_num_batched_tokens": None}, COUNT),
    *_under(_ROLLOUT, "val_kwargs.n", COUNT, 1),
    *_under(_ROLLOUT, {"gpu_memory_utilization:rollout.vllm.memory_share": 0.5, "temperature:rollout.sampling.temperature": 1.0, "top_p:rollout.sampling.top_p": 1.0, "val_kwargs.top_p:eval_sampling.top_p": 1.0}, NUMBER),
    *_under(_ROLLOUT, "val_kwargs.temperature", NUMBER, 0.0),
    *_under(_ROLLOUT, "free_cache_engine:rollout.vllm.sleep_level", BOOL, True, convert=sleep_level),
    *_under(_ROLLOUT, "top_k:rollout.sampling.top_k val_kwargs.top_k:eval_sampling.top_k", WHOLE, -1, convert=not_negative),
    # algorithm
    *settings({"algorithm.adv_estimator": "gae", "algorithm.kl_penalty": "kl", "algorithm.rollout_correction.rollout_is": None, "algorithm.rollout_correction.rollout_is_threshold": "2.0"}, _PPO, TEXT),
    *settings({"algorithm.gamma": 1.0, "algorithm.lam": 1.0, "algorithm.kl_ctrl.kl_coef": 0.001, "algorithm.kl_ctrl.target_kl": 0.1}, _PPO, NUMBER),
    *settings({"algorithm.norm_adv_by_std_in_grpo": True, "algorithm.use_kl_in_reward": False, "algorithm.rollout_correction.bypass_mode": False}, _PPO, BOOL),
    *settings("algorithm.kl_ctrl.type", _PPO, one_of("fixed", "adaptive"), "fixed"),
    *settings("algorithm.kl_ctrl.horizon", _PPO, COUNT, 10000),
    *_under(_ACTOR, "use_kl_loss", BOOL, False),
    *_under(_ACTOR, {"kl_loss_coef": 0.001, "entropy_coeff:algorithm.entropy_bonus": 0.0, "clip_ratio": 0.2, "tis_imp_ratio_cap": None, f"tau_pos|{_ACTOR}.policy_loss.tau_pos": 1.0}, NUMBER),
    *_under(_ACTOR, f"tau_neg|{_ACTOR}.policy_loss.tau_neg", NUMBER, 1.05),
    *_under(_ACTOR, {"kl_loss_type": "low_var_kl", "policy_loss.loss_mode": "vanilla", "loss_agg_mode": "token-mean"}, TEXT),
    *_under(_ACTOR, "clip_ratio_low clip_ratio_high", NUMBER, 0.2, empty=True),
    *_under(_ACTOR, "clip_ratio_c", NUMBER, 3.0, empty=True),
    *_under(_ACTOR, "loss_scale_factor", COUNT),
    *settings("critic.cliprange_value", _PPO, NUMBER, 0.5, empty=True),
    *settings("trainer.critic_warmup", _PPO, WHOLE, 0),
    # rewards
    *settings("reward_model.model.trust_remote_code:reward_model.role.model.trust_remote_code", _PPO, BOOL, convert=or_none),
    *settings({"reward.custom_reward_function.path|custom_reward_function.path": None, "reward.custom_reward_function.name|custom_reward_function.name": "compute_score"}, _PPO, TEXT),
    *settings({"reward.reward_manager.name|reward_model.reward_manager": "naive", "reward.reward_model.model_path|reward_model.model.path|reward.reward_model.model.path": None}, _PPO, TEXT),
    *settings({"reward.reward_model.enable|reward_model.enable": False, "reward.reward_model.enable_resource_pool|reward_model.enable_resource_pool": False}, _PPO, BOOL),
    *settings("reward.reward_kwargs.overlong_buffer_cfg.enable|reward_model.reward_kwargs.overlong_buffer_cfg.enable|reward_model.overlong_buffer.enable", _PPO, BOOL, False),
    *settings({"reward.reward_model.n_gpus_per_node|reward_model.n_gpus_per_node": 8, "reward.reward_model.nnodes|reward_model.nnodes": 0}, _PPO, WHOLE),
    *settings("reward.reward_kwargs.overlong_buffer_cfg.len|reward_model.reward_kwargs.overlong_buffer_cfg.len|reward_model.overlong_buffer.len", _PPO, COUNT),
    *settings("reward.reward_kwargs.max_resp_len|reward_model.reward_kwargs.max_resp_len", _PPO, COUNT),
    *settings("reward.reward_kwargs.overlong_buffer_cfg.penalty_factor|reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor|reward_model.overlong_buffer.penalty_factor", _PPO, NUMBER, 1.0),
    *_ABSENT,
)

OLD_PROGRAM = "fsdp_sft_trainer"
FSDP_SFT: Mapping[str, object] = {
    "data.prompt_key": "question", "data.response_key": "answer", "data.use_dynamic_bsz": False,
    "model.enable_gradient_checkpointing": False, "optim.lr": 1e-5, "optim.betas": (0.9, 0.95),
    "optim.lr_warmup_steps_ratio": 0.1, "optim.lr_scheduler": "cosine",
}
"""The defaults of fsdp_sft_trainer that sft_trainer has not (sft_trainer.yaml of 005a83db)."""

# fmt: on

_NOTHING = ("null", "None", "")
_CONFIG_FILES = ("--config-path", "--config-dir", "-cp", "-cd")
_CONFIG_NAMES = ("--config-name", "-cn")


def read_options(launch: Launch, cards: int | None) -> Options:
    """Return the options of a command.

    Raises:
        ConfigError: The program cannot be converted, or values cannot be read.
    """
    command = TRAINER.short_name(launch.program)
    notes: list[Remark] = []
    overrides = dict(_overrides(launch.arguments, notes))
    is_old = launch.program == OLD_PROGRAM
    listed = settings_of(SETTINGS, command, FSDP_SFT if is_old else None)
    known = by_name(listed)
    given = [_assignment(known, name, text) for name, text in overrides.items()]
    of_families = [g[0] for g in given if not isinstance(g, Remark) and g[1] not in known]
    unset = any("$" in text for text in overrides.values())
    remedy = "give another value, or leave it out"
    remedy += "; --set gives a variable of the script" if unset else ""
    settings = {setting.name: setting for setting in (*listed, *of_families)}
    facts: dict[str, Any] = {"cards": cards, "show_default": _show}
    return read_settings(command, launch, settings, [*notes, *given], remedy, **facts)


def _show(name: str, value: object) -> str:
    return f"{name}={write_value(value)}"


def _overrides(words: Sequence[str], notes: list[Remark]) -> Iterator[tuple[str, str]]:
    """Yield (key, text of the value) for each override; add notes on words that are not read."""
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in _CONFIG_NAMES:
            yield _CONFIG_NAMES[0], value or next(rest, "")
        elif name in _CONFIG_FILES:
            why = "a config of your own is not read: give what it sets as overrides"
            notes.append(Remark("check", f"{name} {value or next(rest, '')}", why))
        elif word.startswith("~"):
            why = "what is taken away there has its default here"
            notes.append(Remark("check", shlex.quote(word), why))
        elif equals and name and not word.startswith("-"):
            yield name.lstrip("+"), value
        else:
            why = "it is no override KEY=VALUE"
            notes.append(Remark("unknown", join_words("", [word]).strip() or "''", why))


def _assignment(known: Mapping[str, Setting], name: str, value: str) -> Assignment | Remark:
    """Return the assignment of a key, which may be one of a family without a counterpart."""
    text = f"{name}={value}"
    if is_secret(name) or "env_vars" in text:
        text = f"{name}={MASK}"
    of_family = (Setting(name, (), WORDS, absent=r) for p, r in FAMILIES if name.startswith(p))
    setting = known.get(name) or next(of_family, None)
    if setting is not None:
        return setting, name, _words(value), text if text.isprintable() else repr(text)
    last = name.rpartition(".")[2]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    close += [key for key in known if key.rpartition(".")[2] == last]
    near = list(dict.fromkeys(close))[:2] or difflib.get_close_matches(name, known, n=1)
    why = f"no such key is known, of verl 0.9.1 or of those before{propose(near)}"
    return Remark("unknown", join_words("", [text]).strip(), why)


def _words(text: str) -> tuple[str, ...] | None:
    """Return the words of a value in hydra's grammar; None for null.

    Raises:
        ConfigError: The text begins like a list but is no list.
    """
    bare = text.strip()
    if bare in _NOTHING:
        return None
    if bare[0] == bare[-1] and bare[0] in "'\"" and len(bare) > 1:
        bare = bare[1:-1].strip()
    if bare.startswith("["):
        try:
            values = read_yaml(bare)
        except ConfigError as error:
            raise ConfigError(f"{text}: It must be a list, such as [a, b].") from error
        if isinstance(values, tuple):
            return tuple(v if isinstance(v, str) else write_value(v) for v in values)
    return (bare,)
