"""Ranks, FSDP's settings as ZeRO's, adapters, optimizers and their schedules."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Entry, Outcome, Remark
from plimsoll.errors import ConfigError

_SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear"}
_FULL = ("bfloat16", "bf16")


def sections(o: Options) -> Mapping[str, tuple[str, str, str]]:
    """Of every role that learns verl's sections of its model, its optimizer and its engine."""
    if o.command == "sft":
        return {"actor": ("model", "optim", "engine")}
    own = "actor_rollout_ref.actor"
    found = {"actor": ("actor_rollout_ref.model", f"{own}.optim", f"{own}.fsdp_config")}
    if o.has_critic:
        found["critic"] = ("critic.model", "critic.optim", "critic.fsdp")
    return found


def cards(o: Options) -> int:
    """Of all machines."""
    if o.command == "sft" and o.launch.cards is not None:
        return int(o.launch.cards * (o.launch.nodes or 1))
    return int(o["trainer.n_gpus_per_node"] * o["trainer.nnodes"])


def ranks(o: Options) -> Iterator[Outcome]:
    flags = ("trainer.n_gpus_per_node", "trainer.nnodes")
    machines = o.launch.nodes if o.command == "sft" and o.launch.cards else None
    if o.command == "sft" and o.launch.cards is not None:
        yield Entry("cluster.ranks", cards(o), note=o.launch.started_by)
        yield from o.idle(f"{o.launch.started_by} says it", *flags)
    else:
        yield o.entry("cluster.ranks", cards(o), *flags)
        if not o.given(flags[0]):
            why = f"nothing says how many cards a machine has: {o[flags[0]]} is verl's default"
            yield Remark("check", "cluster.ranks", why)
    number = machines or o["trainer.nnodes"]
    if number > 1:
        yield o.entry("cluster.nodes", number, flags[1])
        yield Remark("check", "cluster.address", "give HOST:PORT of Ray's head")


def model(o: Options) -> Iterator[Outcome]:
    flag = "model.path" if o.command == "sft" else "actor_rollout_ref.model.path"
    path = o[flag]
    if not o.given(flag):
        raise ConfigError(f"{o.names[flag]}=... is needed: the model to train.")
    if path is None:
        raise ConfigError(f"{o.shown(flag)}: a model's directory or its name on the hub is needed.")
    yield o.entry("actor.model.path", os.path.expanduser(path), flag)


def held(o: Options) -> Iterator[Outcome]:
    """FSDP divides weights, gradients and states, as ZeRO stage 3 does."""
    for role, (_, _, engine) in sections(o).items():
        yield from _divided(o, role, engine)
        yield from _dtype(o, role, f"{engine}.model_dtype")
    if not o.rl:
        return
    yield from _reference(o)
    if not o.has_critic:
        yield from _no_critic(o)


def _divided(o: Options, role: str, engine: str) -> Iterator[Outcome]:
    key, gathered = f"{role}.zero", f"{engine}.reshard_after_forward"
    stage = 3 if o[gathered] else 2
    note = "FSDP divides weights, gradients and states" if stage == 3 else "weights stay gathered"
    yield o.entry(f"{key}.stage", stage, gathered, note=note)
    policy, states, weights = (
        f"{engine}.{name}" for name in ("offload_policy", "optimizer_offload", "param_offload")
    )
    if o[policy] or o[states]:
        note = "" if o[policy] else "there they come to the cards for the step"
        yield o.entry(f"{key}.optimizer_offload", "cpu", policy, states, note=note)
    if o[policy] and stage == 3:
        yield o.entry(f"{key}.parameter_offload", "cpu", policy)
    elif o[weights]:
        why = f"weights stay on the cards while engines sample; {key}.parameter_offload: cpu keeps "
        yield from o.lacking(f"{why}them in host memory all the time, and is slow", weights)
    yield from o.same("nothing is offloaded", policy, states, weights)


def _dtype(o: Options, role: str, flag: str) -> Iterator[Outcome]:
    given = str(o[flag])
    if given in ("fp16", "float16"):
        yield from o.lacking("models are trained in bfloat16 or float32", flag)
        return
    note = "" if given in _FULL else "the optimizer keeps fp32 masters"
    yield o.entry(f"{role}.model.dtype", "bfloat16", flag, note=note)
    if given in _FULL:
        why = "verl then keeps Adam's states in bfloat16, too, without fp32 masters; here both are "
        yield Remark("check", f"{role}.zero.state_dtype", f"{why}in float32")


