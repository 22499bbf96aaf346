"""What GRPO and RLOO learn by: advantages, losses, corrections, KL."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Entry, Outcome, Remark
from plimsoll.convert.trl.batches import per_step
from plimsoll.convert.trl.roles import reference
from plimsoll.errors import ConfigError

_AGGREGATIONS = {
    "grpo": "sequences",
    "sapo": "sequences",
    "dapo": "tokens",
    "bnpo": "tokens",
    "cispo": "tokens",
    "dr_grpo": "constant",
}
"""Of the losses that there are, what is divided by."""
_DELTA = 1e-4
"""That TRL adds to a group's deviation."""
_LOSS = "algorithm.policy_loss"
_CLIPS = ("epsilon", "epsilon_high", "delta")
_TEMPERATURES = ("sapo_temperature_pos", "sapo_temperature_neg")
_SCALES = {"group": "grpo", "true": "grpo", "none": "dr_grpo", "false": "dr_grpo"}


def command_of(o: Options) -> str:
    """The command of Plimsoll's."""
    if o.command == "rloo":
        return "rloo"
    if o["importance_sampling_level"] == "sequence":
        return "gspo"
    return "cispo" if o["loss_type"] == "cispo" else "grpo"


def advantage(o: Options) -> Iterator[Outcome]:
    key = "algorithm.advantage"
    scale = str(o["scale_rewards"]).lower()
    if scale not in _SCALES:
        raise ConfigError(
            f"{o.shown('scale_rewards')}: not supported: rewards are scaled by their group, or "
            "not: group or none. Leave it out, or train it with TRL."
        )
    name, flags = _SCALES[scale], ["scale_rewards"]
    if o["multi_objective_aggregation"] == "normalize_then_sum":
        name, flags = "gdpo", ["multi_objective_aggregation"]
        yield from o.idle("each part is scaled", "scale_rewards")
    else:
        yield from o.same("rewards are added, then scaled", "multi_objective_aggregation")
    yield o.entry(f"{key}.name", name, *flags)
    if name != "dr_grpo":
        yield o.entry(f"{key}.options.delta", _DELTA, *flags, note="TRL's constant")


def policy_loss(o: Options) -> Iterator[Outcome]:
    if o.command == "rloo":
        yield from _of_rloo(o)
        return
    loss = o["loss_type"]
    if loss not in _AGGREGATIONS:
        raise ConfigError(
            f"{o.shown('loss_type')}: not supported: known are {', '.join(_AGGREGATIONS)}. Take "
            "one of them, or train it with TRL."
        )
    if loss == "cispo":
        yield from _cispo(o)
    elif loss == "sapo":
        yield from _sapo(o)
    else:
        yield from _clipped(o)
    yield from _aggregation(o, loss)
    if loss != "sapo":
        yield from o.idle("it is of sapo", *_TEMPERATURES)
    if loss in ("cispo", "sapo"):
        level = "importance_sampling_level"
        if o[level] == "sequence":
            raise ConfigError(f"{o.shown(level)} with {o.shown('loss_type')}: not supported.")
        yield from o.same("ratios are of tokens", level)


def _clipped(o: Options) -> Iterator[Outcome]:
    sequence = o["importance_sampling_level"] == "sequence"
    yield o.entry(f"{_LOSS}.name", "gspo" if sequence else "clip", "importance_sampling_level")
    yield from _bounds(o)
    if o["delta"] is not None and not sequence:
        yield o.entry(f"{_LOSS}.options.dual_clip", o["delta"], "delta")
    elif sequence:
        yield from o.lacking("gspo has no dual clip", "delta")


def _bounds(o: Options) -> Iterator[Outcome]:
    yield o.entry(f"{_LOSS}.options.clip_low", o["epsilon"], "epsilon")
    high = o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"]
    yield o.entry(f"{_LOSS}.options.clip_high", high, *_CLIPS[:2])


def _cispo(o: Options) -> Iterator[Outcome]:
    cap = o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"]
    yield o.entry(f"{_LOSS}.name", "cispo", "loss_type")
    yield o.entry(f"{_LOSS}.options.cap", cap, "epsilon_high", note="the ratio itself is capped")
    yield from o.idle("epsilon_high caps the ratio", "epsilon", "delta")
    if o["epsilon_high"] is None:
        why = f"without --epsilon_high TRL caps every ratio at {cap:g}; its docs advise 5"
        yield Remark("check", f"{_LOSS}.options.cap", why)


