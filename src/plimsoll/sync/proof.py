"""New weights to every engine, and the proof that they arrived and are used.

After each sync three things must hold, or the run stops. Every announced tensor came; its bytes are
the bytes that were sent (`Arrivals`, in the engine); and trainer and engine compute the same
log-probs of a probe, but for rounding. The trainer measures what rounding may do: it computes the
probe once more with noise of that size (model/disturbance.py).

In 16 bits one stale tensor may change less than rounding does. So a run begins with rehearsals: a
layer of each kind is sent with the other sign, which changes the log-probs by far more. An engine
that does not use a tensor that it got, such as one that keeps a packed copy, is found there; so is
one that samples with the cached prefixes of older weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Protocol

import numpy as np

from plimsoll.config.rollout import SyncConfig
from plimsoll.errors import WeightSyncError
from plimsoll.model.disturbance import UNSCALED, Disturbance, Scaled
from plimsoll.records import Floats, Ints, Trajectory

_FACTORS = (-1.0, -8.0, -64.0)
"""By what layers are scaled in a rehearsal: one that has learned shows a change of sign, a new one
may need more, and too much leaves nothing of a deep model but rounding."""
_REHEARSAL_TOKENS = 200
"""Tokens of the probe that rehearsals use, at least, if it has as many."""
_LEAST = 2.0**-21
"""The rounding of a log-prob itself, as a part of it: a log-softmax adds up in fp32."""


@dataclass(frozen=True)
class Rehearsal:
    """The layers of a policy that are sent to engines at once.

    Attributes:
        scaled: the layers whose weights are sent scaled.
        restored: the layers that the rehearsal before scaled, by their names in the policy; their
            weights are sent as they are.
    """

    scaled: Scaled
    restored: tuple[str, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers that are sent."""
        return self.scaled.layers + self.restored


class WeightRoute(Protocol):
    """The way from the trainer's ranks to the engines, which the cluster provides."""

    @property
    def name(self) -> str:
        """The name of the way in metrics."""

    def transfer(self, bucket_bytes: int, version: int, rehearsal: Rehearsal | None = None) -> int:
        """Send all tensors to all engines in buckets; return the bytes that each engine got.

        The tensors are announced first; at the end the engines use them as `version`. In a
        rehearsal only its layers are sent.
        """

    def rehearsals(self) -> Sequence[Rehearsal]:
        """Return what is sent before the run, to see that engines use what they get."""

    def renew(self) -> None:
        """Get ready to send everything anew, by a new way."""

    def trainer_log_probs(
        self, sequences: Sequence[Ints], disturbance: Disturbance | None = None
    ) -> list[Floats]:
        """Return the trainer's log-prob of every token but the first; temperature 1."""

    def engine_log_probs(self, sequences: Sequence[Ints]) -> list[list[Floats]]:
        """Return, for every engine, its log-probs of the same tokens."""

    def engine_answers(self, prompts: Sequence[Ints]) -> list[list[Trajectory]]:
        """Return, for every engine, a short answer to each prompt; temperature 1."""


@dataclass(frozen=True)
class WeightSync:
    """How a run's weights reach its engines, and what proves that they arrived.

    Attributes:
        route: the way to the engines.
        bucket_bytes: bytes of weights sent at once.
        probe: a few token sequences, each of 2 tokens or more.
        rounded_as: the coarser of the dtypes in which trainer and engines compute.
        roundings: how many times the rounding of the trainer's log-probs is accepted as mean
            absolute difference between the trainer's and an engine's.
        most: the accepted difference, in nats per token, whatever the rounding; None: `roundings`
            decides.
    """

    route: WeightRoute
    bucket_bytes: int
    probe: Sequence[Ints]
    rounded_as: str
    roundings: float
    most: float | None = None

    def bound(self, rounding: float) -> float:
        """Return the largest difference that is accepted, in nats per token."""
        return self.roundings * rounding if self.most is None else self.most

    def explain_bound(self, rounding: float) -> str:
        """Return where the bound comes from, for people."""
        if self.most is not None:
            return f"rollout.sync.max_logprob_gap = {self.most:g}"
        return (
            f"rollout.sync.max_roundings = {self.roundings:g} times the {rounding:.2g} by which "
            f"rounding as {self.rounded_as} changes the trainer's own log-probs"
        )


