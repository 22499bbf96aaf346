"""Convert what several trainers have: schedules, adapters, micro-batches, sources, loggers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil, prod

from plimsoll.config.data import COLUMNS, EvalSource, WeightedSource
from plimsoll.config.run import LOGGERS
from plimsoll.errors import ConfigError
from plimsoll_convert.settings import NO_VALUE, Keys, Options, Remark, Sourced, Value

_SCHEDULES = {
    **dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr", "cosine"), "cosine"),
    "linear": "linear",
    **dict.fromkeys(("constant_with_warmup", "constant"), "constant"),
}
PRESETS = {"gae": "ppo", **{name: name for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp")}}
"""Plimsoll's command for each estimator; the command for other estimators is `rl`."""
HALF, HALF_16, FULL = ("bf16", "bfloat16"), ("fp16", "float16", "half"), ("fp32", "float32")
_RESERVED = {*COLUMNS, *WeightedSource.model_fields, *EvalSource.model_fields}
_FILE_NAMES = ("train", "test", "val", "validation", "data")
"""File names that do not describe the file's content."""
_HEAD = "give HOST:PORT of Ray's head"


def ids_of(section: str, names: str) -> list[str]:
    """Return the ids of settings in one section. `names` are separated by blanks."""
    return [f"{section}.{name}" for name in names.split()]


def schedule_of(
    o: Options,
    named: str,
    *,
    default: str,
    warmup: Sourced,
    final: Value,
    constant_warmup: bool = False,
    note: str = "",
) -> Keys:
    """Return the schedule of a learning rate.

    Args:
        o: The settings.
        named: The setting with the schedule's name.
        default: The schedule's name if no setting gives it.
        warmup: Warm-up as a number of steps (int) or a share of the run (float).
        final: Rate at the end, as a share of the peak rate.
        constant_warmup: Whether a schedule called `constant` has a warm-up.
        note: How the name was found.
    """
    name = str(o[named] or default)
    known = ", ".join(_SCHEDULES)
    o.require(name in _SCHEDULES, f"there is no such schedule here. Known: {known}", named)
    shape = o.trace(_SCHEDULES[name], named, note=note)
    if name == "constant" and not constant_warmup:
        return {"schedule": shape}
    final = None if name.startswith("constant") else final
    unit = "warmup_steps" if isinstance(warmup.value, int) else "warmup_ratio"
    return {"schedule": shape, unit: warmup, "final_ratio": final}


def leave_out_halves(o: Options, id: str) -> Keys | None:
    """Return a remark on a setting that was given and asks for float16."""
    halves = o[id] is True or str(o[id]) in HALF_16
    return o.leave_out("models are computed in bfloat16 or float32", id, when=halves)


def shards_of(o: Options, *ids: str) -> int:
    """Return the number of ranks that share a sequence: the product of these settings."""
    return prod(o[id] or 1 for id in ids)


def sequence_parallel(o: Options, ranks: int, *ids: str) -> Value:
    """Return `shards_of` as a value; None for 1.

    Raises:
        ConfigError: The number does not divide `ranks`.
    """
    number = shards_of(o, *ids)
    why = f"{ranks} ranks are no multiple of the {number} that share a sequence"
    o.require(ranks % number == 0, why, *o.given(*ids))
    return o.trace_if(number > 1, number, *o.given(*ids))


def micro_batch(
    o: Options, key: str, number: int, longest: int, *ids: str, shards: int = 1
) -> Sourced:
    """Return a micro-batch's token budget: `number` sequences or pairs of `longest` tokens.

    The budget is what one of the `shards` ranks holds that share the micro-batch.
    """
    note = f"{number} sequences of the longest"
    note += f" on {shards} ranks" if shards > 1 else ""
    return o.trace(ceil(number * longest / shards), key, *ids, note=note)


def token_budget(
    o: Options, tokens: str, switch: str, longest: int, *bounds: str, shards: int = 1
) -> Sourced:
    """Return a micro-batch's token budget: the setting `tokens`, but at least `longest` tokens.

    Both are divided over the `shards` ranks that share the micro-batch.
    """
    least = ceil(longest / shards)
    if o[tokens] >= least:
        return o.trace(o[tokens], tokens, switch)
    return o.trace(least, tokens, switch, *bounds, note="raised to the longest sequence")


