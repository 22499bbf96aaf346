"""Convert a command of TRL to a config; algorithm and rewards are converted here."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from plimsoll.errors import ConfigError
from plimsoll_convert import rules
from plimsoll_convert.launch import Launch
from plimsoll_convert.settings import Keys, Options, Sourced, Value, or_none
from plimsoll_convert.trl import sections
from plimsoll_convert.trl.sections import frozen_stage, learned_tokens, mini_batches, updates
from plimsoll_convert.trl.table import OLD_NAMES, read_options
from plimsoll_convert.writer import Converted, write_config

_AGGREGATIONS = {
    **dict.fromkeys(("grpo", "sapo"), "sequences"),
    **dict.fromkeys(("dapo", "bnpo", "cispo"), "tokens"),
    "dr_grpo": "constant",
}
"""The units of which each loss is a mean."""
_DELTA = 1e-4
"""The number that TRL adds to a group's standard deviation."""
_SCALES = {"group": "grpo", "true": "grpo", "none": "dr_grpo", "false": "dr_grpo"}
_PAIR_LOSSES = {
    **dict.fromkeys(("sigmoid", "sigmoid_norm"), "dpo"),
    **{name: name for name in ("ipo", "hinge", "robust")},
}
_SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")
"""The pair losses that use `label_smoothing` in TRL; all others ignore it."""
_THINK = r"(?s)^<think>(?!.*<think>)(.*?)</think>.*$"
_FUNCTIONS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "accuracy_reward": ("math_answer", {}),
    "reasoning_accuracy_reward": ("math_answer", {}),
    "think_format_reward": ("pattern", {"pattern": _THINK}),
    "get_soft_overlong_punishment": ("overlong", {"max_new_tokens": 1280, "buffer": 256}),
}
"""Plimsoll's reward and its options for each of TRL's reward functions."""


def job(o: Options) -> str:
    """Return the name of Plimsoll's command."""
    if o.command == "grpo":
        if o["importance_sampling_level"] == "sequence":
            return "gspo"
        return "cispo" if o["loss_type"] == "cispo" else "grpo"
    renamed = {"reward": "rm", "orpo": "dpo", "cpo": "dpo", "gkd": "distill"}
    return renamed.get(o.command, o.command)


def algorithm(o: Options) -> Keys:
    """Return the algorithm of the run."""
    match o.command:
        case "grpo":
            return _grpo(o)
        case "rloo":
            return _rloo(o)
        case "dpo":
            return _dpo(o)
        case "cpo":
            _require_known(o, "loss_type", ("sigmoid", "simpo"))
            simpo, why = o["loss_type"] == "simpo", "the labels of cpo and simpo are not smoothed"
            return {
                "loss.name": o.trace("simpo" if simpo else "cpo", "loss_type"),
                "loss.options.alpha": o.take_if(not simpo, "cpo_alpha"),
                "loss.options.gamma": o.take_if(simpo, "simpo_gamma"),
                "nll_weight": o.take_if(simpo, "cpo_alpha"),
                "smoothing": o.leave_out(why, "label_smoothing", when=o["label_smoothing"]),
            }
        case "orpo":
            return {"loss.name": Sourced("orpo", note="trl orpo")}
        case "gkd":
            share, noise = o["beta"], "noise on embeddings is one of SFT's"
            name = "forward_kl" if share == 0 else "reverse_kl" if share == 1 else "jsd"
            return {
                "divergence.name": o.trace(name, "beta"),
                "divergence.options.beta": o.take_if(name == "jsd", "beta"),
                "noise": o.leave_out(noise, "neftune_noise_alpha"),
            }
        case "sft":
            alpha = o.take("neftune_noise_alpha", or_none)
            return {"neftune_alpha": alpha, "learned_tokens": learned_tokens(o)}
    return {}


def _require_known(o: Options, id: str, known: Collection[str]) -> None:
    o.require(str(o[id]) in known, f"not supported: known are {', '.join(known)}", id)


def _grpo(o: Options) -> Keys:
    loss, level = o["loss_type"], "importance_sampling_level"
    flag, scale = "scale_rewards", str(o["scale_rewards"]).lower()
    _require_known(o, "loss_type", _AGGREGATIONS)
    o.require(scale in _SCALES, f"not supported: known are {', '.join(_SCALES)}", flag)
    whole = loss in ("cispo", "sapo") and o[level] == "sequence"
    o.require(not whole, "not supported together", level, "loss_type")
    name = _SCALES[scale]
    if o["multi_objective_aggregation"] == "normalize_then_sum":
        name, flag = "gdpo", "multi_objective_aggregation"
    delta = o.trace_if(name != "dr_grpo", _DELTA, flag, note="TRL's constant")
    constant = _AGGREGATIONS[loss] == "constant"
    low, truncation = "vllm_importance_sampling_clip_min", o["vllm_importance_sampling_mode"]
    cuts = o["use_vllm"] and o[low] and truncation.endswith("truncate")
    note = "of each process's share there" if loss == "bnpo" else ""
    divisor = o.trace(o["max_completion_length"], "max_completion_length", note="TRL's divisor")
    return {
        "advantage.name": o.trace(name, flag),
        "advantage.options.delta": delta,
        "policy_loss": _policy_loss(o, loss),
        "aggregation": o.trace(_AGGREGATIONS[loss], "loss_type", note=note),
        "aggregation_tokens": divisor if constant else None,
        "correction": _correction(o),
        "small_weights": o.leave_out("smaller weights are left as they are", low, when=cuts),
        "kl": _kl(o),
        "mini_batches": mini_batches(o),
    }


