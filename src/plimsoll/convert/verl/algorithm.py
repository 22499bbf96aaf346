"""What PPO and its kin learn by: estimator, policy loss, aggregation, correction, KL."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Entry, Outcome, Remark
from plimsoll.convert.verl.batches import RESPONSE
from plimsoll.convert.verl.roles import kl_in_reward
from plimsoll.errors import ConfigError

ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "gdpo": "gdpo",
}
"""Of verl's estimators those here."""
_PRESETS = {
    "gae": "ppo",
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "reinforce_pp": "reinforce_pp",
}
"""Of estimators the command; of others it is `rl`."""
_LOSSES = {
    "vanilla": "clip",
    "gspo": "gspo",
    "sapo": "sapo",
    "cispo": "cispo",
    "dppo_tv": "dppo_tv",
}
_AGGREGATIONS = {
    "token-mean": "tokens",
    "seq-mean-token-mean": "sequences",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
}
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_ACTOR = "actor_rollout_ref.actor"
_LOSS = "algorithm.policy_loss"
_MODE = f"{_ACTOR}.policy_loss.loss_mode"
_ESTIMATOR = "algorithm.adv_estimator"
_SCALED = "algorithm.norm_adv_by_std_in_grpo"
_BYPASS = "algorithm.rollout_correction.bypass_mode"


def estimator(o: Options) -> str:
    """The name here. Raises ConfigError for one that there is not."""
    name = ESTIMATORS.get(str(o[_ESTIMATOR]))
    if name is None:
        raise ConfigError(
            f"{o.shown(_ESTIMATOR)}: not supported: known are {', '.join(ESTIMATORS)}. Take one of "
            "them, or train it with verl."
        )
    return "dr_grpo" if name == "grpo" and not o[_SCALED] else name


def command_of(o: Options) -> str:
    """The command of Plimsoll's."""
    name = estimator(o)
    loss = o[_MODE]
    if name == "grpo" and loss in ("gspo", "cispo"):
        return str(loss)
    if name == "grpo" and o["algorithm.filter_groups.enable"] and loss == "vanilla":
        return "dapo"
    return _PRESETS.get(name, "rl")


def advantage(o: Options) -> Iterator[Outcome]:
    name, options = estimator(o), "algorithm.advantage.options"
    yield o.entry("algorithm.advantage.name", name, _ESTIMATOR, _SCALED)
    gamma, lam = "algorithm.gamma", "algorithm.lam"
    if name in ("gae", "reinforce_pp"):
        yield o.entry(f"{options}.gamma", o[gamma], gamma)
    else:
        yield from o.idle(f"{o.shown(_ESTIMATOR)} does not discount", gamma)
    if name == "gae":
        yield o.entry(f"{options}.gae_lambda", o[lam], lam)
    else:
        yield from o.idle(f"{o.shown(_ESTIMATOR)} has no critic", lam)
    if name in ("grpo", "gdpo"):
        yield o.entry(f"{options}.delta", 1e-6, _ESTIMATOR, note="verl's constant")
    elif name != "dr_grpo":
        yield from o.idle("it is of grpo", _SCALED)


def critic(o: Options) -> Iterator[Outcome]:
    clip, warmup = "critic.cliprange_value", "trainer.critic_warmup"
    if not o.has_critic:
        yield from o.idle(f"{o.shown(_ESTIMATOR)} has no critic", warmup)
        return
    yield o.entry("algorithm.value_clip", o[clip], clip)
    yield o.entry("algorithm.critic_warmup_steps", max(0, o[warmup]), warmup)
    yield from o.same("gae has a critic", "critic.enable")
    yield from o.idle("the critic's loss is a mean over tokens", "critic.loss_agg_mode")


def policy_loss(o: Options) -> Iterator[Outcome]:
    name = _LOSSES.get(str(o[_MODE]))
    if name is None:
        raise ConfigError(
            f"{o.shown(_MODE)}: not supported: known are {', '.join(_LOSSES)}. Take one of them, "
            "or train it with verl."
        )
    yield o.entry(f"{_LOSS}.name", name, _MODE)
    taus = (f"{_ACTOR}.tau_pos", f"{_ACTOR}.tau_neg")
    clips = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
    both, low, high = (f"{_ACTOR}.{clip}" for clip in clips)
    dual = f"{_ACTOR}.clip_ratio_c"
    if name == "sapo":
        yield o.entry(f"{_LOSS}.options.tau_positive", o[taus[0]], taus[0])
        yield o.entry(f"{_LOSS}.options.tau_negative", o[taus[1]], taus[1])
        yield from o.idle("sapo does not clip", both, low, high, dual)
        return
    yield from o.idle("it is of sapo", *taus)
    if o[low] is not None and o[high] is not None:
        yield from o.idle(
            "clip_ratio_low and clip_ratio_high count, which are 0.2 by default", both
        )
    if name == "dppo_tv":
        yield from _divergence(o, (both, low, high), dual)
        return
    yield o.entry(f"{_LOSS}.options.clip_low", _bound(o, low, both), *_of(o, low, both))
    yield o.entry(f"{_LOSS}.options.clip_high", _bound(o, high, both), *_of(o, high, both))
    if name == "clip" and o[dual] is not None:
        yield o.entry(f"{_LOSS}.options.dual_clip", o[dual], dual)
    else:
        yield from o.idle(f"{name} has no dual clip", dual)


