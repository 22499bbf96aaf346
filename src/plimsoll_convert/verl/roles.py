"""Convert the settings of ranks, FSDP (to ZeRO), adapters, optimizers, schedules and engines."""

from __future__ import annotations

import os

from plimsoll.errors import ConfigError
from plimsoll_convert import rules
from plimsoll_convert.settings import Keys, Options, Sourced, Value

_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
_MODEL = "actor_rollout_ref.model"
_CARDS = ("trainer.n_gpus_per_node", "trainer.nnodes")
_HAS_POOL = "reward.reward_model.enable_resource_pool"
_POOL = ("reward.reward_model.n_gpus_per_node", "reward.reward_model.nnodes")
_OF_ACTOR = (_MODEL, f"{_ACTOR}.optim", f"{_ACTOR}.fsdp_config")
_OF_CRITIC = ("critic.model", "critic.optim", "critic.fsdp")
_OF_SFT = ("model", "optim", "engine")
"""The sections with the model, optimizer and engine settings of a role."""


def cards_of(o: Options) -> int:
    """Return the number of cards of all machines."""
    if o.command == "sft" and o.launch.cards is not None:
        return int(o.launch.cards * (o.launch.nodes or 1))
    return int(o[_CARDS[0]] * o[_CARDS[1]])


def machines(o: Options, *, has_reward_model: bool) -> Keys:
    """Return the machines and cards.

    For SFT they follow from the launcher if it says them, otherwise from the trainer's settings.
    The reward model may have a pool of cards of its own.
    """
    launched = o.command == "sft" and o.launch.cards is not None
    check = ""
    if not launched and not o.given(_CARDS[0]):
        check = f"nothing says how many cards a machine has: {o[_CARDS[0]]} is verl's default"
    ranks = o.trace(cards_of(o), *_CARDS, check=check)
    nodes = (o.launch.nodes if launched else None) or o[_CARDS[1]]
    pool = 0
    if has_reward_model and o[_HAS_POOL]:
        if min(o[flag] for flag in _POOL) < 1:
            raise ConfigError(
                f"{o.show(*_POOL)}: {o.show(_HAS_POOL)} gives the reward model cards of its own, "
                "and these are none. Say how many, or leave the pool out."
            )
        pool = o[_POOL[0]] * o[_POOL[1]]
        cards = o.cards or max(o[_CARDS[0]], o[_POOL[0]])
        nodes = max(nodes, -(-(cards_of(o) + pool) // cards))
    return {
        "ranks": Sourced(cards_of(o), note=o.launch.started_by) if launched else ranks,
        "reward_ranks": o.trace_if(pool, pool, *_POOL, _HAS_POOL),
        "nodes": o.trace_if(nodes > 1, nodes, _CARDS[1], *(_POOL if pool else ())),
        "address": rules.ray_head(o, nodes),
    }


def actor(o: Options) -> Keys:
    """Return the settings of the model that learns."""
    sections = _OF_SFT if o.command == "sft" else _OF_ACTOR
    flag = f"{sections[0]}.path"
    if not o.given(flag):
        raise ConfigError(f"{o.names[flag]}=... is needed: the model to train.")
    if o[flag] is None:
        raise ConfigError(f"{o.show(flag)}: a model's directory or its name on the hub is needed.")
    return _trained_role(o, sections, o.take(flag, os.path.expanduser))


def critic(o: Options) -> Keys | None:
    """Return the critic, or None if the command trains no critic."""
    if not o.has_critic:
        return None
    return _trained_role(o, _OF_CRITIC, o.take(f"{_OF_CRITIC[0]}.path"))


def _trained_role(o: Options, sections: tuple[str, str, str], path: Value) -> Keys:
    """Return what the table does not say of a role; FSDP becomes ZeRO.

    The stage is 3, or 2 if weights stay gathered after the forward pass.
    """
    model, optim, engine = sections
    name, dtype = f"{optim}.optimizer", f"{engine}.model_dtype"
    if str(o[name]).lower() not in ("adamw", "adam", "fusedadam"):
        raise ConfigError(f"{o.show(name)}: not supported: weights are trained by AdamW.")
    full, computes_half = str(o[dtype]) in rules.HALF, str(o[dtype]) in rules.HALF_16
    masters = "" if full else "the optimizer keeps fp32 masters"
    gathered = f"{engine}.reshard_after_forward"
    policy, states = f"{engine}.offload_policy", f"{engine}.optimizer_offload"
    stage, weights = 3 if o[gathered] else 2, f"{engine}.param_offload"
    note = "FSDP divides weights, gradients and states" if stage == 3 else "weights stay gathered"
    there = "" if o[policy] else "there they come to the cards for the step"
    why = "verl then keeps Adam's states in bfloat16, too, without fp32 masters; here both are in "
    slow = "cluster.rank_sleep: all moves the weights of all roles to host memory while engines "
    slow += (
        f"sample; {'critic' if sections == _OF_CRITIC else 'actor'}.zero.parameter_offload: cpu "
    )
    slow += "keeps them there all the time, and is slow"
    return {
        "model.path": path,
        "model.dtype": o.trace_if(not computes_half, "bfloat16", dtype, note=masters),
        "adapter": {} if o[f"{model}.lora_rank"] else None,
        "optimizer": _schedule(o, optim),
        "zero.stage": o.trace(stage, gathered, note=note),
        "zero.optimizer_offload": o.trace_if(
            o[policy] or o[states], "cpu", policy, states, note=there
        ),
        "zero.parameter_offload": o.trace_if(o[policy] and stage == 3, "cpu", policy),
        "zero.state_dtype": rules.to_check(f"{why}float32") if full else None,
        "half": rules.leave_out_halves(o, dtype),
        "offload": o.leave_out(slow, weights, when=o[weights] and not (o[policy] and o[gathered])),
    }


def _schedule(o: Options, optim: str) -> Keys:
    shapes = rules.ids_of(optim, "lr_scheduler_type warmup_style lr_scheduler lr_decay_style")
    names = "lr_warmup_steps lr_warmup_steps_ratio min_lr_ratio"
    steps, share, least = rules.ids_of(optim, names)
    warmup = o.trace(float(o[share] or 0.0), share)
    if (o[steps] or 0) > 0:
        warmup = o.trace(o[steps], steps)
    return rules.schedule_of(
        o,
        next((name for name in shapes if o[name] is not None), shapes[0]),
        default="constant",
        warmup=warmup,
        final=o.trace(o[least] or 0.0, least),
        constant_warmup=True,
    )


def kl_in_reward(o: Options) -> bool:
    """Return whether the KL is subtracted from the reward; gdpo ignores that setting."""
    return bool(o["algorithm.use_kl_in_reward"]) and o["algorithm.adv_estimator"] != "gdpo"


def reference(o: Options) -> Keys | None:
    """Return the reference model; None without a KL, or if the actor has an adapter.

    With an adapter the reference is the actor without its adapter.
    """
    has_kl = o.rl and (kl_in_reward(o) or o[f"{_ACTOR}.use_kl_loss"])
    if not has_kl or o[f"{_MODEL}.lora_rank"]:
        return None
    path = os.path.expanduser(str(o[f"{_REF}.model.path"] or o[f"{_MODEL}.path"]))
    offloads = (f"{_REF}.fsdp_config.offload_policy", f"{_REF}.fsdp_config.param_offload")
    return {
        "model.path": o.trace(path, f"{_MODEL}.path", f"{_REF}.model.path"),
        "zero.stage": Sourced(3, note="FSDP divides its weights"),
        "zero.offload": o.trace_if(any(o[flag] for flag in offloads), "cpu", *offloads),
    }


def rollout(o: Options) -> Keys | None:
    """Return the engines, which share the ranks' cards; None if the command does not sample."""
    if not o.rl:
        return None
    name, width, dtype = rules.ids_of(_ROLLOUT, "name tensor_model_parallel_size dtype")
    sequences = o.take(f"{_ROLLOUT}.max_num_seqs")
    if o[name] == "hf":
        return {
            "vllm": None,
            "transformers.max_sequences": sequences,
            "placement": Sourced("shared", note="it samples on the ranks' cards"),
        }
    cards, across = cards_of(o), o[width] * (o[f"{_ROLLOUT}.pipeline_model_parallel_size"] or 1)
    if across > cards:
        raise ConfigError(
            f"{o.show(width)}: an engine needs {across} cards, and there are {cards} "
            f"({o.show(*_CARDS)})."
        )
    left = f"{across} cards each: {cards % across} are left" if cards % across else ""
    note = f"{cards} cards / {across}"
    given = o.given(f"{_ROLLOUT}.enforce_eager", f"{_ROLLOUT}.max_num_batched_tokens")
    computes = "float32" if str(o[dtype]) in rules.FULL else "bfloat16"
    return {
        "vllm.sleep_level": rules.sleep_level(o, f"{_ROLLOUT}.free_cache_engine"),
        "vllm.max_sequences": sequences,
        "vllm.arguments": {id.rpartition(".")[2]: o.take(id) for id in given},
        "engines": o.trace(cards // across, width, note=note, check=left),
        "placement": Sourced("shared", note="verl's engines share the ranks' cards"),
        "dtype": o.trace_if(str(o[dtype]) not in rules.HALF_16, computes, dtype),
        "half": rules.leave_out_halves(o, dtype),
    }
