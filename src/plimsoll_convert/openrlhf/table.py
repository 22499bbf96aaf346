"""List the flags of OpenRLHF: with a counterpart, without a counterpart, and removed ones.

Names and defaults are those of `openrlhf/cli/train_*.py` at each release.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from plimsoll.config.problems import invalid
from plimsoll.config.secrets import MASK, is_secret
from plimsoll.errors import ConfigError
from plimsoll_convert import absences as why
from plimsoll_convert.absences import Absence
from plimsoll_convert.launch import Launch
from plimsoll_convert.openrlhf import (
    COMMANDS,
    FIRST,
    LAST,
    RELEASES,
    TRAINER,
    Version,
    format_version,
    parse_version,
)
from plimsoll_convert.rules import adapter_targets, sleep_level
from plimsoll_convert.settings import (
    BOUNDS,
    COUNT,
    NUMBER,
    PAIR,
    SWITCH,
    TEXT,
    WHOLE,
    WORDS,
    Assignment,
    Convert,
    Options,
    Setting,
    Typed,
    ValueReader,
    join_words,
    one_of,
    or_none,
    positive,
    read_settings,
    split_flags,
    unchanged,
)

Default = Callable[[str, Version], object]
_DOTTED = (0, 10, 2)
"""The first version whose flags have dots."""
_UNTIL = {"kto": (0, 9, 5), "kd": (0, 9, 5)}
"""The last version that has a command, for commands that were removed."""


@dataclass(frozen=True)
class VersionedFlag:
    """A flag of OpenRLHF, whose name and default may differ between versions and commands.

    Attributes:
        flat: The name up to 0.10.1; None if the flag did not exist.
        dotted: The names from 0.10.2 on; `ppo:NAME` is the name in that command only.
        of: Commands that have the flag, with versions unless all have it: `rm,kd@0.8.1`,
            `ppo@0.8.2-0.9.0`.
        reader: How words are converted to a value.
        default: The parser's default, or a function of a command and a version that returns it.
        absent: Why the flag has no counterpart; None if it has one.
        keys: Keys to which the flag is written without a further rule; see `Setting`.
        convert: How the value is converted for its keys.
    """

    flat: str | None
    dotted: str
    of: str
    reader: ValueReader = WORDS
    default: object = None
    absent: Absence | None = None
    keys: str = ""
    convert: Convert = unchanged

    @property
    def id(self) -> str:
        """The name by which the converter looks the flag up."""
        return self.flat or self.dotted.split()[0].rpartition(":")[2]

    def name(self, command: str, version: Version) -> str | None:
        """Return the flag's name without dashes in a command and version; None if it is missing."""
        if not any(since <= version <= until for since, until in self._spans(command)):
            return None
        if version < _DOTTED:
            return self.flat
        names = [word.rpartition(":") for word in self.dotted.split()]
        of_command = [name for who, _, name in names if who == command]
        return next(iter(of_command or [name for who, _, name in names if not who]), None)

    def setting(self, command: str, version: Version) -> Setting:
        """Return the setting that the flag is in one command and version."""
        value = self.default
        while callable(value):
            value = value(command, version)
        default = bool(value) if self.reader.kind is bool else value
        rest = (self.absent, self.keys, self.convert)
        return Setting(self.id, (command,), self.reader, default, *rest)

    def _spans(self, command: str) -> Iterator[tuple[Version, Version]]:
        for word in self.of.split():
            who, _, when = word.partition("@")
            if command in who.split(","):
                since, _, until = when.partition("-")
                last = _UNTIL.get(command, LAST)
                yield (
                    parse_version(since) if since else FIRST,
                    min(parse_version(until), last) if until else last,
                )


def from_version(value: object, since: str, later: object) -> Default:
    """Return a default function: `value` before the version `since`, and `later` from it on."""
    return lambda command, version: later if version >= parse_version(since) else value


