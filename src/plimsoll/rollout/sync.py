"""New weights to every engine, and the proof that they arrived.

Three things must hold after a sync, or the run stops. Every announced tensor came; its bytes are
the bytes that were sent (`Arrivals`, in the engine); and trainer and engine compute the same
log-probs of a probe batch. The last one finds faults that no checksum can find, such as an engine
that keeps a stale packed copy of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Protocol

import numpy as np

from plimsoll.config.rollout import SyncConfig
from plimsoll.engine.weights import SentTensor
from plimsoll.errors import WeightSyncError
from plimsoll.records import Floats, Ints
from plimsoll.run.counting import plural

_FLOOR = 2e-5
"""The least bound on the gap, in nats: float32 rounding may grow to it as the weights change; see
docs/decisions.md."""
_MERGED_FLOOR = 0.02
"""The same bound if engines get bfloat16 weights with an adapter merged into them: the trainer adds
these up in another order. The first weights do not show it: a new adapter does nothing."""


class WeightRoute(Protocol):
    """The way from the trainer's ranks to the engines, which the cluster provides."""

    @property
    def name(self) -> str:
        """The name of the way in metrics."""
        ...

    def transfer(self, bucket_bytes: int, version: int) -> int:
        """Send all tensors to all engines in buckets; return the bytes that each engine got.

        The tensors are announced first; at the end the engines use them as `version`.
        """
        ...

    def renew(self) -> None:
        """Get ready for engines that were started again, and have the weights of files."""
        ...

    def trainer_log_probs(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Return the trainer's log-prob of every token but the first; temperature 1."""
        ...

    def engine_log_probs(self, sequences: Sequence[Ints]) -> list[list[Floats]]:
        """Return, for every engine, its log-probs of the same tokens."""
        ...


@dataclass(frozen=True)
class WeightSync:
    """How a run's weights reach its engines, and what proves that they arrived.

    Attributes:
        route: the way to the engines.
        bucket_bytes: bytes of weights sent at once.
        probe: a few token sequences, each of 2 tokens or more.
        bound: the largest mean absolute difference that is accepted between the log-probs of
            trainer and engine; nats per token.
        origin: where the bound comes from, for people.
    """

    route: WeightRoute
    bucket_bytes: int
    probe: Sequence[Ints]
    bound: float
    origin: str


@dataclass(frozen=True)
class SyncReport:
    """The result of a sync, or of a proof alone.

    Attributes:
        version: the version of the weights.
        gap: the largest mean absolute difference of log-probs over the engines, nats per token.
        bytes: bytes that each engine got; 0 for a proof alone.
        seconds: time until all engines had taken the weights; 0 for a proof alone.
        route: the name of the way that they took.
    """

    version: int
    gap: float
    bytes: int = 0
    seconds: float = 0.0
    route: str = ""


def prepare_sync(
    route: WeightRoute,
    config: SyncConfig,
    probe: Sequence[Ints],
    *,
    send_first: bool = False,
    merged_in_bfloat16: bool = False,
) -> WeightSync:
    """Return the weight sync of a run, with a bound on the gap that follows from rounding.

    Trainer and engines are compared while both still hold the weights of the same files. Their gap
    is then due to rounding alone; later gaps are bounded by a multiple of it.

    Args:
        route: the way to the engines.
        config: the settings of the sync.
        probe: token sequences, each of 2 tokens or more.
        send_first: the trainer holds other weights than the files, because it quantised them;
            engines get the trainer's weights before they are compared.
        merged_in_bfloat16: engines get an adapter merged into bfloat16 weights.

    Raises:
        WeightSyncError: the gap is over `max_logprob_gap` already.
    """
    widest = WeightSync(
        route,
        config.bucket_bytes,
        probe,
        config.max_logprob_gap,
        f"rollout.sync.max_logprob_gap = {config.max_logprob_gap:g}",
    )
    rounding = (sync_weights if send_first else prove)(widest, 0).gap
    floor = _MERGED_FLOOR if merged_in_bfloat16 else _FLOOR
    bound = max(floor, config.max_gap_growth * rounding)
    if bound >= widest.bound:
        return widest
    origin = (
        f"rollout.sync.max_gap_growth = {config.max_gap_growth:g} times the {rounding:.2g} that "
        f"the first weights gave, at least {floor:g}"
    )
    return replace(widest, bound=bound, origin=origin)


def sync_weights(sync: WeightSync, version: int) -> SyncReport:
    """Send the trainer's weights to all engines as `version`, then prove that they arrived.

    Raises:
        WeightSyncError: an engine disagrees with the trainer; both numbers are in it.
    """
    start = monotonic()
    sent = sync.route.transfer(sync.bucket_bytes, version)
    seconds = monotonic() - start
    return replace(prove(sync, version), bytes=sent, seconds=seconds, route=sync.route.name)


def prove(sync: WeightSync, version: int) -> SyncReport:
    """Compare trainer's and engines' log-probs of the probe; return a report with the gap.

    Raises:
        WeightSyncError: an engine disagrees with the trainer; both numbers are in it.
    """
    expected = np.concatenate(sync.route.trainer_log_probs(sync.probe))
    gaps = []
    for index, log_probs in enumerate(sync.route.engine_log_probs(sync.probe)):
        sampled = np.concatenate(log_probs)
        gap = float(np.abs(sampled - expected).mean())
        if not gap <= sync.bound:
            raise WeightSyncError(_disagreement(index, version, expected, sampled, gap, sync))
        gaps.append(gap)
    return SyncReport(version, max(gaps))


def _disagreement(
    engine: int, version: int, expected: Floats, sampled: Floats, gap: float, sync: WeightSync
) -> str:
    worst = int(np.abs(sampled - expected).argmax())
    return (
        f"rollout engine {engine} does not compute what the trainer computes after weight sync "
        f"{version}: over {len(expected)} probe tokens the mean log-prob is {sampled.mean():.5f} "
        f"in the engine and {expected.mean():.5f} in the trainer, mean absolute difference "
        f"{gap:.4g} (bound {sync.bound:.4g}: {sync.origin}); the worst token has "
        f"{sampled[worst]:.5f} and {expected[worst]:.5f}. The engine has other weights than the "
        "trainer (a tensor stale, dropped or misnamed), or computes in a much coarser dtype: "
        "compare rollout.dtype and rollout.vllm.arguments.quantization with actor.model.dtype "
        "before raising the bound"
    )


class Arrivals:
    """The tensors that one weight sync announced, and which of them have come."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._missing = set(names)

    def take(self, tensors: Sequence[SentTensor], arrived: Sequence[int] | None) -> None:
        """Check the tensors of a bucket that came, and note them.

        Args:
            tensors: the tensors as they were sent.
            arrived: the checksums of what came; None if another process of the engine, which reads
                the same memory, checks it.

        Raises:
            WeightSyncError: one was not announced, came twice, or its bytes are not those sent.
        """
        for number, sent in enumerate(tensors):
            if sent.name not in self._missing:
                raise WeightSyncError(f"{sent.name} came twice, or was never announced")
            if arrived is not None and arrived[number] != sent.checksum:
                raise WeightSyncError(
                    f"{sent.name} arrived damaged: checksum {arrived[number]:x}, but "
                    f"{sent.checksum:x} was sent"
                )
            self._missing.remove(sent.name)

    def complete(self) -> None:
        """Raise WeightSyncError if announced tensors have not come."""
        if self._missing:
            first = ", ".join(sorted(self._missing)[:5])
            raise WeightSyncError(
                f"{plural(len(self._missing), 'tensor')} of the new weights never arrived: "
                f"{first}. The engine would go on with the old ones and sample from no version at "
                "all"
            )
