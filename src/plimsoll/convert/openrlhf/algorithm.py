"""What PPO and its kin learn by: estimator, policy loss, correction, KL; and which of the commands
of `plimsoll rl` that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Entry, Outcome, Remark

ESTIMATORS = {
    "gae": "gae",
    "reinforce": "reinforce_pp",
    "rloo": "rloo",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "flash_reinforce": "batch_mean",
}
"""Of OpenRLHF's estimators those here."""
_PRESETS = {
    "gae": "ppo",
    "reinforce_pp": "reinforce_pp",
    "rloo": "rloo",
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
}
"""Of estimators the command; of others it is `rl`."""
_WHITENED_RLOO = (0, 8, 4)
"""The last version that whitens what rloo gives: then the factor between leaving one out and the
mean of all is gone, and it is reinforce_baseline."""
_SEQUENCES = (0, 6, 4)
"""The last version whose policy loss is the mean of the sequences' means."""
_FROM_ONE = (0, 9, 0)
"""The last version that counts steps from 1."""


def advantage_of(o: Options) -> str:
    """The name of the estimator here."""
    name = o["advantage_estimator"]
    whitened = name == "rloo" and o.version <= _WHITENED_RLOO
    return ESTIMATORS["reinforce_baseline" if whitened else name]


def command_of(o: Options) -> str:
    """The command of Plimsoll's: a preset where there is one."""
    name = _PRESETS.get(advantage_of(o), "rl")
    if name == "grpo" and o["policy_loss_type"] == "gspo":
        return "gspo"
    return "dapo" if name == "grpo" and o["dynamic_filtering"] else name


def advantage(o: Options) -> Iterator[Outcome]:
    name, flag = advantage_of(o), "advantage_estimator"
    options = "algorithm.advantage.options"
    note = ""
    if o[flag] == "rloo" and name != "rloo":
        note = "whitened over the batch until 0.8.4, which makes it the same"
    yield o.entry("algorithm.advantage.name", name, flag, note=note)
    if name == "gae" or (name == "reinforce_pp" and o.given("gamma")):
        yield o.entry(f"{options}.gamma", o["gamma"], "gamma")
    elif name != "reinforce_pp":
        yield from o.idle(f"{o.shown(flag)} does not discount", "gamma")
    if name == "gae":
        yield o.entry(f"{options}.gae_lambda", o["lambd"], "lambd")
    else:
        yield from o.idle(f"{o.shown(flag)} has no critic", "lambd")
    if name == "grpo":
        yield o.entry(f"{options}.delta", 1e-9, flag, note="OpenRLHF's constant")
    if name in ("gae", "reinforce_pp", "reinforce_pp_baseline"):
        why = "advantages are centred and scaled, or neither; they are scaled here"
        yield from o.lacking(why, "no_advantage_std_norm")
    else:
        yield from o.idle(f"{o.shown(flag)} is not whitened", "no_advantage_std_norm")


def critic(o: Options) -> Iterator[Outcome]:
    flags = ("critic_pretrain", "value_clip", "freezing_actor_steps", "save_value_network")
    if not o.has_critic:
        yield from o.idle(f"{o.shown('advantage_estimator')} has no critic", *flags)
        return
    own, scored = o["critic_pretrain"], o["reward_pretrain"]
    if own is not None:
        yield o.entry("critic.model.path", own, "critic_pretrain")
    elif scored is not None and not (o["remote_rm_url"] or o["agent_func_path"]):
        path = scored.split(",")[0]
        yield o.entry(
            "critic.model.path", path, "reward_pretrain", note="critic_pretrain's default"
        )
    else:
        note = "critic_pretrain's default"
        yield o.entry("critic.model.path", o["pretrain"], "pretrain", note=note)
    yield o.entry("algorithm.value_clip", o["value_clip"], "value_clip")
    frozen = o["freezing_actor_steps"]
    steps = max(0, frozen if o.version <= _FROM_ONE else frozen + 1)
    yield o.entry("algorithm.critic_warmup_steps", steps, "freezing_actor_steps")
    yield from o.lacking("the critic is in the checkpoints alone", "save_value_network")


def policy_loss(o: Options) -> Iterator[Outcome]:
    gspo = o["policy_loss_type"] == "gspo"
    key, flags = "algorithm.policy_loss", ("policy_loss_type",)
    yield o.entry(f"{key}.name", "gspo" if gspo else "clip", *flags)
    both = o["eps_clip_low_high"]
    flag = "eps_clip" if both is None else "eps_clip_low_high"
    low, high = both or (o["eps_clip"], o["eps_clip"])
    if gspo or o.given(flag):
        yield o.entry(f"{key}.options.clip_low", low, flag)
        yield o.entry(f"{key}.options.clip_high", high, flag)
    if both is not None:
        yield from o.idle(f"{o.shown('eps_clip_low_high')} counts", "eps_clip")
    if o["dual_clip"] is not None and not gspo:
        yield o.entry(f"{key}.options.dual_clip", o["dual_clip"], "dual_clip")
    elif gspo:
        yield from o.lacking("gspo has no dual clip", "dual_clip")
    yield from _aggregation(o, gspo)


def _aggregation(o: Options, gspo: bool) -> Iterator[Outcome]:
    old = o.version <= _SEQUENCES and not o["packing_samples"]
    sequences = gspo or old or o["loss_agg_mode"] == "seq-mean-token-mean"
    note = "of gspo" if gspo else "of each version up to 0.6.4 without packing" if old else ""
    value = "sequences" if sequences else "tokens"
    yield o.entry("algorithm.aggregation", value, "loss_agg_mode", note=note)


