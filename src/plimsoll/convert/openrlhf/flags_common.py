"""Flags that most commands have: models and their memory, optimizers, rows, saving, logging."""

from __future__ import annotations

from plimsoll.convert.openrlhf import batches, roles, rows
from plimsoll.convert.openrlhf.flag import Flag, always, each, moved
from plimsoll.convert.setting import (
    COUNT,
    NUMBER,
    OFF,
    PAIR,
    SWITCH,
    TEXT,
    WHOLE,
    WORDS,
    Idle,
    Key,
    Lacking,
    Part,
    Same,
    one_of,
    positive,
)

# fmt: off
# ruff: noqa: E501  (a line a flag)

_ALL = "ppo local sft rm dpo kto kd prm"
_NEW = "sft rm dpo"
_DATA = "sft rm dpo kto kd prm"


def _learn(*names: str) -> tuple[str, ...]:
    """Of both roles that may learn."""
    return tuple(f"{role}.{name}" for role in ("actor", "critic") for name in names)


def _betas(pair: tuple[float, float]) -> tuple[float, ...]:
    return (*pair, *pair)


_MODELS = (
    Flag("pretrain", "ppo:actor.model_name_or_path model.model_name_or_path", _ALL, TEXT, Key(("actor.model.path",)), each(kto="bigscience/bloomz-1b7")),
    Flag("bf16", "", "ppo,sft,rm,dpo,kto,kd,prm@-0.9.1 local", SWITCH, Part(roles.precision)),
    Flag("param_dtype", "ds.param_dtype", "ppo,sft,rm,dpo,kto,kd,prm@0.9.2", one_of("bf16", "fp16"), Part(roles.precision), always("bf16")),
    Flag("grad_accum_dtype", "ds.grad_accum_dtype", _ALL, TEXT, Part(roles.precision)),
    Flag("gradient_checkpointing", "ppo:actor.gradient_checkpointing_enable model.gradient_checkpointing_enable", _ALL, SWITCH, Key(_learn("model.gradient_checkpointing"))),
    Flag("gradient_checkpointing_use_reentrant", "ppo:actor.gradient_checkpointing_reentrant model.gradient_checkpointing_reentrant", _ALL, SWITCH, Idle("layers are computed again either way")),
    Flag("load_in_4bit", "ds.load_in_4bit", _ALL, SWITCH, Part(roles.adapters)),
    Flag("lora_rank", "ds.lora.rank", _ALL, WHOLE, Part(roles.adapters), always(0)),
    Flag("lora_alpha", "ds.lora.alpha", _ALL, COUNT, Part(roles.adapters), always(16)),
    Flag("lora_dropout", "ds.lora.dropout", _ALL, NUMBER, Part(roles.adapters), always(0.0)),
    Flag("target_modules", "ds.lora.target_modules", _ALL, WORDS, Part(roles.adapters), always("all-linear")),
    Flag("flash_attn", "", "ppo,sft,rm,dpo,kto,kd,prm@-0.8.9 local", SWITCH, Same("attention is packed, by PyTorch's kernels (actor.model.attention)")),
    Flag("attn_implementation", "ds.attn_implementation", "ppo,sft,rm,dpo,kto,kd,prm@0.8.10", TEXT, Same("attention is packed, by PyTorch's kernels (actor.model.attention)"), always("flash_attention_2")),
    Flag(None, "ds.experts_implementation", "ppo sft rm dpo", TEXT, Idle("experts are computed as transformers does")),
    Flag("packing_samples", "ds.packing_samples", "ppo sft rm dpo prm", SWITCH, Same("sequences are always packed")),
    Flag("use_liger_kernel", "ds.use_liger_kernel", "ppo,sft,dpo,kto,kd,prm@0.6.2", SWITCH, Same("logits are computed in chunks (actor.model.head_chunk)")),
    Flag("torch_compile", "", "ppo,sft,rm,dpo,kto,kd,prm@0.6.2-0.7.0", SWITCH, Idle("models are not compiled")),
    Flag("deepcompile", "ds.deepcompile", "ppo,sft,rm,dpo,kto,kd,prm@0.7.1", SWITCH, Idle("models are not compiled")),
    Flag("aux_loss_coef", "ppo:actor.aux_loss_coef model.aux_loss_coef", _ALL, NUMBER, Lacking("routers of mixtures of experts learn from the loss alone", harmless=(0.0,)), always(0.0)),
    Flag("ring_attn_size", "ds.ring_attn_size", "ppo sft rm dpo", COUNT, Lacking("a sequence is on one card; the cards hold more sequences instead", harmless=(1,)), always(1)),
    Flag("ring_head_stride", "ds.ring_attn_head_stride", "ppo sft rm dpo", WHOLE, Idle("a sequence is on one card"), always(1)),
    Flag("ds_tensor_parallel_size", "ds.tensor_parallel_size", "ppo,sft,rm,dpo@0.7.4 kd,prm@0.8.5", COUNT, Lacking("trained models are divided by ZeRO alone", harmless=(1,)), always(1)),
    Flag("zero_stage", "ds.zero_stage", _ALL, WHOLE, Key(_learn("zero.stage")), always(2)),
    Flag("zpg", "ds.zpg", _ALL, COUNT, Part(roles.zero_plus_plus), always(1)),
    Flag("adam_offload", "ds.adam_offload", _ALL, SWITCH, Key(_learn("zero.optimizer_offload"), lambda on: "cpu" if on else None)),
    Flag("overlap_comm", "ds.overlap_comm", _ALL, SWITCH, Idle("DeepSpeed's own setting stays")),
    Flag("disable_fast_tokenizer", "data.disable_fast_tokenizer", _ALL, SWITCH, Lacking("tokenizers must say which characters a token covers, which only fast ones do")),
    Flag("local_rank", "local_rank", _ALL, WHOLE, Idle("ranks are started by Plimsoll"), always(-1)),
    Flag("use_ms", "use_ms", _ALL, SWITCH, Lacking("ModelScope is not asked: download models and data, and give their paths")),
    Flag("full_determinism", "train.full_determinism_enable", "ppo,sft,rm,dpo,kto,kd,prm@0.6.2", SWITCH, Lacking("seeds fix data, sampling and noise; kernels are PyTorch's usual ones")),
    Flag("seed", "train.seed", _ALL, WHOLE, Key(("run.seed",)), always(42)),
)

