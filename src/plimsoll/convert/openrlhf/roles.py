"""Where roles live and how they are held: ranks, engines, ZeRO, adapters, the reference, and the
schedule of learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Entry, Outcome, Remark
from plimsoll.errors import ConfigError

CARDS = 8
"""Of a machine, where nothing says how many."""
_GRADIENTS = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "float32"), "float32"),
}
_SCHEDULES = {
    "cosine_with_min_lr": ("cosine", True),
    "cosine_warmup_with_min_lr": ("cosine", True),
    "cosine": ("cosine", False),
    "linear": ("linear", False),
    "constant_with_warmup": ("constant", False),
    "constant": ("constant", False),
}
"""Of transformers' schedules what is the same here, and whether it ends at a share of the peak."""


def ranks(o: Options) -> Iterator[Outcome]:
    """Of commands without Ray: the launcher says how many."""
    if o.command == "ppo":
        return
    if o.rl:
        yield from _no_engines(o)
    launch, machines = o.launch, o.launch.nodes or 1
    cards = launch.cards or o.cards or (CARDS if launch.started_by != "torchrun" else 1)
    source = launch.started_by or "the launcher"
    yield Entry("cluster.ranks", cards * machines, note=f"{source}: {cards} cards a machine")
    if launch.cards is None and o.cards is None:
        yield Remark("check", "cluster.ranks", f"no flag says how many cards there are: {cards}")
    yield from _machines(o, machines)


def _machines(o: Options, machines: int) -> Iterator[Outcome]:
    if machines <= 1:
        return
    yield Entry("cluster.nodes", machines, note=f"{machines} machines")
    if o.launch.address is not None:
        yield Entry("cluster.address", f"{o.launch.address}:6379", note="Ray's usual port")
        yield Remark("check", "cluster.address", "the port of Ray's head, not of its dashboard")
    else:
        yield Remark("check", "cluster.address", "give HOST:PORT of Ray's head")


