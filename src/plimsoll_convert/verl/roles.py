"""Convert the settings of ranks, FSDP (to ZeRO), adapters, optimizers, schedules and engines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.errors import ConfigError
from plimsoll_convert import mapping
from plimsoll_convert.options import Options, Remark
from plimsoll_convert.values import Keys, Sourced, Value

_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
_CARDS = ("trainer.n_gpus_per_node", "trainer.nnodes")
_HAS_POOL = "reward.reward_model.enable_resource_pool"
_POOL = ("reward.reward_model.n_gpus_per_node", "reward.reward_model.nnodes")
_SCHEDULES = ("lr_scheduler_type", "warmup_style", "lr_scheduler", "lr_decay_style")


@dataclass(frozen=True)
class Sections:
    """The names of the sections with a role's model, optimizer and engine settings."""

    model: str
    optim: str
    engine: str


_OF_ACTOR = Sections("actor_rollout_ref.model", f"{_ACTOR}.optim", f"{_ACTOR}.fsdp_config")
_OF_CRITIC = Sections("critic.model", "critic.optim", "critic.fsdp")
_OF_SFT = Sections("model", "optim", "engine")


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
    pool = _pool_cards(o) if has_reward_model else 0
    if pool:
        cards = o.cards or max(o[_CARDS[0]], o[_POOL[0]])
        nodes = max(nodes, -(-(cards_of(o) + pool) // cards))
    return {
        "ranks": Sourced(cards_of(o), note=o.launch.started_by) if launched else ranks,
        "reward_ranks": o.trace(pool, *_POOL, _HAS_POOL) if pool else None,
        "nodes": o.trace(nodes, _CARDS[1], *(_POOL if pool else ())) if nodes > 1 else None,
        "address": mapping.ray_head(o, nodes),
    }


def _pool_cards(o: Options) -> int:
    """Return the number of cards of the reward model's own pool; 0 without such a pool."""
    if not o[_HAS_POOL]:
        return 0
    if min(o[flag] for flag in _POOL) < 1:
        raise ConfigError(
            f"{o.show(*_POOL)}: {o.show(_HAS_POOL)} gives the reward model cards of its own, and "
            "these are none. Say how many, or leave the pool out."
        )
    return int(o[_POOL[0]] * o[_POOL[1]])


def actor(o: Options) -> Keys:
    """Return the settings of the model that learns."""
    sections = _OF_SFT if o.command == "sft" else _OF_ACTOR
    flag = f"{sections.model}.path"
    if not o.given(flag):
        raise ConfigError(f"{o.names[flag]}=... is needed: the model to train.")
    if o[flag] is None:
        raise ConfigError(f"{o.show(flag)}: a model's directory or its name on the hub is needed.")
    return _trained_role(o, sections, o.take(flag, os.path.expanduser))


def critic(o: Options) -> Keys | None:
    """Return the critic, or None if the command trains no critic."""
    path = o.take(f"{_OF_CRITIC.model}.path")
    return _trained_role(o, _OF_CRITIC, path) if o.has_critic else None


def _trained_role(o: Options, sections: Sections, path: Value) -> Keys:
    model, optim, engine = sections.model, sections.optim, sections.engine
    name = f"{optim}.optimizer"
    if str(o[name]).lower() not in ("adamw", "adam", "fusedadam"):
        raise ConfigError(f"{o.show(name)}: not supported: weights are trained by AdamW.")
    dtype = f"{engine}.model_dtype"
    full = str(o[dtype]) in mapping.HALF
    note = "" if full else "the optimizer keeps fp32 masters"
    offload = f"{model}.enable_activation_offload"
    adapter = (f"{model}.{part}" for part in ("lora_rank", "lora_alpha", "target_modules"))
    return {
        "model": {
            "path": path,
            "dtype": None
            if str(o[dtype]) in mapping.HALF_16
            else o.trace("bfloat16", dtype, note=note),
            "trust_remote_code": o.take(f"{model}.trust_remote_code"),
            "gradient_checkpointing": o.take(f"{model}.enable_gradient_checkpointing"),
            "activation_offload": o.take(offload, lambda on: "cpu" if on else None),
        },
        "adapter": mapping.adapter_of(o, *adapter),
        "optimizer": {
            "learning_rate": o.take(f"{optim}.lr"),
            "beta1": o.take(f"{optim}.betas", lambda betas: betas[0]),
            "beta2": o.take(f"{optim}.betas", lambda betas: betas[1]),
            "weight_decay": o.take(f"{optim}.weight_decay"),
            "max_grad_norm": o.take(f"{optim}.clip_grad"),
            **_schedule(o, optim),
        },
        "zero": _sharding(o, engine, full),
    }


def _sharding(o: Options, engine: str, full: bool) -> Keys:
    """Return FSDP's settings as ZeRO's: stage 3, or 2 if weights stay gathered after forward."""
    gathered = f"{engine}.reshard_after_forward"
    stage = 3 if o[gathered] else 2
    policy, states = f"{engine}.offload_policy", f"{engine}.optimizer_offload"
    note = "FSDP divides weights, gradients and states" if stage == 3 else "weights stay gathered"
    there = "" if o[policy] else "there they come to the cards for the step"
    why = "verl then keeps Adam's states in bfloat16, too, without fp32 masters; here both are in "
    return {
        "stage": o.trace(stage, gathered, note=note),
        "optimizer_offload": o.trace("cpu", policy, states, note=there)
        if o[policy] or o[states]
        else None,
        "parameter_offload": o.trace("cpu", policy) if o[policy] and stage == 3 else None,
        "state_dtype": mapping.to_check(f"{why}float32") if full else None,
    }


def _schedule(o: Options, optim: str) -> Keys:
    names = [f"{optim}.{name}" for name in _SCHEDULES]
    steps, share, least = (
        f"{optim}.{name}" for name in ("lr_warmup_steps", "lr_warmup_steps_ratio", "min_lr_ratio")
    )
    return mapping.schedule_of(
        o,
        next((name for name in names if o[name] is not None), names[0]),
        default="constant",
        warmup=o.trace(o[steps], steps)
        if (o[steps] or 0) > 0
        else o.trace(float(o[share] or 0.0), share),
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
    model = "actor_rollout_ref.model"
    has_kl = o.rl and (kl_in_reward(o) or o[f"{_ACTOR}.use_kl_loss"])
    if not has_kl or o[f"{model}.lora_rank"]:
        return None
    path = str(o[f"{_REF}.model.path"] or o[f"{model}.path"])
    offloads = (f"{_REF}.fsdp_config.offload_policy", f"{_REF}.fsdp_config.param_offload")
    return {
        "model": {"path": o.trace(os.path.expanduser(path), f"{model}.path", f"{_REF}.model.path")},
        "zero.stage": Sourced(3, note="FSDP divides its weights"),
        "zero.offload": o.trace("cpu", *offloads) if any(o[flag] for flag in offloads) else None,
    }


def rollout(o: Options) -> Keys | None:
    """Return the engines, which share the ranks' cards; None if the command does not sample."""
    if not o.rl:
        return None
    name, width, share, free = (
        f"{_ROLLOUT}.{part}"
        for part in (
            "name",
            "tensor_model_parallel_size",
            "gpu_memory_utilization",
            "free_cache_engine",
        )
    )
    sampling = {
        "max_new_tokens": o.take("data.max_response_length"),
        "temperature": o.take(f"{_ROLLOUT}.temperature"),
        "top_p": o.take(f"{_ROLLOUT}.top_p"),
        "top_k": o.take(f"{_ROLLOUT}.top_k", lambda k: max(0, k)),
    }
    sequences = o.take(f"{_ROLLOUT}.max_num_seqs")
    if o[name] == "hf":
        return {
            **mapping.engine_of(
                o.trace("transformers", name),
                {"max_sequences": sequences},
            ),
            "placement": Sourced("shared", note="it samples on the ranks' cards"),
            "sampling": sampling,
        }
    cards, across = cards_of(o), o[width] * (o[f"{_ROLLOUT}.pipeline_model_parallel_size"] or 1)
    if across > cards:
        raise ConfigError(
            f"{o.show(width)}: an engine needs {across} cards, and there are {cards} "
            f"({o.show(*_CARDS)})."
        )
    left = f"{across} cards each: {cards % across} are left" if cards % across else ""
    note = f"{cards} cards / {across}"
    return {
        **mapping.engine_of(
            o.trace("vllm", name),
            {
                "tensor_parallel": o.take(width),
                "pipeline_parallel": o.take(f"{_ROLLOUT}.pipeline_model_parallel_size"),
                "memory_share": o.take(share),
                "sleep_level": mapping.sleep_level(o, free),
                "max_sequences": sequences,
                "arguments.enforce_eager": _take_if_given(o, f"{_ROLLOUT}.enforce_eager"),
                "arguments.max_num_batched_tokens": _take_if_given(
                    o, f"{_ROLLOUT}.max_num_batched_tokens"
                ),
            },
        ),
        "engines": o.trace(cards // across, width, note=note, check=left),
        "placement": Sourced("shared", note="verl's engines share the ranks' cards"),
        "dtype": _engine_dtype(o),
        "sampling": sampling,
    }


def _take_if_given(o: Options, id: str) -> Value:
    return o.take(id) if o.given(id) else None


def _engine_dtype(o: Options) -> Value:
    flag = f"{_ROLLOUT}.dtype"
    if str(o[flag]) in mapping.HALF_16:
        return None
    return o.trace("float32" if str(o[flag]) in mapping.FULL else "bfloat16", flag)


def remarks(o: Options) -> Iterator[Remark]:
    """Yield remarks on settings that have no counterpart in combination with others."""
    roles = [_OF_SFT] if o.command == "sft" else [_OF_ACTOR, *([_OF_CRITIC] * o.has_critic)]
    for sections in roles:
        engine = sections.engine
        yield from mapping.half_precision_remark(o, f"{engine}.model_dtype")
        weights, policy = f"{engine}.param_offload", f"{engine}.offload_policy"
        if (
            o.given(weights)
            and o[weights]
            and not (o[policy] and o[f"{engine}.reshard_after_forward"])
        ):
            role = "critic" if sections is _OF_CRITIC else "actor"
            why = "cluster.rank_sleep: all moves the weights of all roles to host memory while "
            why += f"engines sample; {role}.zero.parameter_offload: cpu keeps them there all the "
            why += "time, and is slow"
            yield Remark("lacking", weights, why)
    if o.rl and o[f"{_ROLLOUT}.name"] != "hf":
        yield from mapping.half_precision_remark(o, f"{_ROLLOUT}.dtype")
