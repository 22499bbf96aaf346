"""What a response is worth: reward models, servers, functions in files, agents, and the penalties
that OpenRLHF adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plimsoll.convert.openrlhf.algorithm import advantage_of
from plimsoll.convert.openrlhf.batches import rollout_lengths
from plimsoll.convert.options import Options
from plimsoll.convert.outcome import Outcome, Remark
from plimsoll.errors import ConfigError

_SUMMED = (0, 6, 1)
"""The last version that adds up several servers' or models' rewards; later ones share the work
among servers, and have one model."""
_SECONDS = 180.0
"""OpenRLHF's limit for an answer."""
_TURNS = 1000
"""OpenRLHF bounds an episode by its length alone."""


def rewards(o: Options) -> Iterator[Outcome]:
    if o["agent_func_path"]:
        yield from _agent(o)
        yield from o.idle("the agent gives the rewards", "remote_rm_url", "reward_pretrain")
    elif o["remote_rm_url"]:
        yield from _function(o) if _is_file(o) else _servers(o)
        yield from o.idle(f"{o.shown('remote_rm_url')} scores", "reward_pretrain")
    elif o["reward_pretrain"]:
        yield from _models(o)
    else:
        flags = ("reward_pretrain", "remote_rm_url", "agent_func_path")
        known = ", ".join(o.names[flag] for flag in flags if flag in o.values)
        raise ConfigError(f"Nothing scores the responses. Give one of {known}.")
    parts = _parts(o)
    yield from _penalties(o, parts)
    yield from _normalised(o)
    yield from _clipped(o, parts)


def _parts(o: Options) -> list[str]:
    """The names of the parts that functions and servers give: what agents and models give is no
    entry of `rewards`."""
    if o["agent_func_path"] or not o["remote_rm_url"]:
        return []
    return ["reward_func"] if _is_file(o) else list(_groups(o))


