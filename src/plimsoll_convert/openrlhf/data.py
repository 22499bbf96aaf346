"""Convert the settings of data sets, columns, lengths, batch sizes and evaluation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plimsoll.config.base import AUTO
from plimsoll.errors import ConfigError
from plimsoll_convert import mapping
from plimsoll_convert.options import Options
from plimsoll_convert.values import Keys, Sourced, Value, positive

_TURNS = re.compile(r"messages?|conversations?|turns|chat|dialog", re.IGNORECASE)
"""Names of columns that hold lists of turns."""
_UNREAD = (".csv", ".arrow", ".py")
_LENGTHS = ("prompt_max_len", "generate_max_len", "max_len", "max_new_tokens")


def rollout_lengths(o: Options) -> tuple[int, int]:
    """Return (longest prompt, longest response) in tokens."""
    if o["prompt_max_len"] is not None:
        return o["prompt_max_len"], o["generate_max_len"]
    total, response = o["max_len"], o["max_new_tokens"]
    if response is None:
        return total // 2, total - total // 2
    if response >= total:
        raise ConfigError(
            f"{o.show('max_new_tokens')} leaves no room for a prompt in {o.show('max_len')}, "
            f"which is of both together. Give a larger {o.names['max_len']}."
        )
    return total - response, response


def response_length(o: Options) -> Sourced:
    """Return the longest response, in tokens."""
    response = rollout_lengths(o)[1]
    if o["prompt_max_len"] is not None:
        return o.trace(response, "generate_max_len")
    if o["max_new_tokens"] is not None:
        return o.trace(response, "max_new_tokens")
    why = "max_len is of prompt and response together; here each has a limit of its own, half of "
    why += "it: shift them where prompts are short"
    return o.trace(response, "max_len", "max_new_tokens", check=why)


def _longest(o: Options) -> Sourced:
    """Return the longest prompt in RL, else the longest sequence, in tokens."""
    if not o.rl:
        return o.trace(o["max_len"], "max_len")
    prompt = rollout_lengths(o)[0]
    if o["prompt_max_len"] is not None:
        return o.trace(prompt, "prompt_max_len")
    return o.trace(prompt, "max_len", "max_new_tokens", note="max_len less the longest response")


def batch(o: Options) -> Keys:
    """Return the batch sizes of a step."""
    longest = sum(rollout_lengths(o)) if o.rl else int(o["max_len"])
    longest *= 2 if o.pairs else 1
    if o["use_dynamic_batch"]:
        tokens = mapping.token_budget(o, "train_max_tokens_per_gpu", "use_dynamic_batch", longest)
    else:
        number = o["micro_train_batch_size"]
        tokens = mapping.micro_batch(o, "micro_train_batch_size", number, longest, *_LENGTHS)
    size = o.take("train_batch_size")
    return {
        "sequences": None if o.rl or o.pairs else size,
        "pairs": size if o.pairs else None,
        "prompts": o.take("rollout_batch_size"),
        "responses": o.take("n_samples_per_prompt"),
        "micro_batch_tokens": tokens,
        "dynamic_sampling": _dynamic_sampling(o),
    }


def mini_batches(o: Options) -> Value:
    """Return the number of optimizer steps per RL step; None for other jobs."""
    if not o.rl:
        return None
    said_by = ("rollout_batch_size", "n_samples_per_prompt")
    sampled = o[said_by[0]] * o[said_by[1]]
    steps = mapping.equal_parts(o, "train_batch_size", sampled, "responses", *said_by)
    return o.trace(steps, "train_batch_size", *said_by)


def _dynamic_sampling(o: Options) -> Keys | None:
    if not o["dynamic_filtering"]:
        return None
    flags = ("dynamic_filtering", "dynamic_filtering_reward_range")
    low, high = o[flags[1]]
    apart = o["overlong_buffer_len"] is not None and (o["remote_rm_url"] or "").endswith(".py")
    note = "the function's score, without the penalty"
    return {
        "low": o.trace(low, *flags),
        "high": o.trace(high, *flags),
        "by": o.trace("reward_func", *flags, note=note) if apart else None,
    }


@dataclass(frozen=True)
class _Source:
    """A data set: its path or hub name, and a folder within a data set on the hub."""

    path: str
    folder: str | None = None


def _sources(text: str) -> list[_Source]:
    """Return the data sets that a text such as `path@folder,...` names."""
    sources = []
    for part in text.split(","):
        path, at, folder = (piece.strip() for piece in part.partition("@"))
        if at and path.startswith(("/", ".", "~")):
            sources.append(_Source(f"{path.rstrip('/')}/{folder}"))
        elif path:
            sources.append(_Source(path, folder or None))
    return sources


def data(o: Options) -> Keys:
    """Return the settings of all data sets: training and held-out rows, lengths and template."""
    flag = o.first("prompt_data", "dataset")
    sources = _sources(o[flag] or "")
    if not sources:
        raise ConfigError(f"{o.names[flag]} is needed: the rows to learn from.")
    split = o.first("prompt_split", "dataset_split")
    weights = _weights(o, len(sources))
    limited = o["max_samples"] < 10**8 or o.given("max_samples")
    rows = [
        {
            **_rows(o, source, flag),
            "split": o.take(split, lambda name: name or None),
            "limit": o.take("max_samples", int) if limited else None,
            "weight": weight,
        }
        for source, weight in zip(sources, weights, strict=True)
    ]
    names = mapping.source_names(source.path for source in sources)
    return {
        "train": mapping.mixture_of(names, rows, weighted=weights[0] is not None),
        "eval": _held_out(o),
        "max_tokens": _longest(o),
        "over_long": Sourced("truncate", note="OpenRLHF cuts what is longer"),
        "chat_template": _template(o),
    }


def _rows(o: Options, source: _Source, flag: str) -> Keys:
    """Return a data set with its columns. `flag` is the id of the flag that names it."""
    why = ""
    if source.path.endswith(_UNREAD):
        why = "rows are read from JSON lines, JSON and Parquet: convert the file"
    if o["use_ms"]:
        why = "ModelScope is not asked: download models and data, and give their paths"
    folder = f"{source.folder} is a folder of the data set there, its configuration here"
    return {
        "path": o.trace(source.path, flag, check=why),
        "name": None if source.folder is None else o.trace(source.folder, flag, check=folder),
        **_columns(o),
    }


def _weights(o: Options, sources: int) -> Sequence[Value]:
    flag = o.first("prompt_data_probs", "dataset_probs")
    if o[flag] is None or sources == 1:
        return [None] * sources
    texts = o[flag].split(",")
    if len(texts) != sources:
        raise ConfigError(f"{o.show(flag)} has {len(texts)} numbers for {sources} sources.")
    try:
        return [o.trace(float(text), flag) for text in texts]
    except ValueError as error:
        raise ConfigError(f"{o.show(flag)}: a weight is no number: {error}.") from error


def _columns(o: Options) -> Mapping[str, Value]:
    """Return the columns of a data set by their purpose."""
    if o.rl:
        turns = bool(o["apply_chat_template"] and _TURNS.search(o["input_key"]))
        prompts = o.trace(o["input_key"], "input_key")
        if turns:
            prompts = mapping.with_check(prompts, "if the column holds text, write prompt")
        labels = o.take("label_key", lambda name: name or None)
        return {"messages" if turns else "prompt": prompts, "reference": labels}
    if o.pairs:
        margin = o.trace("margin", "margin_loss", note="the column has this name")
        return {
            "prompt": o.take("prompt_key", lambda name: name or None),
            "chosen": o.take("chosen_key"),
            "rejected": o.take("rejected_key"),
            "margin": margin if o["margin_loss"] else None,
        }
    if o["pretrain_mode"]:
        return {"text": o.take("input_key")}
    return {**_answer_columns(o), "label": o.take("label_key")}


def _answer_columns(o: Options) -> Mapping[str, Value]:
    if o["output_key"] and not o["multiturn"]:
        return {"prompt": o.take("input_key"), "response": o.take("output_key")}
    if o["output_key"] is None and not o["apply_chat_template"]:
        ids = ("output_key", "apply_chat_template", "pretrain_mode")
        names = " or ".join(o.names[id] for id in ids if id in o.names)
        raise ConfigError(f"There is nothing to learn: no response. Give {names}.")
    why = ""
    if o.command != "kto" and not o["multiturn"] and o["output_key"] is None:
        why = "every turn of the assistant's is learned; OpenRLHF learns the last one without "
        why += o.names.get("multiturn", "--multiturn")
    return {"messages": o.trace(o["input_key"], "input_key", check=why)}


def _template(o: Options) -> Value:
    """Return the chat template: Jinja text, a path or "none"; None for the tokenizer's template."""
    if o["pretrain_mode"]:
        return None
    if o["apply_chat_template"]:
        return o.take("tokenizer_chat_template", lambda path: path or None)
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
    return bool(_sources(o["eval_dataset"] or "")) and not (o.rl and o["eval_steps"] <= 0)


