"""How long sequences may be for a config to fit as it is written otherwise."""

from __future__ import annotations

from typing import Any

from plimsoll.memory.advise.states import Site, State
from plimsoll.memory.remedies.changes import Value, changes_between, value_at
from plimsoll.spec.run_spec import RunSpec

_STEP = 64
"""Tokens: lengths are multiples of it."""


def shortened(site: Site) -> State | None:
    """The config with the longest sequences with which it fits, in micro-batches of as many tokens
    as they need at least; None where it fits as it is, or with none.

    Of PPO responses become shorter, and prompts stay.
    """
    written = value_at(site.spec.config, _key(site.spec))
    assert isinstance(written, int)

    def at(length: int) -> State | None:
        state = site.tried(frozenset(changes_between(site.spec, _lengths(site.spec, length))))
        return state if state is not None and state.plan.verdict == "fits" else None

    if at(written) is not None:
        return None
    fitting, lacking = 0, -(-written // _STEP)
    while lacking - fitting > 1:
        middle = (fitting + lacking) // 2
        fitting, lacking = (middle, lacking) if at(middle * _STEP) else (fitting, middle)
    return at(fitting * _STEP) if fitting else None


def _key(spec: RunSpec[Any]) -> str:
    """What says how long a sequence is, and can be lowered with the least harm."""
    if spec.sampling is None:
        return "data.max_tokens"
    responses = spec.sampling.longest_responses
    if not spec.sampling.environments:
        return next(iter(responses))
    return max(responses, key=responses.__getitem__)


def _lengths(spec: RunSpec[Any], length: int) -> dict[str, Value]:
    written = value_at(spec.config, _key(spec))
    assert isinstance(written, int)
    work = spec.workload
    tokens = min(work.budget, (work.longest - written + length) * work.together)
    found: dict[str, Value] = {_key(spec): length, "batch.micro_batch_tokens": tokens}
    held_out = {} if spec.sampling is None else spec.sampling.held_out
    for key, sampling in held_out.items():
        found[f"{key}.max_new_tokens"] = min(sampling.max_new_tokens, length)
    return found
