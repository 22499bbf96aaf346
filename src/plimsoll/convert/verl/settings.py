"""verl's settings: those of its examples, with the defaults of its configs
(verl/trainer/config/ of 0.9.1), and the names that they had before."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.convert.setting import (
    BOOL,
    COUNT,
    NUMBER,
    TEXT,
    WHOLE,
    WORDS,
    Becomes,
    Idle,
    Key,
    Lacking,
    Part,
    Read,
    Same,
    Setting,
    of_each,
    one_of,
    positive,
    several,
)
from plimsoll.convert.verl import algorithm, batches, rewards, roles, rollout, rows

# fmt: off
# ruff: noqa: E501  (a line a setting)

_BETAS = Read(float, 2, 2)


def _one(name: str, of: str, read: Read, becomes: Becomes, default: object = None, *, older: str = "", empty: bool = False, **each: object) -> Setting:
    return Setting(name, tuple(of.split()), read, becomes, of_each(default, **each), tuple(older.split()), empty=empty)


def _under(prefix: str, names: str) -> str:
    return " ".join(f"{prefix}.{name}" for name in names.split())


_PPO, _SFT, _ALL = "ppo", "sft", "ppo sft"
_ACTOR, _ROLLOUT, _MODEL, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))
_SCORED = Idle("what is scored is packed as what is learned")
_PARALLEL = Lacking("a sequence is on one card, and trained models are divided by ZeRO alone", harmless=(None, 1, -1, False))
_COMPILED = Idle("models are not compiled")
_HEAD = Same("logits are computed in chunks (actor.model.head_chunk)")
_PACKED = Same("sequences are always packed, without padding")
_SYNC = Idle("weights go to the engines in buckets (rollout.sync)")
_MODALITIES = Lacking("images, video and sound cannot be read", refused=True, harmless=(None, "null"))


def _optimizer(of: str, there: str, role: str, rate: float) -> tuple[Setting, ...]:
    """there: verl's section; role: ours."""
    key = f"{role}.optimizer"
    return (
        _one(f"{there}.lr", of, NUMBER, Key((f"{key}.learning_rate",)), rate),
        _one(f"{there}.weight_decay", of, NUMBER, Key((f"{key}.weight_decay",)), 0.01),
        _one(f"{there}.betas", of, _BETAS, Key((f"{key}.beta1", f"{key}.beta2")), (0.9, 0.999)),
        _one(f"{there}.clip_grad", of, NUMBER, Key((f"{key}.max_grad_norm",)), 1.0, older=there.replace("optim", "grad_clip")),
        *several(_under(there, "lr_scheduler_type lr_scheduler lr_decay_style"), of, TEXT, Part(roles.schedules)),
        _one(f"{there}.warmup_style", of, TEXT, Part(roles.schedules)),
        _one(f"{there}.lr_warmup_steps", of, WHOLE, Part(roles.schedules), -1, empty=True),
        _one(f"{there}.lr_warmup_steps_ratio", of, NUMBER, Part(roles.schedules), 0.0, empty=True, older=f"{there}.warmup_steps_ratio"),
        _one(f"{there}.min_lr_ratio", of, NUMBER, Part(roles.schedules)),
        *several(_under(there, "total_training_steps num_cycles min_lr min_lr_factor lr_warmup_init init_lr_ratio lr_decay_steps lr_wsd_decay_style lr_wsd_decay_steps zero_indexed_step master_weights store_param_remainders exp_avg_dtype exp_avg_sq_dtype"), of, TEXT, Idle("a schedule has the settings of actor.optimizer")),
        *several(_under(there, "optimizer_impl"), of, TEXT, Idle("AdamW is DeepSpeed's or PyTorch's")),
        _one(f"{there}.optimizer", of, TEXT, Part(roles.optimizers), "AdamW"),
    )


