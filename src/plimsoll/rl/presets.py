"""The presets of `plimsoll rl`: config values of a method, under a command of its own.

They are in presets.yaml. What a paper did may depend on the user's config, and is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from typing import Any

import yaml

from plimsoll.config.load import Preset, Values
from plimsoll.config.yaml_tree import value_at

OVERLONG = "overlong"
"""The name of DAPO's length penalty among the parts of the reward."""


def _preset(
    name: str, *, paper: Values | None = None, paper_has_dapo_rewards: bool = False, **read: Any
) -> Preset:
    of_paper = None if paper is None else partial(_paper, paper, paper_has_dapo_rewards)
    return Preset(name, **read, paper=of_paper)


def _paper(values: Values, has_dapo_rewards: bool, config: Values) -> Values:
    """Return what a paper did otherwise than the preset, for the user's config."""
    if not has_dapo_rewards:
        return values
    rewards = _dapo_rewards(config)
    return {**rewards, **values, "batch": {**rewards["batch"], **values.get("batch", {})}}


def _dapo_rewards(config: Values) -> Values:
    """Return values that switch on DAPO's dynamic sampling (equation 11) and length penalty (13).

    Dynamic sampling compares only the main part of the reward. With the penalty included, rewards
    would differ even in a group whose responses are all correct. The penalty grows over the last
    fifth of the longest response, as in the paper (4,096 of 20,480 tokens).
    """
    from plimsoll.config.rollout import SamplingConfig  # the help needs only presets

    longest = value_at(config, ("rollout", "sampling", "max_new_tokens"))
    if not isinstance(longest, int) or longest < 1:  # not given, or refused by the schema
        longest = SamplingConfig().max_new_tokens
    options = {"max_new_tokens": longest, "buffer": max(1, longest // 5)}
    part = _main_part(config)
    return {
        "batch": {"dynamic_sampling": {} if part is None else {"by": part}},
        "rewards": {OVERLONG: {"name": OVERLONG, "options": options}},
    }


def _main_part(config: Values) -> str | None:
    """Return the name of the part of `rewards` with the greatest weight (the first, if several).

    `data.eval.pass_by` has the same default. Without `rewards`, return the name of the reward that
    environments give; None if the config has no environments.
    """
    from plimsoll.config.rl import ENVIRONMENT

    rewards = config.get("rewards")
    parts: dict[str, object] = dict(rewards) if isinstance(rewards, Mapping) else {}
    parts.pop(OVERLONG, None)
    if parts:
        return max(parts, key=lambda name: _weight(parts[name]))
    return ENVIRONMENT if config.get("environments") else None


def _weight(part: object) -> float:
    weight = part.get("weight", 1.0) if isinstance(part, Mapping) else 1.0
    return float(weight) if isinstance(weight, int | float) else 1.0


PRESETS: Mapping[str, Preset] = {
    name: _preset(name, **read)
    for name, read in yaml.load(
        (files("plimsoll.rl") / "presets.yaml").read_text(encoding="utf-8"),
        Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),  # 3 ms of each start, not 20
    ).items()
}
"""The presets by name, in the order of the help."""