_OPTIMIZERS = (
    Flag("learning_rate", "adam.lr", _DATA, NUMBER, Key(("actor.optimizer.learning_rate",)), each(sft=5e-6, rm=9e-6, dpo=1e-5, kto=1e-5, kd=5e-6, prm=1e-6)),
    Flag("adam_betas", "adam.betas", "ppo@-0.10.1 local sft rm dpo kto kd prm", PAIR, Key(_learn("optimizer.beta1", "optimizer.beta2"), _betas), always((0.9, 0.95))),
    Flag("l2", "adam.weight_decay", "ppo@-0.10.1 local sft rm dpo kto kd prm", NUMBER, Key(_learn("optimizer.weight_decay")), always(0.0)),
    Flag("max_norm", "max_norm", "ppo@-0.10.1 local sft rm dpo kto kd prm", NUMBER, Key(_learn("optimizer.max_grad_norm")), always(1.0)),
    Flag(None, "adam.eps", _NEW, NUMBER, Key(("actor.optimizer.eps",)), always(1e-8)),
    Flag("lr_scheduler", "lr_scheduler", "ppo@0.8.5-0.10.1 sft kd prm rm,dpo,kto@0.8.5", TEXT, Part(roles.schedules), always("cosine_with_min_lr")),
    Flag("lr_warmup_ratio", "lr_warmup_ratio", "ppo@-0.10.1 local sft rm dpo kto kd prm", NUMBER, Part(roles.schedules), always(0.03)),
    Flag("min_lr_ratio", "min_lr_ratio", "sft,rm@0.10.2 dpo@0.8.7", NUMBER, Part(roles.schedules), always(0.1)),
)


def _optimizer(role: str, of: str) -> tuple[Flag, ...]:
    """Flags of a role's own, with dots. role: in their names, "" or such as `actor.`."""
    muon = Idle("it is of muon")
    asked = Lacking("weights are trained by AdamW, whose learning rate is another", True, ("adam",))
    return (
        Flag(None, f"{role}optim", of, one_of("adam", "muon"), asked, always("adam")),
        Flag(None, f"{role}muon.lr", of, NUMBER, muon, always(0.02)),
        Flag(None, f"{role}muon.momentum", of, NUMBER, muon, always(0.95)),
        Flag(None, f"{role}muon.nesterov", of, SWITCH, muon, always(True)),
        Flag(None, f"{role}muon.no_nesterov", of, OFF, muon, always(True)),
        Flag(None, f"{role}muon.ns_steps", of, WHOLE, muon, always(5)),
    )