def _held_out(o: Options) -> Keys | Mapping[str, Keys] | None:
    if not _evaluates(o):
        return None
    sources = _sources(o["eval_dataset"])
    kept = sources if o.rl else sources[:1]
    rows = [
        {
            **_rows(o, source, "eval_dataset"),
            "split": o.take("eval_split"),
            "responses": o.take("eval_n_samples_per_prompt"),
        }
        for source in kept
    ]
    names = mapping.source_names(source.path for source in kept)
    return mapping.one_or_named(names, rows)


def eval_sampling(o: Options) -> Keys | None:
    """Return how responses to held-out prompts are sampled; None without evaluation."""
    if not _evaluates(o):
        return None
    flag = o.first("generate_max_len", "max_new_tokens")
    return {
        "temperature": o.take("eval_temperature"),
        "max_new_tokens": o.trace(rollout_lengths(o)[1], flag),
        "top_p": o.trace(o["top_p"], "top_p") if o["top_p"] < 1 else None,
    }


def run(o: Options) -> Keys:
    """Return the length of the run, and its checkpoints and logs."""
    logs = bool(o["use_wandb"])
    best = o["best_metric_key"] not in (None, "none") and _evaluates(o)
    note = "the mean reward, which pass1 is there"
    epochs = "num_episodes" if o.rl else "max_epochs"
    return {
        "directory": o.take("save_path"),
        "seed": o.take("seed"),
        "epochs": o.take(epochs, float),
        "save_every": o.take("save_steps", positive),
        "keep_checkpoints": o.take("max_ckpt_num", note="the last ones"),
        "resume": o.take("load_checkpoint", lambda on: AUTO if on else None),
        "eval_every": _eval_every(o),
        "best": {
            "metric": o.trace("eval/reward", "best_metric_key", note=note),
            "goal": o.trace("highest", "best_metric_key"),
            "final_model": o.trace("last", "best_metric_key"),
        }
        if best
        else None,
        "loggers": o.trace(("wandb",), "use_wandb", note="the key belongs in WANDB_API_KEY")
        if logs
        else None,
        "logger_project": o.take("wandb_project") if logs else None,
    }


def _eval_every(o: Options) -> Value:
    if not _evaluates(o):
        return None
    if o["eval_steps"] > 0:
        return o.take("eval_steps")
    if o.given("max_samples"):
        steps = max(1, o["max_samples"] // o["train_batch_size"])
        note = "after each epoch, if there are as many rows"
        return o.trace(steps, "eval_steps", "max_samples", note=note)
    return mapping.to_check(
        "it is evaluated after each epoch there; in how many steps, the rows say"
    )