def _model(of: str, there: str, role: str) -> tuple[Setting, ...]:
    return (
        _one(f"{there}.path", of, TEXT, Key((f"{role}.model.path",)) if role != "actor" else Part(roles.model), "~/models/deepseek-llm-7b-chat", older=f"{there}.partial_pretrain"),
        _one(f"{there}.trust_remote_code", of, BOOL, Key((f"{role}.model.trust_remote_code",)), False),
        _one(f"{there}.enable_gradient_checkpointing", of, BOOL, Key((f"{role}.model.gradient_checkpointing",)), True),
        _one(f"{there}.enable_activation_offload", of, BOOL, Key((f"{role}.model.activation_offload",), lambda on: "cpu" if on else None), False),
        _one(f"{there}.lora_rank", of, WHOLE, Part(roles.adapters), 0),
        _one(f"{there}.lora_alpha", of, WHOLE, Part(roles.adapters), 16),
        _one(f"{there}.target_modules", of, WORDS, Part(roles.adapters), ("all-linear",)),
        *several(_under(there, "lora_adapter_path exclude_modules"), of, WORDS, Lacking("an adapter begins anew, on actor.adapter.targets")),
        *several(_under(there, "use_remove_padding"), of, BOOL, _PACKED),
        *several(_under(there, "use_fused_kernels use_liger"), of, BOOL, _HEAD),
        *several(_under(there, "use_shm strategy torch_dtype tokenizer_path hf_config_path external_lib"), of, TEXT, Idle("a model is loaded from its directory, with its tokenizer")),
        *several(_under(there, "custom_chat_template"), of, TEXT, Key(("data.chat_template",)) if role == "actor" else Idle("the template is the actor's")),
    )


def _engine(of: str, there: str) -> tuple[Setting, ...]:
    """FSDP's."""
    part = Part(roles.held)
    return (
        _one(f"{there}.param_offload", of, BOOL, part, False),
        _one(f"{there}.optimizer_offload", of, BOOL, part, False),
        _one(f"{there}.offload_policy", of, BOOL, part, False),
        _one(f"{there}.reshard_after_forward", of, BOOL, part, True),
        _one(f"{there}.model_dtype", of, TEXT, part, "fp32"),
        *several(_under(there, "dtype mixed_precision.param_dtype"), of, TEXT, Idle("matrix products are in the model's dtype")),
        *several(_under(there, "mixed_precision.reduce_dtype mixed_precision.buffer_dtype"), of, TEXT, Idle("sums of gradients have zero.gradient_dtype")),
        *several(_under(there, "fsdp_size ulysses_sequence_parallel_size"), of, WHOLE, _PARALLEL),
        *several(_under(there, "forward_prefetch use_orig_params entropy_checkpointing entropy_from_logits_with_chunking pad_to_length forward_only use_no_sync_for_gradient_accumulation"), of, BOOL, Idle("weights are gathered by DeepSpeed")),
        *several(_under(there, "use_torch_compile"), of, BOOL, _COMPILED),
        *several(_under(there, "seed entropy_from_logits_chunk_size pad_to_length_bucket"), of, WHOLE, Idle("run.seed seeds all")),
        *several(_under(there, "full_determinism"), of, BOOL, Idle("seeds fix data, sampling and noise")),
        *several(_under(there, "strategy wrap_policy.min_num_params wrap_policy.transformer_layer_cls_to_wrap"), of, TEXT, Idle("ZeRO divides weights one by one")),
    )


