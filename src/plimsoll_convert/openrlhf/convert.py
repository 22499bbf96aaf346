"""Convert a command of OpenRLHF to a config; algorithm and rewards are converted here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from plimsoll.config.yaml_tree import write_value
from plimsoll.errors import ConfigError, PlimsollError
from plimsoll_convert import rules
from plimsoll_convert.launch import Launch
from plimsoll_convert.openrlhf import COMMANDS, Version, format_version, sections
from plimsoll_convert.openrlhf.sections import frozen_role, mini_batches, rollout_lengths
from plimsoll_convert.openrlhf.table import CORRECTIONS, ESTIMATORS, read_options
from plimsoll_convert.settings import Keys, Options, Remark, Sourced, Value
from plimsoll_convert.writer import Converted, differences, write_config

_WHITENED_RLOO = (0, 8, 4)
"""The last version that whitens rloo's advantages. Whitening removes the constant factor between
rloo and reinforce_baseline, so such an rloo is reinforce_baseline."""
_FROM_ONE = (0, 9, 0)
"""The last version that counts steps from 1."""
_LEVELS = ("is_correction_level", "is_correction_mode", "is_correction_gating")
_SWITCHES = ("enable_vllm_is_correction", "use_icepop", "vllm_is_correction_type")
_THRESHOLD = "vllm_is_truncated_threshold"
CORRECTION_FLAGS = (*_LEVELS, *_SWITCHES, _THRESHOLD)
_SECONDS = 180.0
"""OpenRLHF's time limit for a reward server's answer, in seconds."""
_TURNS = 1000
"""The most turns of an agent's episode. OpenRLHF limits only the length of an episode."""


def estimator(o: Options) -> str:
    """Return Plimsoll's name of the advantage estimator."""
    name = o["advantage_estimator"]
    whitened = name == "rloo" and o.version <= _WHITENED_RLOO
    return ESTIMATORS["reinforce_baseline" if whitened else name]


def job(o: Options) -> str:
    """Return the name of Plimsoll's command: a preset such as `grpo` if there is one, else `rl`."""
    if not o.rl:
        return "distill" if o.command == "kd" else o.command
    name = rules.PRESETS.get(estimator(o), "rl")
    if name == "grpo" and o["policy_loss_type"] == "gspo":
        return "gspo"
    return "dapo" if name == "grpo" and o["dynamic_filtering"] else name


def algorithm(o: Options) -> Keys:
    """Return the algorithm of the run."""
    if not o.rl:
        return _offline(o)
    frozen, name, flag = o["freezing_actor_steps"], estimator(o), "advantage_estimator"
    warmup = max(0, frozen if o.version <= _FROM_ONE else frozen + 1)
    gspo = o["policy_loss_type"] == "gspo"
    sequences = gspo or o["loss_agg_mode"] == "seq-mean-token-mean"
    whitened = o[flag] == "rloo" and name != "rloo"
    note = "whitened over the batch until 0.8.4, which makes it the same" if whitened else ""
    discounts = name == "gae" or (name == "reinforce_pp" and o.given("gamma"))
    delta = o.trace_if(name == "grpo", 1e-9, flag, note="OpenRLHF's constant")
    both = o["eps_clip_low_high"]
    bound = "eps_clip" if both is None else "eps_clip_low_high"
    low, high = both or (o["eps_clip"], o["eps_clip"])
    clips = gspo or o.given(bound)
    return {
        "advantage.name": o.trace(name, flag, note=note),
        "advantage.options.gamma": o.take_if(discounts, "gamma"),
        "advantage.options.gae_lambda": o.take_if(name == "gae", "lambd"),
        "advantage.options.delta": delta,
        "policy_loss.name": o.trace("gspo" if gspo else "clip", "policy_loss_type"),
        "policy_loss.options.clip_low": o.trace_if(clips, low, bound),
        "policy_loss.options.clip_high": o.trace_if(clips, high, bound),
        "policy_loss.options.dual_clip": o.take_if(not gspo, "dual_clip"),
        "aggregation": o.trace("sequences" if sequences else "tokens", "loss_agg_mode"),
        "correction": _correction(o),
        "kl": _kl(o),
        "value_clip": o.take_if(o.has_critic, "value_clip"),
        "critic_warmup_steps": o.trace_if(o.has_critic, warmup, "freezing_actor_steps"),
        "epochs": o.take("max_epochs"),
        "mini_batches": mini_batches(o),
    }


