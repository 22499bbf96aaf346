"""Convert the sections of machines, roles, engines, data, batches and the run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from plimsoll.errors import ConfigError
from plimsoll_convert import rules
from plimsoll_convert.settings import Keys, Options, Sourced, Value, or_none

_CARDS = 8
"""Assumed number of cards per machine, if it is unknown."""
_ACTOR = ("actor_num_nodes", "actor_num_gpus_per_node")
_CRITIC = ("critic_num_nodes", "critic_num_gpus_per_node")
_REWARD = ("reward_num_nodes", "reward_num_gpus_per_node")
_SIZE, _RING = "micro_train_batch_size", "ring_attn_size"
_TURNS = re.compile(r"messages?|conversations?|turns|chat|dialog", re.IGNORECASE)
"""Names of columns that hold lists of turns."""
_LENGTHS = ("prompt_max_len", "generate_max_len", "max_len", "max_new_tokens")


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
        number = cards * nodes
        ranks = Sourced(number, note=note, check=check)
    else:
        number, further = o[_ACTOR[0]] * o[_ACTOR[1]], 0
        ranks = o.trace(number, *_ACTOR)
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
        nodes = max(o[_ACTOR[0]], -(-(number + further) // cards))
    asleep = _shares_cards(o) and o["vllm_num_engines"] and o["vllm_enable_sleep"]
    sleeps = asleep and o["deepspeed_enable_sleep"]
    return {
        "ranks": ranks,
        "critic_ranks": critic_ranks,
        "reward_ranks": reward_ranks,
        "sequence_parallel": rules.sequence_parallel(o, number, _RING),
        "rank_sleep": o.trace_if(sleeps, "states", "deepspeed_enable_sleep"),
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
        engine = o.trace({}, "vllm_num_engines", note="no vLLM")
        here = Sourced("shared", note="it samples on the ranks' cards")
        return {"vllm": None, "transformers": engine, "placement": here}
    if _shares_cards(o):
        return {"placement": o.trace("shared", "colocate_all_models")}
    apart = Sourced("own", note="engines have cards of their own")
    return {"vllm.sleep_level": None, "placement": apart}


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
    o.require(o[flag] in (None, *known), f"known are {', '.join(known)}", flag)
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
    scored = o["reward_pretrain"] and not (o["remote_rm_url"] or o["agent_func_path"])
    flag, note = "reward_pretrain" if scored else "pretrain", "critic_pretrain's default"
    first = o[flag].split(",")[0] if scored else o[flag]
    path = o.take("critic_pretrain") or o.trace(first, flag, note=note)
    return {"model.path": path, **trained_role(o, "critic")}


def reference(o: Options) -> Keys | None:
    """Return the reference model, or None if the config needs no section for it.

    The config needs none if there is no reference, or if the reference is the actor's first
    weights, without ZeRO 3, offload or quantization, or the actor without its adapter.
    """
    flag = "ref_pretrain" if o["ref_pretrain"] else "pretrain"
    offload = o.first("ref_offload", "ref_reward_offload")
    is_compared = o["init_kl_coef"] if o.rl else o.command in ("dpo", "kto")
    is_divided = o["zero_stage"] == 3 or o[offload] or o["load_in_4bit"]
    is_other = o[flag] != o["pretrain"] or (is_divided and not o["lora_rank"])
    return frozen_role(o, o.take(flag), offload) if is_compared and is_other else None


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
    o.require_given("teacher_model", "the model to distil from")
    role = frozen_role(o, o.take("teacher_model"), "teacher_offload")
    return {**role, "model.quantization": None}


def rollout_lengths(o: Options) -> tuple[int, int]:
    """Return (longest prompt, longest response) in tokens."""
    if o["prompt_max_len"] is not None:
        return o["prompt_max_len"], o["generate_max_len"]
    total, response = o["max_len"], o["max_new_tokens"]
    if response is None:
        return total // 2, total - total // 2
    why = f"no room is left for a prompt. Give a larger {o.names['max_len']}"
    o.require(response < total, why, "max_new_tokens", "max_len")
    return total - response, response


def response_length(o: Options) -> Sourced:
    """Return the longest response, in tokens."""
    response = rollout_lengths(o)[1]
    for flag in ("generate_max_len", "max_new_tokens"):
        if o[flag] is not None:
            return o.trace(response, flag)
    why = "max_len is of prompt and response together; here each gets half: shift them as needed"
    return o.trace(response, "max_len", "max_new_tokens", check=why)


def batch(o: Options) -> Keys:
    """Return the batch sizes of a step, without those of sampling."""
    longest = sum(rollout_lengths(o)) if o.rl else int(o["max_len"])
    longest *= 2 if o.pairs else 1
    ring = rules.shards_of(o, _RING)
    if o["use_dynamic_batch"]:
        budget = ("train_max_tokens_per_gpu", "use_dynamic_batch")
        tokens = rules.token_budget(o, *budget, longest, shards=ring)
    else:
        number = o[_SIZE]
        tokens = rules.micro_batch(o, _SIZE, number, longest, *_LENGTHS, shards=ring)
    flags = ("dynamic_filtering", "dynamic_filtering_reward_range")
    filters, (low, high) = o[flags[0]], o[flags[1]] or (None, None)
    apart = o["overlong_buffer_len"] is not None and (o["remote_rm_url"] or "").endswith(".py")
    note = "the function's score, without the penalty"
    return {
        "sequences": o.take_if(not (o.rl or o.pairs), "train_batch_size"),
        "pairs": o.take_if(o.pairs, "train_batch_size"),
        "micro_batch_tokens": tokens,
        "dynamic_sampling.low": o.trace_if(filters, low, *flags),
        "dynamic_sampling.high": o.trace_if(filters, high, *flags),
        "dynamic_sampling.by": o.trace_if(filters and apart, "reward_func", *flags, note=note),
    }


def mini_batches(o: Options) -> Value:
    """Return the number of optimizer steps of an RL step."""
    said_by = ("rollout_batch_size", "n_samples_per_prompt")
    sampled = o[said_by[0]] * o[said_by[1]]
    steps = rules.equal_parts(o, "train_batch_size", sampled, "responses", *said_by)
    return o.trace(steps, "train_batch_size", *said_by)


def _sources(text: str | None) -> list[tuple[str, str]]:
    """Return the data sets that a text such as `path@folder,...` names: (path, folder or "")."""
    sources = []
    for part in (text or "").split(","):
        path, at, folder = (piece.strip() for piece in part.partition("@"))
        if at and path.startswith(("/", ".", "~")):
            sources.append((f"{path.rstrip('/')}/{folder}", ""))
        elif path:
            sources.append((path, folder))
    return sources


def data(o: Options) -> Keys:
    """Return the settings of all data sets: training and held-out rows, lengths and template."""
    flag = o.first("prompt_data", "dataset")
    sources = _sources(o[flag])
    if not sources:
        raise ConfigError(f"{o.names[flag]} is needed: the rows to learn from.")
    split, shares = o.first("prompt_split", "dataset_split"), _weights(o, len(sources))
    limited = o["max_samples"] < 10**8 or o.given("max_samples")
    rows = [
        {
            **_rows(o, source, flag),
            "split": o.take(split, or_none),
            "limit": o.take_if(limited, "max_samples", int),
            "weight": weight,
        }
        for source, weight in zip(sources, shares, strict=True)
    ]
    longest = o.take("prompt_max_len" if o.rl else "max_len")
    if longest is None:
        note = "max_len less the longest response"
        longest = o.trace(rollout_lengths(o)[0], "max_len", "max_new_tokens", note=note)
    return {
        "train": rules.mixture_of([path for path, _ in sources], rows),
        "eval": _held_out(o),
        "max_tokens": longest,
        "over_long": Sourced("truncate", note="OpenRLHF cuts what is longer"),
        "chat_template": _template(o),
    }


def _rows(o: Options, source: tuple[str, str], flag: str) -> Keys:
    """Return a data set with its columns. `flag` is the id of the flag that names it."""
    (path, folder), why = source, ""
    if path.endswith((".csv", ".arrow", ".py")):
        why = "rows are read from JSON lines, JSON and Parquet: convert the file"
    if o["use_ms"]:
        why = "ModelScope is not asked: download models and data, and give their paths"
    check = f"{folder} is a folder of the data set there, its configuration here"
    return {
        "path": o.trace(path, flag, check=why),
        "name": o.trace(folder, flag, check=check) if folder else None,
        **_columns(o),
    }


def _weights(o: Options, sources: int) -> list[Value]:
    flag = o.first("prompt_data_probs", "dataset_probs")
    if o[flag] is None or sources == 1:
        return [None] * sources
    texts = o[flag].split(",")
    o.require(len(texts) == sources, f"{sources} numbers are needed, one a source", flag)
    try:
        return [o.trace(float(text), flag) for text in texts]
    except ValueError as error:
        raise ConfigError(f"{o.show(flag)}: {error}.") from error


def _columns(o: Options) -> Mapping[str, Value]:
    """Return the columns of a data set by their purpose."""
    key = "input_key"
    if o.rl:
        turns = o["apply_chat_template"] and _TURNS.search(o[key])
        check = "if the column holds text, write prompt" if turns else ""
        prompts = o.trace(o[key], key, check=check)
        return {
            "messages" if turns else "prompt": prompts,
            "reference": o.take("label_key", or_none),
        }
    if o.pairs:
        note = "the column has this name"
        return {
            "prompt": o.take("prompt_key", or_none),
            "chosen": o.take("chosen_key"),
            "rejected": o.take("rejected_key"),
            "margin": o.trace_if(o["margin_loss"], "margin", "margin_loss", note=note),
        }
    if o["pretrain_mode"]:
        return {"text": o.take(key)}
    labels, answers = o.take("label_key"), o["output_key"]
    if answers and not o["multiturn"]:
        return {"prompt": o.take(key), "response": o.take("output_key"), "label": labels}
    if answers is None and not o["apply_chat_template"]:
        ids = ("output_key", "apply_chat_template", "pretrain_mode")
        names = " or ".join(o.names[id] for id in ids if id in o.names)
        raise ConfigError(f"There is nothing to learn: no response. Give {names}.")
    why = ""
    if o.command != "kto" and not o["multiturn"] and answers is None:
        why = "every turn of the assistant's is learned; OpenRLHF learns the last one without "
        why += o.names.get("multiturn", "--multiturn")
    return {"messages": o.trace(o[key], key, check=why), "label": labels}


def _template(o: Options) -> Value:
    """Return the chat template: Jinja text, a path or "none"; None for the tokenizer's template."""
    if o["pretrain_mode"]:
        return None
    if o["apply_chat_template"]:
        return o.take("tokenizer_chat_template", or_none)
    text = o["input_template"]
    if text and "{}" in text and (not o.pairs or o["prompt_key"]):
        note = "as Jinja; the end-of-sequence token comes at once, there after a space"
        return o.trace(as_jinja(text), "input_template", note=note)
    return o.trace("none", "apply_chat_template", note="not given: plain text")


