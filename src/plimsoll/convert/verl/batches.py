"""Batches, micro-batches, lengths; how long a run is, and what of it is kept."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.config.run import LOGGERS
from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.errors import ConfigError

_HERE = ("console", "file", *LOGGERS)
_ACTOR = "actor_rollout_ref.actor"
_METRICS = (None, "reward", "seq_reward", "score", "acc", "seq_final_reward")
"""Of a group, by which verl leaves it out: all are alike where rewards are."""
_CUSTOM, _MODELLED = "reward.custom_reward_function.path", "reward.reward_model.enable"
_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg.enable"
PROMPT, RESPONSE = "data.max_prompt_length", "data.max_response_length"


def longest(o: Options) -> int:
    """In tokens."""
    return int(o["data.max_length"] if o.command == "sft" else o[PROMPT] + o[RESPONSE])


def lengths(o: Options) -> Iterator[Outcome]:
    if o.command == "sft":
        yield o.entry("data.max_tokens", o["data.max_length"], "data.max_length")
    else:
        yield o.entry("data.max_tokens", o[PROMPT], PROMPT)
        yield o.entry("rollout.sampling.max_new_tokens", o[RESPONSE], RESPONSE)
    if o["data.filter_overlong_prompts"]:
        yield o.entry("data.on_bad_row", "skip", "data.filter_overlong_prompts")
        yield from o.same("prompts that are too long are left out", "data.truncation")
    elif o["data.truncation"] == "error":
        yield o.entry("data.over_long", "refuse", "data.truncation")
        yield from o.same("prompts that are too long are refused", "data.filter_overlong_prompts")
    else:
        note = "" if o["data.truncation"] == "right" else "there another part is cut off"
        yield o.entry("data.over_long", "truncate", "data.truncation", note=note)
        yield from o.same("prompts that are too long are cut", "data.filter_overlong_prompts")


def batches(o: Options) -> Iterator[Outcome]:
    flag = "data.train_batch_size"
    if o.command == "sft":
        yield o.entry("batch.sequences", o[flag], flag)
        return
    yield o.entry("batch.prompts", o[flag], flag)
    size = f"{_ACTOR}.ppo_mini_batch_size"
    note = f"{o[flag]} prompts / {o[size]}"
    yield o.entry("algorithm.mini_batches", _parts(o, size), flag, size, note=note)
    generated = o["data.gen_batch_size"]
    if generated is not None and generated > o[flag] and o["algorithm.filter_groups.enable"]:
        share = generated / o[flag]
        yield o.entry("batch.dynamic_sampling.oversampling", share, "data.gen_batch_size", flag)
    else:
        yield from o.idle("a step's prompts are asked for at once", "data.gen_batch_size")


def _parts(o: Options, size: str) -> int:
    """Optimizer steps of a step."""
    prompts, each = o["data.train_batch_size"], o[size]
    if prompts % each:
        divisors = [n for n in range(1, prompts + 1) if prompts % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - each))
        raise ConfigError(
            f"{o.shown(size)} does not divide the prompts of a step "
            f"({o.shown('data.train_batch_size')}), which are learned in equal parts. Nearest: "
            f"{o.names[size]}={nearest}."
        )
    return int(prompts // each)


def of_critic(o: Options) -> Iterator[Outcome]:
    flag = "critic.ppo_mini_batch_size"
    if o.has_critic and o[flag] is not None:
        yield o.entry("algorithm.critic_mini_batches", _parts(o, flag), flag)


def micro_batches(o: Options) -> Iterator[Outcome]:
    there = "data" if o.command == "sft" else _ACTOR
    start = "" if o.command == "sft" else "ppo_"
    dynamic, tokens, size = (
        f"{there}.use_dynamic_bsz",
        f"{there}.{start}max_token_len_per_gpu",
        f"{there}.{start}micro_batch_size_per_gpu",
    )
    key, least = "batch.micro_batch_tokens", longest(o)
    bounds = ("data.max_length",) if o.command == "sft" else (PROMPT, RESPONSE)
    if o[dynamic]:
        note = "raised to the longest sequence" if o[tokens] < least else ""
        flags = (tokens, dynamic, *(bounds if note else ()))
        yield o.entry(key, max(o[tokens], least), *flags, note=note)
        yield from o.idle("a token budget is given", size)
        return
    number = o[size]
    if number is None:
        number = 1
        why = f"{o.names[size]} says how many sequences: reckoned with 1"
        yield Remark("check", key, why)
    note = f"{number} sequences of the longest"
    yield o.entry(key, number * least, size, *bounds, note=note)
    yield from o.idle("sequences are counted", tokens)
    yield from o.same("sequences are counted", dynamic)


def dynamic_sampling(o: Options) -> Iterator[Outcome]:
    start = "algorithm.filter_groups"
    most, flying = f"{start}.max_num_gen_batches", f"{start}.max_inflight_gen_batches"
    if not o[f"{start}.enable"]:
        why = "no dynamic sampling is asked for"
        yield from o.idle(why, f"{start}.enable", f"{start}.metric", most, flying)
        return
    key = "batch.dynamic_sampling"
    limit = float(o[most]) if (o[most] or 0) > 0 else 4.0
    yield o.entry(f"{key}.max_drawn", limit, f"{start}.enable", most)
    has_score = o[_CUSTOM] is not None or not o[_MODELLED]
    if has_score and o[_OVERLONG] and o[f"{start}.metric"] in ("acc", "score"):
        yield o.entry(f"{key}.by", "score", f"{start}.metric", note="without the penalty")
    if o[f"{start}.metric"] not in _METRICS:
        yield from o.lacking("groups are looked at by their rewards", f"{start}.metric")
    yield from o.same("groups whose rewards are all equal are replaced", f"{start}.metric", flying)


def length(o: Options) -> Iterator[Outcome]:
    """Of the run."""
    epochs, steps = "trainer.total_epochs", "trainer.total_training_steps"
    if o[steps] is not None:
        yield o.entry("run.steps", o[steps], steps)
        yield from o.idle("steps are given", epochs)
    else:
        yield o.entry("run.epochs", float(o[epochs]), epochs)


def number(o: Options, flag: str) -> int | None:
    """Every how many steps; None of -1. Raises ConfigError for what is no number."""
    if str(o[flag]) == "after_each_epoch":
        return None
    try:
        found = int(o[flag] if o[flag] is not None else -1)
    except ValueError as error:
        raise ConfigError(f"{o.shown(flag)}: It must be a whole number of steps.") from error
    return found if found > 0 else None


def saving(o: Options) -> Iterator[Outcome]:
    project, name = "trainer.project_name", "trainer.experiment_name"
    own = "trainer.default_local_dir"
    if o[own] is not None:
        yield o.entry("run.directory", o[own], own)
        yield from o.idle("a run is called as its directory", name)
    else:
        path = f"checkpoints/{o[project]}/{o[name]}"
        yield o.entry("run.directory", path, project, name)
    flag = "trainer.save_freq"
    if str(o[flag]) == "after_each_epoch":
        why = "in how many steps an epoch ends, the rows say"
        yield Remark("check", "run.save_every", f"{o.shown(flag)}: {why}")
    if (every := number(o, flag)) is not None:
        yield o.entry("run.save_every", every, flag)
    else:
        yield from o.same("a checkpoint is written at the end", flag)
    resumed = "trainer.resume_mode"
    yield o.entry("run.resume", "never" if o[resumed] == "disable" else "auto", resumed)
    yield from o.lacking("a run goes on from run.directory", "trainer.resume_from_path")


def logged(o: Options) -> Iterator[Outcome]:
    names = [str(one) for one in o["trainer.logger"] or ()]
    loggers = tuple(name for name in names if name in LOGGERS)
    if loggers:
        yield o.entry("run.loggers", loggers, "trainer.logger")
        yield o.entry("run.logger_project", o["trainer.project_name"], "trainer.project_name")
    else:
        yield from o.idle("no logger asks for it", "trainer.project_name")
    yield from o.same("metrics are in metrics.jsonl", "trainer.logger")
    for name in names:
        if name not in _HERE:
            why = f"{name}: loggers are {', '.join(LOGGERS)}"
            yield Remark("lacking", "trainer.logger", why)