_DATA = (
    _one("data.train_files", _ALL, WORDS, Part(rows.rows), ("~/data/rlhf/gsm8k/train.parquet",), sft=("~/data/gsm8k/train.parquet",)),
    _one("data.val_files", _ALL, WORDS, Part(rows.held_out), ("~/data/rlhf/gsm8k/test.parquet",), sft=None),
    _one("data.train_max_samples", _ALL, WHOLE, Part(rows.rows), -1),
    _one("data.val_max_samples", _ALL, WHOLE, Part(rows.held_out), -1),
    _one("data.prompt_key", _ALL, TEXT, Part(rows.rows), "prompt", sft=None),
    _one("data.reward_fn_key", _PPO, TEXT, Part(rows.rows), "data_source"),
    _one("data.messages_key", _SFT, TEXT, Part(rows.rows), "messages", older="data.multiturn.messages_key"),
    _one("data.response_key", _SFT, TEXT, Part(rows.rows)),
    *several("data.prompt_dict_keys data.response_dict_keys", _SFT, WORDS, Part(rows.rows)),
    _one("data.tools_key", _SFT, TEXT, Part(rows.rows), "tools", older="data.multiturn.tools_key"),
    *several("data.multiturn.enable", _SFT, BOOL, Same("every turn of the assistant's is learned")),
    *several("data.enable_thinking_key data.enable_thinking_default", _SFT, TEXT, Idle("a template has no options")),
    _one("data.max_prompt_length", _PPO, COUNT, Part(batches.lengths), 512),
    _one("data.max_response_length", _PPO, COUNT, Part(batches.lengths), 512),
    _one("data.max_length", _SFT, COUNT, Part(batches.lengths), 1024),
    _one("data.truncation", _ALL, one_of("error", "left", "right", "middle"), Part(batches.lengths), "error"),
    _one("data.filter_overlong_prompts", _PPO, BOOL, Part(batches.lengths), False),
    _one("data.train_batch_size", _ALL, COUNT, Part(batches.batches), 1024, sft=256),
    _one("data.gen_batch_size", _PPO, COUNT, Part(batches.batches)),
    *several("data.val_batch_size data.filter_overlong_prompts_workers data.dataloader_num_workers data.num_workers", _ALL, WHOLE, Idle("rows are read once, before the first step")),
    _one("data.micro_batch_size_per_gpu", _SFT, COUNT, Part(batches.micro_batches), 4, older="data.micro_batch_size"),
    _one("data.max_token_len_per_gpu", _SFT, COUNT, Part(batches.micro_batches), 8192),
    _one("data.use_dynamic_bsz", _SFT, BOOL, Part(batches.micro_batches), True),
    _one("data.shuffle", _PPO, BOOL, Key(("data.shuffle",)), True),
    *several("data.seed", _PPO, WHOLE, Idle("run.seed seeds the order, too")),
    *several("data.image_key data.video_key data.audio_key data.videos_key data.images_key", _ALL, TEXT, _MODALITIES),
    *several("data.return_raw_chat data.return_raw_input_ids data.return_full_prompt data.return_multi_modal_inputs data.use_shm data.validation_shuffle data.trust_remote_code data.balance_dp_token data.ignore_input_ids_mismatch data.need_tools_kwargs data.continuous_token.enable", _ALL, BOOL, Idle("rows are read and templated before the first step")),
    *several("data.tokenizer data.pad_mode data.image_patch_size data.prompt_type data.val_score_key data.continuous_token.model_family", _ALL, TEXT, Idle("rows are read and templated before the first step")),
    *several("data.custom_cls.path data.custom_cls.name data.sampler.class_path data.sampler.class_name data.datagen.path data.datagen.name", _ALL, TEXT, Lacking("rows are read by data.train's columns: write them to a file")),
    *several("data.tool_config_path data.function_tool_path", _PPO, TEXT, Lacking("tools are given by `environments`: docs/environments.md", refused=True)),
)