def _policy_loss(o: Options, loss: str) -> Keys:
    if loss == "cispo":
        why = f"without --epsilon_high TRL caps every ratio at {o['epsilon']:g}; its docs advise 5"
        cap = o.take("epsilon_high") or o.trace(o["epsilon"], "epsilon_high", check=why)
        return {"name": o.trace("cispo", "loss_type"), "options.cap": cap}
    if loss == "sapo":
        return {
            "name": o.trace("sapo", "loss_type"),
            "options.tau_positive": o.take("sapo_temperature_pos"),
            "options.tau_negative": o.take("sapo_temperature_neg"),
        }
    level = "importance_sampling_level"
    sequence = o[level] == "sequence"
    return {
        "name": o.trace("gspo" if sequence else "clip", level),
        "options": {**_clips(o), "dual_clip": o.take_if(not sequence, "delta")},
        "delta": o.leave_out("gspo has no dual clip", "delta", when=sequence),
    }


def _clips(o: Options) -> dict[str, Value]:
    high = o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"]
    return {"clip_low": o.take("epsilon"), "clip_high": o.trace(high, "epsilon", "epsilon_high")}


def _rloo(o: Options) -> Keys:
    """Return the algorithm of `trl rloo`.

    TRL's loss is a sum over each response, weighted by the probability ratio of the full response.
    """
    note, number = "TRL's loss is a sum over each response", updates(o)
    why = "TRL clips the ratio of the whole response, here each token's: they are alike in the "
    why += f"first of a step's {number} updates alone"
    check = why if number > 1 else ""
    return {
        "advantage.name": Sourced("rloo", note="trl rloo"),
        "policy_loss.name": Sourced("clip", note="trl rloo", check=check),
        "policy_loss.options": _clips(o),
        "aggregation": Sourced("constant", note=note),
        "aggregation_tokens": Sourced(1, note=note),
        "correction": Sourced(None, note="RLOO of TRL has none"),
        "kl": _kl(o),
        "mini_batches": mini_batches(o),
    }


def _correction(o: Options) -> Keys | Sourced:
    switch, mode = "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"
    high, low = "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"
    if not (o[switch] and o["use_vllm"]):
        return o.trace(None, switch if o["use_vllm"] else "use_vllm")
    level, _, kind = str(o[mode]).partition("_")
    name = rules.correction_name(level, clips=kind == "truncate")
    return {
        "name": o.trace(name, mode, switch),
        "options.high": o.trace(1e9 if o[high] is None else o[high], high),
        "options.level": o.trace_if(name != "icepop", level, mode),
        "options.low": o.trace_if(name != "truncate", o[low] or 0.0, low),
    }


def _kl(o: Options) -> Keys | Sourced:
    if not o["beta"]:
        return o.trace("none", "beta")
    if o.command == "rloo":
        why = "TRL takes the KL of the whole response off its reward, before the others' mean is; "
        why += "here each token loses the KL from there to the end. Expected gradients are the same"
        estimator = o.trace("k1", "beta", note="TRL's")
        return {"place": o.trace("reward", "beta", check=why), "estimator": estimator}
    flag, level, why = "use_bias_correction_kl", "importance_sampling_level", ""
    if o[flag] and o[level] == "sequence":
        why = f"with {o.show(level)} TRL weighs a token's KL by the ratio of the whole response, "
        why += f"here by the token's own; --{flag} false makes them the same"
    return {
        "place": o.trace("loss", "beta"),
        "estimator": o.trace("k3", "beta", note="TRL's"),
        "ratio_corrected": o.trace(bool(o[flag]), flag, check=why),
    }


