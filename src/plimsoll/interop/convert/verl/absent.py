"""List verl's settings that have no counterpart, by their names and by what their names begin with."""

from __future__ import annotations

from plimsoll.interop.convert import absences as why
from plimsoll.interop.convert.absences import Absence
from plimsoll.interop.convert.values import BOOL, NUMBER, TEXT, WHOLE, WORDS, Setting, absent

# fmt: off
# ruff: noqa: E501  (a line a reason)

_PPO, _SFT, _ALL = "ppo", "sft", "ppo sft"
_ACTOR, _ROLLOUT, _MODEL, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))
_MODELS = {_MODEL: _PPO, "critic.model": _PPO, "model": _SFT}
_OPTIMS = {f"{_ACTOR}.optim": _PPO, "critic.optim": _PPO, "optim": _SFT}
_ENGINES = {f"{_ACTOR}.fsdp_config": _PPO, f"{_REF}.fsdp_config": _PPO, "critic.fsdp": _PPO, "critic.model.fsdp_config": _PPO, "engine": _SFT}
_ONE_CARD = why.ONE_CARD.unless(None, 1, -1, False)
_SINGLE_TURN = why.TOOLS.unless(None, "single_turn_agent")


def _under(reason: Absence, prefix: str, names: str, *reading: object, of: str = _PPO) -> tuple[Setting, ...]:
    full = " ".join(f"{prefix}.{name}" for name in names.split())
    return absent(reason, of, full, *reading)  # type: ignore[arg-type]  # a reader and a default


def _of_roles() -> tuple[Setting, ...]:
    rows: list[Setting] = []
    for model, of in _MODELS.items():
        rows += _under(why.METHOD, model, "lora_adapter_path exclude_modules", of=of)
        rows += _under(why.PACKED, model, "use_remove_padding", of=of)
        rows += _under(why.KERNELS, model, "use_fused_kernels use_liger", of=of)
        rows += _under(why.UNASKED, model, "use_shm strategy torch_dtype tokenizer_path hf_config_path external_lib", of=of)
    for optim, of in _OPTIMS.items():
        rows += _under(why.UNASKED, optim, "total_training_steps num_cycles min_lr min_lr_factor lr_warmup_init init_lr_ratio lr_decay_steps lr_wsd_decay_style lr_wsd_decay_steps zero_indexed_step master_weights store_param_remainders exp_avg_dtype exp_avg_sq_dtype optimizer_impl", of=of)
    for engine, of in _ENGINES.items():
        rows += _under(why.ENGINE, engine, "dtype mixed_precision.param_dtype mixed_precision.reduce_dtype mixed_precision.buffer_dtype forward_prefetch use_orig_params entropy_checkpointing entropy_from_logits_with_chunking pad_to_length forward_only use_no_sync_for_gradient_accumulation use_torch_compile seed entropy_from_logits_chunk_size pad_to_length_bucket full_determinism strategy wrap_policy.min_num_params wrap_policy.transformer_layer_cls_to_wrap", of=of)
        rows += _under(_ONE_CARD, engine, "fsdp_size ulysses_sequence_parallel_size", WHOLE, of=of)
    return tuple(rows)


