"""What is said to names of methods that are no commands."""

from __future__ import annotations

_NOT_YET = ("grpo", "rloo", "dapo", "gspo", "reinforce", "reinforce_pp")
"""Those that learn from sampled responses."""
_LOSSES = ("orpo", "simpo", "ipo", "cpo")
"""Files of algorithm/preference_loss/."""


def told_of(word: str) -> str | None:
    """What Plimsoll has of a method that was typed as a command; None for any other word."""
    name = word.lower().replace("++", "_pp").replace("-", "_")
    if name in _LOSSES:
        return (
            f"{word!r} is no command of its own, but a loss of `plimsoll dpo`: write `plimsoll dpo "
            f"CONFIG.yaml --algorithm.loss.name {name}`, or algorithm.loss.name: {name} in the "
            "config."
        )
    if name in _NOT_YET:
        return (
            f"Plimsoll does not have {word!r} yet. What it has to learn from sampled responses is "
            "PPO, with a critic: `plimsoll ppo CONFIG.yaml`."
        )
    return None
