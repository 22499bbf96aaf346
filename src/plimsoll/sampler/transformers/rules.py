"""The requirements of the engine on transformers on a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from plimsoll.config.problems import Problem, conflict
from plimsoll.resolve.engine_rules import RolloutRules
from plimsoll.resolve.run_spec import RunSpec

_KEY = "rollout.transformers.max_sequences"
_WHY = "The transformers engine works on all responses to a prompt at once, and "


def _settings(spec: RunSpec[Any]) -> Iterator[Problem]:
    """Refuse more responses to a prompt than the engine works on at once."""
    sampling = spec.sampling
    assert sampling is not None
    most, responses = sampling.rollout.max_sequences, sampling.responses
    if responses > most:
        why = f"{_WHY}batch.responses is {responses}."
        fix = f"{_KEY}: {responses}, or fewer batch.responses, or rollout.vllm"
        yield conflict(_KEY, str(most), why, fix, code="transformers-engine")
    for held_out in sampling.sets:
        if held_out.responses > most:
            why = f"{_WHY}{_KEY} is {most}."
            fix = f"at most {most}, or {_KEY}: {held_out.responses}, or rollout.vllm"
            given = str(held_out.responses)
            key = f"{held_out.key}.responses"
            yield conflict(key, given, why, fix, code="transformers-engine")


RULES = RolloutRules(
    title="transformers",
    where=("local", "ray"),
    package="transformers",
    settings=_settings,
)