def _divergence(o: Options, thresholds: tuple[str, str, str], cap: str) -> Iterator[Outcome]:
    """Of dppo_tv, whose thresholds have the names of PPO's clips there."""
    (both, low, high), options = thresholds, f"{_LOSS}.options"
    yield o.entry(f"{options}.threshold", _bound(o, high, both), *_of(o, high, both))
    yield o.entry(f"{options}.threshold_low", _bound(o, low, both), *_of(o, low, both))
    if o[cap] is not None:
        yield o.entry(f"{options}.cap", o[cap], cap)
    yield Entry(f"{options}.penalty", 0.0, note="verl has none")
    if not o[_BYPASS]:
        why = "probabilities are compared with the sampler's; verl compares them with those of its "
        why += f"trainer when the step began, unless {_BYPASS}=True"
        yield Remark("check", f"{_LOSS}.name", why)


def _of(o: Options, own: str, both: str) -> tuple[str, ...]:
    return (own, both) if o[own] is None else (own,)


def _bound(o: Options, own: str, both: str) -> object:
    return o[both] if o[own] is None else o[own]


def aggregation(o: Options) -> Iterator[Outcome]:
    flag, factor = f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.loss_scale_factor"
    kind = _AGGREGATIONS.get(str(o[flag]))
    if kind is None:
        known = ", ".join(_AGGREGATIONS)
        raise ConfigError(f"{o.shown(flag)}: not supported: known are {known}.")
    yield o.entry("algorithm.aggregation", kind, flag)
    if kind != "constant":
        yield from o.idle("it is of seq-mean-token-sum-norm", factor)
    elif o[flag] == "seq-mean-token-sum":
        yield o.entry("algorithm.aggregation_tokens", 1, flag, note="a sum over each response")
        yield from o.idle("it is of seq-mean-token-sum-norm", factor)
    else:
        tokens = o[RESPONSE] if o[factor] is None else o[factor]
        flags = (RESPONSE,) if o[factor] is None else (factor,)
        yield o.entry("algorithm.aggregation_tokens", tokens, *flags)


_WEIGHED = "algorithm.rollout_correction.rollout_is"
_BOUND = f"{_WEIGHED}_threshold"
_CAP = f"{_ACTOR}.tis_imp_ratio_cap"
_REJECTED = (
    "rollout_rs",
    "rollout_rs_threshold",
    "rollout_rs_threshold_lower",
    "rollout_token_veto_threshold",
    "rollout_is_batch_normalize",
    "loss_type",
)


def correction(o: Options) -> Iterator[Outcome]:
    rejected = tuple(f"algorithm.rollout_correction.{name}" for name in _REJECTED)
    others = [one for one in rejected if one in o.typed and o[one] not in (None, False)]
    why = "responses are left out by algorithm.correction's `mask` or `icepop` alone: docs/rl.md"
    yield from o.lacking(why, *others)
    yield from o.same("it is off", *(one for one in rejected if one not in others))
    if o[_MODE] == "dppo_tv":
        why = "dppo_tv compares probabilities with the sampler's itself"
        yield Entry("algorithm.correction", None, note=why)
        yield from o.idle(why, _WEIGHED, _BOUND, _CAP)
        yield from o.same(why, _BYPASS)
        return
    if o[_BYPASS]:
        why = "ratios are against the trainer's log-probs, and algorithm.correction weighs these "
        yield from o.lacking(f"{why}against the sampler's", _BYPASS)
    else:
        yield from o.same("it is off", _BYPASS)
    yield from _corrected(o)


