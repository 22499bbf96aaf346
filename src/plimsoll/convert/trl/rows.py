"""Where rows come from, and which columns are read: TRL knows formats by the columns' names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.convert.trl.batches import every
from plimsoll.convert.trl.columns import columns, first_row, to_check
from plimsoll.errors import ConfigError


@dataclass(frozen=True)
class _Source:
    """key: of the config. flag: that names it."""

    key: str
    path: str
    flag: str
    name: str | None = None
    split: str | None = None
    weight: float | None = None


def rows(o: Options) -> Iterator[Outcome]:
    flags = ("dataset_name", "dataset_config", "dataset_train_split")
    sources = _sources(o)
    for source in sources:
        yield o.entry(f"{source.key}.path", source.path, source.flag)
        if source.name is not None:
            yield o.entry(f"{source.key}.name", source.name, source.flag, flags[1])
        if source.split is not None:
            yield o.entry(f"{source.key}.split", source.split, source.flag, flags[2])
        for column, (name, flag) in columns(o, first_row(source.path)).items():
            yield o.entry(f"{source.key}.{column}", name, *flag, note="TRL's name")
        if source.weight is not None:
            yield o.entry(f"{source.key}.weight", source.weight, source.flag)
    if o["datasets"] is not None:
        yield from o.idle("datasets counts", *flags)
    if len(sources) > 1 and sources[0].weight is None:
        why = "sources are concatenated there; here rows are drawn equally from each: give weights "
        yield Remark("check", "data.train", f"{why}as their numbers of rows are")
    yield from to_check(o, sources[0].key, first_row(sources[0].path))


def _sources(o: Options) -> Sequence[_Source]:
    if o["datasets"] is not None:
        return _mixed(o)
    if not o["dataset_name"]:
        raise ConfigError("--dataset_name (or `datasets` of the YAML) is needed: the rows.")
    split = o["dataset_train_split"]
    return [_Source("data.train", o["dataset_name"], "dataset_name", o["dataset_config"], split)]


def _mixed(o: Options) -> Sequence[_Source]:
    """Of `datasets`, a list of mappings."""
    wanted = "`datasets` must be a list of mappings with a path each, as in TRL's docs"
    try:
        held = json.loads(o["datasets"])
    except ValueError as error:
        raise ConfigError(f"{wanted}: {error}.") from error
    if not isinstance(held, list) or not held or not all(isinstance(one, dict) for one in held):
        raise ConfigError(f"{wanted}.")
    found = []
    for i, one in enumerate(held, 1):
        path = _file(one) or one.get("data_dir") or one.get("path")
        if not isinstance(path, str) or not path:
            raise ConfigError(f"{wanted}: number {i} has none.")
        short = re.sub(r"\W+", "_", path.rstrip("/").rpartition("/")[2].partition(".")[0])
        key = "data.train" if len(held) == 1 else f"data.train.{short.strip('_') or 'rows'}_{i}"
        share = one.get("fraction")
        weight = float(share) if isinstance(share, int | float) and share > 0 else None
        name, split = one.get("name"), one.get("split", "train")
        plain = _file(one) is not None  # a file has no splits
        found.append(_Source(key, path, "datasets", name, None if plain else split, weight))
    if any(s.weight is None for s in found) and any(s.weight is not None for s in found):
        raise ConfigError("`datasets`: give all of them a fraction, or none.")
    return found


def _file(one: Mapping[str, object]) -> str | None:
    """Of `data_files`, where it is one."""
    files = one.get("data_files")
    return files if isinstance(files, str) else None


def learned(o: Options) -> Iterator[Outcome]:
    """TRL learns whole conversations, but of prompts and completions the completions."""
    flags = ("assistant_only_loss", "completion_only_loss")
    read = columns(o, first_row(_sources(o)[0].path))
    if "text" in read:
        yield from o.idle("a document is learned whole", *flags)
        return
    answers = o["completion_only_loss"]
    own = o["assistant_only_loss"] or ("response" in read if answers is None else answers)
    value = "assistant" if own else "all"
    if o.command != "sft":
        yield from o.same("the assistant's turns are learned", *flags)
        return
    note = "" if own else "TRL learns the other turns, too, but of prompts and completions"
    yield o.entry("algorithm.learned_tokens", value, *flags, note=note)


def template(o: Options) -> Iterator[Outcome]:
    path = o["chat_template_path"]
    if path is not None and str(path).endswith((".jinja", ".j2", ".txt")):
        yield o.entry("data.chat_template", path, "chat_template_path")
    elif path is not None:
        why = "the template of another model's tokenizer: write it into a .jinja file"
        yield Remark("lacking", "chat_template_path", why)
    yield from o.lacking("responses end as the template has it", "eos_token")


def order(o: Options) -> Iterator[Outcome]:
    flags = ("train_sampling_strategy", "shuffle_dataset")
    if o["train_sampling_strategy"] == "sequential" and not o["shuffle_dataset"]:
        yield o.entry("data.shuffle", False, *flags)
    else:
        yield from o.same("a new order every epoch", *flags)


def held_out(o: Options) -> Iterator[Outcome]:
    """Of `data.eval`, and when it is measured."""
    asked = ("dataset_test_split", "eval_steps", "num_generations_eval")
    if o["eval_strategy"] == "no":
        why = "--eval_strategy is not given: nothing is evaluated"
        yield from o.idle(why, *asked, "do_eval", "eval_strategy")
        return
    source = _sources(o)[0]
    yield o.entry("data.eval.path", source.path, source.flag)
    if source.name is not None:
        yield o.entry("data.eval.name", source.name, source.flag)
    if source.split is not None:
        yield o.entry("data.eval.split", o[asked[0]], asked[0])
    for column, (name, flag) in columns(o, first_row(source.path)).items():
        yield o.entry(f"data.eval.{column}", name, *flag, note="TRL's name")
    if o.rl:
        number = o["num_generations_eval"] or o["num_generations"]
        yield o.entry("data.eval.responses", number, "num_generations_eval", "num_generations")
        yield from _as_sampled(o)
    yield from o.same("--eval_strategy says it", "do_eval")
    after = "eval_steps" if o["eval_steps"] else "logging_steps"
    number = every(o, after)
    if o["eval_strategy"] == "steps" and number is not None:
        yield o.entry("run.eval_every", number, after, "eval_strategy")
    else:
        why = f"{o.shown('eval_strategy')}: in how many steps that is, the rows say"
        yield Remark("check", "run.eval_every", why)
        yield from o.idle("steps are not counted", "eval_steps")
        yield from o.same("what is held out is measured", "eval_strategy")


def _as_sampled(o: Options) -> Iterator[Outcome]:
    """Held-out prompts are answered as the others."""
    flags = {"max_new_tokens": "max_completion_length", "temperature": "temperature"}
    for name, flag in flags.items():
        yield o.entry(f"eval_sampling.{name}", o[flag], flag)