def correction_of(o: Options) -> tuple[str, str, str, float, float] | None:
    """Return OpenRLHF's correction for the ratio of the trainer's to the sampler's probabilities.

    Returns:
        What is corrected (`token` or `seq`), what happens outside of the bounds (`mask` or `clip`),
        the statistic that is compared with the bounds, and the lower and the upper bound. None if
        there is no correction.
    """
    bounds = o[_THRESHOLD] or (0.0,)
    low, high = 0.0 if len(bounds) == 1 else bounds[0], bounds[-1]
    if o["is_correction_level"] is not None:
        level, mode, gating = (o[flag] for flag in _LEVELS)
        return None if level == "off" else (level, mode, gating, low, high)
    if not o["enable_vllm_is_correction"]:
        return None
    name = "icepop" if o["use_icepop"] else o["vllm_is_correction_type"] or "tis"
    return (*CORRECTIONS[name], "ratio", low, high)


def why_uncorrected(o: Options) -> str:
    """Return why Plimsoll cannot make OpenRLHF's correction; "" if it can or if there is none."""
    correction = correction_of(o)
    if correction is None:
        return ""
    if o["policy_loss_type"] == "gspo":
        return "OpenRLHF's gspo then divides by the sampler's probabilities, without a bound"
    if correction[2] != "ratio":
        return f"a correction is bounded by ratios, not by {correction[2]}"
    return ""


def _correction(o: Options) -> Keys | Sourced:
    correction = correction_of(o)
    switch = o.first("is_correction_level", "enable_vllm_is_correction")
    if correction is None:
        return o.trace(None, switch)
    if why_uncorrected(o):
        return Sourced(None, tuple(o.given(switch)), note="no correction")
    level, mode, _, low, high = correction
    flags, name = (*_LEVELS, *_SWITCHES), rules.correction_name(level, clips=mode == "clip")
    note, kept = "seq is the geometric mean", "what stays keeps its weights"
    return {
        "name": o.trace(name, *flags),
        "options.level": o.trace_if(name == "mask", "geometric", *flags, note=note),
        "options.kept": o.trace_if(name == "mask", "token", *flags, note=kept),
        "options.low": o.trace_if(mode != "clip", low, _THRESHOLD),
        "options.high": o.trace(high, _THRESHOLD),
    }


def _kl(o: Options) -> Keys | Sourced:
    if not o["init_kl_coef"]:
        return o.trace("none", "init_kl_coef")
    place, target = "loss" if o["use_kl_loss"] else "reward", o["kl_target"]
    corrected = o["kl_unbiased_gradient"] and place == "loss"
    return {
        "place": o.trace(place, "use_kl_loss"),
        "ratio_corrected": o.take_if(corrected, "kl_unbiased_gradient"),
        "adaptive.per": o.trace_if(target, "token", "kl_target", note="OpenRLHF's target"),
        "adaptive.horizon": o.take_if(target, "kl_horizon"),
    }


def _offline(o: Options) -> Keys:
    """Return the algorithm of a job that learns from rows, not from sampled responses."""
    if o.command == "rm":  # OpenRLHF takes every name but sigmoid for the other loss
        name = "log_sigmoid" if o["loss"] == "sigmoid" else "log_exp"
        return {"loss.name": o.trace(name, "loss")}
    if o.command == "kto":
        given = o.given("desirable_loss_weight", "undesirable_loss_weight")
        return {f"loss.options.{flag.replace('_loss', '')}": o.take(flag) for flag in given}
    if o.command == "dpo":
        smooths = not o["ipo"] and o.given("label_smoothing")
        return {
            "loss.name": o.trace("ipo" if o["ipo"] else "dpo", "ipo"),
            "loss.options.label_smoothing": o.take_if(smooths, "label_smoothing"),
        }
    return {}