def _corrected(o: Options) -> Iterator[Outcome]:
    key, level = "algorithm.correction", o[_WEIGHED]
    if (o[_CAP] or 0) > 0 and level is None:
        yield from _truncated(o, "token", float(o[_CAP]), _CAP)
        return
    yield from o.idle("rollout_correction counts", _CAP)
    if level is None:
        yield o.entry(key, None, _WEIGHED)
        yield from o.idle("no correction is asked for", _BOUND)
    elif level not in ("token", "sequence"):
        raise ConfigError(f"{o.shown(_WEIGHED)}: It must be token, sequence or null.")
    else:
        yield from _weighed(o, str(level))


def _weighed(o: Options, level: str) -> Iterator[Outcome]:
    """By a bound such as 2.0, or by two such as `0.5_5.0`."""
    bounds = str(o[_BOUND]).split("_")
    try:
        numbers = [float(one) for one in bounds]
    except ValueError as error:
        raise ConfigError(f"{o.shown(_BOUND)}: It must be a number, or two as 0.5_5.0.") from error
    if len(numbers) == 1:
        yield from _truncated(o, level, numbers[0], _WEIGHED, _BOUND)
        return
    key = "algorithm.correction"
    yield o.entry(f"{key}.name", "mask", _WEIGHED, _BOUND)
    yield o.entry(f"{key}.options.level", level, _WEIGHED)
    yield o.entry(f"{key}.options.low", numbers[0], _BOUND)
    yield o.entry(f"{key}.options.high", numbers[1], _BOUND)


def _truncated(o: Options, level: str, high: float, *flags: str) -> Iterator[Outcome]:
    key = "algorithm.correction"
    yield o.entry(f"{key}.name", "truncate", *flags)
    yield o.entry(f"{key}.options.level", level, *flags)
    yield o.entry(f"{key}.options.high", high, *flags)


def kl(o: Options) -> Iterator[Outcome]:
    key = "algorithm.kl"
    loss, coefficient, kind = (
        f"{_ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type")
    )
    reward, penalty = "algorithm.use_kl_in_reward", "algorithm.kl_penalty"
    control = tuple(f"algorithm.kl_ctrl.{n}" for n in ("kl_coef", "type", "target_kl", "horizon"))
    if o[loss]:
        yield o.entry(f"{key}.place", "loss", loss)
        yield o.entry(f"{key}.coefficient", o[coefficient], coefficient)
        yield from _estimated(o, kind, loss=True)
        if kl_in_reward(o):
            yield from o.lacking("the KL is in one place, here in the loss", reward)
        yield from o.idle("the KL is in the loss", reward, penalty, *control)
        return
    yield from o.idle("the KL is not in the loss", loss, coefficient, kind)
    if not kl_in_reward(o):
        why = "verl's gdpo scales the parts of the reward, and the KL is none of them"
        note = why if o[reward] else "no KL is asked for"
        yield Entry(f"{key}.place", "none", tuple(o.given(loss, reward)), note=note)
        yield from o.idle("there is no KL", penalty, *control)
        return
    yield o.entry(f"{key}.place", "reward", reward)
    yield from _of_responses(o)
    yield o.entry(f"{key}.coefficient", o[control[0]], control[0])
    yield from _estimated(o, penalty, loss=False)
    if o[control[1]] == "adaptive":
        yield o.entry(f"{key}.target", o[control[2]], control[2], control[1])
        yield o.entry(f"{key}.horizon", o[control[3]], control[3])
        yield o.entry(f"{key}.target_per", "token", control[2], note="verl's target")
    else:
        yield from o.idle("the coefficient is fixed", *control[1:])


_TAKEN_OFF = {
    "grpo": "the group's mean and deviation are",
    "dr_grpo": "the group's mean is",
    "rloo": "the mean of the group's others is",
    "reinforce_pp_baseline": "the group's mean is",
}
"""What estimators of whole responses scale by. The others take the KL token by token, as here."""


def _of_responses(o: Options) -> Iterator[Outcome]:
    """On a KL that counts otherwise among the rewards of a group."""
    if taken_off := _TAKEN_OFF.get(estimator(o)):
        why = "verl takes the KL of the whole response off its reward, before "
        why += f"{taken_off} taken; here each token loses the KL from there to the end of its "
        why += "response, after that"
        yield Remark("check", "algorithm.kl.place", why)


def _estimated(o: Options, flag: str, *, loss: bool) -> Iterator[Outcome]:
    text = str(o[flag])
    name = _KL.get(text.removesuffix("+"))
    if name is None:
        known = ", ".join(_KL)
        raise ConfigError(f"{o.shown(flag)}: not supported: known are {known}.")
    yield o.entry("algorithm.kl.estimator", name, flag)
    if loss and text.endswith("+"):
        note = "the gradient of the KL itself"
        yield o.entry("algorithm.kl.ratio_corrected", True, flag, note=note)