def kl_in_reward(o: Options) -> bool:
    """Whether the KL is taken off rewards that count: gdpo looks at their parts alone."""
    return bool(o["algorithm.use_kl_in_reward"]) and o["algorithm.adv_estimator"] != "gdpo"


def has_reference(o: Options) -> bool:
    return bool(kl_in_reward(o) or o["actor_rollout_ref.actor.use_kl_loss"])


def _reference(o: Options) -> Iterator[Outcome]:
    engine = "actor_rollout_ref.ref.fsdp_config"
    names = ("offload_policy", "optimizer_offload", "param_offload", "reshard_after_forward")
    flags = tuple(f"{engine}.{name}" for name in (*names, "model_dtype"))
    if not has_reference(o):
        yield from o.idle("there is no KL, and so no reference", *flags)
        return
    if o["actor_rollout_ref.model.lora_rank"]:
        yield from o.idle("the reference is the actor without its adapter", *flags)
        return
    own = o["actor_rollout_ref.ref.model.path"] or o["actor_rollout_ref.model.path"]
    path = os.path.expanduser(str(own))
    yield o.entry("reference.model.path", path, "actor_rollout_ref.model.path")
    yield Entry("reference.stage", 3, note="FSDP divides its weights")
    if o[flags[0]] or o[flags[2]]:
        yield o.entry("reference.offload", "cpu", flags[0], flags[2])
    yield from o.same("as the actor is held", *flags)


def _no_critic(o: Options) -> Iterator[Outcome]:
    why = f"{o.shown('algorithm.adv_estimator')} has no critic"
    critic = [flag for flag in o.typed if flag.startswith("critic.")]
    yield from o.idle(why, *critic)


def adapters(o: Options) -> Iterator[Outcome]:
    for role, (there, _, _) in sections(o).items():
        rank, alpha, targets = (
            f"{there}.{name}" for name in ("lora_rank", "lora_alpha", "target_modules")
        )
        if not o[rank]:
            yield from o.idle(f"{o.shown(rank)}: no adapter", rank, alpha, targets)
            continue
        key = f"{role}.adapter"
        yield o.entry(f"{key}.rank", o[rank], rank)
        yield o.entry(f"{key}.alpha", float(o[alpha]), alpha)
        yield o.entry(f"{key}.targets", tuple(o[targets] or ("all-linear",)), targets)


def optimizers(o: Options) -> Iterator[Outcome]:
    for _, optim, _ in sections(o).values():
        flag = f"{optim}.optimizer"
        if str(o[flag]).lower() not in ("adamw", "adam", "fusedadam"):
            raise ConfigError(f"{o.shown(flag)}: not supported: weights are trained by AdamW.")
        yield from o.same("weights are trained by AdamW", flag)


def schedules(o: Options) -> Iterator[Outcome]:
    for role, (_, optim, _) in sections(o).items():
        yield from _schedule(o, f"{role}.optimizer", optim)


def _schedule(o: Options, key: str, optim: str) -> Iterator[Outcome]:
    named = tuple(
        f"{optim}.{name}"
        for name in ("lr_scheduler_type", "warmup_style", "lr_scheduler", "lr_decay_style")
    )
    flag = next((one for one in named if o[one] is not None), named[0])
    name = str(o[flag] or "constant")
    if name not in _SCHEDULES:
        known = ", ".join(_SCHEDULES)
        raise ConfigError(f"{o.shown(flag)}: there is no such schedule here. Known: {known}.")
    yield o.entry(f"{key}.schedule", name, flag)
    yield from o.idle(f"{o.shown(flag)} counts", *(one for one in named if one != flag))
    steps, share, least = (
        f"{optim}.{name}" for name in ("lr_warmup_steps", "lr_warmup_steps_ratio", "min_lr_ratio")
    )
    if (o[steps] or 0) > 0:
        yield o.entry(f"{key}.warmup_steps", o[steps], steps)
        yield from o.idle("steps are given", share)
    else:
        yield o.entry(f"{key}.warmup_ratio", o[share] or 0.0, share)
        yield from o.same("no warm-up, or a share of the run", steps)
    if name == "constant":
        yield from o.idle("the schedule does not fall", least)
    else:
        yield o.entry(f"{key}.final_ratio", o[least] or 0.0, least)


def strategies(o: Options) -> Iterator[Outcome]:
    """FSDP, Megatron and others: trained models are divided by ZeRO."""
    groups = ("--config-name", "model", "optim", "actor@actor_rollout_ref.actor")
    flags = [f for f in o.typed if f.endswith(("strategy", "engine")) or f in groups]
    why = "trained models are divided by DeepSpeed's ZeRO, whatever divides them there"
    yield from o.idle(why, *flags)
