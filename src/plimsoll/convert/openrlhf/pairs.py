"""Losses of reward models, of pairs and of labelled responses."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark


def reward_loss(o: Options) -> Iterator[Outcome]:
    """OpenRLHF takes every name but sigmoid for the other one."""
    log_exp = o["loss"] != "sigmoid"
    yield o.entry("algorithm.loss.name", "log_exp" if log_exp else "log_sigmoid", "loss")
    if log_exp and o["margin_loss"]:
        why = "OpenRLHF's LogExpLoss leaves margins out; here they count"
        yield Remark("lacking", "margin_loss", why)


def preference_loss(o: Options) -> Iterator[Outcome]:
    key = "algorithm.loss"
    if o.command == "kto":
        yield o.entry(f"{key}.options.beta", o["beta"], "beta")
        for label in o.given("desirable_loss_weight", "undesirable_loss_weight"):
            yield o.entry(f"{key}.options.{label.replace('_loss', '')}", o[label], label)
        return
    yield o.entry(f"{key}.name", "ipo" if o["ipo"] else "dpo", "ipo")
    yield o.entry(f"{key}.options.beta", o["beta"], "beta")
    if o["ipo"]:
        yield from o.idle("ipo has no label smoothing", "label_smoothing")
    elif o.given("label_smoothing"):
        yield o.entry(f"{key}.options.label_smoothing", o["label_smoothing"], "label_smoothing")