def _of_role(role: str, rate: float) -> tuple[Flag, ...]:
    key = f"{role}.optimizer"
    return (
        *_optimizer(f"{role}.", "ppo"),
        Flag(None, f"{role}.adam.betas", "ppo", PAIR, Key((f"{key}.beta1", f"{key}.beta2"), tuple), always((0.9, 0.95))),
        Flag(None, f"{role}.adam.eps", "ppo", NUMBER, Key((f"{key}.eps",)), always(1e-8)),
        Flag(None, f"{role}.adam.weight_decay", "ppo", NUMBER, Key((f"{key}.weight_decay",)), always(0.0)),
        Flag(None, f"{role}.max_norm", "ppo", NUMBER, Key((f"{key}.max_grad_norm",)), always(1.0)),
        Flag(None, f"{role}.lr_scheduler", "ppo", TEXT, Part(roles.schedules), always("cosine_with_min_lr")),
        Flag(None, f"{role}.lr_warmup_ratio", "ppo", NUMBER, Part(roles.schedules), always(0.03)),
        Flag(None, f"{role}.min_lr_ratio", "ppo", NUMBER, Part(roles.schedules), always(0.1)),
        Flag(f"{role}_learning_rate", f"ppo:{role}.adam.lr", "ppo local", NUMBER, Key((f"{key}.learning_rate",)), always(rate)),
    )


_ROWS = (
    Flag("dataset", "data.dataset", _DATA, TEXT, Part(rows.rows), each(kto=moved("Dahoas/full-hh-rlhf", ("0.7.4", None)))),
    Flag("dataset_probs", "data.dataset_probs", _DATA, TEXT, Part(rows.rows), each(moved("1.0", ("0.7.0", None)), rm=moved("1.0", ("0.7.4", None)))),
    Flag("dataset_split", "data.dataset_split", "sft,rm,dpo,kto,kd,prm@0.7.4", TEXT, Part(rows.rows), always("train")),
    Flag("train_split", "", "sft@-0.10.1 rm,dpo,kto,kd,prm@-0.6.4", TEXT, Part(rows.rows), always("train")),
    Flag("max_samples", "data.max_samples", _ALL, COUNT, Part(rows.rows), each(moved(10**8, ("0.7.0", 10**6)), ppo=10**8, local=10**6, rm=moved(10**8, ("0.7.4", 10**6)), kto=moved(10**8, ("0.7.4", 10**6)))),
    Flag("input_key", "data.input_key", "ppo local sft kto kd prm", TEXT, Part(rows.rows), always("input")),
    Flag("output_key", "data.output_key", "sft kto kd", TEXT, Part(rows.rows), each(kd="output")),
    Flag("label_key", "data.label_key", "ppo local kto prm", TEXT, Part(rows.rows), each(kto="label", prm="label")),
    Flag("prompt_key", "data.prompt_key", "rm dpo", TEXT, Part(rows.rows)),
    Flag("chosen_key", "data.chosen_key", "rm dpo", TEXT, Part(rows.rows), always("chosen")),
    Flag("rejected_key", "data.rejected_key", "rm dpo", TEXT, Part(rows.rows), always("rejected")),
    Flag("multiturn", "data.multiturn", "sft", SWITCH, Part(rows.columns)),
    Flag("pretrain_mode", "model.pretrain_mode_enable", "sft kd", SWITCH, Part(rows.columns)),
    Flag("apply_chat_template", "data.apply_chat_template", "ppo local sft rm dpo kto kd", SWITCH, Part(rows.template)),
    Flag("input_template", "data.input_template", "ppo local sft rm dpo kto kd", TEXT, Part(rows.template), each(None, **dict.fromkeys(("sft", "kto", "kd"), "User: {}\nAssistant: "))),
    Flag("tokenizer_chat_template", "data.tokenizer_chat_template", "sft rm dpo@0.8.11", TEXT, Part(rows.template)),
    Flag("dataloader_num_workers", "data.dataloader_num_workers", "ppo,sft,rm,dpo@0.9.10", WHOLE, Idle("rows are read once, before the first step"), always(0)),
    Flag("eval_dataset", "eval.dataset", "ppo,sft,rm,dpo,kto,kd,prm@0.7.0", TEXT, Part(rows.held_out)),
    Flag("eval_split", "eval.split", "sft rm,dpo,kto,kd,prm@-0.6.4 ppo,rm,dpo,kto,kd,prm@0.7.4", TEXT, Part(rows.held_out), each("test", ppo="train", sft=moved("test", ("0.7.4", "train")), rm=moved("test", ("0.7.4", "train")))),
    Flag("eval_steps", "eval.steps", _ALL, WHOLE, Part(rows.held_out), always(-1)),
    Flag("max_len", "data.max_len", _ALL, COUNT, Part(batches.lengths), each(2048, ppo=moved(None, ("0.9.8", 2048)), local=None, rm=512, dpo=512)),
)