def by_command(otherwise: object = None, **commands: object) -> Default:
    """Return a default function with a value, or a `from_version`, for each command."""
    return lambda command, version: commands.get(command, otherwise)


def flags(
    of: str,
    reader: ValueReader,
    names: str | Mapping[str, object],
    default: object = None,
    convert: Convert = unchanged,
) -> tuple[VersionedFlag, ...]:
    """Return several flags with the same properties.

    Args:
        of: Commands that have the flags; see `VersionedFlag`.
        reader: How words are converted to a value.
        names: `FLAT=DOTTED` or, with keys, `FLAT=DOTTED>KEY+KEY`, separated by blanks. FLAT or
            DOTTED may be empty. Or a mapping from such names to defaults.
        default: The default, or a function that returns it, if names have none.
        convert: How values are converted for their keys.
    """
    by_name = dict.fromkeys(names.split(), default) if isinstance(names, str) else names
    made = []
    for name, value in by_name.items():
        flat, _, rest = name.partition("=")
        dotted, _, keys = rest.partition(">")
        made.append(VersionedFlag(flat or None, dotted, of, reader, value, None, keys, convert))
    return tuple(made)


# fmt: off
# ruff: noqa: E501  (a line a reason)

_ALL = "ppo sft rm dpo kto kd"
_OLD_PPO = "ppo@-0.10.1"


def _idle(reason: Absence, names: Mapping[str, str]) -> tuple[VersionedFlag, ...]:
    """Return flags without a counterpart: `FLAT=DOTTED`, by the commands that have them."""
    return tuple(replace(flag, absent=reason) for of, listed in names.items() for flag in flags(of, WORDS, listed))


def _lacking(reason: Absence, of: str, reader: ValueReader, flat: str | None, dotted: str, default: object = None) -> VersionedFlag:
    return VersionedFlag(flat, dotted, of, reader, default, absent=reason)


_SAVED = "ppo sft rm dpo kd@0.8.2 kto@0.9.2"
_ROLES = ("", "actor.", "critic.")

