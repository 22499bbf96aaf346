"""The values of `variant: paper`: a method as its paper has it, over the values of its preset.

The scale of a paper's runs stays a matter of the config: the model, the learning rate, the prompts
of a step, the lengths. No paper corrects for the difference between sampler and trainer.

The schema is imported where a config is there: the command line reads the presets for its help.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll.config.load import Values
from plimsoll.config.yaml_tree import value_at

OVERLONG = "overlong"
"""The name of DAPO's penalty among the parts of the reward."""


def grpo(config: Values) -> Values:
    """Return the values of Shao et al. 2024 (DeepSeekMath), https://arxiv.org/abs/2402.03300.

    Equations 3 and 4 for the aggregation and the KL, section 4.2 for 64 outputs and the KL's 0.04.
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
    """Return the values of Liu et al. 2025, https://arxiv.org/abs/2503.20783, table 6."""
    return {"algorithm": {"correction": None}}


def rloo(config: Values) -> Values:
    """Return the values of Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740.

    A response is one action, and the KL part of its reward (section 2); no clip (section 3); 2 or 4
    responses, and a KL coefficient of 0.03 for TL;DR, 0.10 for HH (appendix C).
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
    """Return the values of Zheng et al. 2025, https://arxiv.org/abs/2507.18071, section 5.1."""
    return {"algorithm": {"mini_batches": 4, "correction": None}}


def cispo(config: Values) -> Values:
    """Return the values of MiniMax 2025, https://arxiv.org/abs/2506.13585, section 3.1.

    No lower bound of the weight, the dynamic sampling and the length penalty of DAPO, and 16
    updates of a step. Its upper bound is not published.
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

    Section 4.1 for 16 responses and 16 updates of a step, equation 11 for the groups that are kept,
    equation 13 for the length penalty.
    """
    values = _dapo_rewards(config)
    return {
        **values,
        "batch": {**values["batch"], "responses": 16},
        "algorithm": {"mini_batches": 16, "correction": None},
    }


def _dapo_rewards(config: Values) -> dict[str, Any]:
    """Return the length penalty, and dynamic sampling by the part that says what is right.

    With the penalty, the rewards of a group that is all right would differ. The penalty grows over
    the last fifth of the longest response, as in the paper (4,096 of 20,480 tokens).
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
    """Return the part of `rewards` with the greatest weight, the first of several.

    That is what `data.eval.pass_by` takes. Without parts return what an environment gives, or None.
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
