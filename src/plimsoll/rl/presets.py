"""Define the presets of `plimsoll rl`: config values of a method, under a command of its own.

A preset sets only the values that define the method, as it is mostly trained today. Keys of the
user's config override them. Where the method's paper differs, papers.py has the paper's values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll.config.load import MODEL, Preset, Values
from plimsoll.rl import papers

_CRITIC = {"critic.model.path": MODEL, "critic.optimizer.learning_rate": 5e-6}


def _of_groups(advantage: str, **algorithm: Any) -> Values:
    """Return values for eight responses to each prompt, without a critic and a reference."""
    return {
        "batch": {"responses": 8, "share_prompts": True},
        "algorithm": {"advantage": {"name": advantage}, "kl": "none", **algorithm},
    }


def _dapo() -> Values:
    clip = {"name": "clip", "options": {"clip_low": 0.2, "clip_high": 0.28}}
    values = _of_groups("grpo", policy_loss=clip)
    return {**values, "batch": {**values["batch"], "dynamic_sampling": {}}}


_ALL = (
    Preset(
        "ppo",
        "proximal policy optimisation, with a critic",
        {"algorithm": {"correction": None}},
        _CRITIC,
    ),
    Preset(
        "grpo",
        "group relative policy optimisation",
        _of_groups("grpo"),
        paper=papers.grpo,
    ),
    Preset(
        "dr_grpo",
        "GRPO without its biases by length and spread",
        _of_groups("dr_grpo", aggregation="constant"),
        paper=papers.dr_grpo,
    ),
    Preset(
        "rloo",
        "REINFORCE, each response against the others",
        _of_groups("rloo"),
        paper=papers.rloo,
    ),
    Preset(
        "reinforce_pp",
        "REINFORCE++, whitened over the batch",
        {"algorithm": {"advantage": {"name": "reinforce_pp"}}},
    ),
    Preset(
        "gspo",
        "GRPO with ratios of whole sequences",
        _of_groups("grpo", policy_loss={"name": "gspo"}, aggregation="sequences"),
        paper=papers.gspo,
    ),
    Preset(
        "cispo",
        "GRPO with clipped importance weights",
        _of_groups("grpo", policy_loss={"name": "cispo"}),
        paper=papers.cispo,
    ),
    Preset(
        "dapo",
        "GRPO with a higher clip and dynamic sampling",
        _dapo(),
        paper=papers.dapo,
    ),
    Preset(
        "orz",
        "PPO of Open-Reasoner-Zero, without a KL",
        {
            "batch": {"responses": 8, "share_prompts": True},
            "algorithm": {
                "advantage": {"name": "gae", "options": {"gamma": 1.0, "gae_lambda": 1.0}},
                "kl": "none",
                "entropy_bonus": 0.0,
                "critic_mini_batches": 4,
            },
        },
        _CRITIC,
    ),
)

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _ALL}
"""The presets by name, in the order of the help."""
