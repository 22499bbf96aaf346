"""Convert a command of verl to a config; algorithm and rewards are converted here."""

from __future__ import annotations

import os
from collections.abc import Mapping

from plimsoll.errors import ConfigError
from plimsoll_convert import rules
from plimsoll_convert.launch import Launch
from plimsoll_convert.settings import Keys, Options, Sourced, Value, not_negative
from plimsoll_convert.verl import sections
from plimsoll_convert.verl.sections import RESPONSE, files, kl_in_reward, mini_batches
from plimsoll_convert.verl.table import OLD_PROGRAM, read_options
from plimsoll_convert.writer import Converted, write_config

_ESTIMATORS = {
    **{name: name for name in ("gae", "grpo", "rloo", "remax", "gdpo")},
    **{f"{name}_vectorized": name for name in ("grpo", "rloo")},
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}
_LOSSES = {"vanilla": "clip", **{name: name for name in ("gspo", "sapo", "cispo", "dppo_tv")}}
_AGGREGATIONS = {
    "token-mean": "tokens",
    "seq-mean-token-mean": "sequences",
    **dict.fromkeys(("seq-mean-token-sum", "seq-mean-token-sum-norm"), "constant"),
}
_KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_TAKEN_OFF = {
    "grpo": "the group's mean and deviation are",
    "dr_grpo": "the group's mean is",
    "rloo": "the mean of the group's others is",
    "reinforce_pp_baseline": "the group's mean is",
}
"""What each estimator of response rewards subtracts or divides by, as part of a message. Other
estimators subtract the KL token by token, as Plimsoll does."""
_MANAGERS = ("naive", "dapo", "batch", "prime", "gdpo", "rate_limited", "remote")
_ACTOR = "actor_rollout_ref.actor"
_MODE = f"{_ACTOR}.policy_loss.loss_mode"
_ESTIMATOR = "algorithm.adv_estimator"
_SCALED = "algorithm.norm_adv_by_std_in_grpo"
_WEIGHED = "algorithm.rollout_correction.rollout_is"
_BOUND = "algorithm.rollout_correction.rollout_is_threshold"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_CAP = f"{_ACTOR}.tis_imp_ratio_cap"
_FUNCTION, _MODELLED = "reward.custom_reward_function.path", "reward.reward_model.enable"


def _choose(o: Options, id: str, choices: Mapping[str, str]) -> str:
    """Return Plimsoll's name for the value of a setting.

    Raises:
        ConfigError: Plimsoll has no counterpart of the value.
    """
    name = str(o[id])
    o.require(name in choices, f"not supported: known are {', '.join(choices)}", id)
    return choices[name]


def _estimator(o: Options) -> str:
    name = _choose(o, _ESTIMATOR, _ESTIMATORS)
    return "dr_grpo" if name == "grpo" and not o[_SCALED] else name


def job(o: Options) -> str:
    """Return the name of Plimsoll's command."""
    if not o.rl:
        return "sft"
    name, loss = _estimator(o), o[_MODE]
    if name == "grpo" and loss in ("gspo", "cispo"):
        return str(loss)
    if name == "grpo" and o["algorithm.filter_groups.enable"] and loss == "vanilla":
        return "dapo"
    return rules.PRESETS.get(name, "rl")


def algorithm(o: Options) -> Keys:
    """Return the algorithm of the run."""
    if not o.rl:
        return {}
    mode, factor = f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.loss_scale_factor"
    kind = _choose(o, mode, _AGGREGATIONS)
    tokens: Value = None
    if o[mode] == "seq-mean-token-sum":
        tokens = o.trace(1, mode, note="a sum over each response")
    elif kind == "constant":
        tokens = o.take(factor) or o.take(RESPONSE)
    name, critic = _estimator(o), o.has_critic
    clip, size = "critic.cliprange_value", "critic.ppo_mini_batch_size"
    scales = name in ("grpo", "gdpo")
    why = "ratios are of the trainer's own log-probs; algorithm.correction looks at the sampler's"
    delta = o.trace_if(scales, 1e-6, _ESTIMATOR, note="verl's constant")
    return {
        "advantage.name": o.trace(name, _ESTIMATOR, _SCALED),
        "advantage.options.gamma": o.take_if(name in ("gae", "reinforce_pp"), "algorithm.gamma"),
        "advantage.options.gae_lambda": o.take_if(name == "gae", "algorithm.lam"),
        "advantage.options.delta": delta,
        "policy_loss": _policy_loss(o),
        "bypass": o.leave_out(why, _BYPASS, when=o[_MODE] != "dppo_tv" and o[_BYPASS]),
        "aggregation": o.trace(kind, mode),
        "aggregation_tokens": tokens,
        "correction": _correction(o),
        "kl": _kl(o),
        "value_clip": o.trace_if(critic, o[clip], clip),
        "critic_warmup_steps": o.take_if(critic, "trainer.critic_warmup", not_negative),
        "mini_batches": mini_batches(o, f"{_ACTOR}.ppo_mini_batch_size"),
        "critic_mini_batches": mini_batches(o, size) if critic else None,
    }


