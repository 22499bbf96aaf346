"""List TRL's settings, with the defaults of its dataclasses.

Beside them are those that only TRL before 1.0 has, with the defaults of that time.

They are those of trl 1.16 (ScriptArguments, ModelConfig, SFTConfig and so on) and of transformers'
TrainingArguments (5.23).
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from plimsoll.config.problems import refuse
from plimsoll.config.yaml_tree import read_tree
from plimsoll.errors import ConfigError
from plimsoll_convert import absences as why
from plimsoll_convert.absences import Absence
from plimsoll_convert.launch import Launch, propose
from plimsoll_convert.rules import adapter_targets, sleep_level
from plimsoll_convert.settings import (
    BOOL,
    COUNT,
    NUMBER,
    NUMBERS,
    PAIR,
    TEXT,
    WHOLE,
    WORDS,
    Assignment,
    Options,
    Remark,
    Setting,
    Typed,
    absent,
    by_name,
    join_words,
    not_negative,
    one_of,
    read_settings,
    settings,
    settings_of,
    split_flags,
)
from plimsoll_convert.trl import COMMANDS, TRAINER

# fmt: off
# ruff: noqa: E501  (a line a reason)

_ALL = "sft dpo kto reward grpo rloo orpo cpo gkd"
_RL = "grpo rloo"
_WITH_REFERENCE = "dpo kto grpo rloo"

_ABSENT: tuple[Setting, ...] = (
    *absent(Absence("idle", "the end of the template's turns ends responses, and is saved so"), {"sft reward gkd": "eos_token"}, TEXT),
    *absent(why.FILE_READ, {_ALL: "deepspeed config config_file accelerate_config"}),
    *absent(why.LAUNCHED, {_ALL: "fsdp_config main_process_port main_process_ip machine_rank rdzv_backend num_cpu_threads_per_process gpu_ids dynamo_backend deepspeed_multinode_launcher zero3_init_flag zero3_save_16bit_model gradient_clipping same_network multi_gpu use_deepspeed local_rank ddp_timeout", _RL: "vllm_server_base_url vllm_server_host vllm_server_port vllm_group_port vllm_server_timeout"}),
    *absent(why.ENGINE, {_ALL: "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend accelerator_config gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_cache auto_find_batch_size torch_empty_cache_steps", _RL: "ds3_gather_for_generation use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config vllm_model_impl cache_implementation", "grpo": "vllm_device vllm_dtype vllm_enable_prefix_caching"}),
    *absent(why.KERNELS, {_ALL: "attn_implementation use_liger_kernel liger_kernel_config", "grpo": "cast_lm_head_to_fp32"}),
    *absent(why.PACKED, {_ALL: "pad_to_multiple_of pad_token padding_value group_by_length length_column_name", "sft dpo gkd": "padding_free", "sft gkd": "packing_strategy eval_packing"}),
    *absent(why.SCORED, {_ALL: "per_device_eval_batch_size eval_accumulation_steps precompute_ref_batch_size"}),
    *absent(why.READ_ONCE, {_ALL: "dataset_streaming streaming dataset_num_proc dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory dataloader_persistent_workers dataloader_in_order remove_unused_columns ignore_data_skip dataloader_multiprocessing_context", "sft gkd": "dataset_kwargs"}),
    *absent(why.RECORDED, {_ALL: "logging_strategy logging_dir log_level log_level_replica include_num_input_tokens_seen debug logging_first_step log_on_each_node logging_nan_inf_filter disable_tqdm skip_memory_metrics", _RL: "log_completions log_multimodal log_unique_prompts num_completions_to_print"}),
    *absent(why.ALWAYS, {_ALL: "average_tokens_across_devices bnb_4bit_quant_storage"}),
    *absent(why.CHECKPOINTS, {_ALL: "overwrite_output_dir save_only_model save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint"}),
    *absent(why.NAMED, {_ALL: "run_name trackio_space_id trackio_bucket_id trackio_static_space_id hub_revision hub_strategy hub_model_id log_completions_hub_repo"}),
    *absent(why.UNASKED, {_ALL: "bf16_full_eval fp16_full_eval tf32 lora_task_type data_seed dataloader_drop_last label_names include_for_metrics ignore_bias_buffers do_train do_eval do_predict prediction_loss_only eval_do_concat_batches eval_use_gather_object batch_eval_metrics generate_during_eval eval_on_start eval_delay hub_token", "dpo kto reward grpo rloo orpo cpo gkd": "disable_dropout", "orpo cpo": "is_encoder_decoder max_completion_length", "gkd": "max_new_tokens teacher_model_init_kwargs", "grpo": "max_tool_calling_iterations"}),
    *absent(why.OTHER_METHOD, {_WITH_REFERENCE: "ref_model_mixup_alpha ref_model_sync_steps", "dpo": "f_alpha_divergence_coef discopop_tau", "grpo": "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"}),
    *absent(why.UPLOADS, {_ALL: "push_to_hub hub_always_push hub_private_repo"}, BOOL, False),
    *absent(why.MODEL_FILES.unless("main"), {_ALL: "model_revision"}, TEXT, "main"),
    *absent(why.MODEL_FILES, {_ALL: "model_init_kwargs"}, TEXT),
    *absent(why.ONE_CARD, {_ALL: "parallelism_config"}, TEXT),
    *absent(why.ONE_CARD.unless(None, 1), {_ALL: "parallelism_config_tp_size"}, COUNT, 1),
    *absent(why.ENGINE, {_ALL: " ".join(f"parallelism_config_{name}" for name in ("dp_replicate_size", "dp_shard_size", "cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")) + " use_parallelism_config"}),
    *absent(why.METHOD, {_ALL: "lora_target_parameters optim_args optim_target_modules"}),
    *absent(Absence("lacking", "weights are in 16 or in 4 bits: --load_in_4bit", refused=True), {_ALL: "load_in_8bit"}, BOOL, False),
    *absent(why.METHOD.unless("nf4"), {_ALL: "bnb_4bit_quant_type"}, TEXT, "nf4"),
    *absent(why.METHOD, {_ALL: "full_determinism", _WITH_REFERENCE: "sync_ref_model", "dpo": "use_weighting", "gkd": "seq_kd", "grpo": "use_adaptive_entropy"}, BOOL, False),
    *absent(why.METHOD.unless(None, 0.0), {"sft dpo kto grpo rloo": "router_aux_loss_coef"}, NUMBER),
    *absent(why.METHOD.unless(0.0), {_ALL: "label_smoothing_factor"}, NUMBER, 0.0),
    *absent(why.ROWS, {_ALL: "test_split_size"}, NUMBER),
    *absent(why.TEMPLATE, {_RL: "chat_template_kwargs"}, TEXT),
    *absent(why.NO_METHOD.unless("reverse_kl"), {"dpo": "f_divergence_type"}, TEXT, "reverse_kl"),
    *absent(why.METHOD, {"dpo": "ld_alpha"}, NUMBER),
    *absent(why.NO_METHOD.unless("kto"), {"kto": "loss_type"}, TEXT, "kto"),
    *absent(why.NO_METHOD.unless("nll", "chunked_nll"), {"sft gkd": "loss_type"}, TEXT, "nll"),
    *absent(why.NO_METHOD.unless(0.0), {"cpo": "alpha"}, NUMBER, 0.0),
    *absent(why.SAMPLING.unless(1.0), {_RL: "repetition_penalty"}, NUMBER, 1.0),
    *absent(why.SAMPLING, {_RL: "generation_kwargs vllm_structured_outputs_regex vllm_guided_decoding_regex"}, TEXT),
    *absent(why.NO_METHOD, {"rloo": "normalize_advantages"}, BOOL, False),
    *absent(why.NO_METHOD.unless(1.0), {"grpo": "top_entropy_quantile"}, NUMBER, 1.0),
    *absent(why.NO_METHOD, {"grpo": "off_policy_mask_threshold"}, NUMBER),
)

_OFF = "sft dpo kto reward orpo cpo gkd"
_SFT = "sft gkd"

OLD_NAMES = ("vllm_device", "vllm_dtype", "vllm_enable_prefix_caching")
"""Settings that only TRL before 1.0 has (0.14 to 0.16): they tell the version."""

OLD_DEFAULTS: Mapping[str, object] = {
    "beta": 0.04, "bf16": False, "gradient_checkpointing": False, "loss_type": "grpo",
    "max_completion_length": 256, "max_prompt_length": 512, "temperature": 0.9,
    "use_bias_correction_kl": False, "vllm_gpu_memory_utilization": 0.9,
    "vllm_importance_sampling_correction": False, "vllm_mode": "server",
}
"""The defaults of GRPOConfig then, where they are other ones now. `top_k` was 50: the ratio of
policies would be wrong with it.
"""

SETTINGS: tuple[Setting, ...] = (
    # processes
    *settings({"num_processes": None, "num_machines": 1, "parallelism_config_cp_size": 1, "parallelism_config_sp_size": 1}, _ALL, COUNT),
    *settings("zero_stage", _ALL, WHOLE),
    *settings("offload_optimizer_device offload_param_device", _ALL, TEXT),
    *settings("use_fsdp fsdp_offload_params use_cpu:cluster.device=cpu", _ALL, BOOL, False),
    *settings("fsdp", _ALL, WORDS),
    *settings("mixed_precision", _ALL, one_of("no", "fp16", "bf16", "fp8")),
    # models
    *settings({"model_name_or_path:actor.model.path": None, "dtype|torch_dtype": "float32"}, _ALL, TEXT),
    *settings({"bf16": None, "fp16": False, "trust_remote_code:actor.model.trust_remote_code": False, "use_peft": False, "use_rslora:actor.adapter.rslora": False, "use_dora:actor.adapter.dora": False}, _ALL, BOOL),
    *settings({"load_in_4bit:actor.model.quantization=nf4": False, "use_bnb_nested_quant": False, "gradient_checkpointing": True}, _ALL, BOOL),
    *settings("lora_r", _ALL, COUNT, 16),
    *settings("lora_alpha:actor.adapter.alpha", _ALL, COUNT, 32, convert=float),
    *settings("lora_dropout:actor.adapter.dropout", _ALL, NUMBER, 0.05),
    *settings("lora_target_modules:actor.adapter.targets", _ALL, WORDS, convert=adapter_targets),
    *settings("lora_modules_to_save:actor.adapter.modules_to_save", _ALL, WORDS),
    *settings("activation_offloading:actor.model.activation_offload=cpu", _OFF, BOOL, False),
    *settings("seed:run.seed", _ALL, WHOLE, 42),
    # optimizer
    *settings("learning_rate:actor.optimizer.learning_rate", _ALL, NUMBER, 1e-6, sft=2e-5, reward=1e-4, gkd=2e-5),
    *settings({"weight_decay:actor.optimizer.weight_decay": 0.0, "adam_beta1:actor.optimizer.beta1": 0.9, "adam_beta2:actor.optimizer.beta2": 0.999, "adam_epsilon:actor.optimizer.eps": 1e-8}, _ALL, NUMBER),
    *settings({"max_grad_norm:actor.optimizer.max_grad_norm": 1.0, "warmup_steps": 0.0, "warmup_ratio": None, "neftune_noise_alpha": None}, _ALL, NUMBER),
    *settings({"optim": "adamw_torch_fused", "lr_scheduler_type": "linear", "lr_scheduler_kwargs": None}, _ALL, TEXT),
    # batches
    *settings({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}, _ALL, COUNT),
    *settings("num_train_epochs", _ALL, NUMBER, 3.0),
    *settings("max_steps", _ALL, WHOLE, -1),
    *settings("max_length|max_seq_length", _OFF, COUNT, 1024, empty=True),
    *settings("max_prompt_length", "grpo rloo dpo orpo cpo kto", COUNT),
    *settings("max_completion_length:rollout.sampling.max_new_tokens+eval_sampling.max_new_tokens", _RL, COUNT, 512),
    *settings("truncation_mode", "sft dpo", one_of("keep_start", "keep_end"), "keep_start"),
    *settings("packing", _SFT, BOOL, False),
    *settings("train_sampling_strategy", _ALL, TEXT, "random", kto="sequential"),
    *settings("shuffle_dataset", "sft grpo rloo gkd", BOOL),
    # rows
    *settings({"dataset_name": None, "dataset_config": None, "datasets": None, "dataset_train_split": "train", "dataset_test_split": "test"}, _ALL, TEXT),
    *settings("dataset_text_field", _SFT, TEXT, "text"),
    *settings("chat_template_path", "sft reward gkd", TEXT),
    *settings({"completion_only_loss": None, "assistant_only_loss": False}, _SFT, BOOL),
    # the run
    *settings({"output_dir:run.directory": "trainer_output", "resume_from_checkpoint": None, "metric_for_best_model": None, "project": "huggingface"}, _ALL, TEXT),
    *settings("save_strategy", _ALL, one_of("no", "steps", "epoch", "best"), "steps"),
    *settings({"save_steps": 500.0, "eval_steps": None, "logging_steps": 10}, _ALL, NUMBER),
    *settings("save_total_limit", _ALL, WHOLE),
    *settings("eval_strategy|evaluation_strategy", _ALL, one_of("no", "steps", "epoch"), "no"),
    *settings({"load_best_model_at_end": False, "greater_is_better": None}, _ALL, BOOL),
    *settings("report_to", _ALL, WORDS),
    # losses of rows
    *settings("loss_type", "dpo", WORDS, ("sigmoid",)),
    *settings("loss_weights", "dpo", NUMBERS),
    *settings("loss_type", "cpo", TEXT, "sigmoid"),
    *settings("beta:algorithm.loss.options.beta", "dpo kto orpo cpo", NUMBER, 0.1),
    *settings("label_smoothing", "dpo cpo", NUMBER, 0.0),
    *settings("rpo_alpha:algorithm.nll_weight", "dpo", NUMBER),
    *settings("precompute_ref_log_probs:reference_logprobs.precompute", "dpo kto", BOOL, False),
    *settings("desirable_weight:algorithm.loss.options.desirable_weight undesirable_weight:algorithm.loss.options.undesirable_weight", "kto", NUMBER, 1.0),
    *settings("center_rewards_coefficient:algorithm.centring", "reward", NUMBER),
    *settings({"cpo_alpha": 1.0, "simpo_gamma": 0.5}, "cpo", NUMBER),
    *settings("teacher_model_name_or_path:teacher.model.path", "gkd", TEXT),
    *settings({"lmbda": 0.5, "beta": 0.5, "temperature:algorithm.temperature": 0.9}, "gkd", NUMBER),
    # sampling
    *settings("num_generations:batch.responses", _RL, COUNT, 8, rloo=2),
    *settings({"generation_batch_size": None, "steps_per_generation": None, "num_generations_eval": None, "vllm_max_model_length": None, "num_iterations:algorithm.epochs": 1}, _RL, COUNT),
    *settings("vllm_tensor_parallel_size:rollout.vllm.tensor_parallel", _RL, COUNT, 1),
    *settings({"temperature:rollout.sampling.temperature+eval_sampling.temperature": 1.0, "top_p:rollout.sampling.top_p": 1.0, "min_p:rollout.sampling.min_p": None}, _RL, NUMBER),
    *settings("vllm_gpu_memory_utilization:rollout.vllm.memory_share", _RL, NUMBER, 0.3),
    *settings("top_k:rollout.sampling.top_k", _RL, WHOLE, 0, convert=not_negative),
    *settings("use_vllm", _RL, BOOL, False),
    *settings("vllm_enable_sleep_mode:rollout.vllm.sleep_level", _RL, BOOL, False, convert=sleep_level),
    *settings("vllm_mode", _RL, one_of("colocate", "server"), "colocate"),
    # algorithm
    *settings("beta:algorithm.kl.coefficient", _RL, NUMBER, 0.0, rloo=0.05),
    *settings("use_bias_correction_kl vllm_importance_sampling_correction", "grpo", BOOL, True),
    *settings({"epsilon": 0.2, "epsilon_high": None}, _RL, NUMBER),
    *settings({"delta": None, "vllm_importance_sampling_clip_min": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "entropy_coef:algorithm.entropy_bonus": 0.0}, "grpo", NUMBER),
    *settings({"loss_type": "dapo", "scale_rewards": "group"}, "grpo", TEXT),
    *settings("importance_sampling_level", "grpo", one_of("token", "sequence"), "token"),
    *settings("multi_objective_aggregation", "grpo", one_of("sum_then_normalize", "normalize_then_sum"), "sum_then_normalize"),
    *settings("mask_truncated_completions:algorithm.mask_truncated", _RL, BOOL, False),
    *settings("vllm_importance_sampling_mode", "grpo", one_of("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"), "sequence_mask"),
    *settings("vllm_importance_sampling_clip_max|vllm_importance_sampling_cap", "grpo", NUMBER, 3.0, empty=True),
    # rewards
    *settings("reward_funcs", _RL, WORDS),
    *settings("reward_model_name_or_path:reward_model.role.model.path", _RL, TEXT),
    *settings("reward_weights", _RL, NUMBERS),
    *settings("reward_clip_range", "rloo", PAIR),
    *_ABSENT,
)

# fmt: on

_NULLS = (("None",), ("null",))
_CONFIGS: Mapping[str, Mapping[str, object]] = {
    "single_gpu": {"num_processes": 1},
    "multi_gpu": {"num_processes": 8},
    **{f"zero{n}": {"zero_stage": n, "num_processes": 8} for n in (1, 2, 3)},
    **{f"fsdp{n}": {"use_fsdp": True, "num_processes": 8} for n in (1, 2)},
}
"""Settings of TRL's own accelerate configs, by the files' names without `deepspeed_`."""
_ACCELERATE = ("num_processes", "num_machines", "zero_stage", "mixed_precision")
_PARALLEL = tuple(f"parallelism_config_{kind}_size" for kind in ("cp", "sp", "tp"))
_DEEPSPEED = ("zero_stage", "offload_optimizer_device", "offload_param_device")


@cache
def _known(command: str) -> Mapping[str, Setting]:
    return by_name(settings_of(SETTINGS, command))


def read_options(launch: Launch, cards: int | None) -> Options:
    """Return the options of a command.

    Raises:
        ConfigError: The program cannot be converted, or a file or a value cannot be read.
    """
    command = TRAINER.short_name(launch.program)
    words = launch.launcher
    at = next((i for i, word in enumerate(words) if os.path.basename(word) == "accelerate"), None)
    of_accelerate = () if at is None else words[at + 2 :]
    flags = [word for word in of_accelerate if word not in ("-m", "python")]
    typed, problems = split_flags([*flags, *launch.arguments])
    refuse(problems)
    given = {name.replace("-", "_"): words for name, words in typed}
    notes: list[Remark] = []
    options = {**dict(_files(given, notes)), **given}
    old = command == "grpo" and any(name in options for name in OLD_NAMES)
    listed = settings_of(SETTINGS, command, OLD_DEFAULTS if old else None)
    settings = {f"--{setting.name}": setting for setting in listed}
    assignments = [_assignment(command, name, words) for name, words in options.items()]
    remedy = "give another value, or leave the flag out"
    return read_settings(command, launch, settings, [*notes, *assignments], remedy, cards=cards)


def _assignment(command: str, given: str, words: tuple[str, ...]) -> Assignment | Remark:
    """Return the assignment of an option: its name may be `no_NAME`, or a unique prefix."""
    known, name = _known(command), f"--{given}"
    text = join_words(name, words)
    value = None if words[:1] in _NULLS else words
    if given in known:
        return known[given], name, value, text
    switch = known.get(given.removeprefix("no_"))
    if switch is not None and (switch.reader.kind is bool or switch.absent is not None):
        return switch, name, ("false",), text
    begun = {s.name: s for full, s in known.items() if full.startswith(given or " ")}
    if len(begun) == 1:
        return next(iter(begun.values())), name, value, text
    why = f"trl {command} of TRL 1.16 has no such setting"
    if others := [c for c in COMMANDS if given in _known(c)]:
        return Remark("unknown", text, f"{why}; trl {' and '.join(others)} has")
    close = difflib.get_close_matches(name, [f"--{full}" for full in known], n=2)
    return Remark("unknown", text, why + propose(close))


def _files(given: Mapping[str, tuple[str, ...]], notes: list[Remark]) -> Iterator[Typed]:
    """Yield the settings in the files of accelerate, TRL and DeepSpeed that flags name."""
    flags = {name: words[0] for name, words in given.items() if words}
    for flag in ("config_file", "accelerate_config"):
        if flag in flags:
            yield from _accelerate(flag, flags[flag], notes)
    of_trl = [*_config(flags["config"], notes)] if "config" in flags else []
    yield from of_trl
    flags = {name: words[0] for name, words in of_trl if words} | flags
    if "deepspeed" in flags:
        yield from _deepspeed(flags["deepspeed"], notes)


def _config(path: str, notes: list[Remark]) -> Iterator[Typed]:
    for name, value in _mapping(path).items():
        if name == "env":
            why = "variables of the environment are set before `plimsoll` is called"
            notes.append(Remark("check", f"env of {path}", why))
        else:
            yield _as_typed(name.replace("-", "_"), value)


def _as_typed(name: str, value: object) -> Typed:
    plain = isinstance(value, tuple) and not any(isinstance(v, dict | tuple) for v in value)
    values = value if plain and isinstance(value, tuple) else (value,)
    texts = ("None" if v is None else v if isinstance(v, str) else json.dumps(v) for v in values)
    return name, tuple(texts)


def _mapping(path: str) -> Mapping[str, object]:
    """Return the mapping in a YAML or JSON file; raise ConfigError if it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {why}. The command names it.") from error
    return read_tree(text, path).values


