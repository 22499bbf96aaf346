"""Convert the settings of roles: ranks, engines, models, adapters and optimizers."""

from __future__ import annotations

from plimsoll.errors import ConfigError
from plimsoll_convert import mapping
from plimsoll_convert.options import Options
from plimsoll_convert.values import Keys, Sourced, Value

_CARDS = 8
"""Assumed number of cards per machine, if it is unknown."""
_ACTOR = ("actor_num_nodes", "actor_num_gpus_per_node")
_CRITIC = ("critic_num_nodes", "critic_num_gpus_per_node")
_REWARD = ("reward_num_nodes", "reward_num_gpus_per_node")
_ENGINES = ("vllm_num_engines", "vllm_tensor_parallel_size")


def machines(o: Options, reward_models: int) -> Keys:
    """Return the machines and cards.

    For `train_ppo_ray` they follow from its groups' flags, for other programs from the launcher.
    There each of its `reward_models` has a group of its own; here one group has all their cards.
    """
    if not o.rl:
        return _launched_machines(o)
    ranks, further = o[_ACTOR[0]] * o[_ACTOR[1]], 0
    critic_ranks = reward_ranks = None
    if o.has_critic and not o["colocate_all_models"]:
        further = o[_CRITIC[0]] * o[_CRITIC[1]]
        critic_ranks = o.trace(further, *_CRITIC)
    if reward_models and not o["colocate_all_models"] and not shares_critics_cards(o):
        scorers = reward_models * o[_REWARD[0]] * o[_REWARD[1]]
        note = f"for {reward_models} models" if reward_models > 1 else ""
        reward_ranks = o.trace(scorers, *_REWARD, note=note)
        further += scorers
    if not _shares_cards(o):
        further += (o[_ENGINES[0]] or 0) * o[_ENGINES[1]]
    cards = o.cards or max(_CARDS, o[_ACTOR[1]])
    nodes = max(o[_ACTOR[0]], -(-(ranks + further) // cards))
    return {
        "ranks": o.trace(ranks, *_ACTOR),
        "critic_ranks": critic_ranks,
        "reward_ranks": reward_ranks,
        "rank_sleep": _rank_sleep(o),
        "nodes": _nodes(nodes),
        "address": mapping.ray_head(o, nodes),
    }


def _rank_sleep(o: Options) -> Value:
    """Return what ranks move to host memory, beside engines that sleep on the same cards."""
    asleep = _shares_cards(o) and o["vllm_num_engines"] and o["vllm_enable_sleep"]
    return o.take("deepspeed_enable_sleep", lambda on: "states" if on else None) if asleep else None


def _launched_machines(o: Options) -> Keys:
    launch, nodes = o.launch, o.launch.nodes or 1
    cards = launch.cards or o.cards or (_CARDS if launch.started_by != "torchrun" else 1)
    note = f"{launch.started_by or 'the launcher'}: {cards} cards a machine"
    said = launch.cards is not None or o.cards is not None
    check = "" if said else f"no flag says how many cards there are: {cards}"
    ranks = Sourced(cards * nodes, note=note, check=check)
    return {"ranks": ranks, "nodes": _nodes(nodes), "address": mapping.ray_head(o, nodes)}


def _nodes(number: int) -> Value:
    return Sourced(number, note=f"{number} machines") if number > 1 else None


def shares_critics_cards(o: Options) -> bool:
    """Return whether reward models have the critic's cards, which have no other models there."""
    return bool(o["colocate_critic_reward"] and o.has_critic and not o["colocate_all_models"])


def _shares_cards(o: Options) -> bool:
    """Return whether engines and ranks share cards; in asynchronous runs they never do."""
    return bool(o["colocate_all_models"] and not o["async_train"])


def rollout(o: Options) -> Keys:
    """Return the settings of the engines, without sampling settings."""
    if not o["vllm_num_engines"]:
        return {
            **mapping.engine_of(o.trace("transformers", "vllm_num_engines", note="no vLLM"), {}),
            "placement": Sourced("shared", note="it samples on the ranks' cards"),
        }
    shared = _shares_cards(o)
    return {
        **mapping.engine_of(
            Sourced("vllm"),
            {
                "tensor_parallel": o.take("vllm_tensor_parallel_size"),
                "memory_share": o.take("vllm_gpu_memory_utilization"),
                "arguments.enforce_eager": o.take("enforce_eager", lambda on: on or None),
                "sleep_level": mapping.sleep_level(o, "vllm_enable_sleep") if shared else None,
            },
        ),
        "engines": o.take("vllm_num_engines"),
        "placement": o.trace("shared", "colocate_all_models")
        if shared
        else Sourced("own", note="engines have cards of their own"),
    }


def trained_role(o: Options, role: str, path: Value) -> Keys:
    """Return the settings of a role that learns. `role` is "actor" or "critic"."""
    adapter = mapping.adapter_of(o, "lora_rank", "lora_alpha", "target_modules", "lora_dropout")
    offload = o.take("adam_offload", lambda on: "cpu" if on else None)
    divided_again = o["zpg"] > 1 and o["zero_stage"] == 3
    return {
        "model": {
            "path": path,
            "dtype": _dtype(o, role),
            "gradient_checkpointing": o.take("gradient_checkpointing"),
            "quantization": _quantization(o),
        },
        "adapter": adapter,
        "optimizer": _optimizer(o, role),
        "zero": {
            "stage": o.take("zero_stage"),
            "optimizer_offload": offload,
            "hpz_partition_size": o.take("zpg") if divided_again else None,
            "gradient_dtype": _gradient_dtype(o),
        },
        "ema.decay": o.trace(o["ema_beta"], "ema_beta", "enable_ema")
        if o["enable_ema"] and role == "actor"
        else None,
    }


def _quantization(o: Options) -> Value:
    return o.take("load_in_4bit", lambda on: "nf4" if on else None)


def _dtype(o: Options, role: str) -> Value:
    flag = o.first("bf16", "param_dtype")
    if o[flag] == "fp16":
        return None
    if o[flag]:
        return o.trace("bfloat16", flag)
    why = "without --bf16 OpenRLHF trains in the dtype of the model's files; here in bfloat16"
    return mapping.to_check(why) if role == "actor" else None


def _gradient_dtype(o: Options) -> Value:
    given = o["grad_accum_dtype"]
    if given is not None and given not in mapping.HALF + mapping.FULL:
        raise ConfigError(
            f"{o.show('grad_accum_dtype')}: known are {', '.join(mapping.HALF + mapping.FULL)}."
        )
    if o["zero_stage"] == 0:
        return None  # gradients of bfloat16 weights are added in bfloat16
    note = "" if given else "DeepSpeed's default beside bfloat16 weights"
    return o.trace(
        "float32" if given in mapping.FULL else "bfloat16", "grad_accum_dtype", note=note
    )


def _optimizer(o: Options, role: str) -> Keys:
    def named(new: str, old: str) -> str:
        return o.first(f"{role}.{new}", new, old)

    betas = named("adam.betas", "adam_betas")
    return {
        "learning_rate": o.take(o.first(f"{role}_learning_rate", "learning_rate")),
        "beta1": o.trace(o[betas][0], betas),
        "beta2": o.trace(o[betas][1], betas),
        "eps": o.take(o.first(f"{role}.adam.eps", "adam.eps")),
        "weight_decay": o.take(named("adam.weight_decay", "l2")),
        "max_grad_norm": o.take(named("max_norm", "max_norm")),
        **_schedule(o, role),
    }


def _schedule(o: Options, role: str) -> Keys:
    names = ("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio")
    named, warmup, ratio = (o.first(f"{role}.{name}", name) for name in names)
    share = 0.1 if o[ratio] is None else o[ratio]
    note = "" if ratio in o.values else "OpenRLHF's constant"
    falls = "min_lr" in str(o[named] or "min_lr")
    return mapping.schedule_of(
        o,
        named,
        default="cosine_with_min_lr",
        warmup=o.trace(float(o[warmup]), warmup),
        final=o.trace(share, ratio, note=note) if falls else None,
        note="" if named in o.values else "OpenRLHF's only one then",
    )


def critic(o: Options) -> Keys | None:
    """Return the critic, or None if there is no critic.

    Its first weights are critic_pretrain; by default the reward model, or else the actor.
    """
    if not o.has_critic:
        return None
    note = "critic_pretrain's default"
    if o["critic_pretrain"] is not None:
        path = o.take("critic_pretrain")
    elif o["reward_pretrain"] is not None and not (o["remote_rm_url"] or o["agent_func_path"]):
        path = o.trace(o["reward_pretrain"].split(",")[0], "reward_pretrain", note=note)
    else:
        path = o.trace(o["pretrain"], "pretrain", note=note)
    return trained_role(o, "critic", path)


def reference(o: Options) -> Keys | None:
    """Return the reference model, or None if the config needs no section for it.

    The config needs none if there is no reference, or if the reference is the actor's first
    weights, without ZeRO 3, offload or quantization, or the actor without its adapter.
    """
    path = o["ref_pretrain"] or o["pretrain"]
    if not o.rl and o.command not in ("dpo", "kto"):
        return None
    if (o.rl and not o["init_kl_coef"]) or (o["lora_rank"] and path == o["pretrain"]):
        return None
    offload = o.first("ref_offload", "ref_reward_offload")
    divided = o["zero_stage"] == 3
    if not (divided or o[offload] or o["load_in_4bit"] or path != o["pretrain"]):
        return None
    flag = "ref_pretrain" if o["ref_pretrain"] else "pretrain"
    return frozen_role(o, o.trace(path, flag), offload)


def frozen_role(o: Options, path: Value, offload: str) -> Keys:
    """Return a role that only scores. `offload` is the flag that keeps it in host memory."""
    return {
        "model": {"path": path, "quantization": _quantization(o)},
        "zero.stage": o.trace(3, "zero_stage") if o["zero_stage"] == 3 else None,
        "zero.offload": o.take(offload, lambda on: "cpu" if on else None),
    }


def teacher(o: Options) -> Keys | None:
    """Return the teacher of `train_kd`; None for other programs."""
    if o.command != "kd":
        return None
    if o["teacher_model"] is None:
        raise ConfigError("--teacher_model is needed: the model to distil from.")
    role = frozen_role(o, o.take("teacher_model"), "teacher_offload")
    return {**role, "model": {"path": o.take("teacher_model")}}