ABSENT: tuple[Setting, ...] = (
    *_of_roles(),
    *absent(why.ENGINE, _ALL, f"{_ACTOR}.strategy {_REF}.strategy critic.strategy strategy model_engine engine model optim actor@actor_rollout_ref.actor {_ACTOR}.model_engine --config-name"),
    *absent(_ONE_CARD, _ALL, f"{_ACTOR}.ulysses_sequence_parallel_size {_REF}.ulysses_sequence_parallel_size critic.ulysses_sequence_parallel_size ulysses_sequence_parallel_size", WHOLE),
    *absent(why.ENGINE, _PPO, f"{_ACTOR}.use_torch_compile {_REF}.use_torch_compile actor_rollout_ref.nccl_timeout"),
    *absent(why.KERNELS, _ALL, f"{_ACTOR}.entropy_from_logits_with_chunking {_REF}.entropy_from_logits_with_chunking {_ACTOR}.entropy_checkpointing {_REF}.entropy_checkpointing {_ACTOR}.use_fused_kernels"),
    *absent(why.PACKED, _ALL, f"{_ACTOR}.use_remove_padding {_ACTOR}.pad_to_length {_REF}.pad_to_length use_remove_padding"),
    *absent(why.UNASKED, _PPO, f"{_ACTOR}.data_loader_seed {_ACTOR}.freeze_vision_tower actor_rollout_ref.hybrid_engine {_ACTOR}.load_weight data.seed critic.enable critic.loss_agg_mode {_ACTOR}.calculate_entropy {_ACTOR}.calculate_sum_pi_squared algorithm.filter_groups.max_inflight_gen_batches"),
    *absent(why.READ_ONCE, _ALL, "data.val_batch_size data.filter_overlong_prompts_workers data.dataloader_num_workers data.num_workers data.return_raw_chat data.return_raw_input_ids data.return_full_prompt data.return_multi_modal_inputs data.use_shm data.validation_shuffle data.trust_remote_code data.balance_dp_token data.ignore_input_ids_mismatch data.need_tools_kwargs data.continuous_token.enable data.tokenizer data.pad_mode data.image_patch_size data.prompt_type data.val_score_key data.continuous_token.model_family"),
    *absent(why.UNASKED, _SFT, "data.multiturn.enable data.enable_thinking_key data.enable_thinking_default"),
    *absent(why.SCORED, _PPO, " ".join(f"critic.{name}" for name in ["ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu", "forward_micro_batch_size", "forward_micro_batch_size_per_gpu", "ppo_epochs", "ppo_infer_max_token_len_per_gpu", "ppo_infer_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_infer_use_dynamic_bsz", "shuffle"])),
    *(s for section in (_REF, _ROLLOUT) for s in _under(why.SCORED, section, "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu log_prob_use_dynamic_bsz")),
    *_under(why.SCORED, _ACTOR, "shuffle use_prefix_grouper"),
    *_under(why.ENGINE, _ROLLOUT, "mode load_format layered_summon multi_stage_wake_up disable_log_stats skip_tokenizer_init scheduling_policy logprobs_mode checkpoint_engine.update_weights_bucket_megabytes checkpoint_engine.backend cudagraph_capture_sizes use_fire_sampling nnodes n_gpus_per_node update_weights_bucket_megabytes over_sample_rate limit_images quantization swap_space skip_rollout skip_dump_dir enable_chunked_prefill agent.num_workers max_model_len prompt_length response_length do_sample"),
    *_under(why.ALWAYS, _ROLLOUT, "calculate_log_probs enable_prefix_caching"),
    *absent(why.SCORED, _PPO, "reward.num_workers reward_model.num_workers reward_model.max_length reward_model.micro_batch_size_per_gpu reward_model.micro_batch_size reward_model.forward_max_token_len_per_gpu reward_model.use_reward_loop reward_model.launch_reward_fn_async reward_model.use_dynamic_bsz reward_model.model.use_remove_padding reward_model.model.input_tokenizer reward.reward_manager.source reward_model.model.external_lib reward_model.strategy"),
    *absent(why.RECORDED, _PPO, "reward.reward_kwargs.overlong_buffer_cfg.log reward_model.reward_kwargs.overlong_buffer_cfg.log reward_model.overlong_buffer.log trainer.rollout_data_dir trainer.validation_data_dir"),
    *absent(why.RECORDED, _ALL, "trainer.log_val_generations trainer.val_before_train trainer.val_only"),
    *absent(why.PACKED, _ALL, "trainer.balance_batch"),
    *absent(why.CHECKPOINTS, _ALL, "trainer.default_hdfs_dir trainer.checkpoint_callback_class trainer.del_local_ckpt_after_load trainer.remove_previous_ckpt_in_save critic.checkpoint.save_contents checkpoint.save_contents checkpoint.load_contents"),
    *absent(why.CHECKPOINTS, _PPO, "trainer.max_critic_ckpt_to_keep"),
    *absent(why.LAUNCHED, _ALL, "trainer.device trainer.esi_redundant_time trainer.use_legacy_worker_impl trainer.profile_interval trainer.profile_steps trainer.use_v1 trainer.use_distillation"),
    *absent(why.LAUNCHED, _PPO, "trainer.ray_wait_register_center_timeout"),
    *absent(why.TEXT_ONLY.unless(None, "null"), _ALL, "data.image_key data.video_key data.audio_key data.videos_key data.images_key", TEXT),
    *absent(why.ROWS, _ALL, "data.custom_cls.path data.custom_cls.name data.sampler.class_path data.sampler.class_name data.datagen.path data.datagen.name", TEXT),
    *absent(why.TOOLS, _PPO, "data.tool_config_path data.function_tool_path", TEXT),
    *_under(why.ONE_CARD.unless(None, 1), _ROLLOUT, "data_parallel_size expert_parallel_size moe_tensor_parallel_size", WHOLE),
    *_under(why.SAMPLING, _ROLLOUT, "ignore_eos enable_rollout_routing_replay", BOOL, False),
    *_under(why.SAMPLING.unless(1.0), _ROLLOUT, "repetition_penalty", NUMBER, 1.0),
    *_under(why.TOOLS, _ROLLOUT, "multi_turn.enable", BOOL, False),
    *_under(_SINGLE_TURN, _ROLLOUT, "agent.default_agent_loop", TEXT, "single_turn_agent"),
    *_under(why.TOOLS, _ROLLOUT, "agent.agent_loop_config_path agent.custom_async_server.path agent.custom_async_server.name", TEXT),
    *_under(why.METHOD, "algorithm.rollout_correction", "rollout_is_batch_normalize", BOOL, False),
    *_under(why.METHOD, "algorithm.rollout_correction", "rollout_rs rollout_rs_threshold rollout_rs_threshold_lower rollout_token_veto_threshold loss_type", TEXT),
    *absent(why.NO_METHOD, _PPO, "distillation.enabled algorithm.use_pf_ppo", BOOL, False),
    *absent(why.METHOD, _PPO, "algorithm.gdpo_reward_keys", WORDS),
    *absent(Absence("lacking", "programs are run by the rule `code`: see docs/rewards.md"), _PPO, "reward.sandbox_fusion.url reward_model.sandbox_fusion.url sandbox_fusion.url", TEXT),
    *absent(why.NO_METHOD, _PPO, "reward.reward_manager.module.path reward.reward_manager.module.name", TEXT),
    *absent(why.SYNCHRONOUS.unless(None, "sync"), _PPO, "trainer.v1.trainer_mode", TEXT, "sync"),
)