def _policy_loss(o: Options) -> Keys:
    name = _choose(o, _MODE, _LOSSES)
    both, dual = f"{_ACTOR}.clip_ratio", f"{_ACTOR}.clip_ratio_c"
    bounds = (f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high")
    low, high = (o.take(bound) or o.trace(o[both], bound, both) for bound in bounds)
    why, options = "", dict[str, Value]()
    if name == "sapo":
        flags = {"tau_positive": f"{_ACTOR}.tau_pos", "tau_negative": f"{_ACTOR}.tau_neg"}
        options = {key: o.take(flag) for key, flag in flags.items()}
    elif name == "dppo_tv":  # its thresholds have the names of PPO's clips
        options = {"threshold": high, "threshold_low": low, "cap": o.take(dual)}
        options["penalty"] = Sourced(0.0, note="verl has none")
        why = "probabilities are compared with the sampler's; verl compares them with those of its "
        why += f"trainer when the step began, unless {_BYPASS}=True"
    else:
        capped = o.take_if(name == "clip", dual)
        options = {"clip_low": low, "clip_high": high, "dual_clip": capped}
    return {"name": o.trace(name, _MODE, check="" if o[_BYPASS] else why), "options": options}


def _correction(o: Options) -> Keys | Sourced:
    level = o[_WEIGHED]
    if o[_MODE] == "dppo_tv":
        return Sourced(None, note="dppo_tv compares probabilities with the sampler's itself")
    name, bounds = "truncate", dict[str, Value]()
    flags: tuple[str, ...] = (_WEIGHED, _BOUND)
    if (o[_CAP] or 0) > 0 and level is None:
        level, flags, bounds = "token", (_CAP,), {"high": o.take(_CAP, float)}
    elif level is None:
        return o.trace(None, _WEIGHED)
    else:
        is_known = level in ("token", "sequence")
        o.require(is_known, "It must be token, sequence or null", _WEIGHED)
        try:
            numbers = [float(bound) for bound in str(o[_BOUND]).split("_")]
        except ValueError as error:
            why = "It must be a number, or two as 0.5_5.0."
            raise ConfigError(f"{o.show(_BOUND)}: {why}") from error
        bounds = {"high": o.trace(numbers[0], *flags)}
        if len(numbers) > 1:
            name = "mask"
            bounds = {"low": o.trace(numbers[0], _BOUND), "high": o.trace(numbers[1], _BOUND)}
    return {
        "name": o.trace(name, *flags),
        "options": {"level": o.trace(level, *flags), **bounds},
    }


def _kl(o: Options) -> Keys | Sourced:
    loss, reward = f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    if o[loss]:
        kind, note = f"{_ACTOR}.kl_loss_type", "the gradient of the KL itself"
        corrected, why = str(o[kind]).endswith("+"), "the KL is in one place, here in the loss"
        return {
            "place": o.trace("loss", loss),
            "coefficient": o.take(f"{_ACTOR}.kl_loss_coef"),
            "estimator": _kl_estimator(o, kind),
            "ratio_corrected": o.trace_if(corrected, True, kind, note=note),
            "reward": o.leave_out(why, reward, when=kl_in_reward(o)),
        }
    if not kl_in_reward(o):
        why = "verl's gdpo scales the parts of the reward, and the KL is none of them"
        note = why if o[reward] else "no KL is asked for"
        return Sourced("none", tuple(o.given(loss, reward)), note=note)
    names = "kl_coef type target_kl horizon"
    coefficient, kind, target, horizon = rules.ids_of("algorithm.kl_ctrl", names)
    check, adapts = "", o[kind] == "adaptive"
    if taken_off := _TAKEN_OFF.get(_estimator(o)):
        check = f"verl takes the KL of the whole response off its reward, before {taken_off} "
        check += "taken; here each token loses, after that, the KL from there to the end"
    return {
        "place": o.trace("reward", reward, check=check),
        "coefficient": o.take(coefficient),
        "estimator": _kl_estimator(o, "algorithm.kl_penalty"),
        "adaptive.target": o.trace_if(adapts, o[target], target, kind),
        "adaptive.horizon": o.take_if(adapts, horizon),
        "adaptive.per": o.trace_if(adapts, "token", target, note="verl's target"),
    }


def _kl_estimator(o: Options, id: str) -> Sourced:
    name = str(o[id]).removesuffix("+")
    o.require(name in _KL_TYPES, f"not supported: known are {', '.join(_KL_TYPES)}", id)
    return o.trace(_KL_TYPES[name], id)


def reward_model(o: Options) -> Keys | None:
    """Return the reward model; None if there is none, or if a function gives the reward."""
    flag = "reward.reward_model.model_path"
    if not o.rl or o[_FUNCTION] is not None or not o[_MODELLED]:
        return None
    o.require_given(flag, "the reward model")
    why = "it must be a classifier with one label; one that answers in words is a reward `judge`"
    path = o.trace(os.path.expanduser(str(o[flag])), flag, _MODELLED, check=why)
    return {
        "role.model.path": path,
        "role.zero.stage": Sourced(3, note="divided as the others are"),
        "tokenizer": o.trace("own", flag, note="verl writes its chat template"),
    }


def rewards(o: Options) -> Mapping[str, Keys]:
    """Return the parts of the reward that functions and rules give, by name."""
    if not o.rl:
        return {}
    manager = "reward.reward_manager.name"
    known = f"not supported: known are {', '.join(_MANAGERS)}"
    o.require(o[manager] in _MANAGERS, known, manager)
    parts: dict[str, Keys] = {}
    if o[_FUNCTION] is not None:
        name = "reward.custom_reward_function.name"
        options = {
            "path": o.trace(os.path.expanduser(str(o[_FUNCTION])), _FUNCTION),
            "function": o.trace(o[name] or "compute_score", name),
        }
        parts["score"] = {"name": o.trace("verl_function", _FUNCTION), "options": options}
    elif not o[_MODELLED]:
        # `exact_match` after `####` if all files are GSM8K, else `math_answer`
        note = "verl scores by data_source"
        why = "verl scores GSM8K by what follows ####, mathematics by the box, programs by tests"
        graded = all("gsm8k" in path.lower() for path in files(o, "data.train_files"))
        rule = Sourced("exact_match" if graded else "math_answer", note=note, check=why)
        marker = {"options.marker": Sourced("####", note=note)} if graded else {}
        parts["score"] = {"name": rule, **marker}
    buffer = "reward.reward_kwargs.overlong_buffer_cfg"
    on, size, factor = rules.ids_of(buffer, "enable len penalty_factor")
    if o[on]:
        o.require_given(size, "the buffer's length")
        longest = o.take("reward.reward_kwargs.max_resp_len") or o.take(RESPONSE)
        parts["overlong"] = {
            "name": o.trace("overlong", on),
            "options.max_new_tokens": longest,
            "options.buffer": o.take(size),
            "options.factor": o.take(factor),
        }
    return parts


_VERSION = "0.9.1"
_OLD_NOTE = (
    "The program is older than verl 0.9.1: its own defaults are taken. Its later versions have "
    "gradient checkpointing on."
)


def convert(launch: Launch, cards: int | None = None) -> Converted:
    """Return a config that has the same meaning as a verl command.

    Args:
        launch: The command.
        cards: Number of cards per machine, if the command does not say it.

    Raises:
        ConfigError: Values cannot be read, Plimsoll cannot do what they say, or the config is
            wrong.
        SettingsConflict: Settings cannot work together.
    """
    o = read_options(launch, cards)
    scorer = reward_model(o)
    run: Keys = {
        "cluster": sections.machines(o, has_reward_model=scorer is not None),
        "actor": sections.actor(o),
        "critic": sections.critic(o),
        "reference": sections.reference(o),
        "reward_model": scorer,
        "rewards": rewards(o),
        "data": sections.data(o),
        "batch": sections.batch(o),
        "rollout": sections.rollout(o),
        "eval_sampling": sections.eval_sampling(o) if o.rl else None,
        "algorithm": algorithm(o),
        "run": sections.run(o),
    }
    is_old = launch.program == OLD_PROGRAM
    about = f"verl {'before ' if is_old else ''}{_VERSION}, {launch.program}"
    note = _OLD_NOTE if is_old else ""
    return write_config(job(o), run, o, about, note)
