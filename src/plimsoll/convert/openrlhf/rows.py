"""Where rows come from, which columns are read, and what is put around them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plimsoll.config.data import COLUMNS, EvalSource, WeightedSource
from plimsoll.convert.openrlhf.batches import rollout_lengths
from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.errors import ConfigError

_TURNS = re.compile(r"messages?|conversations?|turns|chat|dialog", re.IGNORECASE)
"""In names of columns that hold lists of turns."""
_UNREAD = (".csv", ".arrow", ".py")
_KEYS = {*COLUMNS, *WeightedSource.model_fields, *EvalSource.model_fields}


@dataclass(frozen=True)
class _Source:
    """path: of a file or a folder, or a name on the hub. name: of a folder of a data set there."""

    path: str
    name: str | None = None

    @property
    def short(self) -> str:
        """What it may be called in a mixture."""
        last = self.path.rstrip("/").rpartition("/")[2].partition(".")[0]
        plain = re.sub(r"\W+", "_", last, flags=re.ASCII).strip("_") or "rows"
        return f"{plain}_rows" if plain in _KEYS else plain


def _sources(text: str) -> list[_Source]:
    """Of `path@folder,...`."""
    found = []
    for one in text.split(","):
        path, at, folder = (part.strip() for part in one.partition("@"))
        if not path:
            continue
        if at and path.startswith(("/", ".", "~")):
            found.append(_Source(f"{path.rstrip('/')}/{folder}"))
        else:
            found.append(_Source(path, folder or None))
    return found


def rows(o: Options) -> Iterator[Outcome]:
    """Of `data.train`."""
    flag, probabilities = (
        o.first("prompt_data", "dataset"),
        o.first("prompt_data_probs", "dataset_probs"),
    )
    sources = _sources(o[flag] or "")
    if not sources:
        raise ConfigError(f"{o.names[flag]} is needed: the rows to learn from.")
    keys = _names(sources)
    for source, key in zip(sources, keys, strict=True):
        yield from _source(o, source, key, flag)
        split = o.first("prompt_split", "dataset_split", "train_split")
        if o[split]:
            yield o.entry(f"{key}.split", o[split], split)
        yield from _columns(o, key)
        limit = o["max_samples"]
        if limit < 10**8 or o.given("max_samples"):
            yield o.entry(f"{key}.limit", int(limit), "max_samples")
    yield from _weights(o, keys, probabilities)
    for old in ("train_split", "pretrain_split"):
        if old != o.first("prompt_split", "dataset_split", "train_split"):
            yield from o.idle("another flag says the split", old)


def _names(sources: Sequence[_Source]) -> list[str]:
    if len(sources) == 1:
        return ["data.train"]
    names: list[str] = []
    for source in sources:
        again = sum(name.startswith(source.short) for name in names)
        names.append(f"{source.short}_{again + 1}" if again else source.short)
    return [f"data.train.{name}" for name in names]


def _source(o: Options, source: _Source, key: str, flag: str) -> Iterator[Outcome]:
    yield o.entry(f"{key}.path", source.path, flag)
    if source.name is not None:
        yield o.entry(f"{key}.name", source.name, flag)
        why = f"{source.name} is a folder of the data set there, its configuration here"
        yield Remark("check", f"{key}.name", why)
    if source.path.endswith(_UNREAD):
        why = "rows are read from JSON lines, JSON and Parquet: convert the file"
        yield Remark("check", f"{key}.path", why)
    if o["use_ms"]:
        why = "ModelScope is not asked: download models and data, and give their paths"
        yield Remark("check", f"{key}.path", why)


def _weights(o: Options, keys: Sequence[str], flag: str) -> Iterator[Outcome]:
    given = o[flag]
    if len(keys) == 1:
        yield from o.idle("there is one source", flag)
        return
    if given is None:
        why = "sources are concatenated there; here rows are drawn equally from each: give weights "
        why += "as their numbers of rows are"
        yield Remark("check", "data.train", why)
        return
    weights = [_weight(o, flag, one) for one in given.split(",")]
    if len(weights) != len(keys):
        raise ConfigError(f"{o.shown(flag)} has {len(weights)} numbers for {len(keys)} sources.")
    for key, weight in zip(keys, weights, strict=True):
        yield o.entry(f"{key}.weight", weight, flag)


def _weight(o: Options, flag: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{o.shown(flag)}: {text.strip()!r} is no number.") from error


def _columns(o: Options, key: str) -> Iterator[Outcome]:
    """Which columns hold what."""
    for column, flag in _chosen(o).items():
        yield o.entry(f"{key}.{column}", o[flag], flag)
    if o["margin_loss"]:
        yield o.entry(f"{key}.margin", "margin", "margin_loss", note="the column has this name")


def _chosen(o: Options) -> Mapping[str, str]:
    """The settings of a source, and the flags that name their columns."""
    match o.command:
        case "ppo" | "local":
            found = {"messages" if _of_turns(o, "input_key") else "prompt": "input_key"}
            return found | ({"reference": "label_key"} if o["label_key"] else {})
        case "rm" | "dpo":
            found = {"prompt": "prompt_key"} if o["prompt_key"] else {}
            return found | {"chosen": "chosen_key", "rejected": "rejected_key"}
        case "kto":
            return {**_answered(o), "label": "label_key"}
    return {"text": "input_key"} if o["pretrain_mode"] else _answered(o)


def _answered(o: Options) -> Mapping[str, str]:
    if o["output_key"] and not o["multiturn"]:
        return {"prompt": "input_key", "response": "output_key"}
    return {"messages": "input_key"}


def _of_turns(o: Options, flag: str) -> bool:
    return bool(o["apply_chat_template"] and _TURNS.search(o[flag]))


def columns(o: Options) -> Iterator[Outcome]:
    """What the flags do not say of columns."""
    if o.rl:
        if _of_turns(o, "input_key"):
            why = "if the column holds text, write prompt"
            yield Remark("check", "data.train.messages", why)
    elif o.pairs:
        why = f"{o.shown('margin_loss')} is not given" if "margin_loss" in o.names else ""
        yield from o.idle(why, "margin_key")
    elif o["output_key"] is None and not o["pretrain_mode"]:
        yield from _whole(o)
    if o["multiturn"]:
        yield from o.same("every turn of the assistant's is learned", "multiturn")
        why = "a turn of another column is not joined to the messages: write it into them"
        yield from o.lacking(why, "output_key")
    if o["pretrain_mode"]:
        yield from o.same("a document is learned whole", "pretrain_mode")
        yield from o.idle("a document is learned whole", "output_key", "apply_chat_template")


def _whole(o: Options) -> Iterator[Outcome]:
    if not o["apply_chat_template"]:
        flags = [
            o.names[f]
            for f in ("output_key", "apply_chat_template", "pretrain_mode")
            if f in o.names
        ]
        raise ConfigError(
            f"There is nothing to learn: no response. Give {', '.join(flags[:2])}"
            + (f" or {flags[2]}." if len(flags) > 2 else ".")
        )
    if o.command != "kto" and not o["multiturn"]:
        why = "every turn of the assistant's is learned; OpenRLHF learns the last one without "
        why += f"{o.names.get('multiturn', '--multiturn')}"
        yield Remark("check", "data.train.messages", why)


def template(o: Options) -> Iterator[Outcome]:
    """What is put around prompts and responses."""
    if o["pretrain_mode"]:
        yield from o.idle("documents have no template", "input_template", "tokenizer_chat_template")
        return
    if o["apply_chat_template"]:
        yield from o.same("the tokenizer's chat template is applied", "apply_chat_template")
        yield from o.idle("the chat template is applied instead", "input_template")
        if o["tokenizer_chat_template"]:
            flag = "tokenizer_chat_template"
            yield o.entry("data.chat_template", o[flag], flag)
        return
    yield from o.idle(
        f"{o.names.get('apply_chat_template')} is not given", "tokenizer_chat_template"
    )
    text = o["input_template"]
    named = o.command not in OF_WHOLE_PAIRS or o["prompt_key"]
    if text and "{}" in text and named:
        note = "as Jinja; the end-of-sequence token comes at once, there after a space"
        yield o.entry("data.chat_template", as_jinja(text), "input_template", note=note)
        return
    yield from o.idle("nothing in it stands for a prompt", "input_template")
    yield o.entry("data.chat_template", "none", "apply_chat_template", note="not given: plain text")


OF_WHOLE_PAIRS = ("rm", "dpo")


def as_jinja(text: str) -> str:
    """A chat template that puts a text with `{}` around what the user says."""
    before, _, after = (part.replace("{{", "{").replace("}}", "}") for part in text.partition("{}"))
    user = " ~ ".join([_literal(before), "m.content", _literal(after)])
    return (
        f'{{% for m in messages %}}{{% if m.role == "user" %}}{{{{ {user} }}}}'
        "{% else %}{{ m.content ~ eos_token }}{% endif %}{% endfor %}"
    )


def _literal(text: str) -> str:
    """As Jinja writes text: Python's escapes in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def held_out(o: Options) -> Iterator[Outcome]:
    """Of `data.eval`, and when it is measured."""
    if "eval_dataset" not in o.values:
        yield from _old_held_out(o)
        return
    asked = ("eval_split", "eval_steps", "eval_temperature", "eval_n_samples_per_prompt")
    sources = _sources(o["eval_dataset"] or "")
    if not sources:
        why = "there are no held-out rows: nothing is evaluated"
        yield from o.idle(why, "eval_dataset", *asked, "best_metric_key")
        return
    if o.rl and o["eval_steps"] <= 0:
        why = f"{o.shown('eval_steps')}: nothing is evaluated"
        yield from o.idle(why, "eval_dataset", *asked, "best_metric_key")
        return
    names = [f"data.eval.{k.rpartition('.')[2]}" for k in _names(sources)]
    keys = names if len(sources) > 1 and o.rl else ["data.eval"]
    for source, key in zip(sources, keys, strict=False):
        yield from _source(o, source, key, "eval_dataset")
        yield o.entry(f"{key}.split", o["eval_split"], "eval_split")
        yield from _columns(o, key)
        if o.rl:
            number = o["eval_n_samples_per_prompt"]
            yield o.entry(f"{key}.responses", number, "eval_n_samples_per_prompt")
    if len(sources) > len(keys):
        yield Remark("lacking", "eval_dataset", "jobs that learn from data have one set; the first")
    yield from _evaluated(o)