_BATCHES = (
    Flag("train_batch_size", "train.batch_size", _ALL, COUNT, Part(batches.batches), always(128)),
    Flag("micro_train_batch_size", "train.micro_batch_size", _ALL, COUNT, Part(batches.micro_batches), each(8, ppo=moved(4, ("0.10.0", 1)), local=4, rm=1, prm=1)),
    Flag("max_epochs", "train.max_epochs", _ALL, COUNT, Part(batches.batches), each(1, sft=2)),
)

_SAVING = (
    Flag("save_path", "ckpt.output_dir", _ALL, TEXT, Key(("run.directory",)), always("./ckpt")),
    Flag("save_steps", "ckpt.save_steps", _ALL, WHOLE, Key(("run.save_every",), positive), always(-1)),
    Flag("ckpt_path", "ckpt.path", _ALL, TEXT, Idle("checkpoints are in run.directory"), each(**{c: f"./ckpt/checkpoints_{n}" for c, n in (("ppo", "ppo_ray"), ("local", "ppo"), *((x, x) for x in ("sft", "rm", "dpo", "kto", "kd", "prm")))})),
    Flag("max_ckpt_num", "ckpt.max_num", _ALL, COUNT, Key(("run.keep_checkpoints",), note="the last ones"), always(3)),
    Flag("max_ckpt_mem", "ckpt.max_mem", _ALL, NUMBER, Idle("checkpoints are bounded by their number"), each(10**8, ppo=moved(10**8, ("0.9.9", float("inf"))))),
    Flag("load_checkpoint", "ckpt.load_enable", _ALL, SWITCH, Key(("run.resume",), lambda on: "auto" if on else None)),
    Flag("save_hf_ckpt", "ckpt.save_hf", "ppo local sft dpo rm@0.8.0 kd@0.8.2 kto,prm@0.9.2", SWITCH, Idle("`plimsoll export` writes a checkpoint as a model")),
    Flag("disable_ds_ckpt", "ckpt.disable_ds", "ppo local sft dpo rm@0.8.0 kd@0.8.2 kto,prm@0.9.2", SWITCH, Idle("a run can be resumed from every checkpoint")),
    Flag("universal_ckpt", "", "ppo,sft,rm,dpo,kto,kd,prm@0.6.3-0.6.3", SWITCH, Idle("checkpoints are resumed on as many ranks")),
    Flag("use_ds_universal_ckpt", "ds.use_universal_ckpt", "ppo,sft,rm,dpo,kto,kd,prm@0.6.4", SWITCH, Idle("checkpoints are resumed on as many ranks")),
    Flag("logging_steps", "logger.logging_steps", _ALL, WHOLE, Same("every step is in metrics.jsonl"), always(1)),
    Flag("use_wandb", "logger.wandb.key", _ALL, TEXT, Key(("run.loggers",), lambda key: ("wandb",) if key else None, "the key belongs in WANDB_API_KEY"), secret=True),
    Flag("wandb_org", "logger.wandb.org", _ALL, TEXT, Idle("W&B reads WANDB_ENTITY")),
    Flag("wandb_group", "logger.wandb.group", _ALL, TEXT, Idle("W&B reads WANDB_RUN_GROUP")),
    Flag("wandb_project", "logger.wandb.project", _ALL, TEXT, Part(roles.logged), each("openrlhf_train_ppo", sft="openrlhf_train_sft", rm="openrlhf_train_rm", dpo="openrlhf_train_dpo", kto="openrlhf_train_dpo", kd="openrlhf_train_sft", prm="openrlhf_train_prm")),
    Flag("wandb_run_name", "logger.wandb.run_name", _ALL, TEXT, Idle("a run is called as its directory")),
    Flag("use_tensorboard", "logger.tensorboard_dir", "ppo local sft rm dpo kto kd prm@0.8.9", TEXT, Same("event files are in run.directory")),
)

COMMON = (
    *_MODELS,
    *_ROWS,
    *_BATCHES,
    *_OPTIMIZERS,
    *_optimizer("", _NEW),
    *_of_role("actor", 1e-6),
    *_of_role("critic", 9e-6),
    *_SAVING,
)