_ABSENT: tuple[VersionedFlag, ...] = (
    *_idle(why.PACKED, {"ppo sft rm dpo": "packing_samples=ds.packing_samples"}),
    *_idle(why.KERNELS, {"ppo,sft,rm,dpo,kto,kd@-0.8.9": "flash_attn=", "ppo,sft,rm,dpo,kto,kd@0.8.10": "attn_implementation=ds.attn_implementation", "ppo sft dpo kto kd": "use_liger_kernel=ds.use_liger_kernel", "rm": "compute_fp32_loss=model.compute_fp32_loss_enable"}),
    *_idle(why.RECORDED, {_ALL: "logging_steps=logger.logging_steps use_tensorboard=logger.tensorboard_dir", _OLD_PPO: "perf="}),
    *_idle(why.ALWAYS, {"ppo": "enable_prefix_caching=vllm.enable_prefix_caching"}),
    VersionedFlag("gradient_checkpointing_use_reentrant", "ppo:actor.gradient_checkpointing_reentrant model.gradient_checkpointing_reentrant", _ALL, absent=why.ENGINE),
    *_idle(why.ENGINE, {_ALL: "deepcompile=ds.deepcompile overlap_comm=ds.overlap_comm", "ppo sft rm dpo": "=ds.experts_implementation", "ppo": "vllm_sync_backend=vllm.sync_backend vllm_sync_with_ray=vllm.sync_with_ray", _OLD_PPO: "actor_init_on_gpu="}),
    *_idle(why.LAUNCHED, {_ALL: "local_rank=local_rank", "ppo": "ref_num_nodes=ref.num_nodes ref_num_gpus_per_node=ref.num_gpus_per_node colocate_actor_ref=train.colocate_actor_ref"}),
    *_idle(why.READ_ONCE, {"ppo,sft,rm,dpo@0.9.10": "dataloader_num_workers=data.dataloader_num_workers"}),
    *_idle(why.SCORED, {"ppo": "micro_rollout_batch_size=rollout.micro_batch_size", "ppo@0.8.6": "rollout_max_tokens_per_gpu=rollout.max_tokens_per_gpu"}),
    *_idle(why.CHECKPOINTS, {_ALL: "ckpt_path=ckpt.path max_ckpt_mem=ckpt.max_mem use_ds_universal_ckpt=ds.use_universal_ckpt", _SAVED: "save_hf_ckpt=ckpt.save_hf disable_ds_ckpt=ckpt.disable_ds"}),
    *_idle(why.NAMED, {_ALL: "wandb_org=logger.wandb.org wandb_group=logger.wandb.group wandb_run_name=logger.wandb.run_name"}),
    *_idle(why.OTHER_METHOD, {_OLD_PPO: "ptx_coef=", "ppo@0.10.0": "image_key=data.image_key freeze_visual_encoder=actor.freeze_visual_encoder", "ppo@0.9.1": "async_queue_size=train.async_queue_size", "ppo@0.9.7": "partial_rollout=train.partial_rollout_enable"}),
    *_idle(Absence("idle", "keys and values of all heads are exchanged at once"), {"ppo sft rm dpo": "ring_head_stride=ds.ring_attn_head_stride"}),
    *(flag for role in _ROLES for flag in _idle(why.OTHER_METHOD, {"ppo" if role else "sft rm dpo": " ".join(f"={role}muon.{name}" for name in ("lr", "momentum", "nesterov", "no_nesterov", "ns_steps"))})),
    *_idle(why.UNASKED, {"sft@-0.10.1": "train_split="}),
    *(_lacking(why.ADAMW.unless("adam"), "ppo" if role else "sft rm dpo", one_of("adam", "muon"), None, f"{role}optim", "adam") for role in _ROLES),
    VersionedFlag("aux_loss_coef", "ppo:actor.aux_loss_coef model.aux_loss_coef", _ALL, NUMBER, 0.0, why.METHOD.unless(0.0)),
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
    **dict.fromkeys(("pretrain_data", "pretrain_data_probs", "pretrain_split"), ("0.7.1", "")),
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

_DATA = "sft rm dpo kto kd"
_CARDS = ValueReader(int, lowest=0)
"""Number of cards or machines of a group; 0 if the command has no such group."""
ESTIMATORS = {
    **{name: name for name in ("gae", "rloo", "dr_grpo")},
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "flash_reinforce": "batch_mean"
}
"""Plimsoll's estimator for each of OpenRLHF's."""
CORRECTIONS = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask"), "mis": ("seq", "mask")}
"""(level, mode) of each type of correction."""

_MODELS = (
    VersionedFlag("pretrain", "ppo:actor.model_name_or_path model.model_name_or_path", _ALL, TEXT, by_command(kto="bigscience/bloomz-1b7"), keys="actor.model.path"),
    *flags("ppo,sft,rm,dpo,kto,kd@-0.9.1", SWITCH, "bf16="),
    *flags("ppo,sft,rm,dpo,kto,kd@0.9.2", one_of("bf16", "fp16"), "param_dtype=ds.param_dtype", "bf16"),
    *flags(_ALL, TEXT, "grad_accum_dtype=ds.grad_accum_dtype"),
    VersionedFlag("gradient_checkpointing", "ppo:actor.gradient_checkpointing_enable model.gradient_checkpointing_enable", _ALL, SWITCH, keys="actor.model.gradient_checkpointing+critic.model.gradient_checkpointing"),
    *flags(_ALL, SWITCH, "load_in_4bit=ds.load_in_4bit>actor.model.quantization=nf4+critic.model.quantization=nf4 adam_offload=ds.adam_offload>actor.zero.optimizer_offload=cpu+critic.zero.optimizer_offload=cpu"),
    *flags(_ALL, WHOLE, {"lora_rank=ds.lora.rank>actor.adapter.rank+critic.adapter.rank": 0, "zero_stage=ds.zero_stage>actor.zero.stage+critic.zero.stage": 2, "seed=train.seed>run.seed": 42}),
    *flags(_ALL, COUNT, "lora_alpha=ds.lora.alpha>actor.adapter.alpha+critic.adapter.alpha", 16, convert=float),
    *flags(_ALL, NUMBER, "lora_dropout=ds.lora.dropout>actor.adapter.dropout+critic.adapter.dropout", 0.0),
    *flags(_ALL, WORDS, "target_modules=ds.lora.target_modules>actor.adapter.targets+critic.adapter.targets", "all-linear", convert=adapter_targets),
    *flags(_ALL, COUNT, "zpg=ds.zpg", 1),
    *flags("ppo", TEXT, "critic_pretrain=critic.model_name_or_path"),
    *flags("dpo", TEXT, "ref_pretrain=ref.model_name_or_path"),
    *flags("ppo@-0.10.1", SWITCH, "ref_reward_offload="),
    VersionedFlag("ref_offload", "ppo:ref.offload dpo:ref.offload", "ppo@0.10.2 dpo kto", SWITCH),
    *flags("ppo", SWITCH, "=reward.offload enable_ema=train.enable_ema"),
    *flags("kd", TEXT, "teacher_model="),
    *flags("kd", SWITCH, "teacher_offload="),
    *flags("ppo", NUMBER, "ema_beta=train.ema_beta", 0.992),
)


def _of_role(role: str, rate: float) -> tuple[VersionedFlag, ...]:
    optimizer = f"{role}.optimizer"
    return (
        *flags("ppo", NUMBER, {f"{role}_learning_rate={role}.adam.lr>{optimizer}.learning_rate": rate, f"={role}.adam.eps>{optimizer}.eps": 1e-8, f"={role}.adam.weight_decay>{optimizer}.weight_decay": 0.0}),
        *flags("ppo", NUMBER, {f"={role}.max_norm>{optimizer}.max_grad_norm": 1.0, f"={role}.lr_warmup_ratio": 0.03, f"={role}.min_lr_ratio": 0.1}),
        *flags("ppo", PAIR, f"={role}.adam.betas>{optimizer}.beta1[0]+{optimizer}.beta2[1]", (0.9, 0.95)),
        *flags("ppo", TEXT, f"={role}.lr_scheduler", "cosine_with_min_lr"),
        *_group(role),
    )


def _group(role: str) -> tuple[VersionedFlag, ...]:
    return flags("ppo", _CARDS, {f"{role}_num_nodes={role}.num_nodes": 1, f"{role}_num_gpus_per_node={role}.num_gpus_per_node": 8})


_OPTIMIZERS = (
    *flags(_DATA, NUMBER, "learning_rate=adam.lr>actor.optimizer.learning_rate", by_command(sft=5e-6, rm=9e-6, dpo=1e-5, kto=1e-5, kd=5e-6)),
    *flags(f"ppo@-0.10.1 {_DATA}", PAIR, "adam_betas=adam.betas>actor.optimizer.beta1[0]+actor.optimizer.beta2[1]+critic.optimizer.beta1[0]+critic.optimizer.beta2[1]", (0.9, 0.95)),
    *flags("sft rm dpo", NUMBER, "=adam.eps>actor.optimizer.eps", 1e-8),
    *flags(f"ppo@-0.10.1 {_DATA}", NUMBER, {"l2=adam.weight_decay>actor.optimizer.weight_decay+critic.optimizer.weight_decay": 0.0, "max_norm=max_norm>actor.optimizer.max_grad_norm+critic.optimizer.max_grad_norm": 1.0}),
    *flags(f"ppo@-0.10.1 {_DATA}", NUMBER, "lr_warmup_ratio=lr_warmup_ratio", 0.03),
    *flags("ppo@0.8.5-0.10.1 sft kd rm,dpo,kto@0.8.5", TEXT, "lr_scheduler=lr_scheduler", "cosine_with_min_lr"),
    *flags("sft,rm@0.10.2 dpo@0.8.7", NUMBER, "min_lr_ratio=min_lr_ratio", 0.1),
    *_of_role("actor", 1e-6),
    *_of_role("critic", 9e-6),
)

_ROWS = (
    *flags("ppo", TEXT, {"prompt_data=data.prompt_dataset": None, "prompt_data_probs=data.prompt_probs": None, "prompt_split=data.prompt_split": "train"}),
    *flags(_DATA, TEXT, {"dataset=data.dataset": None, "dataset_probs=data.dataset_probs": None, "dataset_split=data.dataset_split": "train"}),
    *flags(_ALL, COUNT, "max_samples=data.max_samples", by_command(10**6, ppo=10**8)),
    *flags("ppo sft kto kd", TEXT, "input_key=data.input_key", "input"),
    *flags("sft kto kd", TEXT, "output_key=data.output_key", by_command(kd="output")),
    *flags("ppo kto", TEXT, "label_key=data.label_key", by_command(kto="label")),
    *flags("rm dpo", TEXT, {"prompt_key=data.prompt_key": None, "chosen_key=data.chosen_key": "chosen", "rejected_key=data.rejected_key": "rejected"}),
    *flags("rm", SWITCH, "margin_loss=model.margin_loss_enable"),
    *flags("sft", SWITCH, "multiturn=data.multiturn"),
    *flags("sft kd", SWITCH, "pretrain_mode=model.pretrain_mode_enable"),
    *flags(_ALL, SWITCH, "apply_chat_template=data.apply_chat_template use_ms=use_ms"),
    *flags(_ALL, TEXT, {"input_template=data.input_template": by_command(None, **dict.fromkeys(("sft", "kto", "kd"), "User: {}\nAssistant: ")), "eval_dataset=eval.dataset": None}),
    *flags(_ALL, TEXT, "eval_split=eval.split", by_command("test", ppo="train", sft="train", rm="train")),
    *flags("sft rm dpo@0.8.11", TEXT, "tokenizer_chat_template=data.tokenizer_chat_template"),
    *flags(_ALL, WHOLE, "eval_steps=eval.steps", -1),
    *flags("ppo", NUMBER, "eval_temperature=eval.temperature>eval_sampling.temperature", 0.6),
    *flags("ppo", COUNT, "eval_n_samples_per_prompt=eval.n_samples_per_prompt", 4),
    *flags("ppo@0.9.9", TEXT, "best_metric_key=ckpt.best_metric_key", ""),
)

_BATCHES = (
    *flags(_ALL, COUNT, {"max_len=data.max_len": by_command(2048, ppo=from_version(None, "0.9.8", 2048), rm=512, dpo=512), "train_batch_size=train.batch_size": 128}),
    *flags(_ALL, COUNT, {"micro_train_batch_size=train.micro_batch_size": by_command(8, ppo=from_version(4, "0.10.0", 1), rm=1), "max_epochs=train.max_epochs": by_command(1, sft=2)}),
    *flags("ppo@-0.9.7", COUNT, "prompt_max_len= generate_max_len=", 1024),
    *flags("ppo@0.9.8", COUNT, "max_new_tokens=rollout.max_new_tokens"),
    *flags("ppo@0.8.6", SWITCH, "use_dynamic_batch=train.dynamic_batch_enable"),
    *flags("ppo sft rm dpo", COUNT, "ring_attn_size=ds.ring_attn_size", 1),
    *flags("ppo@0.8.6", COUNT, "train_max_tokens_per_gpu=train.max_tokens_per_gpu", 16192),
    *flags("ppo", COUNT, {"num_episodes=train.num_episodes": 1, "n_samples_per_prompt=rollout.n_samples_per_prompt>batch.responses": 1, "rollout_batch_size=rollout.batch_size>batch.prompts": 1024}),
    *flags("ppo@0.8.1", COUNT, "vllm_generate_batch_size=rollout.vllm_generate_batch_size"),
    *flags("ppo@0.8.1", SWITCH, "dynamic_filtering=algo.dynamic_filtering_enable"),
    *flags("ppo@0.8.1", PAIR, "dynamic_filtering_reward_range=algo.dynamic_filtering_range", (0.0, 1.0)),
)


_ENGINES = (
    *_group("reward"),
    *flags("ppo", SWITCH, "colocate_all_models=train.colocate_all colocate_critic_reward=train.colocate_critic_reward deepspeed_enable_sleep=ds.enable_sleep"),
    *flags("ppo", SWITCH, "vllm_enable_sleep=vllm.enable_sleep>rollout.vllm.sleep_level", convert=sleep_level),
    *flags("ppo", SWITCH, "enforce_eager=vllm.enforce_eager>rollout.vllm.arguments.enforce_eager", convert=or_none),
    *flags("ppo", WHOLE, "vllm_num_engines=vllm.num_engines>rollout.engines", convert=or_none),
    *flags("ppo", COUNT, "vllm_tensor_parallel_size=vllm.tensor_parallel_size>rollout.vllm.tensor_parallel", 1),
    *flags("ppo", NUMBER, {"vllm_gpu_memory_utilization=vllm.gpu_memory_utilization>rollout.vllm.memory_share": 0.95, "temperature=rollout.temperature>rollout.sampling.temperature": 1.0}),
)

_ALGORITHM = (
    *flags("ppo", one_of(*ESTIMATORS), "advantage_estimator=algo.advantage.estimator", "gae"),
    *flags("ppo", NUMBER, {"gamma=algo.advantage.gamma": 1.0, "lambd=algo.advantage.lambd": 1.0, "value_clip=critic.value_clip": from_version(0.2, "0.8.2", 0.5), "eps_clip=actor.eps_clip": 0.2}),
    *flags("ppo", NUMBER, {"entropy_loss_coef=actor.entropy_coef>algorithm.entropy_bonus": from_version(0.0, "0.8.3", None), "init_kl_coef=algo.kl.init_coef>algorithm.kl.coefficient": 0.01}),
    *flags("ppo", SWITCH, "no_advantage_std_norm=algo.advantage.no_std_norm use_kl_loss=algo.kl.use_loss"),
    *flags("ppo", WHOLE, {"freezing_actor_steps=critic.freezing_steps": -1, "kl_horizon=algo.kl.horizon": 10000}),
    *flags("ppo@0.8.8", one_of("ppo", "gspo"), "policy_loss_type=actor.policy_loss_type", "ppo"),
    *flags("ppo@0.8.2", PAIR, "eps_clip_low_high=actor.eps_clip_low_high"),
    *flags("ppo@0.8.6", NUMBER, "dual_clip=actor.dual_clip"),
    *flags("ppo@0.11.2", one_of("token-mean", "seq-mean-token-mean"), "loss_agg_mode=actor.loss_agg_mode", "token-mean"),
    *flags("ppo@0.8.9-0.11.1", SWITCH, "enable_vllm_is_correction=algo.advantage.is_correction_enable"),
    *flags("ppo@0.9.1-0.9.2", SWITCH, "use_icepop="),
    *flags("ppo@0.9.3-0.11.1", one_of(*CORRECTIONS), "vllm_is_correction_type=algo.advantage.is_correction_type", "tis"),
    *flags("ppo@0.11.2", one_of("off", "token", "seq"), "is_correction_level=algo.advantage.is_correction_level", "off"),
    *flags("ppo@0.11.2", one_of("mask", "clip"), "is_correction_mode=algo.advantage.is_correction_mode", "mask"),
    *flags("ppo@0.11.2", one_of("ratio", "binary_kl", "tv"), "is_correction_gating=algo.advantage.is_correction_gating", "ratio"),
    *flags("ppo@0.8.9", BOUNDS, "vllm_is_truncated_threshold=algo.advantage.is_correction_threshold", from_version((2.0,), "0.9.1", (0.5, 5.0))),
    *flags("ppo", one_of("k1", "k2", "k3"), "kl_estimator=algo.kl.estimator>algorithm.kl.estimator", "k1"),
    *flags("ppo", NUMBER, "kl_target=algo.kl.target>algorithm.kl.adaptive.target", convert=or_none),
    *flags("ppo@0.11.1", SWITCH, "kl_unbiased_gradient=algo.kl.unbiased_gradient"),
    *flags("rm", TEXT, "loss=model.loss_type", "sigmoid"),
    *flags("dpo kto", NUMBER, "beta=model.beta>algorithm.loss.options.beta", by_command(dpo=0.1, kto=0.01)),
    *flags("dpo", SWITCH, "ipo=model.ipo_enable"),
    *flags("dpo", NUMBER, "label_smoothing=model.label_smoothing nll_loss_coef=model.nll_loss_coef>algorithm.nll_weight", 0.0),
    *flags("kto", NUMBER, "desirable_loss_weight= undesirable_loss_weight=", 1.0),
    *flags("kd", NUMBER, "kd_coef=>algorithm.nll_share", 0.4, convert=lambda share: 1 - share),
)

_REWARDS = (
    *flags("ppo", TEXT, "reward_pretrain=reward.model_name_or_path remote_rm_url=reward.remote_url agent_func_path=train.agent_func_path"),
    *flags("ppo", SWITCH, "normalize_reward=reward.normalize_enable"),
    *flags("ppo", PAIR, "reward_clip_range=reward.clip_range", (-10.0, 10.0)),
    *flags("ppo@0.8.7", NUMBER, {"overlong_buffer_len=reward.overlong_buffer_len": None, "overlong_penalty_factor=reward.overlong_penalty_factor": 1.0}),
    *flags("ppo@0.9.2", NUMBER, "stop_properly_penalty_coef=reward.stop_properly_penalty_coef"),
    *flags("ppo rm", TEXT, "value_head_prefix=ds.value_head_prefix", "score"),
)

_RUN = (
    *flags(_ALL, TEXT, {"save_path=ckpt.output_dir>run.directory": "./ckpt", "use_wandb=logger.wandb.key": None}),
    *flags(_ALL, TEXT, "wandb_project=logger.wandb.project", by_command("openrlhf_train_dpo", ppo="openrlhf_train_ppo", sft="openrlhf_train_sft", kd="openrlhf_train_sft", rm="openrlhf_train_rm")),
    *flags(_ALL, WHOLE, "save_steps=ckpt.save_steps>run.save_every", -1, convert=positive),
    *flags(_ALL, COUNT, "max_ckpt_num=ckpt.max_num", 3),
    *flags(_ALL, SWITCH, "load_checkpoint=ckpt.load_enable>run.resume=auto"),
)

FLAGS: tuple[VersionedFlag, ...] = (*_MODELS, *_ROWS, *_BATCHES, *_OPTIMIZERS, *_RUN, *_ENGINES, *_ALGORITHM, *_REWARDS, *_ABSENT)

# fmt: on

Versions = tuple[Version, Version]
"""The first and the last version that have all flags of a command; if no version has all flags, the
versions that have the most."""


def read_options(
    launch: Launch, version: Version | None, cards: int | None
) -> tuple[Options, Versions]:
    """Return the options of a command, and the versions that have its flags.

    Args:
        launch: The command.
        version: Version of OpenRLHF; None to find it by the flags.
        cards: Cards of a machine.

    Raises:
        ConfigError: Flags that the version has not, each with the nearest names, and values that
            cannot be read.
    """
    command = TRAINER.short_name(launch.program)
    typed, problems = split_flags(launch.arguments)
    first, last = _find_versions(command, typed, version)
    flags = _flags(command, last)
    settings = {f"--{name}": flag.setting(command, last) for name, flag in flags.items()}
    given: list[Assignment] = []
    for name, words in typed:
        flag, possible = _match(command, last, name)
        if flag is not None:
            text = join_words(f"--{name}", words)
            given.append((flag.setting(command, last), f"--{name}", words, text))
            continue
        value = MASK if is_secret(name) else shlex.join(words) or None
        why, fix = _explain_unknown(command, (first, last), name, possible)
        problems.append(invalid(f"--{name}", value, why, fix))
    remedy, facts = "give another value, or leave the flag out", {"cards": cards, "version": last}
    o = read_settings(command, launch, settings, given, remedy, problems, **facts)
    # its parser, too, takes the last of repeated flags in silence
    return replace(o, remarks=()), (first, last)


@cache
def _flags(command: str, version: Version) -> Mapping[str, VersionedFlag]:
    """Return the flags of a command in a version, by name."""
    return {name: flag for flag in FLAGS if (name := flag.name(command, version))}


def _match(command: str, version: Version, name: str) -> tuple[VersionedFlag | None, list[str]]:
    """Return the flag of a name or of a unique prefix (else None), and all names that match."""
    flags = _flags(command, version)
    if name in flags:
        return flags[name], [name]
    begun = sorted(whole for whole in flags if name and whole.startswith(name))
    return (flags[begun[0]] if len(begun) == 1 else None), begun


def _explain_unknown(
    command: str, versions: Versions, name: str, possible: Sequence[str]
) -> tuple[str, str]:
    """Return (reason, remedy) for a name that is no flag."""
    first, newest = versions
    flags = _flags(command, newest)
    close = difflib.get_close_matches(name, flags, n=3) or possible[:3]
    fix = f"did you mean {' or '.join(f'--{near}' for near in close)}?" if close else "leave it out"
    if possible:
        return f"It may be {' or '.join(f'--{whole}' for whole in possible[:4])}.", fix
    program = COMMANDS[command]
    exist = [v for v in RELEASES if _match(command, v, name)[0] is not None]
    if name in REMOVED and (not exist or exist[-1] < newest):
        since, successor = REMOVED[name]
        now = next((n for n, flag in flags.items() if flag.id == successor), successor)
        if not now:
            return f"It was removed in {since}, and has no successor.", "leave it out"
        return f"It was removed in {since}; its successor is --{now}.", f"write --{now}"
    if exist:
        what = f"{program} has it from {format_version(exist[0])} to {format_version(exist[-1])}"
        others = f"the other flags are those of {format_version(first)} to"
        this = "this is" if first == newest else others
        return f"{what}, and {this} {format_version(newest)}.", fix
    also = [COMMANDS[c] for c in COMMANDS if any(name in _flags(c, v) for v in RELEASES)]
    releases = f"{format_version(FIRST)} to {format_version(LAST)}"
    why = f"No {program} of OpenRLHF {releases} has it"
    return (f"{why}; {' and '.join(also)} has." if also else f"{why}."), fix


def _find_versions(command: str, typed: Sequence[Typed], version: Version | None) -> Versions:
    """Return the versions that have the most of the typed flags; only `version` if it is given."""
    exist = [v for v in RELEASES if _flags(command, v)]
    if version is not None:
        if version not in exist:
            span = f"{format_version(exist[0])} to {format_version(exist[-1])}"
            what = f"OpenRLHF {format_version(version)} has no {COMMANDS[command]}"
            raise ConfigError(f"{what}: it is in {span}.")
        return version, version
    counts = {v: sum(_match(command, v, name)[0] is not None for name, _ in typed) for v in exist}
    fitting = [v for v in exist if counts[v] == max(counts.values())]
    return fitting[0], fitting[-1]
