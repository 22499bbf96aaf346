"""Where rows come from: Parquet files with prompts as lists of turns."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.convert.verl.batches import RESPONSE, number
from plimsoll.errors import ConfigError

_ANSWER = "reward_model.ground_truth"
"""The column of verl's data that rewards compare with."""
_OWN = ("train", "test", "val", "validation", "data")
"""Names of files that say nothing of what is in them."""


def files(o: Options, flag: str) -> list[str]:
    """As they are called here."""
    return [os.path.expanduser(one) for one in o[flag] or ()]


def names(paths: Sequence[str]) -> list[str]:
    """What sources are called in a mixture: as their files, or as the folders of these."""
    found: list[str] = []
    for path in paths:
        folder, _, file = path.rstrip("/").rpartition("/")
        short = file.partition(".")[0]
        short = folder.rpartition("/")[2] if short in _OWN and folder else short
        plain = re.sub(r"\W+", "_", short, flags=re.ASCII).strip("_") or "rows"
        again = sum(one == plain or one.startswith(f"{plain}_") for one in found)
        found.append(f"{plain}_{again + 1}" if again else plain)
    return [f"{one}_rows" if one in _TAKEN else one for one in found]


_TAKEN = (
    "path",
    "name",
    "split",
    "messages",
    "prompt",
    "text",
    "source",
    "tools",
    "limit",
    "label",
)


def _keys(paths: Sequence[str], section: str) -> list[str]:
    if len(paths) == 1:
        return [section]
    return [f"{section}.{name}" for name in names(paths)]


def rows(o: Options) -> Iterator[Outcome]:
    flag = "data.train_files"
    paths = files(o, flag)
    if not paths:
        raise ConfigError(f"{flag}=... is needed: the rows to learn from.")
    for path, key in zip(paths, _keys(paths, "data.train"), strict=True):
        yield o.entry(f"{key}.path", path, flag)
        yield from _columns(o, key)
        if o["data.train_max_samples"] > 0:
            yield o.entry(f"{key}.limit", o["data.train_max_samples"], "data.train_max_samples")
        elif o.given("data.train_max_samples"):
            yield from o.same("all rows", "data.train_max_samples")
    if len(paths) > 1:
        why = "files are joined there; here rows are drawn equally from each: give weights as "
        yield Remark("check", "data.train", f"{why}their numbers of rows are")
    yield from _to_check(o)


def _columns(o: Options, key: str) -> Iterator[Outcome]:
    for column, (name, flags) in _chosen(o).items():
        note = "" if o.given(*flags) else "verl's name"
        yield o.entry(f"{key}.{column}", name, *o.given(*flags), note=note)


def _chosen(o: Options) -> Mapping[str, tuple[str, tuple[str, ...]]]:
    """The settings of a source with verl's columns, and the settings that name them."""
    if o.command == "sft":
        return _of_sft(o)
    asked = (str(o["data.prompt_key"]), ("data.prompt_key",))
    found: dict[str, tuple[str, tuple[str, ...]]] = {"messages": asked}
    if not o["reward.reward_model.enable"]:
        found["reference"] = (_ANSWER, ())
        found["source"] = (str(o["data.reward_fn_key"]), ("data.reward_fn_key",))
    return found


def _of_sft(o: Options) -> Mapping[str, tuple[str, tuple[str, ...]]]:
    asked, answered = ("data.prompt_key", "data.response_key")
    if o[asked] is None or o[answered] is None or o.given("data.messages_key"):
        return {"messages": (str(o["data.messages_key"]), ("data.messages_key",))}
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    both = (("prompt", asked, "prompt"), ("response", answered, "response"))
    for column, flag, own in both:
        within = list(o[f"data.{own}_dict_keys"] or ())
        path = ".".join([o[flag], *within])
        found[column] = (path, (flag, f"data.{own}_dict_keys"))
    return found


def _to_check(o: Options) -> Iterator[Outcome]:
    used = {flag for _, flags in _chosen(o).values() for flag in flags}
    others = (
        "prompt_key",
        "response_key",
        "messages_key",
        "prompt_dict_keys",
        "response_dict_keys",
    )
    left = [f"data.{name}" for name in others if f"data.{name}" not in used]
    yield from o.idle("other columns are read", *left)
    if o.rl:
        yield from o.idle("a reward model reads the response alone", "data.reward_fn_key")
    elif o.given("data.tools_key"):
        yield o.entry("data.train.tools", o["data.tools_key"], "data.tools_key")
    if not o.rl and "prompt" in _chosen(o):
        why = "the tokenizer's chat template is put around them, as there"
        yield Remark("check", "data.train.prompt", why)


def held_out(o: Options) -> Iterator[Outcome]:
    flag, every = "data.val_files", number(o, "trainer.test_freq")
    start = "actor_rollout_ref.rollout.val_kwargs."
    asked = tuple(f"{start}{name}" for name in ("n", "do_sample", "temperature", "top_p", "top_k"))
    paths = files(o, flag)
    if every is None or not paths:
        why = "there are no held-out rows" if not paths else f"{o.shown('trainer.test_freq')}: no"
        why += "" if not paths else " steps after which it is evaluated"
        yield from o.idle(why, flag, "data.val_max_samples", "trainer.test_freq", *asked)
        return
    yield o.entry("run.eval_every", every, "trainer.test_freq")
    kept = paths if o.rl else paths[:1]
    for path, key in zip(kept, _keys(kept, "data.eval"), strict=True):
        yield o.entry(f"{key}.path", path, flag)
        yield from _columns(o, key)
        if o["data.val_max_samples"] > 0:
            yield o.entry(f"{key}.limit", o["data.val_max_samples"], "data.val_max_samples")
        if o.rl:
            yield o.entry(f"{key}.responses", o[asked[0]], asked[0])
    yield from o.same("all rows", "data.val_max_samples")
    if len(paths) > len(kept):
        yield Remark("lacking", flag, "jobs that learn from rows have one held-out file; the first")
    if o.rl:
        yield from _sampled(o, asked)


def _sampled(o: Options, asked: Sequence[str]) -> Iterator[Outcome]:
    _, sample, temperature, top_p, top_k = asked
    value = o[temperature] if o[sample] or o.given(temperature) else 0.0
    yield o.entry("eval_sampling.temperature", value, temperature, sample)
    yield o.entry("eval_sampling.max_new_tokens", o[RESPONSE], RESPONSE)
    if value > 0:
        yield o.entry("eval_sampling.top_p", o[top_p], top_p)
        yield o.entry("eval_sampling.top_k", max(0, o[top_k]), top_k)
    else:
        yield from o.idle("the likeliest token is taken", top_p, top_k)
