"""Config values of `variant: paper`: they change a method's preset to what its paper did.

Each function gets the user's config and returns the values that differ from the preset. The scale
of a paper's runs is left to the config: model, learning rate, prompts per step, and lengths.
`correction` is None everywhere, for no paper corrects for the difference between sampler and
trainer.

The config schema is imported inside functions, because the command line's help needs only presets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll.config.load import Values
from plimsoll.config.yaml_tree import value_at

OVERLONG = "overlong"
"""The name of DAPO's length penalty among the parts of the reward."""


def grpo(config: Values) -> Values:
    """Return the values of Shao et al. 2024 (DeepSeekMath), https://arxiv.org/abs/2402.03300.

    The aggregation and the KL are from equations 3 and 4; the 64 responses and the KL coefficient
    of 0.04 from section 4.2.
    """
    return {
        "batch": {"responses": 64},
        "algorithm": {
            "aggregation": "sequences",
            "kl": {"place": "loss", "estimator": "k3", "coefficient": 0.04},
            "correction": None,
        },
    }


def dr_grpo(config: Values) -> Values:
    """Return the values of Liu et al. 2025, https://arxiv.org/abs/2503.20783: no correction.

    Everything else is in the preset (8 responses and a clip of 0.2: table 6).
    """
    return {"algorithm": {"correction": None}}


def rloo(config: Values) -> Values:
    """Return the values of Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740.

    A response is one action, and the KL is part of its reward (section 2). There is no clip
    (section 3). The paper samples 2 or 4 responses; its KL coefficient is 0.03 for the TL;DR data
    and 0.10 for HH (appendix C). Here they are 4 and 0.03.
    """
    return {
        "batch": {"responses": 4},
        "algorithm": {
            "advantage": {"name": "rloo", "options": {"whole": True}},
            "policy_loss": {"name": "reinforce"},
            "aggregation": "constant",
            "aggregation_tokens": 1,
            "kl": {"place": "reward", "estimator": "k1", "coefficient": 0.03},
            "correction": None,
        },
    }


def gspo(config: Values) -> Values:
    """Return the values of Zheng et al. 2025, https://arxiv.org/abs/2507.18071, section 5.1.

    Each batch is divided into 4 mini-batches.
    """
    return {"algorithm": {"mini_batches": 4, "correction": None}}


def cispo(config: Values) -> Values:
    """Return the values of MiniMax 2025, https://arxiv.org/abs/2506.13585, section 3.1.

    The weight of a token has no lower bound (`clip_low: 1.0`). Its upper bound is not published;
    the loss's default stands. A step has 16 updates, and DAPO's dynamic sampling and length
    penalty.
    """
    return {
        **_dapo_rewards(config),
        "algorithm": {
            "policy_loss": {"name": "cispo", "options": {"clip_low": 1.0, "clip_high": 0.2}},
            "mini_batches": 16,
            "correction": None,
        },
    }


def dapo(config: Values) -> Values:
    """Return the values of Yu et al. 2025, https://arxiv.org/abs/2503.14476.

    The 16 responses and the 16 updates per step are from section 4.1, the dynamic sampling from
    equation 11, and the length penalty from equation 13.
    """
    values = _dapo_rewards(config)
    return {
        **values,
        "batch": {**values["batch"], "responses": 16},
        "algorithm": {"mini_batches": 16, "correction": None},
    }


def _dapo_rewards(config: Values) -> dict[str, Any]:
    """Return values that switch on DAPO's length penalty and its dynamic sampling.

    Dynamic sampling compares only the main part of the reward. With the penalty included, rewards
    would differ even in a group whose responses are all correct. The penalty grows over the last
    fifth of the longest response, as in the paper (4,096 of 20,480 tokens).
    """
    from plimsoll.config.rollout import SamplingConfig

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
