"""Convert the settings of the algorithm and the rewards: advantages, losses, corrections, KL."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from plimsoll.errors import ConfigError
from plimsoll_convert.options import Options, Remark
from plimsoll_convert.trl.data import learned_tokens, mini_batches, updates
from plimsoll_convert.trl.roles import frozen_stage
from plimsoll_convert.values import Keys, Sourced, Value

_AGGREGATIONS = {
    "grpo": "sequences",
    "sapo": "sequences",
    "dapo": "tokens",
    "bnpo": "tokens",
    "cispo": "tokens",
    "dr_grpo": "constant",
}
"""The units of which each loss is a mean."""
_DELTA = 1e-4
"""The number that TRL adds to a group's standard deviation."""
_SCALES = {"group": "grpo", "true": "grpo", "none": "dr_grpo", "false": "dr_grpo"}
_PAIR_LOSSES = {
    "sigmoid": "dpo",
    "sigmoid_norm": "dpo",
    "ipo": "ipo",
    "hinge": "hinge",
    "robust": "robust",
}
_NORMALISED = ("sigmoid_norm", "ipo")
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
            return _cpo(o)
        case "orpo":
            name = Sourced("orpo", note="trl orpo")
            return {"loss": {"name": name, "options": {"beta": o.take("beta")}}}
        case "kto":
            names = ("beta", "desirable_weight", "undesirable_weight")
            return {
                "loss": {"options": {name: o.take(name) for name in names}},
                "/reference_logprobs.precompute": o.take("precompute_ref_log_probs"),
            }
        case "gkd":
            return _gkd(o)
        case "reward":
            return {"centring": o.take("center_rewards_coefficient")}
    noise = o.take("neftune_noise_alpha", lambda alpha: alpha or None)
    return {"neftune_alpha": noise, "learned_tokens": learned_tokens(o)}


def _unsupported(o: Options, id: str, known: str) -> ConfigError:
    return ConfigError(f"{o.show(id)}: not supported: {known}. Leave it out, or train it with TRL.")


def _grpo(o: Options) -> Keys:
    loss, level = o["loss_type"], "importance_sampling_level"
    if loss not in _AGGREGATIONS:
        raise _unsupported(o, "loss_type", f"known are {', '.join(_AGGREGATIONS)}")
    if loss in ("cispo", "sapo") and o[level] == "sequence":
        raise ConfigError(f"{o.show(level)} with {o.show('loss_type')}: not supported.")
    constant = _AGGREGATIONS[loss] == "constant"
    tokens = o.take("max_completion_length", note="TRL's divisor") if constant else None
    note = "of each process's share there" if loss == "bnpo" else ""
    return {
        "advantage": _advantage(o),
        "policy_loss": _policy_loss(o, loss),
        "aggregation": o.trace(_AGGREGATIONS[loss], "loss_type", note=note),
        "aggregation_tokens": tokens,
        "correction": _correction(o),
        "kl": _kl(o),
        "epochs": o.take("num_iterations"),
        "mini_batches": mini_batches(o),
        "mask_truncated": o.take("mask_truncated_completions"),
        "entropy_bonus": o.take("entropy_coef"),
    }


def _advantage(o: Options) -> Keys:
    scale, flag = str(o["scale_rewards"]).lower(), "scale_rewards"
    if scale not in _SCALES:
        raise _unsupported(o, flag, "rewards are scaled by their group, or not: group or none")
    name = _SCALES[scale]
    if o["multi_objective_aggregation"] == "normalize_then_sum":
        name, flag = "gdpo", "multi_objective_aggregation"
    delta = None if name == "dr_grpo" else o.trace(_DELTA, flag, note="TRL's constant")
    return {"name": o.trace(name, flag), "options": {"delta": delta}}


def _clips(o: Options) -> dict[str, Value]:
    high = o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"]
    return {"clip_low": o.take("epsilon"), "clip_high": o.trace(high, "epsilon", "epsilon_high")}