def as_jinja(text: str) -> str:
    """Return a Jinja chat template that puts each user message in the place of `{}` in a text."""
    before, _, after = (part.replace("{{", "{").replace("}}", "}") for part in text.partition("{}"))
    quoted = (json.dumps(part, ensure_ascii=False) for part in (before, after))
    user = " ~ m.content ~ ".join(quoted)
    return (
        f'{{% for m in messages %}}{{% if m.role == "user" %}}{{{{ {user} }}}}'
        "{% else %}{{ m.content ~ eos_token }}{% endif %}{% endfor %}"
    )


def _evaluates(o: Options) -> bool:
    return bool(_sources(o["eval_dataset"])) and not (o.rl and o["eval_steps"] <= 0)


def _held_out(o: Options) -> Keys | None:
    if not _evaluates(o):
        return None
    kept = _sources(o["eval_dataset"])[: None if o.rl else 1]
    rows = [
        {
            **_rows(o, source, "eval_dataset"),
            "split": o.take("eval_split"),
            "responses": o.take("eval_n_samples_per_prompt"),
        }
        for source in kept
    ]
    return rules.one_or_named([path for path, _ in kept], rows)


def eval_sampling(o: Options) -> Keys | None:
    """Return how responses to held-out prompts are sampled; None without evaluation."""
    if not _evaluates(o):
        return None
    flag = o.first("generate_max_len", "max_new_tokens")
    return {
        "max_new_tokens": o.trace(rollout_lengths(o)[1], flag),
        "top_p": o.take_if(o["top_p"] < 1, "top_p"),
    }