def _dpo(o: Options) -> Keys:
    names, weights = list(o["loss_type"]), o["loss_weights"]
    learned = [name for name in names if name != "sft"]
    is_known = len(learned) == 1 and learned[0] in _PAIR_LOSSES
    why = f"not supported: known is one of {', '.join(_PAIR_LOSSES)}, beside which `sft` may stand"
    o.require(is_known, why, "loss_type")
    weights = weights or [1.0] * len(names)
    why = f"{len(names)} numbers are needed, one a loss"
    o.require(len(weights) == len(names), why, "loss_weights")
    [name], by_name = learned, dict(zip(names, weights, strict=True))
    o.require(by_name[name] > 0, f"{name} needs a weight over 0", "loss_weights")
    weight, normalised = by_name[name], name in ("sigmoid_norm", "ipo")
    check = f"the loss of pairs has weight 1 here, {weight:g} there: the learning rate counts"
    named = o.trace(_PAIR_LOSSES[name], "loss_type", check=check if weight != 1.0 else "")
    note = "TRL divides by the length"
    smoothing, why = "label_smoothing", f"TRL reads it in {', '.join(_SMOOTHED)} alone"
    keys: dict[str, Keys | Value] = {
        "loss.name": named,
        "loss.options.length_normalised": o.trace_if(normalised, True, "loss_type", note=note),
        "loss.options.beta": o.take("beta"),
        "loss.options.flip_rate": o.take_if(name == "robust", smoothing),
        "smoothing": o.leave_out(why, smoothing, when=name != "robust", kind="idle"),
    }
    if "sft" in names:
        share, note = by_name["sft"] / weight, "a mean over pairs, there over tokens"
        keys["nll_weight"] = o.trace(share, "loss_type", "loss_weights", note=note)
    return keys


def teacher(o: Options) -> Keys | None:
    """Return the teacher of `trl gkd`; None for other commands."""
    if o.command != "gkd":
        return None
    o.require_given("teacher_model_name_or_path", "the model to distil from")
    why = "not supported: the student samples that share of the responses, and `plimsoll distill` "
    o.require(o["lmbda"] <= 0, f"{why}learns on the rows' responses: --lmbda 0 is that", "lmbda")
    return {"zero.stage": frozen_stage(o)}


def reward_model(o: Options) -> Keys | None:
    """Return the reward model, or None if none is given."""
    if o["reward_model_name_or_path"] is None:
        return None
    return {
        "role.zero.stage": frozen_stage(o),
        "weight": o.trace(_weights(o)[0], "reward_weights"),
        "tokenizer": Sourced("own", note="TRL tokenises for the model"),
    }


def _weights(o: Options) -> list[float]:
    """Return the weights of the reward model (if any) and of the functions, in this order."""
    model, functions = o["reward_model_name_or_path"], list(o["reward_funcs"] or ())
    number = len(functions) + (model is not None)
    if number == 0:
        ways = "--reward_funcs or --reward_model_name_or_path"
        raise ConfigError(f"Nothing scores the responses. Give {ways}.")
    weights = list(o["reward_weights"] or (1.0,) * number)
    o.require(len(weights) == number, "one number is needed for each reward", "reward_weights")
    return weights


def rewards(o: Options) -> Mapping[str, Keys]:
    """Return the parts of the reward that functions give, by name."""
    if not o.rl:
        return {}
    functions = list(o["reward_funcs"] or ())
    weights = _weights(o)[o["reward_model_name_or_path"] is not None :]
    parts: dict[str, Keys] = {}
    for function, weight in zip(functions, weights, strict=True):
        check, (name, values) = "", _FUNCTIONS.get(function, ("", {}))
        if not name and "." in function:
            name = ":".join(function.rsplit(".", 1))
            check = "it runs as it is, and gets every column by its own name"
        elif not name:
            ways = f"{', '.join(_FUNCTIONS)}, or a dotted path such as my_module.my_reward"
            raise ConfigError(f"--reward_funcs {function}: TRL has no such function: {ways}.")
        part, note = function.rpartition(".")[2], "of each part here, of their sum there"
        parts[re.sub(r"\W+", "_", part) or "reward"] = {
            "name": o.trace(name, "reward_funcs", check=check),
            "options": {k: o.trace(v, "reward_funcs", note=function) for k, v in values.items()},
            "weight": o.trace(weight, "reward_weights"),
            "clip": o.take("reward_clip_range", note=note),
        }
    return parts


_VERSION = "1.16"
_OLD_NOTE = (
    "is of TRL before 1.0 (0.14 to 0.16): the defaults of that time are taken, but for top_k 50, "
    "which the policy's ratio does not allow. 0.16 takes the mean over all tokens (loss_type bnpo)."
)


def convert(launch: Launch, cards: int | None = None) -> Converted:
    """Return a config that has the same meaning as a TRL command.

    Args:
        launch: The command.
        cards: Number of cards per machine, if the command does not say it.

    Raises:
        ConfigError: Values or files cannot be read, Plimsoll cannot do what they say, or the config
            is wrong.
        SettingsConflict: Settings cannot work together.
    """
    o = read_options(launch, cards)
    run: Keys = {
        "cluster": sections.machines(o),
        "actor": sections.actor(o),
        "reference": sections.reference(o),
        "teacher": teacher(o),
        "reward_model": reward_model(o),
        "rewards": rewards(o),
        "data": sections.data(o),
        "batch": sections.batch(o),
        "rollout": sections.rollout(o),
        "eval_sampling": {} if o["eval_strategy"] != "no" else None,
        "algorithm": algorithm(o),
        "run": sections.run(o),
    }
    old = o.given(*OLD_NAMES)
    about = f"TRL {'before 1.0' if old else _VERSION}, trl {o.command}"
    note = f"--{old[0]} {_OLD_NOTE}" if old else ""
    return write_config(job(o), run, o, about, note)
