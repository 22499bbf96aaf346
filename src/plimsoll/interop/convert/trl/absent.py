"""List TRL's settings that have no counterpart."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.interop.convert import absences as why
from plimsoll.interop.convert.absences import Absence
from plimsoll.interop.convert.values import BOOL, NUMBER, TEXT, Setting, absent

# fmt: off
# ruff: noqa: E501  (a line a reason)

_ALL = "sft dpo kto reward grpo rloo orpo cpo gkd"
_RL = "grpo rloo"
_WITH_REFERENCE = "dpo kto grpo rloo"

ABSENT: tuple[Setting, ...] = (
    *absent(why.FILE_READ, _ALL, "deepspeed config config_file accelerate_config"),
    *absent(why.LAUNCHED, _ALL, "fsdp_config main_process_port main_process_ip machine_rank rdzv_backend num_cpu_threads_per_process gpu_ids dynamo_backend deepspeed_multinode_launcher zero3_init_flag zero3_save_16bit_model gradient_clipping same_network multi_gpu use_deepspeed local_rank ddp_timeout"),
    *absent(why.LAUNCHED, _RL, "vllm_server_base_url vllm_server_host vllm_server_port vllm_group_port vllm_server_timeout"),
    *absent(why.ENGINE, _ALL, "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend accelerator_config gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_cache auto_find_batch_size torch_empty_cache_steps"),
    *absent(why.ENGINE, _RL, "ds3_gather_for_generation use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config vllm_model_impl cache_implementation"),
    *absent(why.KERNELS, _ALL, "attn_implementation use_liger_kernel liger_kernel_config"),
    *absent(why.KERNELS, "grpo", "cast_lm_head_to_fp32"),
    *absent(why.PACKED, _ALL, "pad_to_multiple_of pad_token padding_value group_by_length length_column_name"),
    *absent(why.PACKED, "sft dpo gkd", "padding_free"),
    *absent(why.PACKED, "sft gkd", "packing_strategy eval_packing"),
    *absent(why.SCORED, _ALL, "per_device_eval_batch_size eval_accumulation_steps precompute_ref_batch_size"),
    *absent(why.READ_ONCE, _ALL, "dataset_streaming streaming dataset_num_proc dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory dataloader_persistent_workers dataloader_in_order remove_unused_columns ignore_data_skip dataloader_multiprocessing_context"),
    *absent(why.READ_ONCE, "sft gkd", "dataset_kwargs"),
    *absent(why.RECORDED, _ALL, "logging_strategy logging_dir log_level log_level_replica include_num_input_tokens_seen debug logging_first_step log_on_each_node logging_nan_inf_filter disable_tqdm skip_memory_metrics"),
    *absent(why.RECORDED, _RL, "log_completions log_multimodal log_unique_prompts num_completions_to_print"),
    *absent(why.ALWAYS, _ALL, "average_tokens_across_devices bnb_4bit_quant_storage"),
    *absent(why.CHECKPOINTS, _ALL, "overwrite_output_dir save_only_model save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint"),
    *absent(why.NAMED, _ALL, "run_name trackio_space_id trackio_bucket_id trackio_static_space_id"),
    *absent(why.UNASKED, _ALL, "bf16_full_eval fp16_full_eval tf32 lora_task_type data_seed dataloader_drop_last label_names include_for_metrics ignore_bias_buffers do_train do_eval do_predict prediction_loss_only eval_do_concat_batches eval_use_gather_object batch_eval_metrics generate_during_eval eval_on_start eval_delay"),
    *absent(why.UNASKED, "dpo kto reward grpo rloo orpo cpo gkd", "disable_dropout"),
    *absent(why.UNASKED, "orpo cpo", "is_encoder_decoder max_completion_length"),
    *absent(why.UNASKED, "gkd", "max_new_tokens teacher_model_init_kwargs"),
    *absent(why.UNASKED, "grpo", "max_tool_calling_iterations"),
    *absent(why.OTHER_METHOD, _WITH_REFERENCE, "ref_model_mixup_alpha ref_model_sync_steps"),
    *absent(why.OTHER_METHOD, "dpo", "f_alpha_divergence_coef discopop_tau"),
    *absent(why.OTHER_METHOD, "grpo", "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"),
    *(replace(token, secret=True) for token in absent(why.UNASKED, _ALL, "hub_token")),
    *absent(why.UPLOADS, _ALL, "push_to_hub hub_always_push hub_private_repo", BOOL, False),
    *absent(why.NAMED, _ALL, "hub_revision hub_strategy hub_model_id log_completions_hub_repo"),
    *absent(why.MODEL_FILES.unless("main"), _ALL, "model_revision", TEXT, "main"),
    *absent(why.MODEL_FILES, _ALL, "model_init_kwargs", TEXT),
    *absent(why.ONE_CARD, _ALL, "parallelism_config", TEXT),
    *absent(why.METHOD, _ALL, "lora_target_parameters lora_modules_to_save optim_args optim_target_modules"),
    *absent(Absence("lacking", "weights are in 16 or in 4 bits: --load_in_4bit", refused=True), _ALL, "load_in_8bit", BOOL, False),
    *absent(why.METHOD.unless("nf4"), _ALL, "bnb_4bit_quant_type", TEXT, "nf4"),
    *absent(why.METHOD, _ALL, "full_determinism", BOOL, False),
    *absent(why.METHOD.unless(None, 0.0), "sft dpo kto grpo rloo", "router_aux_loss_coef", NUMBER),
    *absent(why.METHOD.unless(0.0), _ALL, "label_smoothing_factor", NUMBER, 0.0),
    *absent(why.ROWS, _ALL, "test_split_size", NUMBER),
    *absent(why.TEMPLATE, _RL, "chat_template_kwargs", TEXT),
    *absent(why.METHOD, _WITH_REFERENCE, "sync_ref_model", BOOL, False),
    *absent(why.NO_METHOD.unless("reverse_kl"), "dpo", "f_divergence_type", TEXT, "reverse_kl"),
    *absent(why.METHOD, "dpo", "ld_alpha", NUMBER),
    *absent(why.METHOD, "dpo", "use_weighting", BOOL, False),
    *absent(why.NO_METHOD.unless("kto"), "kto", "loss_type", TEXT, "kto"),
    *absent(why.NO_METHOD.unless("nll", "chunked_nll"), "sft gkd", "loss_type", TEXT, "nll"),
    *absent(why.NO_METHOD.unless(0.0), "cpo", "alpha", NUMBER, 0.0),
    *absent(why.METHOD, "gkd", "seq_kd", BOOL, False),
    *absent(why.SAMPLING.unless(1.0), _RL, "repetition_penalty", NUMBER, 1.0),
    *absent(why.SAMPLING, _RL, "generation_kwargs vllm_structured_outputs_regex vllm_guided_decoding_regex", TEXT),
    *absent(why.NO_METHOD, "rloo", "normalize_advantages", BOOL, False),
    *absent(why.METHOD, _RL, "mask_truncated_completions", BOOL, False),
    *absent(why.NO_METHOD.unless(1.0), "grpo", "top_entropy_quantile", NUMBER, 1.0),
    *absent(why.NO_METHOD, "grpo", "off_policy_mask_threshold", NUMBER),
    *absent(why.METHOD, "grpo", "use_adaptive_entropy", BOOL, False),
)