@dataclass(frozen=True)
class SyncReport:
    """The result of a sync, or of a proof alone.

    Attributes:
        version: the version of the weights.
        gap: the largest mean absolute difference of log-probs over the engines, nats per token.
        rounding: the mean absolute difference that rounding makes in the trainer's, nats per token.
        bytes: bytes that each engine got; 0 for a proof alone.
        seconds: time until all engines had taken the weights; 0 for a proof alone.
        route: the name of the way that they took.
    """

    version: int
    gap: float
    rounding: float
    bytes: int = 0
    seconds: float = 0.0
    route: str = ""


def prepare_sync(
    route: WeightRoute,
    config: SyncConfig,
    probe: Sequence[Ints],
    rounded_as: str,
    *,
    send_first: bool = False,
) -> WeightSync:
    """Return the weight sync of a run, after comparing first weights and rehearsing syncs.

    Args:
        route: the way to the engines.
        config: the settings of the sync.
        probe: token sequences, each of 2 tokens or more.
        rounded_as: the coarser of the dtypes in which trainer and engines compute.
        send_first: the trainer holds other weights than the files, because it quantised them;
            engines get the trainer's weights before they are compared.

    Raises:
        WeightSyncError: an engine does not compute what the trainer computes.
    """
    bounds = config.max_roundings, config.max_logprob_gap
    sync = WeightSync(route, config.decided_bucket, probe, rounded_as, *bounds)
    first = sync_weights(sync, 0) if send_first else _prove_again(sync, 0)
    if config.rehearse:
        # An engine of fewer bits rounds more than the trainer can tell, by a factor that stays.
        coarser = 0.0 if sync.most is None else sync.most / first.rounding
        rehearse(replace(sync, roundings=max(sync.roundings, coarser), most=None))
    return sync


def rehearse(sync: WeightSync) -> None:
    """Send layers scaled and back, and prove each time that engines compute and sample with them.

    Raises:
        WeightSyncError: an engine does not compute what the trainer computes.
    """
    ends = np.cumsum([len(tokens) for tokens in sync.probe])
    sync = replace(sync, probe=sync.probe[: 1 + int(np.searchsorted(ends, _REHEARSAL_TOKENS))])
    rehearsals = sync.route.rehearsals()
    for number, planned in enumerate(rehearsals, 1):
        # Versions of their own: engines may keep prefixes apart by version.
        version = number - len(rehearsals)
        rehearsal = planned
        if layers := planned.scaled.layers:
            rehearsal = replace(planned, scaled=_most_visible(sync, layers))
        sync.route.transfer(sync.bucket_bytes, version, rehearsal)
        prove(sync, version, rehearsal.scaled)
        _prove_answers(sync, version, rehearsal.scaled)


def _most_visible(sync: WeightSync, layers: tuple[str, ...]) -> Scaled:
    """Return the layers with the factor that changes the log-probs most, beside rounding."""
    plain, _ = _expect(sync, sync.probe, UNSCALED)

    def visibility(scaled: Scaled) -> float:
        changed, rounding = _expect(sync, sync.probe, scaled)
        return float(np.abs(changed - plain).mean()) / rounding

    return max((Scaled(layers, factor) for factor in _FACTORS), key=visibility)


def sync_weights(sync: WeightSync, version: int) -> SyncReport:
    """Send the trainer's weights to all engines as `version`, then prove that they arrived.

    If the proof fails, everything is sent once more, and proved.

    Raises:
        WeightSyncError: an engine disagrees with the trainer; both numbers are in it.
    """
    start = monotonic()
    sent = sync.route.transfer(sync.bucket_bytes, version)
    seconds = monotonic() - start
    report = _prove_again(sync, version)
    return replace(report, bytes=sent, seconds=seconds, route=sync.route.name)