def _evaluated(o: Options) -> Iterator[Outcome]:
    if o["eval_steps"] > 0:
        yield o.entry("run.eval_every", o["eval_steps"], "eval_steps")
    elif o.given("max_samples"):
        steps = max(1, o["max_samples"] // o["train_batch_size"])
        note = "after each epoch, if there are as many rows"
        yield o.entry("run.eval_every", steps, "eval_steps", "max_samples", note=note)
    else:
        why = "it is evaluated after each epoch there; in how many steps that is, the rows say"
        yield Remark("check", "eval_steps" if o.given("eval_steps") else "run.eval_every", why)
    if not o.rl:
        return
    key = "eval_sampling"
    yield o.entry(f"{key}.temperature", o["eval_temperature"], "eval_temperature")
    response = rollout_lengths(o)[1]
    yield o.entry(f"{key}.max_new_tokens", response, o.first("generate_max_len", "max_new_tokens"))
    if o["top_p"] < 1:
        yield o.entry(f"{key}.top_p", o["top_p"], "top_p")
    yield from _best(o)


def _best(o: Options) -> Iterator[Outcome]:
    """The best evaluation's checkpoint is kept, too."""
    if "best_metric_key" not in o.values or o["best_metric_key"] == "none":
        yield from o.idle("no checkpoint is kept for being the best", "best_metric_key")
        return
    note = "the mean reward, which pass1 is there"
    yield o.entry("run.best.metric", "eval/reward", "best_metric_key", note=note)
    yield o.entry("run.best.goal", "highest", "best_metric_key")
    yield o.entry("run.best.final_model", "last", "best_metric_key")


def _old_held_out(o: Options) -> Iterator[Outcome]:
    """Of versions without a flag for held-out rows: a split of the same data."""
    if o.rl:
        yield from o.idle("this version evaluates nothing", "eval_steps", "eval_split")
        return
    if not o.given("eval_split"):
        yield from o.idle("no held-out rows are named", "eval_steps")
        return
    [source, *more] = _sources(o["dataset"])
    yield from _source(o, source, "data.eval", "dataset")
    yield o.entry("data.eval.split", o["eval_split"], "eval_split")
    yield from _columns(o, "data.eval")
    if more:
        yield Remark("lacking", "eval_split", "there is one set of held-out rows: the first's")
    yield from _evaluated(o)
