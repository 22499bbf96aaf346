"""What a micro-batch carries besides its tokens: one number per learned token, in packed order, or
per sequence."""

from __future__ import annotations

from dataclasses import dataclass

from plimsoll.records import Floats


@dataclass(frozen=True)
class PolicyStream:
    """For the policy loss. old_logprobs_L is None in strictly on-policy steps, where the old
    policy is the one that is being differentiated; reference_logprobs_L is None without a KL loss.
    """

    advantages_L: Floats
    old_logprobs_L: Floats | None
    reference_logprobs_L: Floats | None


@dataclass(frozen=True)
class ValueStream:
    """For the value loss."""

    returns_L: Floats
    old_values_L: Floats


@dataclass(frozen=True)
class PreferenceStream:
    """For a preference loss. reference_logprobs_S: each sequence's log-prob under the reference;
    None for a reference-free loss."""

    reference_logprobs_S: Floats | None