@dataclass(frozen=True)
class _Gate:
    """How OpenRLHF weighs the trainer's probabilities over the sampler's. level: token or seq.
    mode: mask or clip. gating: the statistic that is held against the bounds."""

    level: str
    mode: str
    gating: str
    low: float
    high: float


CORRECTIONS = {
    "tis": ("token", "clip"),
    "icepop": ("token", "mask"),
    "seq-mask-tis": ("seq", "mask"),
    "mis": ("seq", "mask"),
}
_GATES = ("is_correction_level", "is_correction_mode", "is_correction_gating")
_SWITCHES = ("enable_vllm_is_correction", "use_icepop", "vllm_is_correction_type")
_BOUNDS = "vllm_is_truncated_threshold"


def _gate(o: Options) -> _Gate | None:
    bounds = o[_BOUNDS]
    if isinstance(bounds, float | int):
        bounds = (bounds,)
    low, high = bounds if bounds and len(bounds) == 2 else (0.0, *(bounds or (0.0,)))
    if o["is_correction_level"] is not None:
        level, mode, gating = (o[flag] for flag in _GATES)
        return None if level == "off" else _Gate(level, mode, gating, low, high)
    if not o["enable_vllm_is_correction"]:
        return None
    name = "icepop" if o["use_icepop"] else o["vllm_is_correction_type"] or "tis"
    return _Gate(*CORRECTIONS[name], "ratio", low, high)


def correction(o: Options) -> Iterator[Outcome]:
    gate, key = _gate(o), "algorithm.correction"
    flags = (*_GATES, *_SWITCHES, _BOUNDS)
    switch = o.first("is_correction_level", "enable_vllm_is_correction")
    if gate is None:
        yield o.entry(key, None, switch)
        yield from o.idle("no correction is asked for", *(one for one in flags if one != switch))
        return
    why = ""
    if o["policy_loss_type"] == "gspo":
        why = "OpenRLHF's gspo then divides by the sampler's probabilities, without a bound"
    elif gate.gating != "ratio":
        why = f"a correction is bounded by ratios, not by {gate.gating}"
    if why:
        yield Entry(key, None, tuple(o.given(switch)), note="no correction")
        yield from o.lacking(why, *flags)
        return
    yield from _corrected(o, gate, flags)


def _corrected(o: Options, gate: _Gate, flags: tuple[str, ...]) -> Iterator[Outcome]:
    key, options = "algorithm.correction.name", "algorithm.correction.options"
    clipped = gate.mode == "clip"
    name = "truncate" if clipped else "icepop" if gate.level == "token" else "mask"
    yield o.entry(key, name, *(flag for flag in flags if flag != _BOUNDS))
    if name == "mask":
        yield o.entry(
            f"{options}.level", "geometric", *flags[:-1], note="seq is the geometric mean"
        )
        yield o.entry(f"{options}.kept", "token", *flags[:-1], note="what stays keeps its weights")
    if not clipped:
        yield o.entry(f"{options}.low", gate.low, _BOUNDS)
    yield o.entry(f"{options}.high", gate.high, _BOUNDS)
    if clipped and gate.low > 0:
        why = f"weights below {gate.low:g} are raised to it there; here they stay"
        yield Remark("lacking", _BOUNDS, why)


def kl(o: Options) -> Iterator[Outcome]:
    key, coefficient = "algorithm.kl", o["init_kl_coef"]
    placed = ("use_kl_loss", "kl_estimator", "use_kl_estimator_k3", "kl_unbiased_gradient")
    if not coefficient:
        yield o.entry(f"{key}.place", "none", "init_kl_coef")
        why = f"{o.shown('init_kl_coef')}: there is no KL"
        yield from o.idle(why, *placed, "kl_target", "kl_horizon")
        return
    yield o.entry(f"{key}.coefficient", coefficient, "init_kl_coef")
    place = "loss" if o["use_kl_loss"] else "reward"
    yield o.entry(f"{key}.place", place, "use_kl_loss")
    estimator = o["kl_estimator"] or ("k3" if o["use_kl_estimator_k3"] else "k1")
    yield o.entry(f"{key}.estimator", estimator, "kl_estimator", "use_kl_estimator_k3")
    if o["kl_unbiased_gradient"] and place == "loss":
        yield o.entry(f"{key}.ratio_corrected", True, "kl_unbiased_gradient")
    else:
        why = "the KL has a gradient only with the KL in the loss"
        yield from o.idle(why, "kl_unbiased_gradient")
    if not o["kl_target"]:
        yield from o.idle("without a target the coefficient is fixed", "kl_target", "kl_horizon")
        return
    yield o.entry(f"{key}.target", o["kl_target"], "kl_target")
    yield o.entry(f"{key}.target_per", "token", "kl_target", note="OpenRLHF's target")
    yield o.entry(f"{key}.horizon", o["kl_horizon"] or 10_000, "kl_horizon")


def dynamic_sampling(o: Options) -> Iterator[Outcome]:
    bounds = o["dynamic_filtering_reward_range"]
    if not o["dynamic_filtering"]:
        why = "no dynamic sampling is asked for"
        yield from o.idle(why, "dynamic_filtering_reward_range")
        return
    key, flags = "batch.dynamic_sampling", ("dynamic_filtering", "dynamic_filtering_reward_range")
    yield o.entry(f"{key}.low", bounds[0], *flags, note="of a group's mean reward")
    yield o.entry(f"{key}.high", bounds[1], *flags)
    if o["overlong_buffer_len"] is not None and (o["remote_rm_url"] or "").endswith(".py"):
        note = "the function's score, without the penalty"
        yield o.entry(f"{key}.by", "reward_func", *flags, note=note)