def run(o: Options) -> Keys:
    """Return the length of the run, and its evaluation and logs."""
    metric, evaluates = "best_metric_key", _evaluates(o)
    best = o[metric] not in (None, "none") and evaluates
    eval_every = o.take_if(evaluates, "eval_steps")
    if evaluates and o["eval_steps"] <= 0 and o.given("max_samples"):
        steps = max(1, o["max_samples"] // o["train_batch_size"])
        note = "after each epoch, if there are as many rows"
        eval_every = o.trace(steps, "eval_steps", "max_samples", note=note)
    elif evaluates and o["eval_steps"] <= 0:
        eval_every = rules.to_check("it is after each epoch there: in how many steps, rows say")
    note = "the mean reward, which pass1 is there"
    loggers, key = ("wandb",) if o["use_wandb"] else (), "the key belongs in WANDB_API_KEY"
    return {
        "epochs": o.take("num_episodes" if o.rl else "max_epochs", float),
        "keep_checkpoints": o.take("max_ckpt_num", note="the last ones"),
        "eval_every": eval_every,
        "best.metric": o.trace_if(best, "eval/reward", metric, note=note),
        "best.goal": o.trace_if(best, "highest", metric),
        "best.final_model": o.trace_if(best, "last", metric),
        **rules.loggers_of(o, loggers, "use_wandb", "wandb_project", key),
    }