def placement(o: Options) -> Iterator[Outcome]:
    """Of `train_ppo_ray`: groups of cards, and engines."""
    flags = ("actor_num_nodes", "actor_num_gpus_per_node")
    yield o.entry("cluster.ranks", _cards(o, *flags), *flags)
    yield from _critic_ranks(o)
    yield from _engines(o) if o["vllm_num_engines"] else _no_engines(o)
    per_machine = o.cards or max(CARDS, o["actor_num_gpus_per_node"])
    machines = -(-(_cards(o, *flags) + _further_cards(o)) // per_machine)
    yield from _machines(o, max(o["actor_num_nodes"], machines))
    yield from _colocated(o)


def _cards(o: Options, nodes: str, each: str) -> int:
    return int(o[nodes] * o[each])


def _further_cards(o: Options) -> int:
    """Those of the critic's and of the engines' own."""
    found = 0
    if o.has_critic and not o["colocate_all_models"]:
        found += _cards(o, *_OF_CRITIC)
    if not _shares_cards(o):
        found += (o["vllm_num_engines"] or 0) * o["vllm_tensor_parallel_size"]
    return found


def _shares_cards(o: Options) -> bool:
    """Whether engines are on the ranks' cards: of asynchronous runs they never are."""
    return bool(o["colocate_all_models"] and not o["async_train"])


_OF_CRITIC = ("critic_num_nodes", "critic_num_gpus_per_node")


def _critic_ranks(o: Options) -> Iterator[Outcome]:
    if not o.has_critic:
        yield from o.idle(f"{o.shown('advantage_estimator')} has no critic", *_OF_CRITIC)
    elif o["colocate_all_models"]:
        yield from o.idle("the critic shares the actor's ranks", *_OF_CRITIC)
    else:
        yield o.entry("cluster.critic_ranks", _cards(o, *_OF_CRITIC), *_OF_CRITIC)


_OF_ENGINES = ("vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "enforce_eager")


def _no_engines(o: Options) -> Iterator[Outcome]:
    yield o.entry("rollout.engine", "transformers", "vllm_num_engines", note="no vLLM")
    yield Entry("rollout.placement", "shared", note="it samples on the ranks' cards")
    yield from o.idle("there are no vLLM engines", *_OF_ENGINES, "vllm_enable_sleep")
    yield from o.idle("there are no vLLM engines", "colocate_all_models")


def _engines(o: Options) -> Iterator[Outcome]:
    yield o.entry("rollout.engines", o["vllm_num_engines"], "vllm_num_engines")
    parallel = o["vllm_tensor_parallel_size"]
    yield o.entry("rollout.tensor_parallel", parallel, "vllm_tensor_parallel_size")
    share = o["vllm_gpu_memory_utilization"]
    yield o.entry("rollout.memory_share", share, "vllm_gpu_memory_utilization")
    if o["enforce_eager"]:
        yield o.entry("rollout.vllm.enforce_eager", True, "enforce_eager")
    if _shares_cards(o):
        yield o.entry("rollout.placement", "shared", "colocate_all_models")
        level = 2 if o["vllm_enable_sleep"] else 0  # syncs bring all weights
        yield o.entry("rollout.sleep_level", level, "vllm_enable_sleep")
    else:
        yield Entry("rollout.placement", "own", note="engines have cards of their own")
        yield from o.idle("engines have cards of their own", "vllm_enable_sleep")


def _colocated(o: Options) -> Iterator[Outcome]:
    for role, why in _why_no_group(o).items():
        yield from o.idle(why, f"{role}_num_nodes", f"{role}_num_gpus_per_node")
    yield from o.idle("the reference is on the actor's ranks", "colocate_actor_ref")
    why = "reward models are on the actor's ranks, the critic on its own"
    yield from o.idle(why, "colocate_critic_reward")
    if o["async_train"]:
        why = "critic and reference share the actor's ranks; engines have their own"
        yield from o.idle(why, "colocate_all_models")


def _why_no_group(o: Options) -> Mapping[str, str]:
    """Why roles that OpenRLHF gives cards of their own have none here."""
    ref, reward = "the reference is on the actor's ranks", "reward models are on the actor's ranks"
    if not o["init_kl_coef"]:
        ref = "no reference is loaded"
    if o["agent_func_path"] or o["remote_rm_url"]:
        reward = "no reward model is loaded"
    return {"ref": ref, "reward": reward}


def precision(o: Options) -> Iterator[Outcome]:
    """Of weights, and of sums of gradients."""
    if o["param_dtype"] == "fp16":
        yield from o.lacking("models are trained in bfloat16 or float32", "param_dtype")
    elif o["bf16"] or o["param_dtype"]:
        yield from _all(o, "model.dtype", "bfloat16", o.first("bf16", "param_dtype"))
    elif "bf16" in o.values:
        why = "without --bf16 OpenRLHF trains in the dtype of the model's files; here in bfloat16"
        yield Remark("check", "actor.model.dtype", why)
    given, stage = o["grad_accum_dtype"], o["zero_stage"]
    if given is not None and given not in _GRADIENTS:
        known = ", ".join(_GRADIENTS)
        raise ConfigError(f"{o.shown('grad_accum_dtype')}: known are {known}.")
    if stage == 0:
        why = "at ZeRO stage 0 gradients of bfloat16 weights are added in bfloat16"
        yield from o.idle(why, "grad_accum_dtype")
        return
    dtype = _GRADIENTS[given or "bf16"]
    note = "" if given else "DeepSpeed's default beside bfloat16 weights"
    yield from _all(o, "zero.gradient_dtype", dtype, "grad_accum_dtype", note=note)


def zero_plus_plus(o: Options) -> Iterator[Outcome]:
    if o["zpg"] > 1 and o["zero_stage"] == 3:
        yield from _all(o, "zero.hpz_partition_size", o["zpg"], "zpg")
    else:
        yield from o.idle("a second copy of the weights is made at ZeRO stage 3 alone", "zpg")


def adapters(o: Options) -> Iterator[Outcome]:
    if o["load_in_4bit"]:
        yield from _all(o, "model.quantization", "nf4", "load_in_4bit")
    parts = {"alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}
    if not o["lora_rank"]:
        yield from o.idle(f"{o.shown('lora_rank')}: no adapter", "lora_rank", *parts.values())
        return
    yield from _all(o, "adapter.rank", o["lora_rank"], "lora_rank")
    targets = o["target_modules"]
    values: dict[str, object] = {
        "alpha": float(o["lora_alpha"]),
        "dropout": float(o["lora_dropout"]),
        "targets": (targets,) if isinstance(targets, str) else targets,
    }
    for name, flag in parts.items():
        yield from _all(o, f"adapter.{name}", values[name], flag)


def _all(o: Options, key: str, value: object, *flags: str, note: str = "") -> Iterator[Outcome]:
    """Of every role that learns."""
    for role in o.learners:
        yield o.entry(f"{role}.{key}", value, *flags, note=note)


def reference(o: Options) -> Iterator[Outcome]:
    """The frozen policy: a section of its own where it is another model, or is held otherwise than
    whole on every rank."""
    offload = o.first("ref_offload", "ref_reward_offload")
    path = o["ref_pretrain"] or o["pretrain"]
    if o.rl and not o["init_kl_coef"]:
        yield from o.idle(f"{o.shown('init_kl_coef')}: no reference is loaded", "ref_offload")
        return
    if o["lora_rank"] and path == o["pretrain"]:
        yield from o.idle("the reference is the actor without its adapter", offload, "ref_pretrain")
        return
    divided = o["zero_stage"] == 3
    if divided or o[offload] or o["load_in_4bit"] or path != o["pretrain"]:
        own = "ref_pretrain" if o["ref_pretrain"] else "pretrain"
        yield o.entry("reference.model.path", path, own)
    else:
        yield from o.idle("the reference is the actor's first weights", "ref_pretrain")
    if o["load_in_4bit"]:
        yield o.entry("reference.model.quantization", "nf4", "load_in_4bit")
    if divided:
        yield o.entry("reference.stage", 3, "zero_stage")
    if o[offload]:
        yield o.entry("reference.offload", "cpu", offload)


def teacher(o: Options) -> Iterator[Outcome]:
    if o["teacher_model"] is None:
        raise ConfigError("--teacher_model is needed: the model to distil from.")
    yield o.entry("teacher.model.path", o["teacher_model"], "teacher_model")
    if o["zero_stage"] == 3:
        yield o.entry("teacher.stage", 3, "zero_stage")
    if o["teacher_offload"]:
        yield o.entry("teacher.offload", "cpu", "teacher_offload")


def schedules(o: Options) -> Iterator[Outcome]:
    for role in o.learners:
        yield from _schedule(o, role)
    if o.rl and not o.has_critic:
        why = f"{o.shown('advantage_estimator')} has no critic"
        yield from o.idle(why, *(f"critic.{name}" for name in _SCHEDULE))


_SCHEDULE = ("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio")


def _schedule(o: Options, role: str) -> Iterator[Outcome]:
    named, warmup, ratio = (o.first(f"{role}.{flag}", flag) for flag in _SCHEDULE)
    name = o[named] or "cosine_with_min_lr"
    if name not in _SCHEDULES:
        raise ConfigError(
            f"{o.shown(named)}: there is no such schedule here. Known: {', '.join(_SCHEDULES)}."
        )
    shape, ends = _SCHEDULES[name]
    note = "" if named in o.values else "OpenRLHF's only one then"
    yield o.entry(f"{role}.optimizer.schedule", shape, named, note=note)
    if name == "constant":
        yield from o.idle("the schedule `constant` has no warm-up", warmup)
    else:
        yield o.entry(f"{role}.optimizer.warmup_ratio", o[warmup], warmup)
    if ends:
        share = 0.1 if o[ratio] is None else o[ratio]
        note = "" if ratio in o.values else "OpenRLHF's constant"
        yield o.entry(f"{role}.optimizer.final_ratio", share, ratio, note=note)
    else:
        yield from o.idle(f"{o.shown(named)} does not end at a share", ratio)


def average(o: Options) -> Iterator[Outcome]:
    """A moving average of the actor's weights."""
    if o["enable_ema"]:
        beta = 0.992 if o["ema_beta"] is None else o["ema_beta"]
        yield o.entry("actor.ema.decay", beta, "ema_beta", "enable_ema")
    else:
        yield from o.idle("no average is asked for", "ema_beta")


def logged(o: Options) -> Iterator[Outcome]:
    if o["use_wandb"]:
        yield o.entry("run.logger_project", o["wandb_project"], "wandb_project")
    else:
        yield from o.idle(f"{o.names['use_wandb']} is not given", "wandb_project")