def _family(reason: Absence, *prefixes: str) -> tuple[tuple[str, ...], Absence]:
    return prefixes, reason


FAMILIES: tuple[tuple[tuple[str, ...], Absence], ...] = (
    _family(_ONE_CARD, f"{_ACTOR}.megatron.", f"{_REF}.megatron.", "critic.megatron.", "engine.virtual_", "engine.tensor_", "engine.pipeline_", "engine.context_", "engine.expert_"),
    _family(why.ENGINE, *(f"{section}.{engine}." for section in (_ACTOR, _REF, "critic") for engine in ("veomni", "torchtitan", "mindspeed", "engine")), "engine.", f"{_ACTOR}.optim.override_optimizer_config.", "optim.override_optimizer_config.", "critic.optim.override_optimizer_config.", f"{_ROLLOUT}.engine_kwargs."),
    _family(why.RECORDED, "global_profiler.", f"{_ACTOR}.profiler.", f"{_REF}.profiler.", f"{_ROLLOUT}.profiler.", "critic.profiler.", "reward_model.profiler.", "profiler.", f"{_ROLLOUT}.trace.", f"{_ROLLOUT}.prometheus.", "hydra."),
    _family(why.OTHER_METHOD, f"{_ROLLOUT}.multi_turn.", f"{_ROLLOUT}.disaggregation.", f"{_ROLLOUT}.mtp.", "distillation.", f"{_ACTOR}.policy_loss.", "algorithm.pf_ppo."),
    _family(why.CHECKPOINTS, f"{_ACTOR}.checkpoint."),
    _family(why.MODEL_FILES, f"{_MODEL}.override_config.", "critic.model.override_config.", "model.override_config."),
    _family(why.KERNELS, f"{_MODEL}.fused_kernel_options.", f"{_MODEL}.tiled_mlp."),
    _family(why.METHOD, f"{_MODEL}.mtp.", "model.mtp.", f"{_MODEL}.lora.", f"{_ACTOR}.qat."),
    _family(why.LAUNCHED, "reward.reward_model.rollout.", "reward_model.rollout.", "reward.reward_model.", "reward_model.n_gpus", "reward_model.nnodes", "reward_model.enable_resource_pool", "reward_model.megatron.", "reward_model.model.fsdp_config.", "ray_kwargs.", "ray_init.", "transfer_queue.", "trainer.v1.", "async_training.", "skip."),
    _family(why.TEMPLATE, "data.apply_chat_template_kwargs.", "data.mm_processor_kwargs."),
    _family(Absence("lacking", "options of a reward function go under rewards.<name>.options"), "reward.reward_kwargs.", "reward_model.reward_kwargs.", "custom_reward_function.reward_kwargs.", "reward.custom_reward_function.reward_kwargs."),
)
"""Beginnings of names, with the reason why such settings have no counterpart."""
