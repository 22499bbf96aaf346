"""Convert the settings of the algorithm: estimator, policy loss, correction, KL, pair losses."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll_convert.mapping import PRESETS
from plimsoll_convert.openrlhf.data import mini_batches
from plimsoll_convert.openrlhf.table import CORRECTIONS, ESTIMATORS
from plimsoll_convert.options import Options
from plimsoll_convert.values import Keys, Sourced

_WHITENED_RLOO = (0, 8, 4)
"""The last version that whitens rloo's advantages. Whitening removes the constant factor between
rloo and reinforce_baseline, so such an rloo is reinforce_baseline."""
_FROM_ONE = (0, 9, 0)
"""The last version that counts steps from 1."""
_LEVELS = ("is_correction_level", "is_correction_mode", "is_correction_gating")
_SWITCHES = ("enable_vllm_is_correction", "use_icepop", "vllm_is_correction_type")
_THRESHOLD = "vllm_is_truncated_threshold"
CORRECTION_FLAGS = (*_LEVELS, *_SWITCHES, _THRESHOLD)


def estimator(o: Options) -> str:
    """Return Plimsoll's name of the advantage estimator."""
    name = o["advantage_estimator"]
    whitened = name == "rloo" and o.version <= _WHITENED_RLOO
    return ESTIMATORS["reinforce_baseline" if whitened else name]


def job(o: Options) -> str:
    """Return the name of Plimsoll's command: a preset such as `grpo` if there is one, else `rl`."""
    if not o.rl:
        return "distill" if o.command == "kd" else o.command
    name = PRESETS.get(estimator(o), "rl")
    if name == "grpo" and o["policy_loss_type"] == "gspo":
        return "gspo"
    return "dapo" if name == "grpo" and o["dynamic_filtering"] else name


def algorithm(o: Options) -> Keys:
    """Return the algorithm of the run."""
    if not o.rl:
        return _offline(o)
    frozen = o["freezing_actor_steps"]
    warmup = max(0, frozen if o.version <= _FROM_ONE else frozen + 1)
    gspo = o["policy_loss_type"] == "gspo"
    sequences = gspo or o["loss_agg_mode"] == "seq-mean-token-mean"
    return {
        "advantage": _advantage(o),
        "policy_loss": _policy_loss(o, gspo),
        "aggregation": o.trace("sequences" if sequences else "tokens", "loss_agg_mode"),
        "correction": _correction(o),
        "kl": _kl(o),
        "value_clip": o.take("value_clip") if o.has_critic else None,
        "critic_warmup_steps": o.trace(warmup, "freezing_actor_steps") if o.has_critic else None,
        "epochs": o.take("max_epochs"),
        "mini_batches": mini_batches(o),
        "entropy_bonus": o.take("entropy_loss_coef"),
    }


def _advantage(o: Options) -> Keys:
    name, flag = estimator(o), "advantage_estimator"
    whitened = o[flag] == "rloo" and name != "rloo"
    note = "whitened over the batch until 0.8.4, which makes it the same" if whitened else ""
    discounts = name == "gae" or (name == "reinforce_pp" and o.given("gamma"))
    return {
        "name": o.trace(name, flag, note=note),
        "options": {
            "gamma": o.take("gamma") if discounts else None,
            "gae_lambda": o.take("lambd") if name == "gae" else None,
            "delta": o.trace(1e-9, flag, note="OpenRLHF's constant") if name == "grpo" else None,
        },
    }


def _policy_loss(o: Options, gspo: bool) -> Keys:
    both = o["eps_clip_low_high"]
    flag = "eps_clip" if both is None else "eps_clip_low_high"
    low, high = both or (o["eps_clip"], o["eps_clip"])
    clips = gspo or o.given(flag)
    return {
        "name": o.trace("gspo" if gspo else "clip", "policy_loss_type"),
        "options": {
            "clip_low": o.trace(low, flag) if clips else None,
            "clip_high": o.trace(high, flag) if clips else None,
            "dual_clip": None if gspo else o.take("dual_clip"),
        },
    }


