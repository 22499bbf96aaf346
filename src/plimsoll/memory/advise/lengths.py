"""How long sequences may be for a config to fit as it is written otherwise."""

from __future__ import annotations

from plimsoll.config.jobs import JobConfig, RlJobConfig
from plimsoll.memory.advise.changes import Value, changes_between, value_at
from plimsoll.memory.advise.states import Site, State
from plimsoll.memory.price.work import longest_sequence, sequences_together

_STEP = 64
"""Tokens: lengths are multiples of it."""


def shortened(site: Site) -> State | None:
    """The config with the longest sequences with which it fits, in micro-batches of as many tokens
    as they need at least; None where it fits as it is, or with none.

    Of PPO responses become shorter, and prompts stay.
    """
    written = value_at(site.config, _key(site.config))
    assert isinstance(written, int)

    def at(length: int) -> State | None:
        state = site.tried(frozenset(changes_between(site.config, _lengths(site.config, length))))
        return state if state is not None and state.load.verdict == "fits" else None

    if at(written) is not None:
        return None
    fitting, lacking = 0, -(-written // _STEP)
    while lacking - fitting > 1:
        middle = (fitting + lacking) // 2
        fitting, lacking = (middle, lacking) if at(middle * _STEP) else (fitting, middle)
    return at(fitting * _STEP) if fitting else None


def _key(config: JobConfig) -> str:
    sampled = isinstance(config, RlJobConfig)
    return "rollout.sampling.max_new_tokens" if sampled else "data.max_tokens"


def _lengths(config: JobConfig, length: int) -> dict[str, Value]:
    written = value_at(config, _key(config))
    assert isinstance(written, int)
    least = (longest_sequence(config) - written + length) * sequences_together(config)
    tokens = min(config.batch.micro_batch_tokens, least)
    found: dict[str, Value] = {_key(config): length, "batch.micro_batch_tokens": tokens}
    held_out = config.eval_sampling if isinstance(config, RlJobConfig) else None
    if held_out is not None:
        found["eval_sampling.max_new_tokens"] = min(held_out.max_new_tokens, length)
    return found
