"""Batches, which are sequences a process there, and of a step here; lengths; how long a run is, and
what of it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from plimsoll.config.run import LOGGERS
from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.convert.trl.roles import processes
from plimsoll.errors import ConfigError

_LONGEST = 1024
"""TRL's longest sequence, where null leaves it open."""
_PROMPT = 2048
"""Plimsoll's own longest prompt: TRL bounds none."""
_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps")
_SAMPLED = (*_SIZES, "generation_batch_size", "steps_per_generation", "num_generations")


@dataclass(frozen=True)
class _Step:
    """Of a step here: the responses that are sampled, and the optimizer steps that learn them."""

    responses: int
    updates: int


def _per_update(o: Options) -> int:
    """Sequences or pairs of an optimizer step."""
    return int(o[_SIZES[0]] * o[_SIZES[1]] * processes(o))


def _step(o: Options) -> _Step:
    """TRL samples a generation batch, and learns it in as many steps as it has of theirs."""
    once, accumulated = o[_SIZES[0]] * processes(o), o[_SIZES[1]]
    given = o["generation_batch_size"]
    if given is not None and given % once:
        raise ConfigError(
            f"{o.shown('generation_batch_size')} must be a multiple of the {once} sequences that "
            f"{processes(o)} processes learn at once ({o.shown(_SIZES[0])})."
        )
    steps = o["steps_per_generation"] or accumulated if given is None else given // once
    if max(steps, accumulated) % min(steps, accumulated):
        raise ConfigError(
            f"A generation of {steps} steps and {o.shown(_SIZES[1])}: one must be a multiple of "
            "the other, so that a step here samples and learns whole batches."
        )
    return _Step(once * max(steps, accumulated), max(1, steps // accumulated))


def per_step(o: Options) -> int:
    """Optimizer steps in a step here."""
    return _step(o).updates * int(o["num_iterations"]) if o.rl else 1


def batches(o: Options) -> Iterator[Outcome]:
    if o.rl:
        yield from _sampled(o)
        return
    unit = "pairs" if o.pairs else "sequences"
    note = f"{o[_SIZES[0]]} * {o[_SIZES[1]]} of each of {processes(o)} processes"
    yield o.entry(f"batch.{unit}", _per_update(o), *_SIZES, note=note)
    longest = (o["max_length"] or _LONGEST) * (2 if o.pairs else 1)
    note = f"{o[_SIZES[0]]} {unit} of the longest"
    tokens = o[_SIZES[0]] * longest
    yield o.entry("batch.micro_batch_tokens", tokens, _SIZES[0], "max_length", note=note)


def _sampled(o: Options) -> Iterator[Outcome]:
    step, each = _step(o), int(o["num_generations"])
    if step.responses % each:
        raise ConfigError(
            f"{o.shown('num_generations')} does not divide the {step.responses} responses of a "
            f"generation ({processes(o)} processes, {o.shown(_SIZES[0])}, {o.shown(_SIZES[1])}). "
            "Give --generation_batch_size or another number."
        )
    note = f"{step.responses} responses / {each}"
    yield o.entry("batch.prompts", step.responses // each, *_SAMPLED, note=note)
    yield o.entry("batch.responses", each, "num_generations")
    yield o.entry("algorithm.mini_batches", step.updates, *_SAMPLED[:-1])
    tokens = o[_SIZES[0]] * (longest_prompt(o) + o["max_completion_length"])
    note = f"{o[_SIZES[0]]} sequences of the longest"
    flags = (_SIZES[0], "max_completion_length")
    yield o.entry("batch.micro_batch_tokens", tokens, *flags, note=note)


def longest_prompt(o: Options) -> int:
    """In tokens."""
    if o["max_prompt_length"] is not None:
        return int(o["max_prompt_length"])
    whole = o["vllm_max_model_length"]
    return max(1, whole - o["max_completion_length"]) if whole is not None else _PROMPT


def prompts(o: Options) -> Iterator[Outcome]:
    if not o.rl:
        yield from o.idle("max_length is of prompt and response together", "max_prompt_length")
        return
    flags = o.given("max_prompt_length", "vllm_max_model_length")
    if flags:
        note = "less the longest response" if flags == ["vllm_max_model_length"] else ""
        yield o.entry("data.max_tokens", longest_prompt(o), *flags, note=note)
    else:
        why = f"TRL bounds no prompt: {_PROMPT} tokens are Plimsoll's default. Longer ones are "
        yield Remark("check", "data.max_tokens", f"{why}refused: set it as your rows need")
    if o["max_prompt_length"] is not None:
        yield o.entry("data.over_long", "truncate", "max_prompt_length")
        yield from o.idle("max_prompt_length says it", "vllm_max_model_length")


def lengths(o: Options) -> Iterator[Outcome]:
    if o["max_length"] is None:
        why = f"TRL then bounds no length; here {_LONGEST}: set it as your rows and cards allow"
        yield o.entry("data.max_tokens", _LONGEST, "max_length")
        yield Remark("check", "data.max_tokens", why)
    else:
        yield o.entry("data.max_tokens", o["max_length"], "max_length")
    if o["truncation_mode"] == "keep_end":
        yield from o.lacking(
            "the end of what is longer is cut, not its beginning", "truncation_mode"
        )
    yield o.entry("data.over_long", "truncate", "truncation_mode", note="TRL cuts what is longer")


def packed(o: Options) -> Iterator[Outcome]:
    yield from o.same("sequences are always packed", "packing")
    if o["packing"]:
        why = "with --packing TRL counts packs of max_length, which hold several rows; here rows "
        why += "are counted: multiply by how many rows a pack held"
        yield Remark("check", "batch.sequences", why)


def length(o: Options) -> Iterator[Outcome]:
    """Of the run."""
    each = per_step(o)
    if o["max_steps"] > 0:
        note = f"of {each} optimizer steps" if each > 1 else ""
        yield o.entry("run.steps", ceil(o["max_steps"] / each), "max_steps", note=note)
        yield from o.idle("max_steps counts", "num_train_epochs")
    else:
        yield o.entry("run.epochs", float(o["num_train_epochs"]), "num_train_epochs")
        yield from o.idle("epochs count", "max_steps")


def every(o: Options, flag: str) -> int | None:
    """Steps here of a number of optimizer steps; None of a share of the run."""
    return max(1, round(o[flag] / per_step(o))) if o[flag] >= 1 else None


def saving(o: Options) -> Iterator[Outcome]:
    if o["resume_from_checkpoint"] not in (None, "False", "false"):
        yield o.entry(
            "run.resume", "auto", "resume_from_checkpoint", note="what run.directory holds"
        )
    else:
        yield from o.same("a run begins anew", "resume_from_checkpoint")
    strategy, number = o["save_strategy"], every(o, "save_steps")
    if strategy == "steps" and number is not None:
        yield o.entry("run.save_every", number, "save_steps", "save_strategy")
        return
    if strategy != "no":
        why = "a checkpoint is kept every so many steps: write how many"
        yield Remark("check", "run.save_every", f"{o.shown('save_strategy')}: {why}")
    yield from o.same("a checkpoint is written at the end", "save_strategy")
    yield from o.idle(f"{o.shown('save_strategy')}: no steps are counted", "save_steps")


def best(o: Options) -> Iterator[Outcome]:
    flags = ("metric_for_best_model", "greater_is_better")
    if not o["load_best_model_at_end"] or o["eval_strategy"] == "no":
        why = "no checkpoint is kept for being the best"
        yield from o.idle(why, "load_best_model_at_end", *flags)
        return
    name = str(o[flags[0]] or "loss").removeprefix("eval_")
    higher = o[flags[1]] if o[flags[1]] is not None else not name.endswith("loss")
    yield o.entry("run.best.metric", f"eval/{name}", "load_best_model_at_end", flags[0])
    yield o.entry("run.best.goal", "highest" if higher else "lowest", *flags)
    if name != "loss":
        yield Remark("check", "run.best.metric", "metrics have other names: see docs/runs.md")


def logged(o: Options) -> Iterator[Outcome]:
    names = [n.strip() for word in o["report_to"] or () for n in word.split(",") if n.strip()]
    loggers = tuple(name for name in names if name in LOGGERS)
    if loggers:
        yield o.entry("run.loggers", loggers, "report_to")
        yield from (o.entry("run.logger_project", o[f], f) for f in o.given("project"))
    else:
        yield from o.idle("no logger is asked for", "project")
    for name in names:
        if name not in (*LOGGERS, "none"):
            yield Remark("lacking", "report_to", f"{name}: loggers are {', '.join(LOGGERS)}")
    if names == ["none"] or not names:
        yield from o.same("metrics are in metrics.jsonl and TensorBoard's files", "report_to")
