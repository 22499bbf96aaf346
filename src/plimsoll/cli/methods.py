"""What is said to names of methods that are no commands."""

from __future__ import annotations

from plimsoll.rl.presets import PRESETS

_ADVANTAGES = ("reinforce", "reinforce_pp_baseline", "remax", "gdpo", "batch_mean")
"""Files of algorithm/advantage/ that are no preset."""
_POLICY_LOSSES = ("sapo", "dppo_tv")
"""Files of algorithm/policy_loss/ that are none."""
_LOSSES = ("orpo", "simpo", "ipo", "cpo")
"""Files of algorithm/preference_loss/."""
_PARTS = {
    **dict.fromkeys(_ADVANTAGES, ("an advantage", "rl", "algorithm.advantage.name")),
    **dict.fromkeys(_POLICY_LOSSES, ("a policy loss", "rl", "algorithm.policy_loss.name")),
    **dict.fromkeys(_LOSSES, ("a loss", "dpo", "algorithm.loss.name")),
}


def told_of(word: str) -> str | None:
    """What Plimsoll has of a method that was typed as a command; None for any other word."""
    name = word.lower().replace("++", "_pp").replace("-", "_")
    if name in PRESETS:
        return f"{word!r} is the command {name!r}: write `plimsoll {name} CONFIG.yaml`."
    if name not in _PARTS:
        return None
    what, job, key = _PARTS[name]
    return (
        f"{word!r} is no command of its own, but {what} of `plimsoll {job}`: write `plimsoll {job} "
        f"CONFIG.yaml --{key} {name}`, or {key}: {name} in the config."
    )