def reward_models(o: Options) -> list[Keys]:
    """Return the reward models; empty if an agent, servers or a function give the reward."""
    if not o.rl or o["agent_func_path"] or o["remote_rm_url"]:
        return []
    if not o["reward_pretrain"]:
        flags = ("reward_pretrain", "remote_rm_url", "agent_func_path")
        known = ", ".join(o.names[flag] for flag in flags if flag in o.values)
        raise ConfigError(f"Nothing scores the responses. Give one of {known}.")
    offload = o.first("reward.offload", "ref_reward_offload")
    return [
        {"role": frozen_role(o, o.trace(path, "reward_pretrain"), offload)}
        for path in _split(o["reward_pretrain"])
    ]


def agents(o: Options) -> Mapping[str, Keys]:
    """Return a dict with the agent, or an empty dict if no agent file is given."""
    flag = "agent_func_path"
    if not o[flag]:
        return {}
    response = rollout_lengths(o)[1]
    why = "it runs as it is, but is refused if it samples otherwise than rollout.sampling says"
    limit = o.first("generate_max_len", "max_new_tokens")
    turns = min(_TURNS, max(1, response // 2))
    agent = {
        "name": o.trace(o[flag], flag, check=why),
        "max_tokens": o.trace(response, limit, note="of an episode after its prompt"),
        "max_turns": o.trace(turns, flag, note="bounded there by length alone"),
        "tool_format": o.trace("none", flag, note="an agent reads text"),
    }
    return {"agent": agent}


def rewards(o: Options) -> Mapping[str, Keys]:
    """Return the parts of the reward by name, except reward models."""
    bounds = o.take_if(clips_rewards(o), "reward_clip_range", tuple)
    parts: dict[str, Keys] = {n: {**part, "clip": bounds} for n, part in scored_parts(o).items()}
    size, flag = "overlong_buffer_len", "stop_properly_penalty_coef"
    if o[size] is not None:
        note = "OpenRLHF counts from an episode's first sampled token to its last"
        longest = o.trace(rollout_lengths(o)[1], "max_new_tokens", "max_len")
        parts["overlong"] = {
            "name": o.trace("overlong", size),
            "options.max_new_tokens": longest,
            "options.buffer": o.take(size, int),
            "options.factor": o.take("overlong_penalty_factor", float),
            "options.observations": o.trace_if(o["agent_func_path"], True, size, note=note),
        }
    if o[flag] is not None:
        kept = o.trace(max(0.0, o[flag]), flag)
        parts = {name: {**part, "truncated_factor": kept} for name, part in parts.items()}
        if o[flag] < 0:
            parts["length"] = {"name": o.trace("length", flag), "options.value": o.take(flag)}
    return parts


def clips_rewards(o: Options) -> bool:
    """Return whether rewards are clipped.

    Estimators that compare the rewards of a group hardly ever reach the bounds.
    """
    return o.rl and estimator(o) in ("gae", "reinforce_pp")


def scored_parts(o: Options) -> Mapping[str, Keys]:
    """Return the parts of the reward that servers or a function give, by name."""
    flag = "remote_rm_url"
    if o["agent_func_path"] or not o[flag]:
        return {}
    urls = _split(o[flag])
    tokenizer = o.trace(o["pretrain"], "pretrain", note="texts as the actor saw them")
    if urls and urls[0].endswith(".py"):
        options = {"path": o.trace(urls[0], flag), "tokenizer": tokenizer}
        return {"reward_func": {"name": o.trace("openrlhf_function", flag), "options": options}}
    server = {
        "urls": o.trace(tuple(urls), flag),
        "format": o.trace("openrlhf", flag),
        "tokenizer": tokenizer,
        "time_limit": Sourced(_SECONDS, note="OpenRLHF waits so long"),
    }
    return {"remote": {"http": server}}


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def convert(launch: Launch, version: Version | None = None, cards: int | None = None) -> Converted:
    """Return a config that has the same meaning as an OpenRLHF command.

    Args:
        launch: The command.
        version: Version of OpenRLHF; None to find it by the flags.
        cards: Number of cards per machine, if the command does not say it.

    Raises:
        ConfigError: Flags cannot be read, Plimsoll cannot do what they say, or the config is wrong.
        SettingsConflict: Settings cannot work together.
    """
    options, (first, last) = read_options(launch, version, cards)
    converted = _convert(options)
    if first == last:
        return converted
    since = format_version(first)
    try:
        older = _convert(read_options(launch, first, cards)[0])
        changed = [f"{k}: {write_value(v)}" for k, v in differences(converted, older).items()]
        how = f"--version {since} would mean {', '.join(changed)}."
        note = how if changed else "They mean the same in all of them."
    except PlimsollError:
        note = f"As one of {since} it is refused: --version says which it is."
    span = f"The flags are those of {since} to {format_version(last)}."
    return replace(converted, version_note=f"{span} {note}")


def _convert(o: Options) -> Converted:
    """Return the config of a command in the version of its options."""
    o.require_given("pretrain", "the model to train")
    models = reward_models(o)
    several = {f"model_{i}": model for i, model in enumerate(models, 1)}
    averaged = o.trace_if(o["enable_ema"], o["ema_beta"], "ema_beta", "enable_ema")
    run: dict[str, Keys | Value | Remark] = {
        "cluster": sections.machines(o, len(models)),
        "actor": {**sections.trained_role(o, "actor"), "ema.decay": averaged},
        "critic": sections.critic(o),
        "reference": sections.reference(o),
        "teacher": sections.teacher(o),
        "reward_model": models[0] if len(models) == 1 else None,
        "reward_models": several if len(models) > 1 else {},
        "rewards": rewards(o),
        "environments": agents(o),
        "data": sections.data(o),
        "batch": sections.batch(o),
        "rollout": sections.rollout(o) if o.rl else None,
        "rollout.sampling.max_new_tokens": sections.response_length(o) if o.rl else None,
        "eval_sampling": sections.eval_sampling(o) if o.rl else None,
        "algorithm": algorithm(o),
        "run": sections.run(o),
    }
    run |= {"half": rules.leave_out_halves(o, "param_dtype")}
    in_effect = o.typed.keys() | (o.values.keys() & {"reward_clip_range", _THRESHOLD})
    for holds, flags, why in _lacking(o) if o.rl else _lacking_of_rows(o):
        for flag in [f for f in flags.split() if holds and f in in_effect]:
            run[f"left_out.{flag}"] = Remark("lacking", flag, why)
    about = f"OpenRLHF {format_version(o.version)}, {COMMANDS[o.command]}"
    return write_config(job(o), run, o, about)


_Lacking = tuple[object, str, str]
"""Whether flags are left out, their ids (separated by blanks), and the reason."""


def _lacking_of_rows(o: Options) -> Iterator[_Lacking]:
    margins = o["margin_loss"] and o["loss"] != "sigmoid"
    yield margins, "margin_loss", "OpenRLHF's LogExpLoss leaves margins out; here they count"
    why = "a turn of another column is not joined: write it into the messages"
    yield o["multiturn"], "output_key", why
    several = "," in (o["eval_dataset"] or "")
    yield several, "eval_dataset", "jobs that learn from data have one held-out set; the first"


def _lacking(o: Options) -> Iterator[_Lacking]:
    correction, whitens = correction_of(o), ("gae", "reinforce_pp", "reinforce_pp_baseline")
    why = "advantages are centred and scaled, or neither"
    yield estimator(o) in whitens, "no_advantage_std_norm", why
    yield o["policy_loss_type"] == "gspo", "dual_clip", "gspo has no dual clip"
    if reason := why_uncorrected(o):
        yield True, " ".join(CORRECTION_FLAGS), reason
    elif correction is not None and correction[1] == "clip" and correction[3] > 0:
        why = f"weights below {correction[3]:g} are raised to it there; here they stay"
        yield True, _THRESHOLD, why
    more = (o["vllm_generate_batch_size"] or 0) > o["rollout_batch_size"]
    yield more, "vllm_generate_batch_size", "no more is sampled than is learned"
    modelled = not (o["agent_func_path"] or o["remote_rm_url"])
    why = "scores are as the model gives them: reward_model.weight divides"
    yield modelled, "normalize_reward", why
    why = "reward models are on the actor's ranks or their own (cluster.reward_ranks)"
    yield modelled and sections.shares_critics_cards(o), "colocate_critic_reward", why
    yield o["value_head_prefix"] != "score", "value_head_prefix", "a head is saved as `score`"
    unscored, why = not scored_parts(o), "functions and servers alone have such a factor"
    yield unscored, "stop_properly_penalty_coef", why
    why = "rewards of models and agents are not clipped"
    yield unscored and clips_rewards(o), "reward_clip_range", why