@dataclass(frozen=True)
class Gate:
    """OpenRLHF's correction for the ratio of the trainer's to the sampler's probabilities.

    Attributes:
        level: What is corrected: `token` or `seq` (sequences).
        mode: What happens outside of the bounds: `mask` or `clip`.
        gating: The statistic that is compared with the bounds.
        low: Lower bound.
        high: Upper bound.
    """

    level: str
    mode: str
    gating: str
    low: float
    high: float


def gate(o: Options) -> Gate | None:
    """Return the correction that the OpenRLHF command makes, or None."""
    bounds = o[_THRESHOLD] or (0.0,)
    low, high = 0.0 if len(bounds) == 1 else bounds[0], bounds[-1]
    if o["is_correction_level"] is not None:
        level, mode, gating = (o[flag] for flag in _LEVELS)
        return None if level == "off" else Gate(level, mode, gating, low, high)
    if not o["enable_vllm_is_correction"]:
        return None
    name = "icepop" if o["use_icepop"] else o["vllm_is_correction_type"] or "tis"
    return Gate(*CORRECTIONS[name], "ratio", low, high)


def why_uncorrected(o: Options) -> str:
    """Return why Plimsoll cannot make OpenRLHF's correction; "" if it can or if there is none."""
    correction = gate(o)
    if correction is None:
        return ""
    if o["policy_loss_type"] == "gspo":
        return "OpenRLHF's gspo then divides by the sampler's probabilities, without a bound"
    if correction.gating != "ratio":
        return f"a correction is bounded by ratios, not by {correction.gating}"
    return ""


def _correction(o: Options) -> Keys | Sourced:
    correction = gate(o)
    switch = o.first("is_correction_level", "enable_vllm_is_correction")
    if correction is None:
        return o.trace(None, switch)
    if why_uncorrected(o):
        return Sourced(None, tuple(o.given(switch)), note="no correction")
    flags, clips = (*_LEVELS, *_SWITCHES), correction.mode == "clip"
    name = "truncate" if clips else "icepop" if correction.level == "token" else "mask"
    masks = name == "mask"
    return {
        "name": o.trace(name, *flags),
        "options": {
            "level": o.trace("geometric", *flags, note="seq is the geometric mean")
            if masks
            else None,
            "kept": o.trace("token", *flags, note="what stays keeps its weights")
            if masks
            else None,
            "low": None if clips else o.trace(correction.low, _THRESHOLD),
            "high": o.trace(correction.high, _THRESHOLD),
        },
    }


def _kl(o: Options) -> Keys | Sourced:
    if not o["init_kl_coef"]:
        return o.trace("none", "init_kl_coef")
    place = "loss" if o["use_kl_loss"] else "reward"
    target = o.take("kl_target", lambda value: value or None)
    corrected = o["kl_unbiased_gradient"] and place == "loss"
    return {
        "place": o.trace(place, "use_kl_loss"),
        "coefficient": o.take("init_kl_coef"),
        "estimator": o.take("kl_estimator"),
        "ratio_corrected": o.take("kl_unbiased_gradient") if corrected else None,
        "adaptive.target": target,
        "adaptive.per": target and o.trace("token", "kl_target", note="OpenRLHF's target"),
        "adaptive.horizon": target and o.take("kl_horizon"),
    }


def _offline(o: Options) -> Keys:
    """Return the algorithm of a job that learns from rows, not from sampled responses."""
    match o.command:
        case "rm":
            # OpenRLHF takes every name but sigmoid for the other loss
            name = "log_sigmoid" if o["loss"] == "sigmoid" else "log_exp"
            return {"loss": {"name": o.trace(name, "loss")}}
        case "kto":
            flags = ("desirable_loss_weight", "undesirable_loss_weight")
            options = {flag.replace("_loss", ""): o.take(flag) for flag in o.given(*flags)}
            return {"loss": {"options": {"beta": o.take("beta"), **options}}}
        case "dpo":
            smooths = not o["ipo"] and o.given("label_smoothing")
            smoothing = o.take("label_smoothing") if smooths else None
            return {
                "loss": {
                    "name": o.trace("ipo" if o["ipo"] else "dpo", "ipo"),
                    "options": {"beta": o.take("beta"), "label_smoothing": smoothing},
                },
                "nll_weight": o.take("nll_loss_coef"),
            }
        case "kd":
            return {"nll_share": o.take("kd_coef", lambda share: 1 - share)}
    return {}