def _listed(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _is_file(o: Options) -> bool:
    return any(one.endswith(".py") for one in _listed(o["remote_rm_url"])[:1])


def _groups(o: Options) -> dict[str, list[str]]:
    """Servers by the part of the reward that they give."""
    urls = _listed(o["remote_rm_url"])
    if o.version <= _SUMMED and len(urls) > 1:
        return {f"remote_{i}": [url] for i, url in enumerate(urls, 1)}
    return {"remote": urls}


def _agent(o: Options) -> Iterator[Outcome]:
    key, response = "environments.agent", rollout_lengths(o)[1]
    yield o.entry(f"{key}.name", o["agent_func_path"], "agent_func_path")
    flag = o.first("generate_max_len", "max_new_tokens")
    yield o.entry(f"{key}.max_tokens", response, flag, note="of an episode after its prompt")
    note = "bounded there by length alone"
    turns = min(_TURNS, max(1, response // 2))
    yield o.entry(f"{key}.max_turns", turns, "agent_func_path", note=note)
    note = "an agent reads text"
    yield o.entry(f"{key}.tool_format", "none", "agent_func_path", note=note)
    why = "it runs as it is, by `reset` and `step`, not by `execute`; one that samples otherwise "
    why += "than rollout.sampling says is refused in its first episode"
    yield Remark("check", f"{key}.name", why)


def _servers(o: Options) -> Iterator[Outcome]:
    for name, urls in _groups(o).items():
        key = f"rewards.{name}.http"
        yield o.entry(f"{key}.urls", tuple(urls), "remote_rm_url")
        yield o.entry(f"{key}.format", "openrlhf", "remote_rm_url")
        note = "texts as the actor saw them"
        yield o.entry(f"{key}.tokenizer", o["pretrain"], "pretrain", note=note)
        yield o.entry(f"{key}.time_limit", _SECONDS, note="OpenRLHF waits so long")


def _function(o: Options) -> Iterator[Outcome]:
    key, [path, *_] = "rewards.reward_func", _listed(o["remote_rm_url"])
    yield o.entry(f"{key}.name", "openrlhf_function", "remote_rm_url")
    yield o.entry(f"{key}.options.path", path, "remote_rm_url")
    note = "texts as the actor saw them"
    yield o.entry(f"{key}.options.tokenizer", o["pretrain"], "pretrain", note=note)


def _models(o: Options) -> Iterator[Outcome]:
    paths = _listed(o["reward_pretrain"])
    for i, path in enumerate(paths, 1):
        key = "reward_model.role" if len(paths) == 1 else f"reward_models.model_{i}.role"
        yield o.entry(f"{key}.model.path", path, "reward_pretrain")
        if o["zero_stage"] == 3:
            yield o.entry(f"{key}.stage", 3, "zero_stage")
        offload = o.first("reward.offload", "ref_reward_offload")
        if o[offload]:
            yield o.entry(f"{key}.offload", "cpu", offload)
        if o["load_in_4bit"]:
            yield o.entry(f"{key}.model.quantization", "nf4", "load_in_4bit")


def heads(o: Options) -> Iterator[Outcome]:
    """The name of the head in the files of a reward model."""
    if o["value_head_prefix"] != "score":
        why = "a head is saved and read as `score`, as transformers calls it"
        yield from o.lacking(why, "value_head_prefix")
    else:
        yield from o.idle("it is the name here, too", "value_head_prefix")


def _penalties(o: Options, parts: Sequence[str]) -> Iterator[Outcome]:
    scored = list(parts)
    if (buffer := o["overlong_buffer_len"]) is not None:
        key, response = "rewards.overlong", rollout_lengths(o)[1]
        yield o.entry(f"{key}.name", "overlong", "overlong_buffer_len")
        yield o.entry(f"{key}.options.max_new_tokens", response, "max_new_tokens", "max_len")
        yield o.entry(f"{key}.options.buffer", int(buffer), "overlong_buffer_len")
        factor = float(o["overlong_penalty_factor"])
        yield o.entry(f"{key}.options.factor", factor, "overlong_penalty_factor")
        if o["agent_func_path"]:
            note = "OpenRLHF counts from an episode's first sampled token to its last"
            yield o.entry(f"{key}.options.observations", True, "overlong_buffer_len", note=note)
        scored.append("overlong")
    else:
        yield from o.idle("no penalty for length is asked for", "overlong_penalty_factor")
    coefficient = o["stop_properly_penalty_coef"]
    if coefficient is None:
        return
    flag = "stop_properly_penalty_coef"
    for part in scored:
        yield o.entry(f"rewards.{part}.truncated_factor", max(0.0, coefficient), flag)
    if coefficient < 0:
        yield o.entry("rewards.length.name", "length", flag)
        yield o.entry("rewards.length.options.value", coefficient, flag)
    if not parts:
        why = "a factor for truncated responses is one of functions and servers alone"
        yield Remark("lacking", flag, why)


def _normalised(o: Options) -> Iterator[Outcome]:
    flags = ("normalize_reward", "reward.offload")
    if o["agent_func_path"] or o["remote_rm_url"]:
        yield from o.idle("it is of a reward model that OpenRLHF loads", *flags)
        if not o["init_kl_coef"]:
            yield from o.idle(
                "there is neither a reference nor a reward model", "ref_reward_offload"
            )
        return
    why = "OpenRLHF scales by the mean and deviation in the reward model's config.json; scores are "
    why += "as the model gives them: reward_model.weight can divide them"
    yield from o.lacking(why, "normalize_reward")


def _clipped(o: Options, parts: Sequence[str]) -> Iterator[Outcome]:
    flag, bounds = "reward_clip_range", o["reward_clip_range"]
    if advantage_of(o) not in ("gae", "reinforce_pp"):
        why = "OpenRLHF clips what is left of a group's rewards, which is hardly ever so large"
        yield from o.idle(why, flag)
        return
    for part in parts:
        yield o.entry(f"rewards.{part}.clip", tuple(map(float, bounds)), flag)
    if not parts:
        yield Remark("lacking", flag, "rewards of models and agents are not clipped")
