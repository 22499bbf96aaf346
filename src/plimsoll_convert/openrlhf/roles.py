"""Convert the settings of roles: ranks, engines, models, adapters and optimizers."""

from __future__ import annotations

from plimsoll.errors import ConfigError
from plimsoll_convert import rules
from plimsoll_convert.settings import Keys, Options, Sourced, Value

_CARDS = 8
"""Assumed number of cards per machine, if it is unknown."""
_ACTOR = ("actor_num_nodes", "actor_num_gpus_per_node")
_CRITIC = ("critic_num_nodes", "critic_num_gpus_per_node")
_REWARD = ("reward_num_nodes", "reward_num_gpus_per_node")


def machines(o: Options, reward_models: int) -> Keys:
    """Return the machines and cards.

    For `train_ppo_ray` they follow from its groups' flags, for other programs from the launcher.
    There each of its `reward_models` has a group of its own; here one group has all their cards.
    """
    critic_ranks = reward_ranks = None
    if not o.rl:
        launch, nodes = o.launch, o.launch.nodes or 1
        cards = launch.cards or o.cards or (_CARDS if launch.started_by != "torchrun" else 1)
        note = f"{launch.started_by or 'the launcher'}: {cards} cards a machine"
        said = launch.cards is not None or o.cards is not None
        check = "" if said else f"no flag says how many cards there are: {cards}"
        ranks = Sourced(cards * nodes, note=note, check=check)
    else:
        actors, further = o[_ACTOR[0]] * o[_ACTOR[1]], 0
        ranks = o.trace(actors, *_ACTOR)
        if o.has_critic and not o["colocate_all_models"]:
            further = o[_CRITIC[0]] * o[_CRITIC[1]]
            critic_ranks = o.trace(further, *_CRITIC)
        if reward_models and not o["colocate_all_models"] and not shares_critics_cards(o):
            scorers = reward_models * o[_REWARD[0]] * o[_REWARD[1]]
            note = f"for {reward_models} models" if reward_models > 1 else ""
            reward_ranks = o.trace(scorers, *_REWARD, note=note)
            further += scorers
        if not _shares_cards(o):
            further += (o["vllm_num_engines"] or 0) * o["vllm_tensor_parallel_size"]
        cards = o.cards or max(_CARDS, o[_ACTOR[1]])
        nodes = max(o[_ACTOR[0]], -(-(actors + further) // cards))
    asleep = _shares_cards(o) and o["vllm_num_engines"] and o["vllm_enable_sleep"]
    return {
        "ranks": ranks,
        "critic_ranks": critic_ranks,
        "reward_ranks": reward_ranks,
        "rank_sleep": o.trace_if(
            asleep and o["deepspeed_enable_sleep"], "states", "deepspeed_enable_sleep"
        ),
        "nodes": Sourced(nodes, note=f"{nodes} machines") if nodes > 1 else None,
        "address": rules.ray_head(o, nodes),
    }


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
            "vllm": None,
            "transformers": o.trace({}, "vllm_num_engines", note="no vLLM"),
            "placement": Sourced("shared", note="it samples on the ranks' cards"),
        }
    if _shares_cards(o):
        placement = o.trace("shared", "colocate_all_models")
        return {
            "vllm.sleep_level": rules.sleep_level(o, "vllm_enable_sleep"),
            "placement": placement,
        }
    return {"placement": Sourced("own", note="engines have cards of their own")}


def trained_role(o: Options, role: str) -> Keys:
    """Return the settings of a role that learns. `role` is "actor" or "critic"."""
    flag, dtype = o.first("bf16", "param_dtype"), None
    if not o[flag] and role == "actor":
        why = "without --bf16 OpenRLHF trains in the dtype of the model's files; here in bfloat16"
        dtype = rules.to_check(why)
    elif o[flag] and o[flag] != "fp16":
        dtype = o.trace("bfloat16", flag)
    return {
        "model.dtype": dtype,
        "adapter": {} if o["lora_rank"] else None,
        "optimizer": _schedule(o, role),
        "zero.hpz_partition_size": o.take_if(o["zpg"] > 1 and o["zero_stage"] == 3, "zpg"),
        "zero.gradient_dtype": _gradient_dtype(o),
    }


def _gradient_dtype(o: Options) -> Value:
    flag, known = "grad_accum_dtype", rules.HALF + rules.FULL
    if o[flag] is not None and o[flag] not in known:
        raise ConfigError(f"{o.show(flag)}: known are {', '.join(known)}.")
    if o["zero_stage"] == 0:
        return None  # gradients of bfloat16 weights are added in bfloat16
    note = "" if o[flag] else "DeepSpeed's default beside bfloat16 weights"
    return o.trace("float32" if o[flag] in rules.FULL else "bfloat16", flag, note=note)


def _schedule(o: Options, role: str) -> Keys:
    names = ("lr_scheduler", "lr_warmup_ratio", "min_lr_ratio")
    named, warmup, ratio = (o.first(f"{role}.{name}", name) for name in names)
    share = 0.1 if o[ratio] is None else o[ratio]
    note = "" if ratio in o.values else "OpenRLHF's constant"
    return rules.schedule_of(
        o,
        named,
        default="cosine_with_min_lr",
        warmup=o.trace(float(o[warmup]), warmup),
        final=o.trace_if("min_lr" in str(o[named] or "min_lr"), share, ratio, note=note),
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
    return {"model.path": path, **trained_role(o, "critic")}


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
    is_plain = not (o["zero_stage"] == 3 or o[offload] or o["load_in_4bit"])
    if is_plain and path == o["pretrain"]:
        return None
    return frozen_role(
        o, o.trace(path, "ref_pretrain" if o["ref_pretrain"] else "pretrain"), offload
    )


def frozen_role(o: Options, path: Value, offload: str) -> Keys:
    """Return a role that only scores. `offload` is the flag that keeps it in host memory."""
    return {
        "model.path": path,
        "model.quantization": o.trace_if(o["load_in_4bit"], "nf4", "load_in_4bit"),
        "zero.stage": o.trace_if(o["zero_stage"] == 3, 3, "zero_stage"),
        "zero.offload": o.trace_if(o[offload], "cpu", offload),
    }


def teacher(o: Options) -> Keys | None:
    """Return the teacher of `train_kd`; None for other programs."""
    if o.command != "kd":
        return None
    if o["teacher_model"] is None:
        raise ConfigError("--teacher_model is needed: the model to distil from.")
    role = frozen_role(o, o.take("teacher_model"), "teacher_offload")
    return {**role, "model.quantization": None}
