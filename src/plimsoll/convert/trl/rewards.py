"""What a response is worth: TRL's own functions, functions of the user's, and a reward model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.convert.trl.roles import stage
from plimsoll.errors import ConfigError

_THINK = r"(?s)^<think>(?!.*<think>)(.*?)</think>.*$"
_OWN: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "accuracy_reward": ("math_answer", {}),
    "reasoning_accuracy_reward": ("math_answer", {}),
    "think_format_reward": ("pattern", {"pattern": _THINK}),
    "get_soft_overlong_punishment": ("overlong", {"max_new_tokens": 1280, "buffer": 256}),
}
"""TRL's functions, with the rules that are the same."""


def rewards(o: Options) -> Iterator[Outcome]:
    model, functions = o["reward_model_name_or_path"], list(o["reward_funcs"] or ())
    if model is None and not functions:
        raise ConfigError(
            "Nothing scores the responses. Give --reward_funcs or --reward_model_name_or_path."
        )
    weights = o["reward_weights"] or (1.0,) * (len(functions) + (model is not None))
    if len(weights) != len(functions) + (model is not None):
        raise ConfigError(f"{o.shown('reward_weights')}: one number is needed for each reward.")
    left = list(weights)
    if model is not None:
        yield o.entry("reward_model.role.model.path", model, "reward_model_name_or_path")
        if stage(o) == 3:
            given = o.given("zero_stage", "use_fsdp", "fsdp")
            yield o.entry("reward_model.role.stage", 3, *given, note="ZeRO")
        yield o.entry("reward_model.weight", left.pop(0), "reward_weights")
        yield o.entry("reward_model.tokenizer", "own", note="TRL tokenises for the model")
    for function, weight in zip(functions, left, strict=True):
        yield from _function(o, function, weight)


def _function(o: Options, function: str, weight: float) -> Iterator[Outcome]:
    part = re.sub(r"\W+", "_", function.rpartition(".")[2]) or "reward"
    key = f"rewards.{part}"
    if function in _OWN:
        name, options = _OWN[function]
        for option, value in options.items():
            yield o.entry(f"{key}.options.{option}", value, "reward_funcs", note=function)
    elif "." in function:
        module, _, own = function.rpartition(".")
        name = f"{module}:{own}"
        why = "it runs as it is (docs/rewards.md); the column that data.train.reference names "
        why += "comes as `reference`"
        yield Remark("check", f"{key}.name", why)
    else:
        raise ConfigError(
            f"--reward_funcs {function}: TRL has no such function: {', '.join(_OWN)}, or a dotted "
            "path such as my_module.my_reward."
        )
    yield o.entry(f"{key}.name", name, "reward_funcs")
    yield o.entry(f"{key}.weight", weight, "reward_weights")
    bounds = o["reward_clip_range"]
    if bounds is not None:
        note = "of each part here, of their sum there"
        yield o.entry(f"{key}.clip", tuple(bounds), "reward_clip_range", note=note)