_BATCHES = (
    _one(f"{_ACTOR}.ppo_mini_batch_size", _PPO, COUNT, Part(batches.batches), 256),
    _one(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", _PPO, COUNT, Part(batches.micro_batches), older=f"{_ACTOR}.ppo_micro_batch_size"),
    _one(f"{_ACTOR}.use_dynamic_bsz", _PPO, BOOL, Part(batches.micro_batches), False),
    _one(f"{_ACTOR}.ppo_max_token_len_per_gpu", _PPO, COUNT, Part(batches.micro_batches), 16384),
    _one(f"{_ACTOR}.ppo_epochs", _PPO, COUNT, Key(("algorithm.epochs",)), 1),
    _one(f"{_ROLLOUT}.n", _PPO, COUNT, Key(("batch.responses",)), 1),
    _one("critic.ppo_mini_batch_size", _PPO, COUNT, Part(batches.of_critic)),
    *several(_under("critic", "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu forward_max_token_len_per_gpu forward_micro_batch_size forward_micro_batch_size_per_gpu ppo_epochs ppo_infer_max_token_len_per_gpu ppo_infer_micro_batch_size_per_gpu"), _PPO, WHOLE, Idle("the critic learns by the actor's packs")),
    *several("critic.use_dynamic_bsz critic.ppo_infer_use_dynamic_bsz critic.shuffle", _PPO, BOOL, Idle("the critic learns by the actor's packs")),
    *several(_under(_REF, "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu"), _PPO, WHOLE, _SCORED),
    *several(_under(_ROLLOUT, "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu"), _PPO, WHOLE, _SCORED),
    *several(f"{_REF}.log_prob_use_dynamic_bsz {_ROLLOUT}.log_prob_use_dynamic_bsz {_ACTOR}.shuffle {_ACTOR}.use_prefix_grouper", _PPO, BOOL, _SCORED),
    *several("algorithm.filter_groups.enable", _PPO, BOOL, Part(batches.dynamic_sampling), False),
    *several("algorithm.filter_groups.metric", _PPO, TEXT, Part(batches.dynamic_sampling)),
    *several("algorithm.filter_groups.max_num_gen_batches algorithm.filter_groups.max_inflight_gen_batches", _PPO, WHOLE, Part(batches.dynamic_sampling), 0),
)

_ALGORITHM = (
    _one("algorithm.adv_estimator", _PPO, TEXT, Part(algorithm.advantage), "gae"),
    _one("algorithm.gamma", _PPO, NUMBER, Part(algorithm.advantage), 1.0),
    _one("algorithm.lam", _PPO, NUMBER, Part(algorithm.advantage), 1.0),
    _one("algorithm.norm_adv_by_std_in_grpo", _PPO, BOOL, Part(algorithm.advantage), True),
    _one("algorithm.use_kl_in_reward", _PPO, BOOL, Part(algorithm.kl), False),
    _one("algorithm.kl_penalty", _PPO, TEXT, Part(algorithm.kl), "kl"),
    _one("algorithm.kl_ctrl.type", _PPO, one_of("fixed", "adaptive"), Part(algorithm.kl), "fixed"),
    _one("algorithm.kl_ctrl.kl_coef", _PPO, NUMBER, Part(algorithm.kl), 0.001),
    _one("algorithm.kl_ctrl.horizon", _PPO, COUNT, Part(algorithm.kl), 10000),
    _one("algorithm.kl_ctrl.target_kl", _PPO, NUMBER, Part(algorithm.kl), 0.1),
    _one(f"{_ACTOR}.use_kl_loss", _PPO, BOOL, Part(algorithm.kl), False),
    _one(f"{_ACTOR}.kl_loss_coef", _PPO, NUMBER, Part(algorithm.kl), 0.001),
    _one(f"{_ACTOR}.kl_loss_type", _PPO, TEXT, Part(algorithm.kl), "low_var_kl"),
    _one(f"{_ACTOR}.entropy_coeff", _PPO, NUMBER, Key(("algorithm.entropy_bonus",)), 0.0),
    _one(f"{_ACTOR}.clip_ratio", _PPO, NUMBER, Part(algorithm.policy_loss), 0.2),
    _one(f"{_ACTOR}.clip_ratio_low", _PPO, NUMBER, Part(algorithm.policy_loss), 0.2, empty=True),
    _one(f"{_ACTOR}.clip_ratio_high", _PPO, NUMBER, Part(algorithm.policy_loss), 0.2, empty=True),
    _one(f"{_ACTOR}.clip_ratio_c", _PPO, NUMBER, Part(algorithm.policy_loss), 3.0, empty=True),
    _one(f"{_ACTOR}.tau_pos", _PPO, NUMBER, Part(algorithm.policy_loss), 1.0, older=f"{_ACTOR}.policy_loss.tau_pos"),
    _one(f"{_ACTOR}.tau_neg", _PPO, NUMBER, Part(algorithm.policy_loss), 1.05, older=f"{_ACTOR}.policy_loss.tau_neg"),
    _one(f"{_ACTOR}.policy_loss.loss_mode", _PPO, TEXT, Part(algorithm.policy_loss), "vanilla"),
    _one(f"{_ACTOR}.loss_agg_mode", _PPO, TEXT, Part(algorithm.aggregation), "token-mean"),
    _one(f"{_ACTOR}.loss_scale_factor", _PPO, COUNT, Part(algorithm.aggregation)),
    _one("algorithm.rollout_correction.rollout_is", _PPO, TEXT, Part(algorithm.correction)),
    _one("algorithm.rollout_correction.rollout_is_threshold", _PPO, TEXT, Part(algorithm.correction), "2.0"),
    *several("algorithm.rollout_correction.rollout_is_batch_normalize algorithm.rollout_correction.bypass_mode", _PPO, BOOL, Part(algorithm.correction), False),
    *several("algorithm.rollout_correction.rollout_rs algorithm.rollout_correction.rollout_rs_threshold algorithm.rollout_correction.rollout_token_veto_threshold algorithm.rollout_correction.loss_type algorithm.rollout_correction.rollout_rs_threshold_lower", _PPO, TEXT, Part(algorithm.correction)),
    *several(f"{_ACTOR}.tis_imp_ratio_cap", _PPO, NUMBER, Part(algorithm.correction)),
    _one("distillation.enabled", _PPO, BOOL, Lacking("a teacher beside rewards is not learned from; `plimsoll distill` learns on rows", refused=True), False),
    _one("algorithm.gdpo_reward_keys", _PPO, WORDS, Lacking("parts of the reward are those of `rewards`, each with a name")),
    _one("algorithm.use_pf_ppo", _PPO, BOOL, Lacking("responses are not drawn again by their rewards", refused=True), False),
    _one("critic.cliprange_value", _PPO, NUMBER, Part(algorithm.critic), 0.5, empty=True),
    _one("critic.enable", _PPO, BOOL, Part(algorithm.critic)),
    _one("critic.loss_agg_mode", _PPO, TEXT, Part(algorithm.critic)),
    _one("trainer.critic_warmup", _PPO, WHOLE, Part(algorithm.critic), 0),
    _one(f"{_ACTOR}.calculate_entropy", _PPO, BOOL, Idle("the entropy is among the metrics")),
    _one(f"{_ACTOR}.calculate_sum_pi_squared", _PPO, BOOL, Idle("it is of another baseline")),
)

_REWARDS = (
    _one("reward.custom_reward_function.path", _PPO, TEXT, Part(rewards.rewards), older="custom_reward_function.path"),
    _one("reward.custom_reward_function.name", _PPO, TEXT, Part(rewards.rewards), "compute_score", older="custom_reward_function.name"),
    _one("reward.reward_manager.name", _PPO, TEXT, Part(rewards.rewards), "naive", older="reward_model.reward_manager"),
    _one("reward.reward_model.enable", _PPO, BOOL, Part(rewards.rewards), False, older="reward_model.enable"),
    _one("reward.reward_model.model_path", _PPO, TEXT, Part(rewards.rewards), older="reward_model.model.path reward.reward_model.model.path"),
    _one("reward.reward_kwargs.overlong_buffer_cfg.enable", _PPO, BOOL, Part(rewards.overlong), False, older="reward_model.reward_kwargs.overlong_buffer_cfg.enable reward_model.overlong_buffer.enable"),
    _one("reward.reward_kwargs.overlong_buffer_cfg.len", _PPO, COUNT, Part(rewards.overlong), older="reward_model.reward_kwargs.overlong_buffer_cfg.len reward_model.overlong_buffer.len"),
    _one("reward.reward_kwargs.max_resp_len", _PPO, COUNT, Part(rewards.overlong), older="reward_model.reward_kwargs.max_resp_len"),
    _one("reward.reward_kwargs.overlong_buffer_cfg.penalty_factor", _PPO, NUMBER, Part(rewards.overlong), 1.0, older="reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor reward_model.overlong_buffer.penalty_factor"),
    _one("reward.reward_kwargs.overlong_buffer_cfg.log", _PPO, BOOL, Same("each part of the reward is among the metrics"), older="reward_model.reward_kwargs.overlong_buffer_cfg.log reward_model.overlong_buffer.log"),
    *several("reward.num_workers reward_model.num_workers reward_model.max_length reward_model.micro_batch_size_per_gpu reward_model.micro_batch_size reward_model.forward_max_token_len_per_gpu", _PPO, WHOLE, Idle("rewards are asked for side by side")),
    *several("reward_model.use_reward_loop reward_model.launch_reward_fn_async reward_model.use_dynamic_bsz reward_model.model.use_remove_padding", _PPO, BOOL, Idle("rewards are asked for side by side")),
    *several("reward_model.model.trust_remote_code", _PPO, BOOL, Key(("reward_model.role.model.trust_remote_code",), lambda on: on or None)),
    *several("reward_model.model.input_tokenizer reward.reward_manager.source reward_model.model.external_lib reward_model.strategy", _PPO, TEXT, Idle("a reward model reads with its own tokenizer")),
    *several("reward.sandbox_fusion.url reward_model.sandbox_fusion.url sandbox_fusion.url", _PPO, TEXT, Lacking("programs are run by the rule `code`: docs/rewards.md")),
    *several("reward.reward_manager.module.path reward.reward_manager.module.name", _PPO, TEXT, Lacking("a manager of one's own is not called: write a reward function", refused=True)),
)

_MODELS = (
    *_model(_PPO, _MODEL, "actor"),
    *_optimizer(_PPO, f"{_ACTOR}.optim", "actor", 1e-6),
    *_engine(_PPO, f"{_ACTOR}.fsdp_config"),
    *_engine(_PPO, f"{_REF}.fsdp_config"),
    *_model(_PPO, "critic.model", "critic"),
    *_optimizer(_PPO, "critic.optim", "critic", 1e-5),
    *(replace(one, older=(one.name.replace("critic.fsdp", "critic.model.fsdp_config"),)) for one in _engine(_PPO, "critic.fsdp")),
    *_model(_SFT, "model", "actor"),
    *_optimizer(_SFT, "optim", "actor", 1e-3),
    *_engine(_SFT, "engine"),
    *several(f"{_ACTOR}.strategy {_REF}.strategy critic.strategy strategy model_engine engine model optim actor@actor_rollout_ref.actor {_ACTOR}.model_engine --config-name", _ALL, TEXT, Part(roles.strategies)),
    *several(f"{_ACTOR}.ulysses_sequence_parallel_size {_REF}.ulysses_sequence_parallel_size critic.ulysses_sequence_parallel_size ulysses_sequence_parallel_size", _ALL, WHOLE, _PARALLEL),
    *several(f"{_ACTOR}.use_torch_compile {_REF}.use_torch_compile", _PPO, BOOL, _COMPILED),
    *several(f"{_ACTOR}.entropy_from_logits_with_chunking {_REF}.entropy_from_logits_with_chunking {_ACTOR}.entropy_checkpointing {_REF}.entropy_checkpointing {_ACTOR}.use_fused_kernels {_ACTOR}.use_remove_padding {_ACTOR}.pad_to_length {_REF}.pad_to_length use_remove_padding", _ALL, BOOL, _HEAD),
    *several(f"{_ACTOR}.data_loader_seed", _PPO, WHOLE, Idle("run.seed seeds all")),
    *several(f"{_ACTOR}.freeze_vision_tower actor_rollout_ref.hybrid_engine {_ACTOR}.load_weight", _PPO, BOOL, Idle("there is one kind of model here")),
    *several("actor_rollout_ref.nccl_timeout", _PPO, WHOLE, Idle("cluster.hang_timeout ends what hangs")),
    *several(f"{_REF}.model.path", _PPO, TEXT, Key(("reference.model.path",))),
)

_SAMPLING = (
    _one(f"{_ROLLOUT}.name", _PPO, TEXT, Part(rollout.engines), "vllm"),
    _one(f"{_ROLLOUT}.tensor_model_parallel_size", _PPO, COUNT, Part(rollout.engines), 2),
    _one(f"{_ROLLOUT}.pipeline_model_parallel_size", _PPO, COUNT, Key(("rollout.pipeline_parallel",)), 1),
    _one(f"{_ROLLOUT}.gpu_memory_utilization", _PPO, NUMBER, Part(rollout.engines), 0.5),
    _one(f"{_ROLLOUT}.free_cache_engine", _PPO, BOOL, Part(rollout.engines), True),
    _one(f"{_ROLLOUT}.dtype", _PPO, TEXT, Part(rollout.engines), "bfloat16"),
    _one(f"{_ROLLOUT}.temperature", _PPO, NUMBER, Key(("rollout.sampling.temperature",)), 1.0),
    _one(f"{_ROLLOUT}.top_p", _PPO, NUMBER, Key(("rollout.sampling.top_p",)), 1.0),
    _one(f"{_ROLLOUT}.top_k", _PPO, WHOLE, Key(("rollout.sampling.top_k",), lambda k: max(0, k)), -1),
    _one(f"{_ROLLOUT}.do_sample", _PPO, BOOL, Idle("it samples by the temperature"), True),
    _one(f"{_ROLLOUT}.max_num_seqs", _PPO, COUNT, Key(("rollout.max_sequences",)), 256),
    *several(_under(_ROLLOUT, "enforce_eager enable_prefix_caching"), _PPO, BOOL, Part(rollout.options)),
    *several(_under(_ROLLOUT, "max_num_batched_tokens"), _PPO, COUNT, Part(rollout.options)),
    *several(_under(_ROLLOUT, "max_model_len prompt_length response_length"), _PPO, WHOLE, Idle("as long as prompt and response together")),
    *several(_under(_ROLLOUT, "data_parallel_size expert_parallel_size moe_tensor_parallel_size"), _PPO, WHOLE, Lacking("there are as many engines as fit on the ranks' cards", harmless=(None, 1))),
    *several(_under(_ROLLOUT, "mode load_format layered_summon multi_stage_wake_up disable_log_stats skip_tokenizer_init scheduling_policy logprobs_mode checkpoint_engine.update_weights_bucket_megabytes checkpoint_engine.backend cudagraph_capture_sizes use_fire_sampling nnodes n_gpus_per_node update_weights_bucket_megabytes over_sample_rate limit_images quantization swap_space skip_rollout skip_dump_dir"), _PPO, WORDS, _SYNC),
    *several(_under(_ROLLOUT, "enable_chunked_prefill"), _PPO, BOOL, Idle("vLLM's own default stays")),
    *several(_under(_ROLLOUT, "calculate_log_probs"), _PPO, BOOL, Same("the engines' log-probs are kept")),
    *several(_under(_ROLLOUT, "ignore_eos"), _PPO, BOOL, Lacking("a response ends where the model ends it"), False),
    *several(_under(_ROLLOUT, "enable_rollout_routing_replay"), _PPO, BOOL, Lacking("experts are chosen anew when a response is learned"), False),
    *several(_under(_ROLLOUT, "repetition_penalty"), _PPO, NUMBER, Lacking("log-probs are those of the model", harmless=(1.0,)), 1.0),
    *several(_under(_ROLLOUT, "multi_turn.enable"), _PPO, BOOL, Lacking("turns and tools are given by `environments`: docs/environments.md", refused=True), False),
    *several(_under(_ROLLOUT, "agent.default_agent_loop"), _PPO, TEXT, Lacking("an agent's loop is an environment here: docs/environments.md", True, (None, "single_turn_agent")), "single_turn_agent"),
    *several(_under(_ROLLOUT, "agent.agent_loop_config_path agent.custom_async_server.path agent.custom_async_server.name"), _PPO, TEXT, Lacking("an agent's loop is an environment here: docs/environments.md", refused=True)),
    *several(_under(_ROLLOUT, "agent.num_workers"), _PPO, WHOLE, Idle("prompts are asked for at once")),
    _one(f"{_ROLLOUT}.val_kwargs.n", _PPO, COUNT, Part(rows.held_out), 1),
    _one(f"{_ROLLOUT}.val_kwargs.do_sample", _PPO, BOOL, Part(rows.held_out), False),
    _one(f"{_ROLLOUT}.val_kwargs.temperature", _PPO, NUMBER, Part(rows.held_out), 0.0),
    _one(f"{_ROLLOUT}.val_kwargs.top_p", _PPO, NUMBER, Part(rows.held_out), 1.0),
    _one(f"{_ROLLOUT}.val_kwargs.top_k", _PPO, WHOLE, Part(rows.held_out), -1),
)

_TRAINER = (
    _one("trainer.n_gpus_per_node", _ALL, COUNT, Part(roles.ranks), 8, sft=1),
    _one("trainer.nnodes", _ALL, COUNT, Part(roles.ranks), 1),
    _one("trainer.total_epochs", _ALL, COUNT, Part(batches.length), 30, sft=4),
    _one("trainer.total_training_steps", _ALL, COUNT, Part(batches.length)),
    _one("trainer.save_freq", _ALL, TEXT, Part(batches.saving), -1),
    _one("trainer.test_freq", _ALL, TEXT, Part(rows.held_out), -1),
    _one("trainer.project_name", _ALL, TEXT, Part(batches.saving), "verl_examples", sft="gsm8k-sft"),
    _one("trainer.experiment_name", _ALL, TEXT, Part(batches.saving), "gsm8k", sft="test"),
    _one("trainer.default_local_dir", _ALL, TEXT, Part(batches.saving)),
    _one("trainer.max_actor_ckpt_to_keep", _ALL, WHOLE, Key(("run.keep_checkpoints",), positive, note="the last ones"), older="trainer.max_ckpt_to_keep"),
    *several("trainer.max_critic_ckpt_to_keep", _PPO, WHOLE, Idle("a checkpoint holds actor and critic")),
    _one("trainer.resume_mode", _ALL, one_of("auto", "disable", "resume_path"), Part(batches.saving), "auto"),
    _one("trainer.resume_from_path", _ALL, TEXT, Part(batches.saving)),
    _one("trainer.logger", _ALL, WORDS, Part(batches.logged), ("console", "wandb")),
    _one("trainer.seed", _SFT, WHOLE, Key(("run.seed",)), 1),
    *several("trainer.val_before_train trainer.val_only", _ALL, BOOL, Idle("`plimsoll eval` measures a model before it is trained")),
    *several("trainer.balance_batch", _ALL, BOOL, Same("packs are balanced over the ranks"), True),
    *several("trainer.log_val_generations", _ALL, WHOLE, Same("what was sampled is in trajectories/: `plimsoll rollouts`")),
    *several("trainer.rollout_data_dir trainer.validation_data_dir", _PPO, TEXT, Same("what was sampled is in trajectories/: `plimsoll rollouts`")),
    *several("trainer.default_hdfs_dir trainer.device trainer.checkpoint_callback_class trainer.esi_redundant_time trainer.use_legacy_worker_impl trainer.profile_interval trainer.profile_steps", _ALL, WORDS, Idle("checkpoints are in run.directory")),
    *several("trainer.del_local_ckpt_after_load trainer.use_v1 trainer.remove_previous_ckpt_in_save trainer.use_distillation", _ALL, BOOL, Idle("there is one kind of worker here")),
    *several("trainer.ray_wait_register_center_timeout", _PPO, WHOLE, Idle("cluster.start_timeout says how long is waited")),
    _one("trainer.v1.trainer_mode", _PPO, TEXT, Lacking("a step samples, then learns; nothing is sampled by older weights", harmless=(None, "sync")), "sync"),
    *several("critic.checkpoint.save_contents checkpoint.save_contents checkpoint.load_contents", _ALL, WORDS, Idle("a run can be resumed from every checkpoint")),
)

SETTINGS: tuple[Setting, ...] = (
    *_DATA,
    *_MODELS,
    *_BATCHES,
    *_TRAINER,
    *_SAMPLING,
    *_ALGORITHM,
    *_REWARDS,
)


def _family(prefix: str, becomes: Becomes, *older: str) -> Setting:
    """All names that begin so."""
    return Setting(prefix, tuple(_ALL.split()), WORDS, becomes, older=older)


FAMILIES: tuple[Setting, ...] = (
    _family(f"{_ACTOR}.megatron.", _PARALLEL, f"{_REF}.megatron.", "critic.megatron.", "engine.virtual_", "engine.tensor_", "engine.pipeline_", "engine.context_", "engine.expert_"),
    _family(f"{_ACTOR}.veomni.", Idle("ZeRO divides weights, gradients and states"), f"{_REF}.veomni.", "critic.veomni.", f"{_ACTOR}.torchtitan.", f"{_REF}.torchtitan.", f"{_ACTOR}.mindspeed.", f"{_REF}.mindspeed.", f"{_ACTOR}.engine.", f"{_REF}.engine.", "engine.use_mbridge", "engine.vanilla_mbridge", "engine.override_transformer_config.", "engine."),
    _family("global_profiler.", Idle("seconds and bytes of each phase are in the run directory"), f"{_ACTOR}.profiler.", f"{_REF}.profiler.", f"{_ROLLOUT}.profiler.", "critic.profiler.", "reward_model.profiler.", "profiler.", f"{_ROLLOUT}.trace."),
    _family(f"{_ACTOR}.optim.override_optimizer_config.", Idle("AdamW has the settings of actor.optimizer"), "optim.override_optimizer_config.", "critic.optim.override_optimizer_config."),
    _family(f"{_ROLLOUT}.engine_kwargs.", Idle("of vLLM's options name those that you want under rollout.vllm")),
    _family(f"{_ROLLOUT}.multi_turn.", Idle("there are no turns without multi_turn.enable"), f"{_ROLLOUT}.disaggregation.", f"{_ROLLOUT}.mtp."),
    _family(f"{_ACTOR}.checkpoint.", Idle("a run can be resumed from every checkpoint")),
    _family(f"{_MODEL}.override_config.", Lacking("models are loaded as their config.json says"), "critic.model.override_config.", "model.override_config."),
    _family(f"{_MODEL}.fused_kernel_options.", _HEAD, f"{_MODEL}.tiled_mlp."),
    _family(f"{_MODEL}.mtp.", Lacking("heads for several tokens are not trained"), "model.mtp."),
    _family(f"{_MODEL}.lora.", Lacking("an adapter has the settings of actor.adapter: lora_rank and lora_alpha of the model")),
    _family("reward.reward_model.rollout.", Idle("a reward model is on the actor's ranks"), "reward_model.rollout.", "reward.reward_model.", "reward_model.n_gpus", "reward_model.nnodes", "reward_model.enable_resource_pool", "reward_model.megatron.", "reward_model.model.fsdp_config."),
    _family("distillation.", Idle("it is of distillation.enabled")),
    _family("ray_kwargs.", Idle("Ray is joined by cluster.address"), "ray_init.", "transfer_queue.", "trainer.v1.", "async_training.", "skip."),
    _family(f"{_ACTOR}.policy_loss.", Idle("it is of another policy loss")),
    _family(f"{_ACTOR}.qat.", Lacking("weights are trained in 16 bits")),
    _family("algorithm.pf_ppo.", Idle("it is of PF-PPO")),
    _family("data.apply_chat_template_kwargs.", Lacking("a template has no options: write them into data.chat_template"), "data.mm_processor_kwargs."),
    _family(f"{_ROLLOUT}.prometheus.", Idle("what engines do is in the run directory")),
    _family("hydra.", Idle("a run's files are in run.directory")),
    _family("reward.reward_kwargs.", Lacking("options of a reward function go under rewards.<name>.options"), "reward_model.reward_kwargs.", "custom_reward_function.reward_kwargs.", "reward.custom_reward_function.reward_kwargs."),
)
"""By what their names begin with, in this order."""
