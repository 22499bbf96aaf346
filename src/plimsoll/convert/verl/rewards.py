"""What a response is worth: verl's own scores by the row's source, a function in a file, a reward
model, and DAPO's penalty."""

from __future__ import annotations

import os
from collections.abc import Iterator

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Entry, Outcome, Remark
from plimsoll.convert.verl.batches import RESPONSE
from plimsoll.convert.verl.rows import files
from plimsoll.errors import ConfigError

_PATH, _NAME = "reward.custom_reward_function.path", "reward.custom_reward_function.name"
_MANAGER = "reward.reward_manager.name"
_ENABLED, _MODEL = "reward.reward_model.enable", "reward.reward_model.model_path"
_MANAGERS = ("naive", "dapo", "batch", "prime", "gdpo", "rate_limited", "remote")


def rewards(o: Options) -> Iterator[Outcome]:
    if o[_MANAGER] not in _MANAGERS:
        known = ", ".join(_MANAGERS)
        raise ConfigError(f"{o.shown(_MANAGER)}: not supported: known are {known}.")
    yield from o.idle("parts of the reward are scored side by side, and added", _MANAGER)
    if o[_PATH] is not None:
        yield from _function(o)
        yield from o.idle(f"{o.shown(_PATH)} scores", _ENABLED, _MODEL)
    elif o[_ENABLED]:
        yield from _model(o)
    else:
        yield from _own(o)
        yield from o.idle("no reward model is asked for", _ENABLED, _MODEL)
    if o[_PATH] is None:
        yield from o.idle("no function of your own is given", _NAME)


def _function(o: Options) -> Iterator[Outcome]:
    key = "rewards.score"
    yield o.entry(f"{key}.name", "verl_function", _PATH)
    yield o.entry(f"{key}.options.path", os.path.expanduser(str(o[_PATH])), _PATH)
    yield o.entry(f"{key}.options.function", o[_NAME] or "compute_score", _NAME)


def _model(o: Options) -> Iterator[Outcome]:
    if not o[_MODEL]:
        raise ConfigError(f"{o.shown(_ENABLED)} needs {o.names[_MODEL]}=...: the reward model.")
    path = os.path.expanduser(str(o[_MODEL]))
    yield o.entry("reward_model.role.model.path", path, _MODEL, _ENABLED)
    yield o.entry("reward_model.tokenizer", "own", _MODEL, note="verl writes its chat template")
    yield Entry("reward_model.role.stage", 3, note="divided as the others are")
    why = "a sequence classifier with one label scores; one that answers in words is a `judge` of "
    yield Remark("check", "reward_model.role.model.path", f"{why}`rewards`: docs/rewards.md")


def _own(o: Options) -> Iterator[Outcome]:
    """By `data_source`: of GSM8K the number after the last `####`, of others a judged answer."""
    key, note = "rewards.score", "verl scores by data_source"
    if all("gsm8k" in path.lower() for path in files(o, "data.train_files")):
        yield Entry(f"{key}.name", "exact_match", note=note)
        yield Entry(f"{key}.options.marker", "####", note=note)
    else:
        yield Entry(f"{key}.name", "math_answer", note=note)
    why = "verl scores each row by its data_source: of GSM8K what follows ####, of mathematics "
    why += "what is boxed, of programs their tests (`code` here)"
    yield Remark("check", f"{key}.name", why)


def overlong(o: Options) -> Iterator[Outcome]:
    start = "reward.reward_kwargs."
    on, size, factor = (
        f"{start}overlong_buffer_cfg.{name}" for name in ("enable", "len", "penalty_factor")
    )
    longest = f"{start}max_resp_len"
    if not o[on]:
        yield from o.idle("no penalty for length is asked for", on, size, factor, longest)
        return
    if o[size] is None:
        raise ConfigError(f"{o.shown(on)} needs {o.names[size]}=...: the buffer's length.")
    key = "rewards.overlong"
    yield o.entry(f"{key}.name", "overlong", on)
    flag = longest if o[longest] is not None else RESPONSE
    yield o.entry(f"{key}.options.max_new_tokens", o[flag], flag)
    yield o.entry(f"{key}.options.buffer", o[size], size)
    yield o.entry(f"{key}.options.factor", o[factor], factor)