def _accelerate(flag: str, path: str, notes: list[Remark]) -> Iterator[Typed]:
    """Yield the settings in a config of accelerate that can be converted."""
    name = os.path.basename(path).partition(".")[0].removeprefix("deepspeed_")
    why, values = "", dict[str, object]()
    if Path(path).is_file():
        config = _mapping(path)
        values = {n: config[n] for n in _ACCELERATE if n in config}
        values |= dict(_parallelism(config.get("parallelism_config")))
        if str(config.get("distributed_type", "")).upper() == "FSDP":
            values["use_fsdp"] = True
        for section in (config.get("deepspeed_config"), config.get("fsdp_config")):
            if isinstance(section, dict):
                values |= {n: section[n] for n in _DEEPSPEED if n in section}
                if str(section.get("fsdp_offload_params", "")).lower() == "true":
                    values["fsdp_offload_params"] = True
    elif name in _CONFIGS:
        values = dict(_CONFIGS[name])
        why = f"the file is not here: taken as TRL's own {name}.yaml, of 8 processes"
    else:
        why = "the file is not here: its processes, ZeRO stage and offload are not known"
    if why:
        notes.append(Remark("check", f"--{flag} {path}", why))
    yield from (_as_typed(key, value) for key, value in values.items())


def _parallelism(section: object) -> Iterator[tuple[str, object]]:
    """Yield the settings of accelerate's `parallelism_config`, whose keys may have that prefix."""
    for name, value in section.items() if isinstance(section, dict) else ():
        if (known := f"parallelism_config_{name.removeprefix('parallelism_config_')}") in _PARALLEL:
            yield known, value


def _deepspeed(path: str, notes: list[Remark]) -> Iterator[Typed]:
    """Yield the settings in a config of DeepSpeed that can be converted."""
    if not Path(path).is_file():
        why = "the file is not here: its ZeRO stage and offload are not known"
        notes.append(Remark("check", f"--deepspeed {path}", why))
        return
    zero = _mapping(path).get("zero_optimization")
    if not isinstance(zero, dict):
        return
    yield _as_typed("zero_stage", zero.get("stage", 0))
    for name in ("optimizer", "param"):
        offload = zero.get(f"offload_{name}")
        if isinstance(offload, dict) and "device" in offload:
            yield _as_typed(f"offload_{name}_device", offload["device"])