def _sapo(o: Options) -> Iterator[Outcome]:
    yield o.entry(f"{_LOSS}.name", "sapo", "loss_type")
    for flag, name in zip(_TEMPERATURES, ("tau_positive", "tau_negative"), strict=True):
        yield o.entry(f"{_LOSS}.options.{name}", o[flag], flag)
    yield from o.idle("sapo does not clip", *_CLIPS)


def _aggregation(o: Options, loss: str) -> Iterator[Outcome]:
    kind = _AGGREGATIONS[loss]
    note = "of each process's share there" if loss == "bnpo" else ""
    yield o.entry("algorithm.aggregation", kind, "loss_type", note=note)
    if kind == "constant":
        tokens = o["max_completion_length"]
        flags = ("max_completion_length",)
        yield o.entry("algorithm.aggregation_tokens", tokens, *flags, note="TRL's divisor")


def _of_rloo(o: Options) -> Iterator[Outcome]:
    """TRL's loss is the sum of a response's log-probs, by the ratio of the whole response."""
    yield Entry("algorithm.advantage.name", "rloo", note="trl rloo")
    yield Entry(f"{_LOSS}.name", "clip", note="trl rloo")
    yield from _bounds(o)
    note = "TRL's loss is a sum over each response"
    yield Entry("algorithm.aggregation", "constant", note=note)
    yield Entry("algorithm.aggregation_tokens", 1, note=note)
    yield Entry("algorithm.correction", None, note="RLOO of TRL has none")
    if per_step(o) > 1:
        why = "TRL clips the ratio of the whole response, here each token's: they are alike in the "
        yield Remark("check", _LOSS, f"{why}first of a step's {per_step(o)} updates alone")


def correction(o: Options) -> Iterator[Outcome]:
    key = "algorithm.correction"
    switch, mode, high, low = (
        f"vllm_importance_sampling_{name}"
        for name in ("correction", "mode", "clip_max", "clip_min")
    )
    if not (o[switch] and o["use_vllm"]):
        why = "no correction is asked for" if o["use_vllm"] else "--use_vllm is not given"
        yield o.entry(key, None, switch if o["use_vllm"] else "use_vllm")
        yield from o.idle(why, switch, mode, high, low)
        return
    level, _, kind = str(o[mode]).partition("_")
    top = 1e9 if o[high] is None else o[high]
    name = "truncate" if kind == "truncate" else "icepop" if level == "token" else "mask"
    yield o.entry(f"{key}.name", name, mode, switch)
    yield o.entry(f"{key}.options.high", top, high)
    if name != "icepop":
        yield o.entry(f"{key}.options.level", level, mode)
    if name != "truncate":
        yield o.entry(f"{key}.options.low", o[low] or 0.0, low)
    elif o[low]:
        yield Remark("lacking", low, "weights that are smaller are left as they are")


def kl(o: Options) -> Iterator[Outcome]:
    key, coefficient = "algorithm.kl", o["beta"]
    if not coefficient:
        yield o.entry(f"{key}.place", "none", "beta")
        yield from o.idle(f"{o.shown('beta')}: there is no KL", "use_bias_correction_kl")
        yield from o.idle("there is no KL", "sync_ref_model")
        return
    loss = o.command == "grpo"
    yield o.entry(f"{key}.place", "loss" if loss else "reward", "beta")
    yield o.entry(f"{key}.coefficient", coefficient, "beta")
    yield o.entry(f"{key}.estimator", "k3" if loss else "k1", "beta", note="TRL's")
    yield from _kl_in_loss(o, key) if loss else _kl_in_reward(key)
    yield from reference(o)


def _kl_in_loss(o: Options, key: str) -> Iterator[Outcome]:
    flag, level = "use_bias_correction_kl", "importance_sampling_level"
    yield o.entry(f"{key}.ratio_corrected", bool(o[flag]), flag)
    if o[flag] and o[level] == "sequence":
        why = f"with {o.shown(level)} TRL weighs the KL of each token by the ratio of its whole "
        why += f"response, here by the token's own: {key}.ratio_corrected: false and "
        why += "--use_bias_correction_kl false are the same"
        yield Remark("check", f"{key}.ratio_corrected", why)


def _kl_in_reward(key: str) -> Iterator[Outcome]:
    why = "TRL takes the KL of the whole response off its reward, before the others' mean is; here "
    why += "each token loses the KL from there to the end of its response, after that. Expected "
    why += "gradients are the same"
    yield Remark("check", f"{key}.place", why)