def correction_name(level: str, *, clips: bool) -> str:
    """Return the name of a correction of the trainer's to the sampler's probabilities.

    Args:
        level: What is corrected: `token`, or sequences.
        clips: Whether ratios outside of the bounds are clipped. Otherwise they are masked.
    """
    if clips:
        return "truncate"
    return "icepop" if level == "token" else "mask"


def equal_parts(o: Options, size: str, whole: int, what: str, *said_by: str) -> int:
    """Return the number of equal parts: `whole` divided by the setting `size`.

    Raises:
        ConfigError: The size does not divide the whole. The nearest one that does is named.
    """
    part = int(o[size])
    if whole % part == 0:
        return whole // part
    divisors = (n for n in range(1, whole + 1) if whole % n == 0)
    nearest = min(divisors, key=lambda n: abs(n - part))
    raise ConfigError(
        f"{o.show(size)} does not divide the {whole} {what} of a step ({o.show(*said_by)}), which "
        f"are learned in equal parts. Nearest: {o.show_default(o.names[size], nearest)}."
    )


def source_names(paths: Iterable[str]) -> list[str]:
    """Return a unique name for each data set of a mixture, from its file's or folder's name."""
    names: list[str] = []
    for path in paths:
        folder, _, file = path.rstrip("/").rpartition("/")
        short = file.partition(".")[0]
        short = folder.rpartition("/")[2] if short in _FILE_NAMES and folder else short
        plain = re.sub(r"\W+", "_", short, flags=re.ASCII).strip("_") or "rows"
        plain = f"{plain}_rows" if plain in _RESERVED else plain
        again = sum(re.fullmatch(rf"{plain}(_\d+)?", name) is not None for name in names)
        names.append(f"{plain}_{again + 1}" if again else plain)
    return names


def adapter_targets(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the modules of an adapter as a tuple; all linear layers if no module is named."""
    return (names,) if isinstance(names, str) else names or ("all-linear",)


def mixture_of(paths: Sequence[str], rows: Sequence[Keys]) -> Keys:
    """Return the only data set, or several by name, with a check if they have no weights.

    The other trainer concatenates data sets, but Plimsoll draws equally from each.
    """
    if len(rows) == 1 or rows[0].get("weight") is not None:
        return one_or_named(paths, rows)
    why = "sources are concatenated there; here rows are drawn equally from each: give weights "
    return {**one_or_named(paths, rows), "": to_check(f"{why}as their numbers of rows are")}


def with_check(value: Sourced, why: str) -> Sourced:
    """Return the value with a text for the user to check; unchanged if the text is empty."""
    return replace(value, check=why) if why else value


def to_check(why: str) -> Sourced:
    """Return a check for the user about a key, without a value for the key."""
    return Sourced(NO_VALUE, check=why)


def ray_head(o: Options, machines: int) -> Value:
    """Return the address of Ray's head, or a check if it is unknown; None for one machine."""
    if machines <= 1:
        return None
    if o.launch.address is None:
        return to_check(_HEAD)
    check = "the port of Ray's head, not of its dashboard"
    return Sourced(f"{o.launch.address}:6379", note="Ray's usual port", check=check)


def sleep_level(sleeps: bool) -> int:
    """Return vLLM's sleep level: 2 (free all memory) if engines sleep, else 0.

    Level 2 is possible because each sync brings all weights.
    """
    return 2 if sleeps else 0


def one_or_named(paths: Iterable[str], rows: Sequence[Keys]) -> Keys:
    """Return the only data set, or several by the names of their files."""
    return rows[0] if len(rows) == 1 else dict(zip(source_names(paths), rows, strict=True))


def loggers_of(o: Options, names: Iterable[str], id: str, project: str, note: str = "") -> Keys:
    """Return the loggers that Plimsoll has, and their project, with remarks on other loggers.

    Args:
        o: The settings.
        names: Names of the trainer's loggers.
        id: The setting that names them.
        project: The setting with the project's name.
        note: How the loggers are used.
    """
    known = tuple(name for name in names if name in LOGGERS)
    why = f"loggers are {', '.join(LOGGERS)}"
    return {
        "loggers": o.trace_if(known, known, id, note=note),
        "logger_project": o.take_if(known, project),
        "other_loggers": {
            name: Remark("lacking", id, f"{name}: {why}")
            for name in names
            if name not in (*LOGGERS, "none", "console", "file")
        },
    }
