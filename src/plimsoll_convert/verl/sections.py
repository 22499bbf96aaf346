"""Convert the sections of machines, roles, engines, data, batches and the run.

FSDP becomes ZeRO. verl's rows are Parquet files with prompts as lists of turns.
"""

from __future__ import annotations

import os

from plimsoll.config.base import AUTO
from plimsoll.errors import ConfigError
from plimsoll_convert import rules
from plimsoll_convert.settings import Keys, Options, Sourced, Value, positive

_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
_MODEL = "actor_rollout_ref.model"
_CARDS = ("trainer.n_gpus_per_node", "trainer.nnodes")
_HAS_POOL = "reward.reward_model.enable_resource_pool"
_POOL = ("reward.reward_model.n_gpus_per_node", "reward.reward_model.nnodes")
_OF_ACTOR = (_MODEL, f"{_ACTOR}.optim", f"{_ACTOR}.fsdp_config")
_OF_CRITIC = ("critic.model", "critic.optim", "critic.fsdp")
_OF_SFT = ("model", "optim", "engine")
"""The sections with the model, optimizer and engine settings of a role."""
_ANSWER = "reward_model.ground_truth"
"""The column of verl's data that has the reference answer."""
_METRICS = (None, "reward", "seq_reward", "score", "acc", "seq_final_reward")
"""Metrics by which verl may filter groups. Each is equal in a group if the rewards are equal."""
_GROUPS = "algorithm.filter_groups"
_ULYSSES = "ulysses_sequence_parallel_size"
PROMPT, RESPONSE = "data.max_prompt_length", "data.max_response_length"


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
        why = "the pool has no cards. Say how many, or leave it out"
        o.require(min(o[flag] for flag in _POOL) > 0, why, _HAS_POOL, *_POOL)
        pool = o[_POOL[0]] * o[_POOL[1]]
        cards = o.cards or max(o[_CARDS[0]], o[_POOL[0]])
        nodes = max(nodes, -(-(cards_of(o) + pool) // cards))
    return {
        "ranks": Sourced(cards_of(o), note=o.launch.started_by) if launched else ranks,
        "reward_ranks": o.trace_if(pool, pool, *_POOL, _HAS_POOL),
        "nodes": o.trace_if(nodes > 1, nodes, _CARDS[1], *(_POOL if pool else ())),
        "sequence_parallel": rules.sequence_parallel(o, cards_of(o), _ulysses(o)),
        "address": rules.ray_head(o, nodes),
        "/ulysses": _other_ulysses(o),
    }


def _ulysses(o: Options) -> str:
    """Return the setting that says how many ranks share the actor's sequences."""
    return _ULYSSES if o.command == "sft" else f"{_ACTOR}.{_ULYSSES}"


def _other_ulysses(o: Options) -> Keys | None:
    """Return remarks on roles whose sequences are divided otherwise than the actor's."""
    own, others = rules.shards_of(o, _ulysses(o)), (f"{_REF}.{_ULYSSES}", f"critic.{_ULYSSES}")
    differs = [id for id in o.given(*others) if (o[id] or 1) != own]
    why = f"all roles on the same cards share packs by {own}, as the actor does: the same numbers"
    return o.leave_out(why, *differs)


def actor(o: Options) -> Keys:
    """Return the settings of the model that learns."""
    sections = _OF_SFT if o.command == "sft" else _OF_ACTOR
    flag = f"{sections[0]}.path"
    why = "give the model to train, a directory or a name on the hub"
    o.require(o.given(flag) and o[flag], why, flag)
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
    is_adam = str(o[name]).lower() in ("adamw", "adam", "fusedadam")
    o.require(is_adam, "not supported: weights are trained by AdamW", name)
    full, computes_half = str(o[dtype]) in rules.HALF, str(o[dtype]) in rules.HALF_16
    masters = "" if full else "the optimizer keeps fp32 masters"
    gathered = f"{engine}.reshard_after_forward"
    policy, states = f"{engine}.offload_policy", f"{engine}.optimizer_offload"
    stage, weights = 3 if o[gathered] else 2, f"{engine}.param_offload"
    note = "FSDP divides weights, gradients and states" if stage == 3 else "weights stay gathered"
    note_offload = "" if o[policy] else "there they come to the cards for the step"
    offload = o.trace_if(o[policy] or o[states], "cpu", policy, states, note=note_offload)
    why = "verl then keeps Adam's states in bfloat16, too, without fp32 masters; here both are in "
    slow = "cluster.rank_sleep: all moves all weights to host memory while engines sample"
    return {
        "model.path": path,
        "model.mlp_tile": _mlp_tile(o, f"{model}.tiled_mlp"),
        "model.dtype": o.trace_if(not computes_half, "bfloat16", dtype, note=masters),
        "adapter": {} if o[f"{model}.lora_rank"] else None,
        "optimizer": _schedule(o, optim),
        "zero.stage": o.trace(stage, gathered, note=note),
        "zero.optimizer_offload": offload,
        "zero.parameter_offload": o.trace_if(o[policy] and stage == 3, "cpu", policy),
        "zero.state_dtype": rules.to_check(f"{why}float32") if full else None,
        "half": rules.leave_out_halves(o, dtype),
        "offload": o.leave_out(slow, weights, when=o[weights] and not (o[policy] and o[gathered])),
    }


def _mlp_tile(o: Options, section: str) -> Value:
    enabled, number = rules.ids_of(section, "enabled num_shards")
    tokens = _micro_batch(o).value
    assert isinstance(tokens, int)
    tile = -(-tokens // o[number])
    return o.trace_if(o[enabled], tile, enabled, number, note="of a micro-batch's tokens")


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
    if o[name] == "hf":
        most = o.take(f"{_ROLLOUT}.max_num_seqs")
        here = Sourced("shared", note="it samples on the ranks' cards")
        return {"vllm": None, "transformers.max_sequences": most, "placement": here}
    cards, across = cards_of(o), o[width] * (o[f"{_ROLLOUT}.pipeline_model_parallel_size"] or 1)
    why = f"an engine needs {across} cards, and there are {cards}"
    o.require(across <= cards, why, width, *_CARDS)
    left = f"{across} cards each: {cards % across} are left" if cards % across else ""
    note = f"{cards} cards / {across}"
    computes = "float32" if str(o[dtype]) in rules.FULL else "bfloat16"
    return {
        "engines": o.trace(cards // across, width, note=note, check=left),
        "placement": Sourced("shared", note="verl's engines share the ranks' cards"),
        "dtype": o.trace_if(str(o[dtype]) not in rules.HALF_16, computes, dtype),
        "half": rules.leave_out_halves(o, dtype),
    }


def files(o: Options, flag: str) -> list[str]:
    """Return the file paths in a setting, with `~` expanded; empty if it is not set."""
    return [os.path.expanduser(path) for path in o[flag] or ()]


def data(o: Options) -> Keys:
    """Return the settings of all data sets: training and held-out rows, lengths and template."""
    o.require_given("data.train_files", "the rows to learn from")
    paths = files(o, "data.train_files")
    limit = o.take("data.train_max_samples", positive)
    columns = _columns(o)
    tools = o.take_if(not o.rl and o.given("data.tools_key"), "data.tools_key")
    if tools is not None:
        columns["tools"] = tools
    if "prompt" in columns:
        why = "the tokenizer's chat template is put around them, as there"
        columns["prompt"] = rules.with_check(columns["prompt"], why)
    rows = [{"path": o.trace(p, "data.train_files"), **columns, "limit": limit} for p in paths]
    template = "actor_rollout_ref.model" if o.rl else "model"
    flag, skips = "data.truncation", "data.filter_overlong_prompts"
    note = "" if o[flag] in ("error", "right") else "there another part is cut off"
    over_long = o.trace("refuse" if o[flag] == "error" else "truncate", flag, note=note)
    return {
        "train": rules.mixture_of(paths, rows),
        "eval": _held_out(o),
        "over_long": None if o[skips] else over_long,
        "on_bad_row": o.trace_if(o[skips], "skip", skips),
        "chat_template": o.take(f"{template}.custom_chat_template"),
    }


def _column(o: Options, name: str, *flags: str) -> Sourced:
    given = o.given(*flags)
    return o.trace(name, *given, note="" if given else "verl's name")


def _columns(o: Options) -> dict[str, Sourced]:
    """Return the columns of a data set by their purpose."""
    if o.rl:
        columns = {"messages": _column(o, str(o["data.prompt_key"]), "data.prompt_key")}
        if not o["reward.reward_model.enable"]:
            columns["reference"] = _column(o, _ANSWER)
            columns["source"] = _column(o, str(o["data.reward_fn_key"]), "data.reward_fn_key")
        return columns
    keys = {"prompt": "data.prompt_key", "response": "data.response_key"}
    turns = o["data.multiturn.enable"] or o.given("data.messages_key")
    if turns or any(o[key] is None for key in keys.values()):
        whole = ("data.messages_key", "data.multiturn.enable")
        return {"messages": _column(o, str(o["data.messages_key"]), *whole)}
    inner = {"prompt": "data.prompt_dict_keys", "response": "data.response_dict_keys"}
    return {
        name: _column(o, ".".join([o[key], *(o[inner[name]] or ())]), key, inner[name])
        for name, key in keys.items()
    }


def _evaluates(o: Options) -> bool:
    return _steps(o, "trainer.test_freq") is not None and bool(o["data.val_files"])


def _held_out(o: Options) -> Keys | None:
    flag = "data.val_files"
    if not _evaluates(o):
        why = "trainer.test_freq asks for no evaluation: for one, set data.eval and run.eval_every"
        unasked = _steps(o, "trainer.test_freq") is None
        return o.leave_out(why, flag, when=unasked, kind="idle")
    paths, why = files(o, flag), "jobs that learn from rows have one held-out file; the first"
    rest = o.leave_out(why, flag, when=not o.rl and len(paths) > 1)
    paths = paths[: None if o.rl else 1]
    rows = {
        **_columns(o),
        "limit": o.take("data.val_max_samples", positive),
        "responses": o.take("actor_rollout_ref.rollout.val_kwargs.n"),
    }
    sets = [{**rows, "path": o.trace(path, flag)} for path in paths]
    return {**rules.one_or_named(paths, sets), "/left_out": rest}


def eval_sampling(o: Options) -> Keys | None:
    """Return how responses to held-out prompts are sampled; None without evaluation.

    The default is greedy decoding (temperature 0).
    """
    if not _evaluates(o):
        return None
    section = "actor_rollout_ref.rollout.val_kwargs"
    sample, temperature = rules.ids_of(section, "do_sample temperature")
    value = o[temperature] if o[sample] or o.given(temperature) else 0.0
    greedy: Keys = {} if value > 0 else {"top_p": None, "top_k": None}
    return {"temperature": o.trace(value, temperature, sample), **greedy}


def batch(o: Options) -> Keys:
    """Return the batch sizes of a step, without the responses to a prompt."""
    return {
        "prompts" if o.rl else "sequences": o.take("data.train_batch_size"),
        "micro_batch_tokens": _micro_batch(o),
        "dynamic_sampling": _dynamic_sampling(o),
    }


def mini_batches(o: Options, size: str) -> Value:
    """Return the number of optimizer steps per RL step; None if the setting `size` is not set."""
    if o[size] is None:
        return None
    prompts = "data.train_batch_size"
    steps = rules.equal_parts(o, size, o[prompts], "prompts", prompts)
    return o.trace(steps, *((prompts,) if size.startswith(_ACTOR) else ()), size)


def _micro_batch(o: Options) -> Sourced:
    bounds: tuple[str, ...] = (PROMPT, RESPONSE)
    names = "use_dynamic_bsz ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu"
    dynamic, tokens, size = rules.ids_of(_ACTOR, names)
    if not o.rl:
        bounds = ("data.max_length",)
        dynamic, tokens, size = rules.ids_of("data", names.replace("ppo_", ""))
    longest, ranks = sum(o[bound] for bound in bounds), rules.shards_of(o, _ulysses(o))
    if o[dynamic]:
        return rules.token_budget(o, tokens, dynamic, longest, *bounds, shards=ranks)
    of_all, cards = size.removesuffix("_per_gpu"), cards_of(o)
    if o[of_all] and not o.given(size):  # an older setting, which counts those of all cards
        streams = max(1, cards // ranks)
        number = max(1, o[of_all] // streams)
        note = f"{o[of_all]} sequences of all {cards} cards: {number} sequences of the longest on "
        check = f"{o[of_all]} sequences do not divide among {cards} cards"
        check = check if o[of_all] % streams else ""
        own = -(-number * longest // ranks)
        return o.trace(own, of_all, *bounds, note=f"{note}each", check=check)
    why = "" if o[size] else f"{o.names[size]} says how many sequences: reckoned with 1"
    counted = rules.micro_batch(o, size, o[size] or 1, longest, *bounds, shards=ranks)
    return rules.with_check(counted, why)


def _dynamic_sampling(o: Options) -> Keys | None:
    enable, metric, most = rules.ids_of(_GROUPS, "enable metric max_num_gen_batches")
    if not o[enable]:
        return None
    flags = ("data.gen_batch_size", "data.train_batch_size")
    generated, prompts = (o[flag] for flag in flags)
    more = generated is not None and generated > prompts
    modelled = o["reward.reward_model.enable"]
    has_score = o["reward.custom_reward_function.path"] is not None or not modelled
    penalised = o["reward.reward_kwargs.overlong_buffer_cfg.enable"]
    apart = has_score and penalised and o[metric] in ("acc", "score")
    other = "groups are looked at by their rewards"
    limit = float(o[most]) if (o[most] or 0) > 0 else 4.0
    return {
        "max_drawn": o.trace(limit, enable, most),
        "by": o.trace_if(apart, "score", metric, note="without the penalty"),
        "oversampling": o.trace(generated / prompts, *flags) if more else None,
        "metric": o.leave_out(other, metric, when=o[metric] not in _METRICS),
    }


def _steps(o: Options, flag: str) -> int | None:
    """Return an interval in steps from a setting; None for -1 or `after_each_epoch`."""
    if str(o[flag]) == "after_each_epoch":
        return None
    try:
        number = int(o[flag] if o[flag] is not None else -1)
    except ValueError as error:
        raise ConfigError(f"{o.show(flag)}: It must be a whole number of steps.") from error
    return number if number > 0 else None


def run(o: Options) -> Keys:
    """Return the length of the run, and its checkpoints and logs."""
    project, name = "trainer.project_name", "trainer.experiment_name"
    path = o.trace(f"checkpoints/{o[project]}/{o[name]}", project, name)
    save, kept = "trainer.save_freq", "trainer.max_actor_ckpt_to_keep"
    number = _steps(o, save)
    saves = o.trace_if(number is not None, number, save)
    if str(o[save]) == "after_each_epoch":
        why = f"{o.show(save)}: in how many steps an epoch ends, the rows say"
        saves = rules.to_check(why)
    resume = "never" if o["trainer.resume_mode"] == "disable" else AUTO
    unbounded = o["trainer.total_training_steps"] is None
    return {
        "directory": o.take("trainer.default_local_dir") or path,
        "epochs": o.take_if(unbounded, "trainer.total_epochs", float),
        "save_every": saves,
        "keep_checkpoints": o.take(kept, positive, note="the last ones"),
        "resume": o.trace(resume, "trainer.resume_mode"),
        "eval_every": o.take_if(_evaluates(o), "trainer.test_freq", int),
        **rules.loggers_of(o, [*map(str, o["trainer.logger"] or ())], "trainer.logger", project),
    }
