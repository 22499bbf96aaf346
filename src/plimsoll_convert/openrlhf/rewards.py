"""Convert the settings of rewards: models, servers, functions, agents and penalties."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.errors import ConfigError
from plimsoll_convert.openrlhf.data import rollout_lengths
from plimsoll_convert.openrlhf.learning import estimator
from plimsoll_convert.openrlhf.roles import frozen_role
from plimsoll_convert.options import Options
from plimsoll_convert.values import Keys, Sourced

_SECONDS = 180.0
"""OpenRLHF's time limit for a reward server's answer, in seconds."""
_TURNS = 1000
"""The most turns of an agent's episode. OpenRLHF limits only the length of an episode."""
_TEXTS = "texts as the actor saw them"


def reward_models(o: Options) -> list[Keys]:
    """Return the reward models; empty if an agent, servers or a function give the reward."""
    if not o.rl or o["agent_func_path"] or o["remote_rm_url"]:
        return []
    if not o["reward_pretrain"]:
        flags = ("reward_pretrain", "remote_rm_url", "agent_func_path")
        known = ", ".join(o.names[flag] for flag in flags if flag in o.values)
        raise ConfigError(f"Nothing scores the responses. Give one of {known}.")
    offload = o.first("reward.offload", "ref_reward_offload")
    return [
        {"role": frozen_role(o, o.trace(path, "reward_pretrain"), offload)}
        for path in _split(o["reward_pretrain"])
    ]


def agents(o: Options) -> Mapping[str, Keys]:
    """Return a dict with the agent, or an empty dict if no agent file is given."""
    flag = "agent_func_path"
    if not o[flag]:
        return {}
    response = rollout_lengths(o)[1]
    why = (
        "it runs as it is, by `reset` and `step` or by `execute`; one that samples otherwise than "
    )
    why += "rollout.sampling says is refused in its first episode"
    limit = o.first("generate_max_len", "max_new_tokens")
    turns = min(_TURNS, max(1, response // 2))
    agent = {
        "name": o.trace(o[flag], flag, check=why),
        "max_tokens": o.trace(response, limit, note="of an episode after its prompt"),
        "max_turns": o.trace(turns, flag, note="bounded there by length alone"),
        "tool_format": o.trace("none", flag, note="an agent reads text"),
    }
    return {"agent": agent}


def rewards(o: Options) -> Mapping[str, Keys]:
    """Return the parts of the reward by name, except reward models."""
    scored = scored_parts(o)
    if clips(o):
        bounds = o.take("reward_clip_range", lambda pair: tuple(map(float, pair)))
        scored = {name: {**part, "clip": bounds} for name, part in scored.items()}
    parts = {**scored, **_over_long(o)}
    flag, factor = "stop_properly_penalty_coef", o["stop_properly_penalty_coef"]
    if factor is not None:
        kept = o.trace(max(0.0, factor), flag)
        parts = {name: {**part, "truncated_factor": kept} for name, part in parts.items()}
        if factor < 0:
            value = {"value": o.trace(factor, flag)}
            parts["length"] = {"name": o.trace("length", flag), "options": value}
    return parts


def clips(o: Options) -> bool:
    """Return whether rewards are clipped.

    Estimators that compare the rewards of a group hardly ever reach the bounds.
    """
    return o.rl and estimator(o) in ("gae", "reinforce_pp")


def scored_parts(o: Options) -> Mapping[str, Keys]:
    """Return the parts of the reward that servers or a function give, by name."""
    flag = "remote_rm_url"
    if o["agent_func_path"] or not o[flag]:
        return {}
    urls = _split(o[flag])
    tokenizer = o.trace(o["pretrain"], "pretrain", note=_TEXTS)
    if urls and urls[0].endswith(".py"):
        options = {"path": o.trace(urls[0], flag), "tokenizer": tokenizer}
        return {"reward_func": {"name": o.trace("openrlhf_function", flag), "options": options}}
    server = {
        "urls": o.trace(tuple(urls), flag),
        "format": o.trace("openrlhf", flag),
        "tokenizer": tokenizer,
        "time_limit": Sourced(_SECONDS, note="OpenRLHF waits so long"),
    }
    return {"remote": {"http": server}}


def _over_long(o: Options) -> Mapping[str, Keys]:
    """Return the penalty for long responses by its name; empty without a penalty."""
    flag = "overlong_buffer_len"
    if o[flag] is None:
        return {}
    options = {
        "max_new_tokens": o.trace(rollout_lengths(o)[1], "max_new_tokens", "max_len"),
        "buffer": o.trace(int(o[flag]), flag),
        "factor": o.trace(float(o["overlong_penalty_factor"]), "overlong_penalty_factor"),
    }
    if o["agent_func_path"]:
        note = "OpenRLHF counts from an episode's first sampled token to its last"
        options["observations"] = o.trace(True, flag, note=note)
    return {"overlong": {"name": o.trace("overlong", flag), "options": options}}


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