def _prove_again(sync: WeightSync, version: int) -> SyncReport:
    """Return `prove`; if it fails, once more after all weights were sent anew."""
    try:
        return prove(sync, version)
    except WeightSyncError as error:
        sync.route.renew()
        sync.route.transfer(sync.bucket_bytes, version)
        try:
            return prove(sync, version)
        except WeightSyncError as second:
            raise WeightSyncError(
                f"{second}. All weights were sent once more before; the first time: {error}"
            ) from error


def prove(sync: WeightSync, version: int, scaled: Scaled = UNSCALED) -> SyncReport:
    """Compare trainer's and engines' log-probs of the probe; return a report with the gap.

    Args:
        sync: the sync.
        version: the version of the weights.
        scaled: the layers whose weights were sent scaled.

    Raises:
        WeightSyncError: an engine disagrees with the trainer; both numbers are in it.
    """
    expected, rounding = _expect(sync, sync.probe, scaled)
    gaps = []
    for index, log_probs in enumerate(sync.route.engine_log_probs(sync.probe)):
        sampled = np.concatenate(log_probs)
        gap = float(np.abs(sampled - expected).mean())
        if not gap <= sync.bound(rounding):
            raise WeightSyncError(
                f"rollout engine {index} does not compute what the trainer computes after "
                f"{_name(version, scaled)}: over {len(expected)} probe tokens "
                f"{_disagreement(expected, sampled, rounding, sync)}"
            )
        gaps.append(gap)
    return SyncReport(version, max(gaps), rounding)


def _expect(sync: WeightSync, sequences: Sequence[Ints], scaled: Scaled) -> tuple[Floats, float]:
    """Return the trainer's log-probs, and by how much rounding changes them on average."""
    plain, rounded = (
        np.concatenate(sync.route.trainer_log_probs(sequences, Disturbance(dtype, scaled)))
        for dtype in (None, sync.rounded_as)
    )
    least = _LEAST * float(np.abs(plain).mean())
    return plain, max(least, float(np.abs(rounded - plain).mean()))


def _prove_answers(sync: WeightSync, version: int, scaled: Scaled) -> None:
    """Raise WeightSyncError if an engine samples with other weights than it scores with."""
    for index, answers in enumerate(sync.route.engine_answers(sync.probe)):
        sequences = [np.concatenate([a.prompt.tokens, a.response_tokens]) for a in answers]
        log_probs, rounding = _expect(sync, sequences, scaled)
        ends = np.cumsum([len(tokens) - 1 for tokens in sequences])
        pairs = zip(ends, answers, strict=True)
        expected = np.concatenate([log_probs[e - len(a.response_tokens) : e] for e, a in pairs])
        sampled = np.concatenate([a.sampler_logprobs for a in answers])
        if not np.abs(sampled - expected).mean() <= sync.bound(rounding):
            raise WeightSyncError(
                f"rollout engine {index} does not sample with the weights that it got: after "
                f"{_name(version, scaled)}, over {len(expected)} sampled tokens "
                f"{_disagreement(expected, sampled, rounding, sync)}. If its log-probs of prompts "
                "are right, it uses cached prefixes of older weights"
            )


def _name(version: int, scaled: Scaled) -> str:
    if not scaled.layers:
        return f"weight sync {version}"
    layers = ", ".join(scaled.layers)
    return f"a rehearsal of the weight sync, which sent {layers} times {scaled.factor:g}"


def _disagreement(expected: Floats, sampled: Floats, rounding: float, sync: WeightSync) -> str:
    gaps = np.abs(sampled - expected)
    worst = int(gaps.argmax())
    return (
        f"the mean log-prob is {sampled.mean():.5f} in the engine and {expected.mean():.5f} in the "
        f"trainer, mean absolute difference {gaps.mean():.4g} (bound {sync.bound(rounding):.4g}: "
        f"{sync.explain_bound(rounding)}); the worst token has {sampled[worst]:.5f} and "
        f"{expected[worst]:.5f}. The engine has other weights than the trainer (a tensor stale, "
        "dropped or misnamed), computes the model in another way, or computes in a much coarser "
        "dtype, as with rollout.vllm.arguments.quantization: rollout.sync.max_logprob_gap then "
        "sets a bound for it. `plimsoll explain-gap CONFIG` tries which setting closes the gap"
    )