def _policy_loss(o: Options, loss: str) -> Keys:
    if loss == "cispo":
        cap = o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"]
        why = f"without --epsilon_high TRL caps every ratio at {cap:g}; its docs advise 5"
        check = why if o["epsilon_high"] is None else ""
        options: dict[str, Value] = {"cap": o.trace(cap, "epsilon_high", check=check)}
        return {"name": o.trace("cispo", "loss_type"), "options": options}
    if loss == "sapo":
        flags = {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg"}
        options = {name: o.take(flag) for name, flag in flags.items()}
        return {"name": o.trace("sapo", "loss_type"), "options": options}
    level = "importance_sampling_level"
    sequence = o[level] == "sequence"
    return {
        "name": o.trace("gspo" if sequence else "clip", level),
        "options": {**_clips(o), "dual_clip": None if sequence else o.take("delta")},
    }


def _rloo(o: Options) -> Keys:
    """Return the algorithm of `trl rloo`.

    TRL's loss is a sum over each response, weighted by the probability ratio of the full response.
    """
    note, number = "TRL's loss is a sum over each response", updates(o)
    why = "TRL clips the ratio of the whole response, here each token's: they are alike in the "
    why += f"first of a step's {number} updates alone"
    check = why if number > 1 else ""
    return {
        "advantage": {"name": Sourced("rloo", note="trl rloo")},
        "policy_loss": {
            "name": Sourced("clip", note="trl rloo", check=check),
            "options": _clips(o),
        },
        "aggregation": Sourced("constant", note=note),
        "aggregation_tokens": Sourced(1, note=note),
        "correction": Sourced(None, note="RLOO of TRL has none"),
        "kl": _kl(o),
        "epochs": o.take("num_iterations"),
        "mini_batches": mini_batches(o),
        "mask_truncated": o.take("mask_truncated_completions"),
    }


def _correction(o: Options) -> Keys | Sourced:
    switch, mode, high, low = (
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min",
    )
    if not (o[switch] and o["use_vllm"]):
        return o.trace(None, switch if o["use_vllm"] else "use_vllm")
    level, _, kind = str(o[mode]).partition("_")
    name = "truncate" if kind == "truncate" else "icepop" if level == "token" else "mask"
    return {
        "name": o.trace(name, mode, switch),
        "options": {
            "high": o.trace(1e9 if o[high] is None else o[high], high),
            "level": o.trace(level, mode) if name != "icepop" else None,
            "low": o.trace(o[low] or 0.0, low) if name != "truncate" else None,
        },
    }


def _kl(o: Options) -> Keys | Sourced:
    if not o["beta"]:
        return o.trace("none", "beta")
    if o.command == "rloo":
        why = "TRL takes the KL of the whole response off its reward, before the others' mean is; "
        why += "here each token loses the KL from there to the end of its response, after that. "
        why += "Expected gradients are the same"
        place, corrected = o.trace("reward", "beta", check=why), None
    else:
        place, corrected = o.trace("loss", "beta"), _ratio_corrected(o)
    return {
        "place": place,
        "coefficient": o.take("beta"),
        "estimator": o.trace("k1" if o.command == "rloo" else "k3", "beta", note="TRL's"),
        "ratio_corrected": corrected,
    }


def _ratio_corrected(o: Options) -> Value:
    flag, level, why = "use_bias_correction_kl", "importance_sampling_level", ""
    if o[flag] and o[level] == "sequence":
        why = f"with {o.show(level)} TRL weighs the KL of each token by the ratio of its whole "
        why += "response, here by the token's own; they are the same without the correction: "
        why += f"--{flag} false"
    return o.trace(bool(o[flag]), flag, check=why)


def _dpo(o: Options) -> Keys:
    names, weights = list(o["loss_type"]), o["loss_weights"]
    learned = [name for name in names if name != "sft"]
    if len(learned) != 1 or learned[0] not in _PAIR_LOSSES:
        known = f"there is one loss of pairs, {', '.join(_PAIR_LOSSES)}, beside which `sft` may "
        raise _unsupported(o, "loss_type", f"{known}stand")
    if weights is not None and len(weights) != len(names):
        text = f"{len(names)} numbers are needed, one a loss"
        raise ConfigError(f"{o.show('loss_weights')}: {text}.")
    [name], by_name = learned, dict(zip(names, weights or [1.0] * len(names), strict=True))
    if by_name[name] <= 0:
        raise ConfigError(f"{o.show('loss_weights')}: {name} needs a weight over 0.")
    nll = o.take("rpo_alpha")
    if "sft" in names:
        note, share = "a mean over pairs, there over tokens", by_name["sft"] / by_name[name]
        nll = o.trace(share, "loss_type", "loss_weights", note=note)
    normalised = o.trace(True, "loss_type", note="TRL divides by the length")
    options = {
        "length_normalised": normalised if name in _NORMALISED else None,
        "beta": o.take("beta"),
        "flip_rate": o.take("label_smoothing") if name == "robust" else None,
    }
    check = (
        f"the loss of pairs has weight 1 here, {by_name[name]:g} there: the learning rate counts"
    )
    return {
        "loss": {
            "name": o.trace(
                _PAIR_LOSSES[name], "loss_type", check=check if by_name[name] != 1.0 else ""
            ),
            "options": options,
        },
        "nll_weight": nll,
        "/reference_logprobs.precompute": o.take("precompute_ref_log_probs"),
    }


def _cpo(o: Options) -> Keys:
    name = o["loss_type"]
    if name not in ("sigmoid", "simpo"):
        raise _unsupported(o, "loss_type", "known are sigmoid (CPO) and simpo")
    simpo = name == "simpo"
    options = {
        "beta": o.take("beta"),
        "alpha": None if simpo else o.take("cpo_alpha"),
        "gamma": o.take("simpo_gamma") if simpo else None,
    }
    return {
        "loss": {"name": o.trace("simpo" if simpo else "cpo", "loss_type"), "options": options},
        "nll_weight": o.take("cpo_alpha") if simpo else None,
    }


def teacher(o: Options) -> Keys | None:
    """Return the teacher of `trl gkd`; None for other commands."""
    if o.command != "gkd":
        return None
    path = o.take("teacher_model_name_or_path")
    if path is None:
        raise ConfigError("--teacher_model_name_or_path is needed: the model to distil from.")
    if o["lmbda"] > 0:
        raise ConfigError(
            f"{o.show('lmbda')}: not supported: that share of the responses is sampled from the "
            "student, and `plimsoll distill` learns on the rows' responses: --lmbda 0 is that."
        )
    return {"model": {"path": path}, "zero.stage": frozen_stage(o)}


def _gkd(o: Options) -> Keys:
    share = o["beta"]
    name = "forward_kl" if share == 0 else "reverse_kl" if share == 1 else "jsd"
    options = {"beta": o.take("beta") if name == "jsd" else None}
    return {
        "divergence": {"name": o.trace(name, "beta"), "options": options},
        "temperature": o.take("temperature"),
    }


def reward_model(o: Options) -> Keys | None:
    """Return the reward model, or None if none is given."""
    path = o.take("reward_model_name_or_path")
    if path is None:
        return None
    return {
        "role": {"model": {"path": path}, "zero.stage": frozen_stage(o)},
        "weight": o.trace(_weights(o)[0], "reward_weights"),
        "tokenizer": Sourced("own", note="TRL tokenises for the model"),
    }


def _weights(o: Options) -> list[float]:
    """Return the weights of the reward model (if any) and of the functions, in this order."""
    model, functions = o["reward_model_name_or_path"], list(o["reward_funcs"] or ())
    number = len(functions) + (model is not None)
    if number == 0:
        raise ConfigError(
            "Nothing scores the responses. Give --reward_funcs or --reward_model_name_or_path."
        )
    weights = list(o["reward_weights"] or (1.0,) * number)
    if len(weights) != number:
        raise ConfigError(f"{o.show('reward_weights')}: one number is needed for each reward.")
    return weights


def rewards(o: Options) -> Mapping[str, Keys]:
    """Return the parts of the reward that functions give, by name."""
    if not o.rl:
        return {}
    functions = list(o["reward_funcs"] or ())
    weights = _weights(o)[o["reward_model_name_or_path"] is not None :]
    return dict(_part(o, name, w) for name, w in zip(functions, weights, strict=True))


def _part(o: Options, function: str, weight: float) -> tuple[str, Keys]:
    check, options = "", {}
    if function in _FUNCTIONS:
        name, values = _FUNCTIONS[function]
        options = {k: o.trace(v, "reward_funcs", note=function) for k, v in values.items()}
    elif "." in function:
        name = ":".join(function.rsplit(".", 1))
        check = "it runs as it is, and gets every column by its own name"
    else:
        raise ConfigError(
            f"--reward_funcs {function}: TRL has no such function: {', '.join(_FUNCTIONS)}, or a "
            "dotted path such as my_module.my_reward."
        )
    part = re.sub(r"\W+", "_", function.rpartition(".")[2]) or "reward"
    return part, {
        "name": o.trace(name, "reward_funcs", check=check),
        "options": options,
        "weight": o.trace(weight, "reward_weights"),
        "clip": o.take("reward_clip_range", tuple, note="of each part here, of their sum there"),
    }


def remarks(o: Options) -> Iterator[Remark]:
    """Yield remarks on settings that have no counterpart in combination with others."""
    if o.command == "gkd" and o.given("neftune_noise_alpha"):
        yield Remark("lacking", "neftune_noise_alpha", "noise on embeddings is one of SFT's")
    if o.command == "grpo" and o["importance_sampling_level"] == "sequence" and o.given("delta"):
        yield Remark("lacking", "delta", "gspo has no dual clip")
    low = "vllm_importance_sampling_clip_min"
    if o["use_vllm"] and o[low] and str(o[low.replace("clip_min", "mode")]).endswith("truncate"):
        yield Remark("lacking", low, "weights that are smaller are left as they are")
    if not o.given("label_smoothing"):
        return
    if o.command == "cpo" and o["label_smoothing"]:
        yield Remark("lacking", "label_smoothing", "the labels of cpo and simpo are not smoothed")
    [name] = [n for n in o["loss_type"] if n != "sft"][:1] if o.command == "dpo" else [""]
    if o.command == "dpo" and name != "robust":
        why = f"TRL reads it in {', '.join(_SMOOTHED)} alone, and trains {name} without it"
        yield Remark("idle", "label_smoothing", why)
