"""Losses of jobs that learn from rows."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.convert.trl.roles import reference, stage
from plimsoll.errors import ConfigError

_DPO = {
    "sigmoid": "dpo",
    "sigmoid_norm": "dpo",
    "ipo": "ipo",
    "hinge": "hinge",
    "robust": "robust",
}
"""Of TRL's losses of pairs those that there are."""
_NORMALISED = ("sigmoid_norm", "ipo")
_SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")
"""The losses of pairs in which TRL reads `label_smoothing`; it passes over it in all others."""
_KEY = "algorithm.loss"


def sft(o: Options) -> Iterator[Outcome]:
    flag = "neftune_noise_alpha"
    if o[flag] and o.command == "sft":
        yield o.entry("algorithm.neftune_alpha", o[flag], flag)
    elif o[flag]:
        yield Remark("lacking", flag, "noise on embeddings is one of SFT's")
    else:
        yield from o.idle("there is no noise", flag)


def dpo(o: Options) -> Iterator[Outcome]:
    names, weights = list(o["loss_type"]), o["loss_weights"]
    flags = ("loss_type", "loss_weights")
    learned = [name for name in names if name != "sft"]
    if len(learned) != 1 or learned[0] not in _DPO:
        known = ", ".join(_DPO)
        raise ConfigError(
            f"{o.shown('loss_type')}: not supported: there is one loss of pairs, {known}, beside "
            "which `sft` may stand. Leave the others out, or train it with TRL."
        )
    if weights is not None and len(weights) != len(names):
        raise ConfigError(
            f"{o.shown('loss_weights')}: {len(names)} numbers are needed, one a loss."
        )
    by_name = dict(zip(names, weights or [1.0] * len(names), strict=True))
    if by_name[learned[0]] <= 0:
        raise ConfigError(f"{o.shown('loss_weights')}: {learned[0]} needs a weight over 0.")
    yield o.entry(f"{_KEY}.name", _DPO[learned[0]], "loss_type")
    if learned[0] in _NORMALISED:
        note = "TRL divides by the length"
        yield o.entry(f"{_KEY}.options.length_normalised", True, "loss_type", note=note)
    if "sft" in names:
        share = by_name["sft"] / by_name[learned[0]]
        note = "a mean over pairs, there over tokens"
        yield o.entry("algorithm.nll_weight", share, *flags, note=note)
    if by_name[learned[0]] != 1.0:
        why = f"the loss of pairs has weight 1 here, {by_name[learned[0]]:g} there"
        yield Remark("check", "actor.optimizer.learning_rate", why)
    yield from o.same("as the names say", "loss_weights")
    yield from reference(o)


def beta(o: Options) -> Iterator[Outcome]:
    if o.command == "cpo":
        yield from _unsmoothed(o)
        if o["loss_type"] != "simpo":
            yield o.entry(f"{_KEY}.options.beta", o["beta"], "beta")
        return
    yield o.entry(f"{_KEY}.options.beta", o["beta"], "beta")
    if o.command == "orpo":
        yield o.entry(f"{_KEY}.name", "orpo", note="trl orpo")
    if o.command == "kto":
        yield from reference(o)
    if o.command != "dpo":
        return
    [name] = [one for one in o["loss_type"] if one != "sft"][:1] or ["sigmoid"]
    if name == "robust":
        yield o.entry(f"{_KEY}.options.flip_rate", o["label_smoothing"], "label_smoothing")
        return
    why = f"TRL reads it in {', '.join(_SMOOTHED)} alone, and trains {name} without it"
    if name in ("sigmoid", "sigmoid_norm") and o["label_smoothing"]:
        why += f"; {_KEY}.options.label_smoothing would smooth the labels here"
    yield from o.idle(why, "label_smoothing")


def _unsmoothed(o: Options) -> Iterator[Outcome]:
    """Of CPO and SimPO, which TRL smooths."""
    if o["label_smoothing"]:
        why = f"the labels of cpo and simpo are not smoothed; TRL's {o['loss_type']} does it"
        yield from o.lacking(why, "label_smoothing")
    else:
        yield from o.same("labels are not smoothed", "label_smoothing")


def cpo(o: Options) -> Iterator[Outcome]:
    name = o["loss_type"]
    if name == "sigmoid":
        yield o.entry(f"{_KEY}.name", "cpo", "loss_type")
        yield o.entry(f"{_KEY}.options.alpha", o["cpo_alpha"], "cpo_alpha")
        yield from o.idle("it is of simpo", "simpo_gamma")
    elif name == "simpo":
        yield o.entry(f"{_KEY}.name", "simpo", "loss_type")
        yield o.entry(f"{_KEY}.options.beta", o["beta"], "beta")
        yield o.entry(f"{_KEY}.options.gamma", o["simpo_gamma"], "simpo_gamma")
        yield o.entry("algorithm.nll_weight", o["cpo_alpha"], "cpo_alpha")
    else:
        known = "sigmoid (CPO) and simpo"
        raise ConfigError(f"{o.shown('loss_type')}: not supported: known are {known}.")


def teacher(o: Options) -> Iterator[Outcome]:
    path = o["teacher_model_name_or_path"]
    if path is None:
        raise ConfigError("--teacher_model_name_or_path is needed: the model to distil from.")
    if o["lmbda"] > 0:
        raise ConfigError(
            f"{o.shown('lmbda')}: not supported: that share of the responses is sampled from the "
            "student, and `plimsoll distill` learns on the rows' responses: --lmbda 0 is that."
        )
    yield o.entry("teacher.model.path", path, "teacher_model_name_or_path")
    if stage(o) == 3:
        yield o.entry("teacher.stage", 3, *o.given("zero_stage", "use_fsdp", "fsdp"), note="ZeRO")
    yield from o.same("responses are the rows' own", "lmbda")
    share = o["beta"]
    name = "forward_kl" if share == 0 else "reverse_kl" if share == 1 else "jsd"
    yield o.entry("algorithm.divergence.name", name, "beta")
    if name == "jsd":
        yield o.entry("algorithm.divergence.options.beta", share, "beta")
